"""The written file against the format's text, and what is left when writing fails."""

import errno
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cass_reader import Reader, crc32c
from checkpoints import config, weights, write_hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pycass._pycass import ffi, lib

from pycass.convert import convert, source, writer
from pycass.errors import ConversionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("writer") / "m"
    write_hf(path, config("qwen3"))
    return path


def nest_parts(bits):
    a, x, b, offsets, records, *_ = writer.encode_nest(np.ascontiguousarray(bits))
    tiles = len(offsets) - 1
    table = 4 * (tiles + 1)
    used = table + len(records)
    side = (offsets + table).astype("<u4").tobytes() + records.tobytes() + bytes(-(-(used + 1024) // 64) * 64 - used)
    return {16: a.tobytes(), 17: x.tobytes() + bytes(-len(x) % 64), 18: b.tobytes(), 19: side}


def decoded(bits):
    from cass_reader import Nest, Tensor

    return Nest(Tensor("t", "nest", bits.shape, 0, nest_parts(bits)))


def test_crc_of_the_text():
    assert (
        crc32c(b"123456789")
        == 0xE3069283
        == writer.crc32c(b"123456789")
        == writer.crc32c(b"6789", writer.crc32c(b"12345"))
    )


@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 65), (3, 200), (100, 7), (64, 640)])
def test_nest_by_the_independent_reader(shape):
    rng = np.random.default_rng(shape[0])
    for bits in (
        rng.integers(0, 1 << 16, shape).astype(np.uint16),
        np.zeros(shape, np.uint16),
        np.full(shape, 0x8001, np.uint16),
        np.full(shape, 0xFFFF, np.uint16),
        (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
    ):
        assert np.array_equal(decoded(bits).bits(), bits)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 140), st.integers(0, 255), st.integers(0, 60))
def test_nest_of_any_weights(seed, rows, cols, exponent, spread):
    rng = np.random.default_rng(seed)
    e = np.clip(rng.integers(exponent - spread, exponent + 1, (rows, cols)), 0, 255)
    bits = (rng.integers(0, 2, (rows, cols)) << 15 | e << 7 | rng.integers(0, 128, (rows, cols))).astype(np.uint16)
    assert np.array_equal(decoded(bits).bits(), bits)


def test_draft_values_by_the_independent_reader():
    rng = np.random.default_rng(3)
    bits = (rng.standard_normal((32, 192)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    parts = nest_parts(bits)
    out = np.empty(bits.shape, np.float32)
    a, x = (np.frombuffer(parts[k], np.uint8).copy() for k in (16, 17))
    status = lib.pycass_nest_decode_draft(
        ffi.from_buffer("uint8_t[]", a),
        ffi.from_buffer("uint8_t[]", x),
        *bits.shape,
        ffi.from_buffer("float[]", out, require_writable=True),
    )
    assert status == 0
    exact = decoded(bits).draft()
    assert np.allclose(out, exact, rtol=2e-7, atol=0)
    weights = (bits.astype(np.uint32) << 16).view(np.float32)
    error = np.abs(exact - weights).max(axis=1) / np.abs(weights).max(axis=1)
    assert (error < 0.35).all()


@pytest.mark.parametrize("codec", ["nest", "raw"])
def test_pieces_do_not_change_the_file(folder, tmp_path, monkeypatch, codec):
    convert(folder, tmp_path / "a", codec=codec)
    monkeypatch.setattr(source, "CHUNK_WEIGHTS", 1)
    seen = []
    convert(folder, tmp_path / "b", codec=codec, threads=3, progress=lambda *a: seen.append(a))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    done = [d for d, *_ in seen]
    assert done == sorted(done) and done[-1] == seen[-1][1] and len(seen) > 100
    Reader(tmp_path / "b")


def test_chunks_equal_the_whole_matrix(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "CHUNK_WEIGHTS", 2000)
    convert(folder, tmp_path / "a", calibrate=None)
    reader = Reader(tmp_path / "a")
    for name, bits in weights(config("qwen3")).items():
        if bits.ndim == 2:
            assert reader.tensors[name].parts == nest_parts(bits), name


def partials(path):
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("fail_at", [0, 1, 20, -1])
def test_a_full_disk(folder, tmp_path, monkeypatch, fail_at):
    (tmp_path / "m.cass").write_bytes(b"old")
    real, calls = os.pwrite, []

    def pwrite(fd, data, at):
        calls.append(at)
        if len(calls) > fail_at >= 0 or (fail_at < 0 and at == 0):  # the header is written last
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: max(1, len(data) // 2)], at)  # short writes happen too

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ConversionError, match="no room: No space left on device"):
        convert(folder, tmp_path / "m.cass")
    assert partials(tmp_path) == ["m.cass"] and (tmp_path / "m.cass").read_bytes() == b"old"


def test_room_is_checked_before_writing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 1000})())
    with pytest.raises(ConversionError, match="1000 are free"):
        convert(folder, tmp_path / "m.cass")
    assert partials(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_nothing(folder, tmp_path, error):
    def progress(done, total, name):
        if done > total // 2:
            raise error

    with pytest.raises(error):
        convert(folder, tmp_path / "m.cass", progress=progress)
    assert partials(tmp_path) == []


def test_a_failing_rename_leaves_nothing(folder, tmp_path, monkeypatch):
    def replace(a, b):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ConversionError, match="Permission denied"):
        convert(folder, tmp_path / "m.cass")
    assert partials(tmp_path) == []


