"""Hugging Face checkpoints -> .cass, read back with the independent reader."""

import json
import struct

import numpy as np
import pytest
from cass_reader import Reader
from checkpoints import bf16_to_f32, config, convert, f32_to_bf16, safetensors_bytes, shapes, weights, write_hf

from pycass.convert import open_source, verify_against
from pycass.errors import ConversionError


def converted(tmp_path, c, codec="nest", **kw):
    tensors = write_hf(tmp_path / "m", c, **kw)
    report = convert(tmp_path / "m", tmp_path / "m.cass", codec=codec)
    return tensors, report, Reader(tmp_path / "m.cass")


def refused(tmp_path, match, c=None, **kw):
    write_hf(tmp_path / "m", c or config(), **kw)
    with pytest.raises(ConversionError, match=match):
        convert(tmp_path / "m", tmp_path / "m.cass")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def same(tensors, reader):
    assert list(reader.tensors) == list(tensors)
    for name, bits in tensors.items():
        assert np.array_equal(reader.bf16(name), bits), name


@pytest.mark.parametrize("codec", ["nest", "raw"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_bit_comes_back(tmp_path, family, codec):
    c = config(family)
    tensors, report, reader = converted(tmp_path, c, codec)
    same(tensors, reader)
    stored = reader.config
    assert stored["family"] == {"llama": 1, "mistral": 1, "qwen2": 2, "qwen3": 3}[family]
    assert (stored["n_vocab"], stored["n_token"], stored["n_embd"], stored["n_ff"]) == (320, 300, 96, 80)
    assert (stored["n_layer"], stored["n_head"], stored["n_head_kv"]) == (2, 6, 2)
    assert stored["head_dim"] == c.get("head_dim", 16) and stored["flags"] == 0
    codecs = {t.codec for t in reader.tensors.values() if len(t.shape) == 2}
    assert codecs == {codec} and {t.codec for t in reader.tensors.values() if len(t.shape) == 1} == {"raw"}
    assert report.changed_values == 0 and report.file_bytes == (tmp_path / "m.cass").stat().st_size
    assert verify_against(tmp_path / "m.cass", tmp_path / "m") == []


def test_sliding_window_of_mistral_limits_the_context(tmp_path):
    _, report, reader = converted(tmp_path, config("mistral", sliding_window=128))
    assert reader.config["n_ctx_train"] == 128 and "sliding window" in report.notes[0]


def test_sliding_window_of_qwen2(tmp_path):
    window = {"sliding_window": 64, "max_window_layers": 1}
    assert (
        converted(tmp_path / "a", config("qwen2", use_sliding_window=False, **window))[2].config["n_ctx_train"] == 512
    )
    assert converted(tmp_path / "b", config("qwen2", use_sliding_window=True, **window))[2].config["n_ctx_train"] == 64
    assert (
        converted(tmp_path / "c", config("qwen2", use_sliding_window=True, **window | {"max_window_layers": 2}))[
            2
        ].config["n_ctx_train"]
        == 512
    )


def test_tied_without_lm_head(tmp_path):
    _, report, reader = converted(tmp_path, config(tie_word_embeddings=True))
    assert report.tied and reader.config["flags"] == 1 and "lm_head.weight" not in reader.tensors


def test_tied_with_the_same_lm_head(tmp_path):
    c = config(tie_word_embeddings=True)
    tensors = weights(c)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    _, report, reader = converted(tmp_path, c, tensors=tensors)
    assert report.tied and "lm_head.weight" not in reader.tensors and report.notes == []


def test_tied_with_another_lm_head_is_stored_untied(tmp_path):
    c = config(tie_word_embeddings=True)
    tensors = weights(c)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][7, 7] ^= 1
    _, report, reader = converted(tmp_path, c, tensors=tensors)
    assert not report.tied and reader.config["flags"] == 0 and "untied" in report.notes[0]
    assert np.array_equal(reader.bf16("lm_head.weight"), tensors["lm_head.weight"])


def test_untied_without_lm_head(tmp_path):
    c = config()
    tensors = weights(c)
    del tensors["lm_head.weight"]
    refused(tmp_path / "a", "lm_head.weight is missing", c, tensors=tensors)
    del c["tie_word_embeddings"]
    _, report, reader = converted(tmp_path / "b", c, tensors=tensors)
    assert report.tied and "output matrix" in report.notes[0]


@pytest.mark.parametrize("group", [1, 3, 5, 7])
def test_odd_groups(tmp_path, group):
    c = config(num_attention_heads=2 * group, num_key_value_heads=2, head_dim=16)
    tensors, _, reader = converted(tmp_path, c)
    same(tensors, reader)


def test_uneven_groups_are_refused(tmp_path):
    refused(
        tmp_path, "3 query heads cannot be shared evenly by 2", config(num_attention_heads=3, num_key_value_heads=2)
    )


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported; supported: llama"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "num_local_experts.*mixtures"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config .gptq."),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope.*supported: default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"vocab_size": 0}, "n_vocab"),
        ({"vocab_size": 2**63}, "n_vocab"),
        ({"num_hidden_layers": 10**6}, "n_layer"),
        ({"hidden_size": "96"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size.*missing"),
        ({"num_attention_heads": 0}, "heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
        ({"hidden_size": 97}, "97"),
        ({"rms_norm_eps": 0.0}, "rms_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"max_position_embeddings": True}, "max_position"),
    ],
)
def test_unsupported_configs_are_named(tmp_path, changes, match):
    refused(tmp_path, match, config() | changes, tensors=weights(config()))


def test_shards(tmp_path):
    c = config("qwen2")
    tensors = write_hf(tmp_path / "m", c, shards=3)
    (tmp_path / "m" / "consolidated.safetensors").write_bytes(b"not read")
    report = convert(tmp_path / "m", tmp_path / "m.cass")
    same(tensors, Reader(tmp_path / "m.cass"))
    assert report.notes == ["consolidated.safetensors is not listed in model.safetensors.index.json and was not read"]


def test_a_missing_shard_and_a_stray_one(tmp_path):
    write_hf(tmp_path / "m", config(), shards=3)
    shard = tmp_path / "m" / "model-00002-of-00003.safetensors"
    stray = tmp_path / "m" / "model-00004-of-00003.safetensors"
    data = shard.read_bytes()
    stray.write_bytes(data)
    with pytest.raises(ConversionError, match="00004-of-00003.*does not list"):
        convert(tmp_path / "m", tmp_path / "m.cass")
    stray.unlink()
    shard.unlink()
    with pytest.raises(ConversionError, match="00002-of-00003.safetensors is missing"):
        convert(tmp_path / "m", tmp_path / "m.cass")
    shard.write_bytes(data)
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    with pytest.raises(ConversionError, match="no model.safetensors.index.json"):
        convert(tmp_path / "m", tmp_path / "m.cass")


def test_an_index_that_lies(tmp_path):
    write_hf(tmp_path / "m", config(), shards=2)
    index = tmp_path / "m" / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    first, second = sorted(set(good.values()))
    name = next(n for n, f in good.items() if f == first)
    for change, match in [
        ({name: second}, "missing, which the index promises|stray"),
        ({name: "../x.safetensors"}, "not a file name"),
        ({"extra": first}, "extra is missing"),
        ({name: 7}, "not a file name"),
    ]:
        index.write_text(json.dumps({"weight_map": good | change}))
        with pytest.raises(ConversionError, match=match):
            convert(tmp_path / "m", tmp_path / "m.cass")
    index.write_text(json.dumps({"weight_map": {n: f for n, f in good.items() if n != name}}))
    with pytest.raises(ConversionError, match="stray tensor"):
        convert(tmp_path / "m", tmp_path / "m.cass")


def test_a_tensor_in_two_shards(tmp_path):
    c, tensors = config(), weights(config())
    write_hf(tmp_path / "m", c, tensors, shards=2)
    shard = tmp_path / "m" / "model-00002-of-00002.safetensors"
    part = {n: ("BF16", tensors[n]) for n in [*list(tensors)[1::2], list(tensors)[0]]}
    shard.write_bytes(safetensors_bytes(part))
    with pytest.raises(ConversionError, match="twice in the checkpoint"):
        convert(tmp_path / "m", tmp_path / "m.cass")


def test_missing_stray_and_misshapen_tensors(tmp_path):
    c = config()
    for i, (edit, match) in enumerate(
        [
            (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is missing"),
            (
                lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.zeros((80, 96), np.uint16)}),
                "layers.2.*not known",
            ),
            (
                lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": np.zeros(96, np.uint16)}),
                "attention's output",
            ),
            (lambda t: t.update({"model.norm.weight": np.zeros(95, np.uint16)}), r"\[95\], \[96\] expected"),
            (lambda t: t.update({"model.norm.weight": np.zeros((96, 1, 1), np.uint16)}), "one or two dimensions"),
            (
                lambda t: t.update({"model.norm.weight": ("I8", np.zeros(96, np.int8))}),
                "type I8; supported: BF16, F16, F32",
            ),
        ]
    ):
        tensors = weights(c)
        edit(tensors)
        refused(tmp_path / str(i), match, c, tensors=tensors)


def test_old_buffers_are_ignored(tmp_path):
    c, tensors = config(), weights(config())
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", np.ones(8, np.float32))}
    write_hf(tmp_path / "m", c, tensors | extra)
    convert(tmp_path / "m", tmp_path / "m.cass")
    same(tensors, Reader(tmp_path / "m.cass"))


def test_f32_and_f16_are_rounded_to_nearest_even(tmp_path):
    c = config()
    rng = np.random.default_rng(5)
    values = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes(c).items()}
    values["model.norm.weight"][:4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x80000001], np.uint32).view(
        np.float32
    )
    halves = {n: v.astype(np.float16) for n, v in values.items() if "mlp" in n}
    typed = {n: ("F16", halves[n]) if n in halves else ("F32", v) for n, v in values.items()}
    write_hf(tmp_path / "m", c, typed)
    report = convert(tmp_path / "m", tmp_path / "m.cass")
    reader, changed = Reader(tmp_path / "m.cass"), 0
    for name, value in values.items():
        value = halves[name].astype(np.float32) if name in halves else value
        assert np.array_equal(reader.bf16(name), f32_to_bf16(value)), name
        changed += int((bf16_to_f32(f32_to_bf16(value)) != value).sum())
    assert list(reader.bf16("model.norm.weight")[:4]) == [0x3F80, 0x3F82, 0x3F81, 0x8000]
    assert report.changed_values == changed > 0 and reader.config["flags"] == 2
    assert reader.json["provenance"]["changed_values"] == changed and str(changed) in report.notes[0]
    assert report.source_dtype == "F32, F16"


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_weights_that_are_not_numbers_stop_the_conversion(tmp_path, value):
    c, tensors = config(), weights(config())
    tensors["model.layers.1.mlp.down_proj.weight"][40, 33] = value
    refused(tmp_path, r"tensor model.layers.1.mlp.down_proj.weight\[40, 33\]", c, tensors=tensors)


