"""Conversion to `cass1` and `cass2`, and what the engine makes of such files: the bits and logits of `raw`, speculation
that changes nothing, reports of what cass2 rounds."""

import json

import numpy as np
import pytest
from cass_reader import Cass, Reader
from checkpoints import bf16_to_f32, convert

from pycass import CassFile, Model
from pycass.cli import main
from pycass.convert import Rounding, cass_parts, source, verify_against
from pycass.errors import ConversionError, FormatError
from pycass.inspect_file import describe, describe_text, verify

NAMES = ["llama_tied", "qwen2"]
CODECS = ["cass1", "cass2"]
IDS = [(7 * i * i + 3 * i) % 290 for i in range(30)]


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_is_what_the_text_says(tiny_cass, codec):
    """The plain reader finds every value, and so does the engine."""
    path = tiny_cass("qwen2", codec)
    reader, raw = Reader(path), Reader(tiny_cass("qwen2", "raw"))
    assert list(reader.tensors) == list(raw.tensors) and reader.json["cass"]["prune"] == 0.4
    with CassFile(path) as f:
        f.verify()
        for name, t in reader.tensors.items():
            want = raw.bf16(name)
            if len(t.shape) == 2:
                assert t.codec == codec
                want = want.copy()
                codec == "cass2" and cass_parts.round_cass2(want)
            bits = reader.bf16(name)
            assert np.array_equal(bits, want) and np.array_equal(f.bf16(name), want)
            if len(t.shape) == 2 and t.shape[0] > 20:
                assert np.array_equal(f.bf16(name, (5, 19)), want[5:19])


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_and_threads_change_nothing(tiny_hf, tiny_cass, tmp_path, codec, monkeypatch):
    monkeypatch.setattr(source, "CHUNK_WEIGHTS", 16 * 112)
    for threads in (1, 3):
        convert(tiny_hf("qwen2"), tmp_path / "m.cass", codec=codec, threads=threads)
        have, want = Reader(tmp_path / "m.cass"), Reader(tiny_cass("qwen2", codec))
        assert have.json == want.json and have.data == want.data


def test_reports(tiny_hf, tmp_path):
    one = convert(tiny_hf("qwen2"), tmp_path / "1.cass", codec="cass1")
    two = convert(tiny_hf("qwen2"), tmp_path / "2.cass", codec="cass2")
    assert one.codec == "cass1" and one.changed_values == 0 and not one.notes
    assert two.changed_values > 1000 and "near-lossless" in two.notes[-1]
    for r in (one, two):
        assert r.file_bytes == (tmp_path / r.out.split("/")[-1]).stat().st_size
        d = describe(r.out)
        assert 0 <= r.speculation_bytes - d["speculation_bytes"] < 64 * r.n_tensors and d["near_lossless"] == (r.codec == "cass2")
        assert ("lossless     no" in describe_text(d)) == (r.codec == "cass2")
        assert "without 40 % of each row, 3 of 7 mantissa bits" in describe_text(d)
    assert describe(two.out)["provenance"]["changed_values"] == two.changed_values
    with CassFile(two.out) as f:
        assert f.config.rounded


def test_verify_against(tiny_hf, tiny_cass, tmp_path):
    hf = tiny_hf("qwen2")
    assert "have the bits of" in verify(tiny_cass("qwen2", "cass1"), hf)
    text = verify(tiny_cass("qwen2", "cass2"), hf)
    assert "as cass2 rounds it" in text and "near-lossless" in text and "relative at most" in text
    rounding = Rounding()
    assert verify_against(tiny_cass("qwen2", "cass2"), hf, rounding) == []
    changed, errors, sizes = 0, [], []
    with CassFile(tiny_cass("qwen2", "raw")) as raw, CassFile(tiny_cass("qwen2", "cass2")) as f:
        for name in raw.tensors:
            if len(raw.tensors[name].shape) == 2:
                a, b = raw.bf16(name), f.bf16(name)
                changed += (a != b).sum()
                a, b = (bf16_to_f32(x).astype(np.float64).ravel() for x in (a, b))
                errors.append(np.abs(a - b)), sizes.append(np.abs(a))
    errors, sizes = np.concatenate(errors), np.concatenate(sizes)
    there = sizes > 0
    assert (rounding.changed, rounding.values) == (changed, errors.size)
    assert rounding.largest == errors.max() and np.isclose(rounding.total, errors.sum())
    assert rounding.largest_relative == (errors[there] / sizes[there]).max() and rounding.nonzero == there.sum()
    convert(tiny_hf("qwen2_yarn"), tmp_path / "other.cass", codec="cass2")
    assert verify_against(tmp_path / "other.cass", hf), "another model differs"


