"""GGUF -> .cass: the bits of the Hugging Face checkpoint that the file was made from, and hostile files."""

import math
import random
import struct

import numpy as np
import pytest
from cass_reader import Reader
from checkpoints import (
    bf16_to_f32,
    config,
    convert,
    f32_to_bf16,
    gguf_bytes,
    gguf_keys,
    gguf_tensors,
    weights,
    write_gguf,
    write_hf,
)
from gguf import GGML_QUANT_SIZES, quants

from pycass.convert import open_source, source, verify_against
from pycass.errors import ConversionError


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bits_equal_the_hugging_face_folder(tmp_path, family):
    c = config(family)
    tensors = write_hf(tmp_path / "m", c)
    write_gguf(tmp_path / "m.gguf", c, tensors)
    report = convert(tmp_path / "m.gguf", tmp_path / "a.cass")
    convert(tmp_path / "m", tmp_path / "b.cass")
    a, b = Reader(tmp_path / "a.cass"), Reader(tmp_path / "b.cass")
    for section in ("speculation", "verification", "directory"):
        assert a.section[section] == b.section[section], section
    ca, cb = a.config, b.config
    assert (
        ca.pop("rms_eps") == pytest.approx(cb.pop("rms_eps"))
        and (ca.pop("rope_inv_freq") == cb.pop("rope_inv_freq")).all()
    )
    assert ca == cb
    assert all(np.array_equal(a.bf16(n), bits) for n, bits in tensors.items())
    assert report.changed_values == 0 and not report.quantized and report.source_format == "gguf"
    assert (
        verify_against(tmp_path / "a.cass", tmp_path / "m")
        == []
        == verify_against(tmp_path / "b.cass", tmp_path / "m.gguf")
    )


def test_biases_of_llama_are_reordered_like_their_rows(tmp_path):
    """Not in llama's family here, but the order must not depend on it: checked on the reader itself."""
    from checkpoints import permute

    from pycass.convert.gguf import _unpermute

    for heads, dim in ((1, 2), (3, 8), (6, 16)):
        rows = np.arange(heads * dim)
        assert (permute(rows, heads)[_unpermute(heads, dim)] == rows).all()


def test_permuted_rows_are_the_same_in_any_pieces(tmp_path, monkeypatch):
    c = config("llama", num_attention_heads=6, num_key_value_heads=3, head_dim=24)
    tensors = weights(c)
    write_gguf(tmp_path / "m.gguf", c, tensors)
    name = "model.layers.1.self_attn.q_proj.weight"
    monkeypatch.setattr(source, "CHUNK_WEIGHTS", 16)
    with open_source(tmp_path / "m.gguf") as s:
        ref = s.tensors[name]
        assert len(ref.chunks()) == 9
        assert np.array_equal(np.concatenate([ref.read(*r)[0] for r in ref.chunks()]), tensors[name])
        assert np.array_equal(ref.read(5, 7)[0], tensors[name][5:7])


def test_without_output_the_embedding_is_tied(tmp_path):
    c = config(tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", c, weights(c))
    assert convert(tmp_path / "m.gguf", tmp_path / "m.cass").tied


def test_f16_and_f32_are_counted(tmp_path):
    c = config()
    tensors = weights(c)
    out = gguf_tensors(c, tensors, 30)
    values = np.random.default_rng(1).standard_normal((80, 96)).astype(np.float32)
    out["blk.0.ffn_up.weight"] = (0, (80, 96), values.tobytes())
    out["blk.1.ffn_up.weight"] = (1, (80, 96), values.astype(np.float16).tobytes())
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(gguf_keys(c), out))
    report, reader = convert(tmp_path / "m.gguf", tmp_path / "m.cass"), None
    reader = Reader(tmp_path / "m.cass")
    half = values.astype(np.float16).astype(np.float32)
    assert np.array_equal(reader.bf16("model.layers.0.mlp.up_proj.weight"), f32_to_bf16(values))
    assert np.array_equal(reader.bf16("model.layers.1.mlp.up_proj.weight"), f32_to_bf16(half))
    assert report.changed_values == sum(int((bf16_to_f32(f32_to_bf16(v)) != v).sum()) for v in (values, half))
    assert reader.config["flags"] == 2


