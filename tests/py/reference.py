"""A transformer in float64, from the architecture's formulas: what a model's logits are but for the rounding that
pycass does on purpose."""

import numpy as np
from checkpoints import bf16_to_f32, f32_to_bf16


def exactly(x):
    return x


def to_bf16(x):
    """To the nearest BF16 value."""
    return bf16_to_f32(f32_to_bf16(x)).astype(np.float64)


def to_int8(x):
    """As the draft has activations: int8 times a scale for each 64 columns. The products and sums are float32."""
    groups = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 64)]).reshape(*x.shape[:-1], -1, 64)
    groups = groups.astype(np.float32)
    top = np.abs(groups).max(axis=-1, keepdims=True)
    q = np.rint(groups * (np.float32(127) / np.where(top > 0, top, 1)))
    return (q.astype(np.float64) * top / 127).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def _norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotated(x, c):
    """x [token, head, head_dim], the tokens at positions 0, 1, .. The angles and their cosines are float32 products."""
    positions = np.arange(len(x), dtype=np.float32)[:, None, None]
    angle = (positions * np.array(c.rope_inv_freq, np.float32)).astype(np.float64)
    factor = np.float32(c.rope_attention_factor)
    cosine, sine = (f(angle).astype(np.float32) * factor for f in (np.cos, np.sin))
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def _attention(q, k, v):
    """[token, head, head_dim] each, keys and values of all query heads."""
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[-1])
    scores[:, np.triu(np.ones((len(q), len(q)), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(axis=-1, keepdims=True), v)


def logits(ids, c, w, acts=exactly, cache=exactly, multiply=None):
    """float64 [len(ids), n_vocab]. c: a Config; w(name): a tensor's float64 values, or None where there is none.
    acts: what is done to the activations that enter a matrix product; cache: to keys and values. multiply(name, x): another
    product of tensor name with activations x [token, column]."""
    multiply = multiply or (lambda name, x: acts(x) @ w(name).T)

    def product(name, x):
        y = multiply(name + ".weight", x)
        bias = w(name + ".bias")
        return y if bias is None else y + bias

    def heads(x, n, norm=None):
        x = x.reshape(len(ids), n, c.head_dim)
        return x if norm is None else _norm(x, norm, c.rms_eps)

    x = w("model.embed_tokens.weight")[list(ids)]
    for i in range(c.n_layer):
        at = f"model.layers.{i}."
        h = _norm(x, w(at + "input_layernorm.weight"), c.rms_eps)
        q = heads(product(at + "self_attn.q_proj", h), c.n_head, w(at + "self_attn.q_norm.weight"))
        k = heads(product(at + "self_attn.k_proj", h), c.n_head_kv, w(at + "self_attn.k_norm.weight"))
        k, v = cache(_rotated(k, c)), cache(heads(product(at + "self_attn.v_proj", h), c.n_head_kv))
        k, v = (np.repeat(t, c.n_head // c.n_head_kv, axis=1) for t in (k, v))
        x = x + product(at + "self_attn.o_proj", _attention(_rotated(q, c), k, v).reshape(len(ids), -1))
        h = _norm(x, w(at + "post_attention_layernorm.weight"), c.rms_eps)
        gate, up = product(at + "mlp.gate_proj", h), product(at + "mlp.up_proj", h)
        x = x + product(at + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
    output = "model.embed_tokens" if c.tied_embedding else "lm_head"
    return product(output, _norm(x, w("model.norm.weight"), c.rms_eps))
