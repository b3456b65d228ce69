"""Tiny random models of each family, whose logits are known from transformers (tests/golden/make.py).

Weights come from an integer hash, so that the tests can write the same checkpoints again on any machine and only the
results are stored. Scales are such that attention looks around, that the most likely token wins by a clear margin,
and that drafts are sometimes wrong."""

import zlib
from dataclasses import dataclass, field

import numpy as np
from checkpoints import f32_to_bf16, shapes, tokenizer_json, write_hf

BOS, EOS = "<|bos|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ bos_token if loop.first else '' }}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
N_IDS, N_PROMPT, N_GREEDY, N_LONG = 40, 12, 24, 1500


@dataclass(frozen=True)
class Spec:
    """A model: its config.json, and `n_token` of its `vocab_size` rows that the tokenizer has."""

    config: dict
    n_token: int
    kept: tuple = field(default=(0, 1, 5, 11, 20, 39))  # positions of the logits without rounding of the cache


def _spec(family, n_token=300, **config):
    base = {
        "model_type": family,
        "vocab_size": n_token,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": n_token - 2,
        "eos_token_id": n_token - 1,
    }
    return Spec(base | config, n_token)


def _dims(hidden, ff, heads, kv, head_dim=None):
    out = {
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }
    return out | ({"head_dim": head_dim} if head_dim else {})


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# groups of query heads per key head: 3, 3, 1, 5, 2, 3, 7, 2, 2, 3; many sizes are not multiples of 16 or 64
SPECS = {
    "llama_tied": _spec("llama", **_dims(66, 96, 6, 2, 16), tie_word_embeddings=True, vocab_size=320),
    "llama_untied": _spec("llama", 333, **_dims(72, 100, 6, 2), num_hidden_layers=3),
    "llama3_rope": _spec("llama", **_dims(64, 112, 4, 4), rope_theta=500000.0, rope_scaling=_LLAMA3),
    "llama_linear": _spec(
        "llama", **_dims(80, 130, 5, 1), tie_word_embeddings=True, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "llama_yarn": _spec("llama", **_dims(64, 96, 4, 2), rope_scaling=_YARN | {"attention_factor": 1.3}),
    "mistral": _spec("mistral", **_dims(96, 160, 6, 2, 24), sliding_window=None),
    "qwen2": _spec("qwen2", **_dims(112, 176, 7, 1), tie_word_embeddings=True, rope_theta=1000000.0),
    "qwen2_yarn": _spec("qwen2", 301, **_dims(64, 120, 4, 2), rope_parameters=_YARN | {"rope_theta": 10000.0}),
    "qwen3": _spec("qwen3", **_dims(64, 128, 4, 2, 32), tie_word_embeddings=True, rms_norm_eps=1e-6),
    "qwen3_untied": _spec("qwen3", 311, **_dims(90, 150, 3, 1, 20), num_hidden_layers=3, vocab_size=317),
}
LONG = ("llama3_rope", "qwen2_yarn")  # models whose logits far behind are known too


def _mix(z):
    """The finalizer of splitmix64, on uint64 arrays."""
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def random_bits(key, n):
    """n 64-bit numbers that depend on the text `key` only."""
    start = np.uint64(zlib.crc32(key.encode())) << np.uint64(32)
    return _mix((start + np.arange(n, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15))


def normal(key, shape):
    """Nearly normal numbers (sums of four uniform ones), exact in float64."""
    bits = random_bits(key, int(np.prod(shape)))
    total = sum((bits >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.float64) for i in range(4))
    return ((total - 131070.0) / 65536.0 * 1.732).reshape(shape)


def _values(name, tensor, shape, config):
    """float64 values of one tensor."""
    x = normal(f"{name}/{tensor}", shape)
    if tensor == "model.norm.weight" and config["tie_word_embeddings"]:
        return np.where(x > 0, 1.0, -1.0) + 0.25 * x  # else the most likely token is always the same again
    if tensor.endswith("norm.weight"):
        heads = "q_norm" in tensor or "k_norm" in tensor
        return (1.4 if heads else 1.0) + 0.25 * x
    if tensor.endswith("bias"):
        return x * (6.0 if "k_proj" in tensor else 0.5)
    if tensor == "lm_head.weight" or (tensor == "model.embed_tokens.weight" and config["tie_word_embeddings"]):
        return x * 3.2 / np.sqrt(shape[1])
    if tensor == "model.embed_tokens.weight":
        return x
    gain = {
        "q_proj": 1.2,
        "k_proj": 1.2,
        "v_proj": 1.0,
        "o_proj": 1.0,
        "gate_proj": 1.2,
        "up_proj": 1.0,
        "down_proj": 1.0,
    }
    return x * gain[tensor.split(".")[-2]] / np.sqrt(shape[1])


def weights(name):
    """{tensor: BF16 bits}."""
    config = SPECS[name].config
    return {t: f32_to_bf16(_values(name, t, shape, config)) for t, shape in shapes(config).items()}


def ids(name, n=N_IDS, key="ids"):
    """The fixed sequence of n tokens."""
    return [int(i) for i in random_bits(f"{name}/{key}", n) % np.uint64(SPECS[name].n_token - 2)]


def write(name, folder):
    """Writes the checkpoint: a Hugging Face directory."""
    spec = SPECS[name]
    added = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": False, "chat_template": CHAT_TEMPLATE}
    write_hf(folder, spec.config, weights(name), tokenizer=False, tokenizer_config__json=added)
    tokenizer_json(spec.n_token).save(str(folder / "tokenizer.json"))
    return folder