@pytest.mark.parametrize("kind", sorted(quants._type_traits, key=lambda t: t.name), ids=lambda t: t.name)
def test_every_quantised_type(tmp_path, monkeypatch, kind):
    block, size = GGML_QUANT_SIZES[kind]
    cols = math.lcm(block, 32)
    c = config(hidden_size=cols * 2, head_dim=16)
    out = gguf_tensors(c, weights(c), 30)
    raw = np.random.default_rng(int(kind)).integers(
        0, 0x3C, (80, cols * 2 // block * size), np.uint8
    )  # scales stay finite
    out["blk.0.ffn_up.weight"] = (int(kind), (80, cols * 2), raw.tobytes())
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(gguf_keys(c), out))
    monkeypatch.setattr(source, "CHUNK_WEIGHTS", 4096)
    expected = f32_to_bf16(quants.dequantize(raw, kind))
    report = convert(tmp_path / "m.gguf", tmp_path / "m.cass")
    reader = Reader(tmp_path / "m.cass", check_sections=False)
    assert np.array_equal(reader.bf16("model.layers.0.mlp.up_proj.weight"), expected)
    assert report.quantized == (kind.name != "BF16") and reader.config["flags"] & 4 == (4 if report.quantized else 0)


def with_keys(tmp_path, keys, c=None, edit=None):
    c = c or config()
    tensors = gguf_tensors(c, weights(c), 30)
    if edit:
        edit(tensors)
    (tmp_path / "m.gguf").write_bytes(
        gguf_bytes({k: v for k, v in (gguf_keys(c) | keys).items() if v is not None}, tensors)
    )
    return open_source(tmp_path / "m.gguf")


def test_rope_of_gguf(tmp_path):
    from pycass.convert import rope

    with with_keys(
        tmp_path, {"llama.rope.scaling.type": ("str", "linear"), "llama.rope.scaling.factor": ("f32", 4.0)}
    ) as s:
        assert (
            s.config.rope_inv_freq
            == rope.resolve({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 16, 512)[0]
        ).all()
    yarn = {
        "llama.rope.scaling.type": ("str", "yarn"),
        "llama.rope.scaling.factor": ("f32", 4.0),
        "llama.rope.scaling.original_context_length": ("u32", 512),
    }
    with with_keys(tmp_path, yarn) as s:
        expected = rope.resolve(
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}, 16, 512
        )
        assert (s.config.rope_inv_freq == expected[0]).all() and s.config.rope_attention_factor == expected[1]
        assert s.config.n_ctx_train == 2048
    factors = np.arange(1, 9, dtype=np.float32)
    with with_keys(tmp_path, {}, edit=lambda t: t.update({"rope_freqs.weight": (0, (8,), factors.tobytes())})) as s:
        assert (s.config.rope_inv_freq == rope.resolve({"rope_theta": 1e4}, 16, 512)[0] / factors).all()


@pytest.mark.parametrize(
    "keys, match",
    [
        (
            {"general.architecture": ("str", "gemma")},
            "architecture 'gemma' is not supported; supported: llama, qwen2, qwen3",
        ),
        ({"general.architecture": None}, "architecture"),
        ({"llama.expert_count": ("u32", 8)}, "mixtures"),
        ({"llama.rope.dimension_count": ("u32", 8)}, "rope.dimension_count 8"),
        ({"llama.attention.value_length": ("u32", 32)}, "value_length"),
        ({"llama.rope.scaling.type": ("str", "longrope")}, "longrope.*supported"),
        ({"llama.logit_scale": ("f32", 0.5)}, "logit_scale"),
        ({"llama.context_length": None}, "context_length is missing"),
        ({"llama.context_length": ("str", "many")}, "context_length"),
        ({"llama.block_count": ("u32", 3)}, "blk|missing"),
        ({"llama.block_count": ("u32", 4294967295)}, "n_layer"),
        ({"llama.attention.head_count": ("u32", 0)}, "heads"),
        ({"llama.attention.head_count_kv": ("u32", 0)}, "head_count_kv"),
        ({"llama.attention.head_count_kv": ("i32[]", [2, 3])}, "differs by layer"),
        ({"llama.attention.layer_norm_rms_epsilon": ("f32", float("nan"))}, "epsilon"),
        ({"general.alignment": ("u32", 0)}, "alignment"),
        ({"general.alignment": ("u32", 48)}, "alignment"),
        ({"split.count": ("u32", 3)}, "split"),
        (
            {"tokenizer.ggml.model": ("str", "bert")},
            "tokenizer.ggml.model 'bert' is not supported; supported: gpt2, llama",
        ),
        ({"tokenizer.ggml.pre": ("str", "falcon")}, "tokenizer.ggml.pre 'falcon' is not supported; supported: .*qwen2"),
        ({"tokenizer.ggml.pre": None}, "pre"),
        ({"tokenizer.ggml.tokens": None}, "tokens"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ("str[]", ["ab"])}, "not a pair"),
        ({"tokenizer.ggml.merges": ("str[]", ["qqq zzz"])}, "damaged"),
        ({"tokenizer.ggml.token_type": ("i32[]", [1, 1])}, "token types"),
        ({"tokenizer.ggml.tokens": ("u32", 1)}, "list"),
        ({"tokenizer.ggml.tokens": ("i32[]", [1])}, "list of str"),
        ({"tokenizer.ggml.bos_token_id": ("str", "x")}, "bos"),
    ],
)
def test_unsupported_files_are_named(tmp_path, keys, match):
    with pytest.raises(ConversionError, match=match):
        with_keys(tmp_path, keys)