def test_a_killed_conversion_leaves_no_whole_file_and_is_cleaned_up(folder, tmp_path):
    code = (
        "import sys, time\nfrom pycass.convert import convert\n"
        "def p(done, total, name):\n    print('x', flush=True)\n    time.sleep(60)\n"
        "convert(sys.argv[1], sys.argv[2], progress=p)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(tmp_path / "m.cass")],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert child.stdout.readline() == b"x\n"
    running = partials(tmp_path)
    assert len(running) == 1 and running[0].endswith(".partial")
    convert(folder, tmp_path / "m.cass")  # beside it: the other's file is in use and stays
    assert partials(tmp_path) == ["m.cass", *running]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert partials(tmp_path) == ["m.cass", *running]
    time.sleep(0.05)
    convert(folder, tmp_path / "m.cass")
    assert partials(tmp_path) == ["m.cass"]


def test_an_older_file_is_replaced(folder, tmp_path):
    (tmp_path / "m.cass").write_bytes(b"old")
    (tmp_path / "m.cass.notes.txt").write_bytes(b"mine")
    convert(folder, tmp_path / "m.cass")
    Reader(tmp_path / "m.cass")
    assert partials(tmp_path) == ["m.cass", "m.cass.notes.txt"]
    assert (tmp_path / "m.cass").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_impossible_targets(folder, tmp_path):
    for out, match in ((tmp_path, "is a folder"), (tmp_path / "absent" / "m.cass", "no such folder")):
        with pytest.raises(ConversionError, match=match):
            convert(folder, out)
    with pytest.raises(ConversionError, match="codec 'zip' is not known; known: nest, raw"):
        convert(folder, tmp_path / "m.cass", codec="zip")
    with pytest.raises(ConversionError, match="give the folder"):
        convert(folder / "model.safetensors", tmp_path / "m.cass")


def test_the_source_is_not_overwritten(tmp_path):
    from checkpoints import write_gguf

    path = write_gguf(tmp_path / "m.gguf", config(), weights(config()))
    with pytest.raises(ConversionError, match="is the source itself"):
        convert(path, path)
    assert path.read_bytes()[:4] == b"GGUF"


def test_texts_without_utf8_keep_their_escapes():
    import json

    blob = {"a": "x\ud800y", "b": "é"}
    assert json.loads(writer.json_section(blob).decode("utf-8")) == blob


def test_the_engine_reads_what_was_written(folder, tmp_path):
    from pycass.file import CassFile

    convert(folder, tmp_path / "m.cass")
    with CassFile(tmp_path / "m.cass") as f:
        f.verify()
        for name, bits in weights(config("qwen3")).items():
            assert np.array_equal(f.bf16(name), bits), name


def test_provenance(folder, tmp_path):
    import hashlib

    report = convert(folder, tmp_path / "m.cass")
    p = Reader(tmp_path / "m.cass").json["provenance"]
    assert (
        p["source_sha256"]
        == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        == report.source_sha256
    )
    assert (p["source"], p["source_format"], p["source_dtype"], p["changed_values"]) == ("m", "safetensors", "BF16", 0)


def test_only_regular_files_are_replaced(folder, tmp_path):
    import socket
    import stat

    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "sock"))
    (tmp_path / "to_fifo").symlink_to("fifo")
    (tmp_path / "loop").symlink_to("loop")
    before = partials(tmp_path)
    for out in ("fifo", "sock", "to_fifo", "loop", "/dev/null", "/dev/stdin/x", "a" * 300, "a\0b"):
        with pytest.raises(ConversionError):
            convert(folder, tmp_path / out)
    assert partials(tmp_path) == before and stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(folder, tmp_path, there):
    (tmp_path / "deep").mkdir()
    if there:
        (tmp_path / "deep" / "m.cass").write_bytes(b"old")
    (tmp_path / "link").symlink_to("deep/m.cass")
    convert(folder, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "deep" / "m.cass").is_symlink()
    Reader(tmp_path / "deep" / "m.cass")
    (tmp_path / "lost").symlink_to("absent/m.cass")
    with pytest.raises(ConversionError, match="no such folder"):
        convert(folder, tmp_path / "lost")


def test_no_file_of_the_source_folder_is_overwritten(tmp_path):
    write_hf(tmp_path / "m", config("qwen3"))
    (tmp_path / "m" / "more").mkdir()
    (tmp_path / "m" / "more" / "README.md").write_text("x")
    before = {p: p.read_bytes() for p in (tmp_path / "m").rglob("*") if p.is_file()}
    assert len(before) > 3
    for path in before:
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(path)
        for out in (path, tmp_path / "link"):
            with pytest.raises(ConversionError, match="is the source itself"):
                convert(tmp_path / "m", out)
    assert before == {p: p.read_bytes() for p in (tmp_path / "m").rglob("*") if p.is_file()}
    for _ in range(2):  # an older result may lie there
        convert(tmp_path / "m", tmp_path / "m" / "m.cass")


def test_a_file_that_the_engine_refuses_is_not_kept(folder, tmp_path, monkeypatch):
    real = writer.config_section
    monkeypatch.setattr(writer, "config_section", lambda cfg, flags: real(cfg, flags)[:-4] + b"\0\0\xc0\x7f")
    (tmp_path / "m.cass").write_bytes(b"old")
    with pytest.raises(ConversionError, match="cannot be read back"):
        convert(folder, tmp_path / "m.cass")
    assert partials(tmp_path) == ["m.cass"] and (tmp_path / "m.cass").read_bytes() == b"old"