def test_a_value_beyond_bf16_stops_the_conversion(tmp_path):
    c, tensors = config(), weights(config())
    norm = np.ones(96, np.float32)
    norm[3] = np.finfo(np.float32).max
    tensors["model.norm.weight"] = ("F32", norm)
    refused(tmp_path, r"model.norm.weight\[3\]", c, tensors=tensors)


def test_truncated_safetensors(tmp_path):
    write_hf(tmp_path / "m", config())
    file = tmp_path / "m" / "model.safetensors"
    data = file.read_bytes()
    header = 8 + struct.unpack_from("<Q", data)[0]
    for size in [0, 1, 7, 8, 9, 100, header - 1, header, header + 1, len(data) // 2, len(data) - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(ConversionError):
            convert(tmp_path / "m", tmp_path / "m.cass")
    file.write_bytes(data + b"x")
    with pytest.raises(ConversionError):
        convert(tmp_path / "m", tmp_path / "m.cass")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [2**63 - 1, 2**63 - 1], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [1], "data_offsets": [-2, 0]},
        {"dtype": "BF16", "shape": [1], "data_offsets": [2**63, 2**63 + 2]},
        {"dtype": "BF16", "shape": [2], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]},
        {"dtype": "BF17", "shape": [1], "data_offsets": [0, 2]},
        {"shape": [1]},
        [],
        None,
    ],
)
def test_hostile_safetensors_headers(tmp_path, entry):
    write_hf(tmp_path / "m", config())
    text = json.dumps({"model.norm.weight": entry}).encode()
    (tmp_path / "m" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(2))
    with pytest.raises(ConversionError):
        convert(tmp_path / "m", tmp_path / "m.cass")


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 10**9])
def test_hostile_safetensors_header_sizes(tmp_path, size):
    write_hf(tmp_path / "m", config())
    (tmp_path / "m" / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{}" + bytes(64))
    with pytest.raises(ConversionError):
        convert(tmp_path / "m", tmp_path / "m.cass")


def test_folders_that_lack_something(tmp_path):
    with pytest.raises(ConversionError, match="no such file"):
        convert(tmp_path / "absent", tmp_path / "m.cass")
    (tmp_path / "m").mkdir()
    with pytest.raises(ConversionError, match="config.json: no such file"):
        convert(tmp_path / "m", tmp_path / "m.cass")
    (tmp_path / "m" / "config.json").write_text("{nonsense")
    with pytest.raises(ConversionError, match="not JSON"):
        convert(tmp_path / "m", tmp_path / "m.cass")
    write_hf(tmp_path / "m", config(), tokenizer=False)
    with pytest.raises(ConversionError, match="no tokenizer.json"):
        convert(tmp_path / "m", tmp_path / "m.cass")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ConversionError, match="save the model as safetensors"):
        convert(tmp_path / "m", tmp_path / "m.cass")


