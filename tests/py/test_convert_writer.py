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
    a, x, b, c, offsets, records = writer.encode_nest(np.ascontiguousarray(bits))
    tiles = len(offsets) - 1
    table = 4 * (tiles + 1)
    used = table + len(records)
    side = (offsets + table).astype("<u4").tobytes() + records.tobytes() + bytes(-(-(used + 1024) // 64) * 64 - used)
    return {16: a.tobytes(), 17: x.tobytes() + bytes(-len(x) % 64), 18: b.tobytes(), 19: c.tobytes(), 20: side}


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
    convert(folder, tmp_path / "a")
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
