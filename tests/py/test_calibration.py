"""Calibration: the statistics, what conversion makes of them, and how draft and target use it."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import reference
import tiny_models as tiny
from cass_reader import Nest, Reader
from checkpoints import bf16_to_f32
from running import KERNELS, each_kernel, each_model, seen

from pycass import CassFile, Model
from pycass.calibration_text import samples
from pycass.convert import calibration, convert
from pycass.errors import ContextFull, ConversionError, FormatError, InvalidArgument, PycassError

TEXTS = ([5, 9, 12, 250, 3, 77, 31, 8, 8, 200], [40, 41, 42, 43, 44, 45])


def target_weights(file):
    return lambda name: bf16_to_f32(file.bf16(name)).astype(np.float64) if name in file.tensors else None


def observed(file, texts):
    """{tensor: activations [token, channel]} in float64; the first token of each text is left out."""
    found = {}

    def multiply(name, x):
        found.setdefault(name, []).append(x[1:])
        return x @ weights(name).T

    weights = target_weights(file)
    for text in texts:
        reference.logits(text, file.config, weights, multiply=multiply)
    return {name: np.concatenate(rows) for name, rows in found.items()}


@each_model
def test_statistics_are_those_of_the_forward_pass(name, tiny_cass, tiny_model):
    with CassFile(tiny_cass(name)) as file:
        total, square, count = tiny_model(name).observe(TEXTS)
        found = calibration.from_sums(file.config, total, square, count, {}).channels
        expected = observed(file, TEXTS)
        assert count == sum(len(t) - 1 for t in TEXTS) and found.keys() == expected.keys()
        for tensor, x in expected.items():
            rms, size = np.sqrt((x**2).mean(0)), np.sqrt((x**2).mean())
            # the target rounds activations, keys and values to BF16; seen: at most 0.03
            assert np.abs(found[tensor].rms - rms).max() < 0.08 * size, tensor
            assert np.abs(found[tensor].mean - x.mean(0)).max() < 0.08 * size, tensor


@each_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_statistics_do_not_depend_on_threads_batches_or_kernels(kernel, threads, tiny_model):
    expected = tiny_model("qwen2").observe(TEXTS)
    found = tiny_model("qwen2", kernel=kernel, threads=threads, batch_size=32).observe(TEXTS)
    for a, b in zip(expected, found):
        assert np.allclose(a, b, rtol=0.05 if kernel == "amx" else 1e-12)


def test_statistics_of_a_calibrated_file_are_those_of_the_weights(tiny_model):
    """Hot columns are set aside for the products, not for the sums."""
    plain, hot = (tiny_model("qwen3", codec).observe(TEXTS) for codec in ("nest", "hot"))
    assert np.allclose(plain[1], hot[1], rtol=0.02)


def test_observing_leaves_the_model_as_it_was(tiny_model):
    model, ids = tiny_model("llama_tied"), tiny.ids("llama_tied", 9)
    before = seen(model.generate(ids, 20, ignore_eos=True, logprobs=True))
    model.observe(TEXTS)
    model.reset()
    assert seen(model.generate(ids, 20, ignore_eos=True, logprobs=True)) == before
    assert model.observe([[], [7]])[2] == 0
    with pytest.raises(ContextFull):
        model.observe([[1] * (model.n_ctx + 1)])
    with pytest.raises(InvalidArgument):
        model.observe([[1, 2, 10**6]])


# ---- the file ----


@each_model
def test_the_file_is_as_the_format_has_it(name, tiny_cass, tmp_path):
    """The second reader finds every bit, the hot columns, the bias and the statistics."""
    path = tiny_cass(name, "hot")
    reader, file = Reader(path), CassFile(path)
    kept, hot = calibration.of_file(file), {}
    assert reader.json["calibration"] == {"text": "builtin", "samples": 12, "tokens": kept.about["tokens"]}
    for tensor, t in reader.tensors.items():
        assert np.array_equal(reader.bf16(tensor), file.bf16(tensor))
        if t.codec != "nest" or (tensor == "model.embed_tokens.weight" and not file.config.tied_embedding):
            assert not set(t.parts) & {20, 21, 22}
            continue
        nest, stats = Nest(t), kept.channels[tensor]
        hot[tensor] = list(nest.hot)
        assert len(nest.hot) == 16 and set(nest.hot) == set(np.argsort(-stats.rms, kind="stable")[:16])
        missed = bf16_to_f32(reader.bf16(tensor)).astype(np.float64) - nest.draft()
        assert np.allclose(nest.bias, missed @ stats.mean.astype(np.float64), rtol=1e-5, atol=1e-7)
        assert not missed[:, nest.hot].any()
    layer = "model.layers.1.{}_proj.weight".format
    assert hot[layer("self_attn.q")] == hot[layer("self_attn.k")] == hot[layer("self_attn.v")]
    assert hot[layer("mlp.gate")] == hot[layer("mlp.up")]
    file.close()


def test_group_exponents_by_importance(tiny_cass, tmp_path):
    """Weighted by the activations' squares, the groups' exponents make the weighted error smaller, and differ."""
    convert(tiny_cass("qwen3", "hot"), tmp_path / "w.cass", hot=0, bias=False)
    convert(tiny_cass("qwen3", "hot"), tmp_path / "p.cass", hot=0, bias=False, weighted=False)
    weighted, plain = Reader(tmp_path / "w.cass"), Reader(tmp_path / "p.cass")
    with CassFile(tmp_path / "w.cass") as file:
        channels = calibration.of_file(file).channels
    differ = 0
    for name, stats in channels.items():
        bits = bf16_to_f32(plain.bf16(name)).astype(np.float64)
        errors = [(((r.draft(name) - bits) ** 2) @ (stats.rms.astype(np.float64) ** 2)).sum() for r in (weighted, plain)]
        assert errors[0] <= errors[1] * (1 + 1e-9)
        differ += errors[0] < errors[1] * (1 - 1e-9)
    assert differ > len(channels) / 2


@pytest.mark.parametrize("options", [{"hot": 0}, {"bias": False}, {"hot": 0, "bias": False}, {"hot": 32}, {"hot": 64}])
def test_parts_as_asked_for(options, tiny_cass, tmp_path):
    convert(tiny_cass("mistral", "hot"), tmp_path / "m.cass", **options)
    reader = Reader(tmp_path / "m.cass")
    assert reader.json["nest"] == {"hot": 16, "bias": True, "weighted": True} | options
    for name, t in reader.tensors.items():
        reader.bf16(name)
        if name.endswith("proj.weight"):
            assert (20 in t.parts) == (options.get("hot", 16) > 0) and (22 in t.parts) == options.get("bias", True)
            assert len(Nest(t).hot) == options.get("hot", 16)


def test_the_largest_channels_are_hot():
    """A multiple of 16 of them that fits, in ascending order; of equal ones the first."""
    few = calibration.Channels(np.arange(15, dtype=np.float32), None)
    assert len(few.hot(16)) == 0
    stats = calibration.Channels(np.array([1, 5, 5, 0] * 5, np.float32), None)
    expected = sorted({1, 2, 5, 6, 9, 10, 13, 14, 17, 18} | {0, 4, 8, 12, 16} | {3})
    assert list(stats.hot(16)) == list(stats.hot(64)) == expected and len(stats.hot(0)) == 0


# ---- the arithmetic ----


@each_model
def test_the_target_is_that_of_the_same_weights(name, tiny_model):
    """Sums in another order, nothing else: far below what rounding activations does."""
    ids = tiny.ids(name)
    plain, hot = tiny_model(name).logits(ids), tiny_model(name, "hot").logits(ids)
    assert not np.array_equal(plain, hot)
    assert np.abs(plain - hot).max() < 0.3


@each_model
def test_first_position_of_the_draft(name, tiny_cass, tiny_model):
    """Exact products of the hot columns, int8 ones of the others, and the bias."""
    model, path = tiny_model(name, "hot"), tiny_cass(name, "hot")
    reader = Reader(path)
    nests = {n: Nest(t) for n, t in reader.tensors.items() if t.codec == "nest"}

    def weights(tensor):
        if tensor not in reader.tensors:
            return None
        return nests[tensor].draft() if tensor in nests else bf16_to_f32(reader.bf16(tensor)).astype(np.float64)

    def multiply(tensor, x):
        nest, w, cold = nests[tensor], weights(tensor), x.copy()
        cold[:, nest.hot] = 0
        bias = 0 if nest.bias is None else nest.bias
        return reference.to_bf16(x[:, nest.hot]) @ w[:, nest.hot].T + reference.to_int8(cold) @ w.T + bias

    with CassFile(path) as file:
        errors = []
        for token in tiny.ids(name, 40):
            drafted = model.draft_logits([token])[0]
            same = reference.logits([token], file.config, weights, cache=reference.to_bf16, multiply=multiply)[0]
            errors.append(np.linalg.norm(drafted - same) / np.linalg.norm(same))
    assert np.median(errors) < 1e-4, sorted(errors)  # an int8 that rounds the other way makes 1e-3


def test_the_draft_is_nearer_to_the_target(tiny_model):
    """On the whole: random weights have few channels that stand out."""
    ratios = []
    for name in tiny.SPECS:
        ids, models = tiny.ids(name), (tiny_model(name), tiny_model(name, "hot"))
        far = [np.linalg.norm(m.draft_logits(ids) - m.logits(ids)) for m in models]
        ratios.append(far[1] / far[0])
    assert np.median(ratios) < 0.95, ratios  # seen: 0.86


def test_more_tokens_than_a_panel(tiny_model):
    """Passes of any size give the bits of passes of one token."""
    ids = [i % 290 for i in range(200)]
    model = tiny_model("llama_yarn", "hot", batch_size=200)
    small = tiny_model("llama_yarn", "hot", batch_size=33)
    model.logits(ids), small.logits(ids)
    a, b = (m.generate(ids, 8, spec="off", ignore_eos=True, logprobs=True) for m in (model, small))
    assert seen(a) == seen(b)


# ---- tensors that the draft reads in full ----


@each_kernel
@pytest.mark.parametrize("codec", ["nest", "hot"])
def test_a_draft_that_reads_all_is_the_target(kernel, codec, tiny_model):
    ids = tiny.ids("qwen3")
    model = tiny_model("qwen3", codec, kernel=kernel, draft_full=["*"])
    target = model.logits(ids)
    same = model.draft_logits(ids)
    embedding_differs = tiny_model("qwen3", codec, kernel=kernel, draft_full=["model.layers.*"]).draft_logits(ids)
    assert np.array_equal(same.view(np.uint32), target.view(np.uint32))
    assert not np.array_equal(embedding_differs, target)
    assert model.generate(ids, 20, spec="on", spec_ngram=False).spec.drafted == 0  # it would save nothing


def test_draft_full_by_name(tiny_model):
    """Each tensor alone brings the draft nearer, and is counted in what a draft pass reads."""
    ids, name = tiny.ids("llama_untied"), "model.layers.0.mlp.down_proj.weight"
    plain, one = tiny_model("llama_untied"), tiny_model("llama_untied", draft_full=[name])
    assert not np.array_equal(plain.draft_logits(ids), one.draft_logits(ids))
    read = []
    for model in (plain, one):
        model.generate(ids, 12, spec="on", draft_max=2, draft_fixed=True, ignore_eos=True)
        s = model.stats()
        read.append(s["bytes_read"] / s["steps"])
    assert read[1] > read[0]
    with pytest.raises(InvalidArgument, match="no tensor nonsense"):
        tiny_model("llama_untied", draft_full=["nonsense"])


# ---- conversion ----


def test_a_cass_file_as_source(tiny_hf, tiny_cass, tmp_path):
    """The same bits and metadata from a checkpoint and from a file made of it; the calibration stays."""
    source = tiny_cass("qwen2", "hot")
    report = convert(source, tmp_path / "again.cass")
    assert report.notes == []
    assert (tmp_path / "again.cass").read_bytes() == source.read_bytes()
    convert(source, tmp_path / "raw.cass", codec="raw")
    convert(tmp_path / "raw.cass", tmp_path / "nest.cass", calibrate=None)
    assert (tmp_path / "nest.cass").read_bytes() == tiny_cass("qwen2").read_bytes()
    convert(tiny_cass("qwen2"), tmp_path / "new.cass", samples=12)  # nothing kept: measured
    assert (tmp_path / "new.cass").read_bytes() == source.read_bytes()
    with pytest.raises(ConversionError, match="source itself"):
        convert(source, source)


def test_text_of_ones_own(tiny_cass, tmp_path):
    (tmp_path / "mine.txt").write_text("one two three\n---\nfour five\n---\nsix\n")
    convert(tiny_cass("qwen2", "hot"), tmp_path / "m.cass", calibrate=tmp_path / "mine.txt", samples=2)
    about = Reader(tmp_path / "m.cass").json["calibration"]
    assert about["text"] == "mine.txt" and about["samples"] == 2 and 0 < about["tokens"] < 100
    (tmp_path / "empty.txt").write_text("\n")
    for wrong in ("empty.txt", "absent.txt", "m.cass"):
        with pytest.raises(PycassError):
            convert(tiny_cass("qwen2"), tmp_path / "no.cass", calibrate=tmp_path / wrong)
    with pytest.raises(ConversionError, match="hot columns"):
        convert(tiny_cass("qwen2"), tmp_path / "no.cass", hot=17)
    assert sorted(os.listdir(tmp_path)) == ["empty.txt", "m.cass", "mine.txt"]


def test_a_model_that_cannot_be_measured_is_converted_without(tiny_hf, tmp_path, monkeypatch):
    def load(*args, **options):
        raise PycassError("it does not run")

    monkeypatch.setattr(Model, "load", load)
    report = convert(tiny_hf("qwen2"), tmp_path / "m.cass")
    assert report.notes == ["not calibrated: it does not run"]
    assert "calibration" not in Reader(tmp_path / "m.cass").json and os.listdir(tmp_path) == ["m.cass"]


def test_an_interrupt_while_measuring_leaves_nothing(tiny_hf, tmp_path):
    def progress(done, total, what):
        if what == "calibration":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny_hf("qwen2"), tmp_path / "m.cass", progress=progress)
    assert os.listdir(tmp_path) == []


def test_killed_while_measuring(tiny_hf, tmp_path):
    """What is left is cleaned up by the next conversion."""
    code = (
        "import sys, time\nfrom pycass.convert import convert\n"
        "def p(done, total, what):\n    if what == 'calibration':\n        print('x', flush=True)\n        time.sleep(60)\n"
        "convert(sys.argv[1], sys.argv[2], progress=p)\n"
    )
    command = [sys.executable, "-c", code, str(tiny_hf("qwen2")), str(tmp_path / "m.cass")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as child:
        assert child.stdout.readline() == b"x\n"
        child.send_signal(signal.SIGKILL)
    assert len(os.listdir(tmp_path)) == 1 and not (tmp_path / "m.cass").exists()
    time.sleep(0.05)
    convert(tiny_hf("qwen2"), tmp_path / "m.cass", calibrate=None)
    assert os.listdir(tmp_path) == ["m.cass"]


# ---- damage ----


@pytest.mark.parametrize(
    "damage",
    [
        lambda hot: hot[::-1],
        lambda hot: np.full_like(hot, hot[0]),
        lambda hot: np.append(hot[:-1], np.uint32(1 << 20)),
        lambda hot: np.append(hot[:-1], np.uint32(2**32 - 1)),
    ],
)
def test_damaged_hot_columns_are_refused(damage, tiny_cass, tmp_path):
    """They are checked whatever the sections' checksums say."""
    path = tmp_path / "m.cass"
    shutil.copy(tiny_cass("qwen3", "hot"), path)
    hot = Reader(path).tensors["model.layers.0.self_attn.o_proj.weight"].parts[20]
    data = path.read_bytes()
    path.write_bytes(data.replace(hot, damage(np.frombuffer(hot, "<u4")).astype("<u4").tobytes(), 1))
    with pytest.raises(FormatError, match="hot columns are damaged"):
        CassFile(path)


