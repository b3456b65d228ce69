"""Small random checkpoints for the tests of conversion: Hugging Face folders and GGUF files."""

import functools
import json
import struct

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import pycass.convert

convert = functools.partial(pycass.convert.convert, calibrate=None)  # calibration has tests of its own

SAMPLE = [
    "Hello world! The quick brown fox jumps over the lazy dog. ",
    "Café déjà vu — 123 456 7890 😊 Führer ",
    "def f(x):\n    return x * 100\n\n\n# end\t\ttabs",
    "日本語 漢字 한국어 the then there other    spaces        more",
] * 4


def bf16_to_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values):
    """To nearest even; finite values only."""
    u = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def tokenizer_json(n=300, bos=None):
    """A byte-level BPE tokenizer of `n` ids with two control tokens, <|bos|> and <|im_end|>."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        SAMPLE,
        trainers.BpeTrainer(
            vocab_size=n - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    t.add_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|im_end|>", special=True)])
    return t


def config(family="llama", **changes):
    out = {
        "model_type": family,
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 298,
        "eos_token_id": 299,
    }
    if family == "qwen3":
        out["head_dim"] = 32
    return out | changes


def shapes(c):
    """{name: shape} in the order of the format's text."""
    e, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    d = c.get("head_dim") or e // c["num_attention_heads"]
    q, kv = d * c["num_attention_heads"], d * c["num_key_value_heads"]
    out = {"model.embed_tokens.weight": (v, e)}
    for i in range(c["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (e,),
            "self_attn.q_proj.weight": (q, e),
            "self_attn.k_proj.weight": (kv, e),
            "self_attn.v_proj.weight": (kv, e),
            "self_attn.o_proj.weight": (e, q),
            "post_attention_layernorm.weight": (e,),
            "mlp.gate_proj.weight": (f, e),
            "mlp.up_proj.weight": (f, e),
            "mlp.down_proj.weight": (e, f),
        }
        if c["model_type"] == "qwen2":
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if c["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
        out |= {f"model.layers.{i}.{n}": s for n, s in layer.items()}
    out["model.norm.weight"] = (e,)
    if not c.get("tie_word_embeddings"):
        out["lm_head.weight"] = (v, e)
    return out


def weights(c, seed=0):
    """{name: BF16 bits}: normal, with zeros, denormals and large values among them."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(c).items():
        bits = f32_to_bf16(rng.standard_normal(shape) * 0.05)
        flat = bits.reshape(-1)
        flat[rng.integers(0, flat.size, 3)] = [0x0000, 0x8000, 0x0001]
        flat[rng.integers(0, flat.size, 2)] = [0x7F7F, 0xC2F6]
        out[name] = bits
    return out


def safetensors_bytes(tensors):
    """tensors: {name: (dtype name, array)}."""
    header, data, at = {}, b"", 0
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        data, at = data + raw, at + len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_hf(folder, c, tensors=None, tokenizer=True, shards=1, **extra):
    """Writes a checkpoint folder; tensors {name: BF16 bits or (dtype, array)}. extra: file name (dots as __) -> object."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(c) if tensors is None else tensors
    typed = {n: t if isinstance(t, tuple) else ("BF16", t) for n, t in tensors.items()}
    (folder / "config.json").write_text(json.dumps(c))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(typed))
    else:
        weight_map = {}
        for s in range(shards):
            file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(typed.items())[s::shards])
            (folder / file).write_bytes(safetensors_bytes(part))
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if tokenizer:
        tokenizer_json().save(str(folder / "tokenizer.json"))
    for name, value in extra.items():
        (folder / name.replace("__", ".")).write_text(value if isinstance(value, str) else json.dumps(value))
    return tensors


# ---- GGUF -----------------------------------------------------------------------------------------------------

_GGUF = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def gguf_name(name):
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in plain:
        return plain[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF[module]}.{kind}"