def test_a_sliding_window_limits_the_context(tmp_path):
    with with_keys(tmp_path, {"llama.attention.sliding_window": ("u32", 100)}) as s:
        assert s.config.n_ctx_train == 100 and "sliding" in s.notes[0]


@pytest.mark.parametrize(
    "edit, match",
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), "up_proj.weight is missing"),
        (lambda t: t.pop("token_embd.weight"), "token_embd.weight is missing"),
        (lambda t: t.update({"blk.7.ffn_up.weight": t["blk.0.ffn_up.weight"]}), "not known"),
        (lambda t: t.update({"odd.weight": t["blk.0.ffn_up.weight"]}), "odd.weight is not known"),
        (lambda t: t.update({"blk.0.attn_output.bias": (0, (96,), bytes(384))}), "attention's output"),
        (lambda t: t.update({"blk.0.ffn_up_exps.weight": t["blk.0.ffn_up.weight"]}), "not known"),
        (lambda t: t.update({"rope_factors_long.weight": (0, (8,), bytes(32))}), "longrope"),
        (lambda t: t.update({"rope_freqs.weight": (0, (8,), bytes(32))}), "rope_freqs"),
        (lambda t: t.update({"blk.0.ffn_up.weight": (24, (80, 96), bytes(7680))}), "type I8; supported"),
        (lambda t: t.update({"blk.0.ffn_up.weight": (9999, (80, 96), bytes(7680))}), "unknown type 9999"),
        (lambda t: t.update({"blk.0.ffn_up.weight": (12, (80, 96), bytes(7680))}), "Q4_K"),
        (lambda t: t.update({"blk.0.ffn_up.weight": (30, (2**40, 2**40), bytes(64))}), "shape"),
        (lambda t: t.update({"blk.0.ffn_up.weight": (30, (2**63, 2), bytes(64))}), "shape"),
        (lambda t: t.update({"output.weight": (30, (320, 96), bytes(64))}), "truncated"),
        (lambda t: t.update({"blk.0.ffn_up.weight": (30, (80, 96), bytes(64))}), "overlap|truncated"),
    ],
)
def test_damaged_tensor_tables(tmp_path, edit, match):
    with pytest.raises(ConversionError, match=match):
        with_keys(tmp_path, {}, edit=edit)


def test_weights_that_are_not_numbers(tmp_path):
    c, tensors = config(), weights(config())
    tensors["model.layers.0.self_attn.q_proj.weight"][17, 4] = 0x7FC0
    write_gguf(tmp_path / "m.gguf", c, tensors)
    with pytest.raises(ConversionError, match=r"q_proj.weight\[17, 4\] is infinite or not a number"):
        convert(tmp_path / "m.gguf", tmp_path / "m.cass")
    assert not (tmp_path / "m.cass").exists()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    c = config(num_hidden_layers=1, vocab_size=300)
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", c, weights(c))
    return path, path.read_bytes()


def survives(path, data):
    """Opens and reads everything: an error in words or a model, nothing else."""
    path.write_bytes(data)
    try:
        with open_source(path) as s:
            for t in s.tensors.values():
                for chunk in t.chunks():
                    t.read(*chunk)
        return True
    except ConversionError:
        return False


def test_cut_anywhere(tiny, tmp_path):
    path, data = tiny
    header = data.index(b"blk.0.")
    rng = random.Random(0)
    cuts = [
        *range(64),
        *(rng.randrange(len(data)) for _ in range(150)),
        *(rng.randrange(header + 2000) for _ in range(150)),
        len(data) - 1,
    ]
    assert survives(tmp_path / "x.gguf", data)
    for n in cuts:
        assert not survives(tmp_path / "x.gguf", data[:n]), n