def test_matrices_of_one_input_must_agree(tiny_cass, tmp_path):
    path = tmp_path / "m.cass"
    reader = Reader(tiny_cass("qwen3", "hot"))
    q, o = (reader.tensors[f"model.layers.0.self_attn.{x}_proj.weight"].parts[20] for x in "qo")
    at = reader.data.index(q)
    other = np.frombuffer(q, "<u4").copy()
    free = [c for c in range(reader.config["n_embd"]) if c not in other]
    other = np.sort(np.append(other[1:], free[0])).astype("<u4").tobytes()
    path.write_bytes(reader.data[:at] + other + reader.data[at + len(q) :])
    with pytest.raises(FormatError, match="layer 0: matrices of one input have different hot columns"):
        Model.load(path)
    assert q != o


def test_a_damaged_bias_spoils_only_the_draft(tiny_cass, tmp_path):
    """NaN in it: wrong guesses, the same output."""
    path, ids = tmp_path / "m.cass", tiny.ids("qwen3", 9)
    reader = Reader(tiny_cass("qwen3", "hot"))
    bias = reader.tensors["model.layers.1.mlp.down_proj.weight"].parts[22]
    path.write_bytes(reader.data.replace(bias, b"\xff" * len(bias), 1))
    with Model.load(tiny_cass("qwen3", "hot")) as good, Model.load(path) as bad:
        expected = seen(good.generate(ids, 30, ignore_eos=True, logprobs=True, spec="off"))
        for kernel in KERNELS:
            assert seen(bad.generate(ids, 30, ignore_eos=True, logprobs=True, spec="on", draft_fixed=True)) == expected, kernel
    with CassFile(path) as f, pytest.raises(FormatError, match="checksum"):
        f.verify()


def test_the_shipped_text_is_there():
    texts = samples()
    assert len(texts) == 128 and len(set(texts)) == 128