def test_calibration_chooses_what_is_kept(tiny_hf, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    convert(tiny_hf("llama_tied"), tmp_path / "with.cass", codec="cass1", calibrate=str(text))
    convert(tiny_hf("llama_tied"), tmp_path / "without.cass", codec="cass1")
    convert(tmp_path / "with.cass", tmp_path / "again.cass", codec="cass1", calibrate="auto")  # with the statistics that it keeps
    have, plain, again = (Reader(tmp_path / f"{n}.cass") for n in ("with", "without", "again"))
    name = "model.layers.1.mlp.down_proj.weight"
    kept = [Cass(r.tensors[name]).kept for r in (have, plain, again)]
    assert np.array_equal(kept[0], kept[2]) and not np.array_equal(kept[0], kept[1])
    assert np.array_equal(have.bf16(name), plain.bf16(name))
    norms = np.frombuffer(have.tensors[name].parts[0x80000001], "<f4")
    scores = bf16_to_f32(have.bf16(name) & 0x7FFF) * norms
    seen = kept[0][: scores.shape[0], : scores.shape[1]]
    assert (np.where(seen, np.inf, scores).max(axis=1, where=~seen, initial=0) <= np.where(seen, scores, np.inf).min(axis=1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_logits(tiny_model, name):
    raw, nest = tiny_model(name, "raw").logits(IDS), tiny_model(name, "nest", kernel="scalar")
    for kernel in ("scalar", None):
        cass1, cass2 = (tiny_model(name, codec, kernel=kernel) for codec in CODECS)
        if cass1.kernel == "amx":
            continue
        assert np.array_equal(cass1.logits(IDS), raw), "cass1 is lossless"
        assert not np.array_equal(cass2.logits(IDS), raw)
        assert np.linalg.norm(cass2.logits(IDS) - raw) < 0.05 * np.linalg.norm(raw)
        draft = cass1.draft_logits(IDS)
        assert 0.02 < np.linalg.norm(draft - raw) / np.linalg.norm(raw) < 1.2
    assert nest.logits(IDS).shape == raw.shape


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", NAMES)
def test_speculation_changes_nothing(tiny_model, name, codec):
    model, drafted = tiny_model(name, codec), 0
    for options in ({}, {"temperature": 0.8, "seed": 5}):
        plain = model.generate(IDS[:9], 40, spec="off", ignore_eos=True, **options)
        for draft_max in (1, 4, 8):
            out = model.generate(IDS[:9], 40, spec="on", draft_max=draft_max, draft_fixed=True, ignore_eos=True, **options)
            assert out.token_ids == plain.token_ids
            drafted += out.spec.drafted
    assert drafted > 100


@pytest.mark.parametrize(
    "flags,wanted",
    [
        (["--codec", "cass1"], {"prune": 0.4, "mantissa_bits": 3, "half": True, "pruned": "coded"}),
        (
            ["--codec", "cass1", "--prune", "0.25", "--mantissa-bits", "5", "--no-half", "--pruned", "raw"],
            {"prune": 0.25, "mantissa_bits": 5, "half": False, "pruned": "raw"},
        ),
        (["--codec", "cass2", "--prune", "0.5"], {"prune": 0.5, "mantissa_bits": 3, "half": True, "pruned": "coded"}),
    ],
)
def test_flags(tiny_hf, tmp_path, flags, wanted, capsys):
    out = tmp_path / "m.cass"
    assert main(["convert", str(tiny_hf("qwen2")), "-o", str(out), "--no-calibrate", *flags]) in (0, None)
    reader = Reader(out)
    assert reader.json["cass"] == wanted
    name = "model.layers.0.mlp.up_proj.weight"
    spec = reader.tensors[name].parts[32]
    cols = reader.tensors[name].shape[1]
    assert spec[0] == wanted["mantissa_bits"] and spec[1] == wanted["half"] + 2 * (wanted["pruned"] == "raw")
    assert int.from_bytes(spec[4:8], "little") == int(wanted["prune"] * cols + 0.5)
    capsys.readouterr()
    main(["info", str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["cass"] == wanted


@pytest.mark.parametrize("wrong", [{"prune": 1.0}, {"mantissa_bits": 8}, {"pruned": "no"}, {"pruned": "raw", "codec": "cass2"}])
def test_wrong_options(tiny_hf, tmp_path, wrong):
    with pytest.raises(ConversionError):
        convert(tiny_hf("qwen2"), tmp_path / "m.cass", **({"codec": "cass1"} | wrong))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("codec", ["nest", "raw", *CODECS])
def test_damaged_sources_are_refused(tiny_cass, tmp_path, codec):
    """Of a .cass file: a conversion would give damage new checksums."""
    data = bytearray(open(tiny_cass("qwen2", codec), "rb").read())
    data[len(data) // 3] ^= 4
    (tmp_path / "damaged.cass").write_bytes(data)
    with pytest.raises(FormatError):
        convert(tmp_path / "damaged.cass", tmp_path / "out.cass")
    assert not (tmp_path / "out.cass").exists()


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_weights_do_not_stop_a_model(tiny_cass, tmp_path, codec):
    """Bytes of segments changed: verify says so, and the model runs as it can."""
    path, rng = tiny_cass("qwen2", codec), np.random.default_rng(1)
    data = bytearray(path.read_bytes())
    for t in Reader(path).tensors.values():
        for kind, head in ((32, 64), (33, 0)) if len(t.shape) == 2 else ():
            begin, table = data.index(t.parts[kind]), head + 20 * (-(-t.shape[0] // 16) + 1)
            for i in rng.integers(table + 64, len(t.parts[kind]), 20):
                data[begin + i] ^= 1 << int(rng.integers(8))
    (tmp_path / "damaged.cass").write_bytes(data)
    with CassFile(tmp_path / "damaged.cass") as f, pytest.raises(FormatError, match="checksum"):
        f.verify()
    with Model.load(tmp_path / "damaged.cass", threads=1) as model:
        assert len(model.generate(IDS[:5], 8, spec="on", ignore_eos=True).token_ids) == 8