def test_random_damage(tiny, tmp_path):
    path, data = tiny
    rng = random.Random(1)
    table = data.index(b"token_embd")
    for _ in range(400):
        bad = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.choice([rng.randrange(24), rng.randrange(600), table + rng.randrange(900)])
            width = rng.choice([1, 1, 4, 8])
            bad[at : at + width] = rng.choice([bytes([rng.randrange(256)] * width), b"\xff" * width, bytes(width)])
        survives(tmp_path / "x.gguf", bytes(bad))


@pytest.mark.parametrize(
    "at, form, value",
    [(4, "I", 1), (4, "I", 3 << 24), (8, "Q", 2**64 - 1), (16, "Q", 2**64 - 1), (16, "Q", 2**40), (8, "Q", 2**33)],
)
def test_hostile_counts(tiny, tmp_path, at, form, value):
    bad = bytearray(tiny[1])
    struct.pack_into("<" + form, bad, at, value)
    assert not survives(tmp_path / "x.gguf", bytes(bad))


def test_hostile_lengths_of_keys_and_arrays(tmp_path):
    def file(*parts):
        return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"".join(parts) + bytes(64)

    key = struct.pack("<Q", 1) + b"k"
    for body in [
        struct.pack("<Q", 2**63),
        key + struct.pack("<IQ", 8, 2**63),
        key + struct.pack("<IIQ", 9, 0, 2**62),
        key + struct.pack("<IIQ", 9, 8, 2**61),
        key + struct.pack("<IIQ", 9, 9, 1),
        key + struct.pack("<I", 77),
        struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<I", 0),
    ]:
        assert not survives(tmp_path / "x.gguf", file(body))


def test_keys_and_tensors_that_are_there_twice(tiny, tmp_path):
    data = tiny[1]
    assert not survives(
        tmp_path / "x.gguf",
        data.replace(b"llama.block_count", b"llama.block_xxxxx").replace(b"general.name", b"tokenizer.gg"[:12]),
    )
    assert not survives(tmp_path / "x.gguf", data.replace(b"blk.0.ffn_gate.weight", b"blk.0.ffn_down.weight"))


def test_odd_values_under_any_key_are_answered_in_words(tmp_path):
    c = config(num_hidden_layers=1, vocab_size=300)
    tensors, keys = gguf_tensors(c, weights(c), 30), gguf_keys(c)
    extra = [
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.attn_factor",
        "rope.scale_linear",
        "attention.sliding_window",
        "expert_count",
        "logit_scale",
    ]
    others = [
        "tokenizer.chat_template",
        "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.add_space_prefix",
        "general.alignment",
        "general.sampling.temp",
        "split.count",
    ]
    odd = [
        ("u32", 0),
        ("u32", 1),
        ("u32", 2**32 - 1),
        ("i32", -1),
        ("u64", 2**64 - 1),
        ("f32", float("nan")),
        ("f32", 1e30),
        ("bool", True),
        ("str", ""),
        ("str", "yarn"),
        ("str[]", []),
        ("str[]", ["a", "a"]),
        ("i32[]", []),
        ("i32[]", [-1] * 300),
        ("f32[]", [0.5] * 300),
        ("str[]", [""] * 300),
    ]
    for base in (
        {},
        {"llama.rope.scaling.type": ("str", "yarn"), "llama.rope.scaling.factor": ("f32", 2.0)},
        {"tokenizer.ggml.model": ("str", "llama"), "tokenizer.ggml.scores": ("f32[]", [-1.0] * 300)},
    ):
        for key in [*keys, *(f"llama.{k}" for k in extra), *others]:
            for value in odd:
                (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys | base | {key: value}, tensors))
                try:
                    open_source(tmp_path / "m.gguf").close()
                except ConversionError as e:
                    assert len(str(e)) > 10
                except Exception as e:
                    raise AssertionError(f"{key} = {value}: {e!r}") from e


def test_not_a_gguf_file(tmp_path):
    for data in (b"", b"GGUF", b"GGML" + bytes(100)):
        (tmp_path / "x.gguf").write_bytes(data)
        with pytest.raises(ConversionError, match="not a GGUF file"):
            open_source(tmp_path / "x.gguf")
    with pytest.raises(ConversionError, match="no such file"):
        open_source(tmp_path / "absent.gguf")