def test_verify_against_names_the_difference(tmp_path):
    c = config()
    tensors = write_hf(tmp_path / "m", c)
    convert(tmp_path / "m", tmp_path / "m.cass")
    tensors["model.layers.0.self_attn.v_proj.weight"][5, 9] ^= 1
    write_hf(tmp_path / "m", c | {"rope_theta": 5000.0}, tensors)
    found = verify_against(tmp_path / "m.cass", tmp_path / "m")
    assert found == [
        "rope_inv_freq: the frequencies differ",
        f"model.layers.0.self_attn.v_proj.weight: 1 of {32 * 96} values differ, first at [5, 9]",
    ]


ODD = [None, True, -1, 0, 1, 2.5, 1e308, float("nan"), float("inf"), 2**70, "", "x", [], [1], {}, {"a": {}}]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_odd_values_in_any_setting_are_answered_in_words(tmp_path, family):
    c = config(
        family,
        rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        sliding_window=64,
        use_sliding_window=True,
        max_window_layers=1,
        layer_types=["full_attention"] * 2,
        head_dim=16,
        hidden_act="silu",
        quantization_config=None,
        num_experts=0,
        partial_rotary_factor=1.0,
        original_max_position_embeddings=128,
    )
    write_hf(tmp_path / "m", c, weights(config(family, head_dim=16)))
    path = tmp_path / "m" / "config.json"
    rope = [
        ("rope_scaling", k)
        for k in (
            "rope_type",
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
            "truncate",
            "rope_theta",
            "low_freq_factor",
        )
    ]
    for keys in [(k,) for k in c] + rope:
        for value in ODD:
            changed = json.loads(json.dumps(c))
            if len(keys) == 2 and keys[1].startswith("mscale"):
                changed["rope_scaling"] |= {"mscale": 1.0, "mscale_all_dim": 0.5}
            target = changed if len(keys) == 1 else changed[keys[0]]
            target[keys[-1]] = value
            path.write_text(json.dumps(changed))
            answered(tmp_path / "m", (keys, value))