def permute(w, n_head):
    """What GGUF's converter does to llama's q and k: the halves of each head interleaved."""
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def gguf_keys(c):
    """Metadata {key: (kind, value)} of config `c`; kinds: u32, f32, str, bool, str[], i32[], f32[]."""
    a = "llama" if c["model_type"] == "mistral" else c["model_type"]
    out = {
        "general.architecture": ("str", a),
        "general.name": ("str", "tiny"),
        f"{a}.block_count": ("u32", c["num_hidden_layers"]),
        f"{a}.context_length": ("u32", c["max_position_embeddings"]),
        f"{a}.embedding_length": ("u32", c["hidden_size"]),
        f"{a}.feed_forward_length": ("u32", c["intermediate_size"]),
        f"{a}.attention.head_count": ("u32", c["num_attention_heads"]),
        f"{a}.attention.head_count_kv": ("u32", c["num_key_value_heads"]),
        f"{a}.attention.layer_norm_rms_epsilon": ("f32", c["rms_norm_eps"]),
        f"{a}.rope.freq_base": ("f32", c["rope_theta"]),
    }
    if c.get("head_dim"):
        out |= {
            f"{a}.attention.key_length": ("u32", c["head_dim"]),
            f"{a}.attention.value_length": ("u32", c["head_dim"]),
        }
    return out | gguf_vocabulary(tokenizer_json(), c["vocab_size"])


def gguf_vocabulary(tokenizer, rows, pre="gpt-2"):
    """Metadata of a BPE tokenizer, filled up to `rows` tokens as converters do it."""
    t = json.loads(tokenizer.to_str())
    ids = {i: text for text, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = {x["id"]: 3 if x["special"] else 4 for x in t["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in t["model"]["merges"]]
    return {
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", pre),
        "tokenizer.ggml.tokens": ("str[]", [ids.get(i, f"[PAD{i}]") for i in range(rows)]),
        "tokenizer.ggml.token_type": ("i32[]", [added.get(i, 1) if i in ids else 5 for i in range(rows)]),
        "tokenizer.ggml.merges": ("str[]", merges),
        "tokenizer.ggml.bos_token_id": ("u32", 298),
        "tokenizer.ggml.eos_token_id": ("u32", 299),
        "tokenizer.ggml.add_bos_token": ("bool", False),
    }


_KINDS = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "str": (8, None), "u64": (10, "<Q")}


def _value(kind, v):
    if kind == "str":
        raw = v.encode()
        return struct.pack("<Q", len(raw)) + raw
    return struct.pack(_KINDS[kind][1], v)


def gguf_bytes(keys, tensors, version=3):
    """keys as gguf_keys; tensors {GGUF name: (type number, shape rows first, bytes)}."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)))
    for key, (kind, v) in keys.items():
        out += _value("str", key)
        if kind.endswith("[]"):
            item = kind[:-2]
            out += struct.pack("<IIQ", 9, _KINDS[item][0], len(v)) + b"".join(_value(item, x) for x in v)
        else:
            out += struct.pack("<I", _KINDS[kind][0]) + _value(kind, v)
    data = bytearray()
    for name, (number, shape, raw) in tensors.items():
        data += bytes(-len(data) % 32)
        out += _value("str", name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, len(data))
        data += raw
    return bytes(out + bytes(-len(out) % 32) + data)


def gguf_tensors(c, tensors, number=1):
    """{HF name: BF16 bits} as GGUF's {name: (type, shape, bytes)}: matrices as F32 (0), F16 (1), BF16 (30); rows as F32."""
    out = {}
    for name, bits in tensors.items():
        if c["model_type"] in ("llama", "mistral"):
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                bits = permute(bits, c[heads]) if part in name else bits
        values = bf16_to_f32(bits)
        kind = number if bits.ndim == 2 else 0
        raw = (values if kind == 0 else bits if kind == 30 else values.astype(np.float16)).tobytes()
        out[gguf_name(name)] = (kind, bits.shape, raw)
    return out


def write_gguf(path, c, tensors, number=30, keys=None):
    path.write_bytes(gguf_bytes(gguf_keys(c) | (keys or {}), gguf_tensors(c, tensors, number)))
    return path


def nfc_split_tokenizer(pattern, nfc, ignore_merges, n=400):
    """A tokenizer of the shape of Qwen2's and Llama 3's."""
    from tokenizers import Regex

    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        SAMPLE,
        trainers.BpeTrainer(
            vocab_size=n - 3, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    t.add_tokens(
        [
            AddedToken("<|bos|>", special=True),
            AddedToken("<|im_end|>", special=True),
            AddedToken("<tool>", normalized=False, special=False),
        ]
    )
    return t