def answered(folder, what):
    try:
        open_source(folder).close()
    except ConversionError as e:
        assert len(str(e)) > 10
    except Exception as e:
        raise AssertionError(f"{what}: {e!r}") from e


def test_odd_values_in_the_small_files(tmp_path):
    write_hf(tmp_path / "m", config())
    settings = (
        "bos_token",
        "eos_token",
        "unk_token",
        "add_bos_token",
        "add_eos_token",
        "tokenizer_class",
        "chat_template",
        "legacy",
    )
    for file, keys in (
        ("tokenizer_config.json", settings),
        ("generation_config.json", ("eos_token_id", "temperature", "top_k")),
        ("chat_template.json", ("chat_template",)),
        ("model.safetensors.index.json", ("weight_map",)),
    ):
        for key in keys:
            for value in ODD + [{"content": 7}, [{"name": "default"}], [7]]:
                (tmp_path / "m" / file).write_text(
                    json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|bos|>"} | {key: value})
                )
                if file.endswith("index.json"):
                    (tmp_path / "m" / "model.safetensors").replace(
                        tmp_path / "m" / "model-00001-of-00001.safetensors"
                    ) if (tmp_path / "m" / "model.safetensors").exists() else None
                answered(tmp_path / "m", (file, key, value))
        (tmp_path / "m" / file).unlink()


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_huge_numbers_are_answered_in_words(tmp_path, value):
    for n, key in enumerate(("rms_norm_eps", "rope_theta", "vocab_size", "sliding_window", "head_dim")):
        c = config("mistral")
        if key != "sliding_window" or value < 0:  # a window beyond the context is no limit
            match = "rms_norm_eps|rope_theta|outside of"
            refused(tmp_path / str(n), match, c | {key: value}, tensors=weights(c))
    write_hf(tmp_path / "g", config())
    for key in ("temperature", "top_p", "top_k"):
        (tmp_path / "g" / "generation_config.json").write_text(json.dumps({key: value}))
        with pytest.raises(ConversionError, match=key):
            open_source(tmp_path / "g")


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"rms_norm_eps": 1.0}, "rms_eps = 1.0"),
        ({"rms_norm_eps": 1 - 1e-12}, "rms_eps"),
        ({"rms_norm_eps": 0}, "rms_eps"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-4}}, "rotary frequency 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1e6}}, "attention factor"),
    ],
)
def test_what_the_engine_would_refuse_is_not_converted(tmp_path, changes, match):
    refused(tmp_path, match, config(**changes), tensors=weights(config()))


def test_special_files_are_refused_before_they_are_opened(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    for src in (tmp_path / "pipe.gguf", "/dev/null", "/dev/zero"):
        with pytest.raises(ConversionError, match="not a regular file"):
            open_source(src)
    for src in ("a\0b", "x" * 5000, "/dev/null/x"):
        with pytest.raises(ConversionError):
            open_source(src)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        write_hf(tmp_path / name / "m", config())
        (tmp_path / name / "m" / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name / "m" / name)
        with pytest.raises(ConversionError, match="not a regular file"):
            open_source(tmp_path / name / "m")
