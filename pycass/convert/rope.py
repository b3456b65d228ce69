"""Rotary frequencies: every supported scaling resolved to (inv_freq, attention factor).

The arithmetic follows Hugging Face transformers (`modeling_rope_utils.py`): float32 throughout, in the same
order. The one difference is `base ** x`, which is rounded correctly here; transformers takes it from a vector
library that may be off by one unit in the last place.
"""

import math

import numpy as np

from ..errors import ConversionError

SUPPORTED = ("default", "linear", "llama3", "yarn")


def is_number(value):
    """Whether a value out of JSON is a finite number that a float can hold: an int may have hundreds of digits."""
    try:
        return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def shown(value):
    """A value for a message: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an int beyond Python's limit of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _number(params, key, default=None, positive=True):
    value = params.get(key, default)
    if value is None:
        raise ConversionError(f"rope parameters lack '{key}' (type {shown(params.get('rope_type'))})")
    if not is_number(value):
        raise ConversionError(f"rope parameter '{key}' is not a number that a float holds: {shown(value)}")
    if positive and value <= 0:
        raise ConversionError(f"rope parameter '{key}' must be positive: {value!r}")
    return value


def _pos_freqs(base, head_dim):
    """base ** (2 i / head_dim), float32 [head_dim / 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    with np.errstate(over="ignore"):
        return np.power(np.float64(base), exponent.astype(np.float64)).astype(np.float32)


def _llama3(inv_freq, params):
    factor = _number(params, "factor")
    low, high = _number(params, "low_freq_factor"), _number(params, "high_freq_factor")
    old_context = _number(params, "original_max_position_embeddings")
    if high <= low:
        raise ConversionError(f"rope type llama3: high_freq_factor {high} is not above low_freq_factor {low}")
    f32 = np.float32
    # number / tensor is reciprocal times number in torch: two roundings
    wavelen = (f32(1) / inv_freq) * f32(2 * math.pi)
    scaled = np.where(wavelen > f32(old_context / low), inv_freq / f32(factor), inv_freq)
    smooth = ((f32(1) / wavelen) * f32(old_context) - f32(low)) / f32(high - low)
    blended = (f32(1) - smooth) * scaled / f32(factor) + smooth * scaled
    medium = ~(wavelen < f32(old_context / high)) & ~(wavelen > f32(old_context / low))
    return np.where(medium, blended, scaled)


def _yarn_mscale(scale, mscale=1.0):
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn_attention_factor(params, factor):
    if params.get("attention_factor") is not None:
        return float(_number(params, "attention_factor"))
    mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if mscale and all_dim:
        return _yarn_mscale(factor, _number(params, "mscale")) / _yarn_mscale(factor, _number(params, "mscale_all_dim"))
    return _yarn_mscale(factor)


def _yarn_ramp(params, base, head_dim, context):
    """0 where a pair is extrapolated (fast), 1 where it is interpolated (slow); float32 [head_dim / 2]."""
    fast, slow = (
        _number(params, key) if params.get(key) else default for key, default in (("beta_fast", 32), ("beta_slow", 1))
    )

    def dimension(rotations):
        return (head_dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(fast), dimension(slow)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(ramp, np.float32(0), np.float32(1))


def _yarn(params, base, head_dim, n_ctx):
    context = _number(params, "original_max_position_embeddings")
    # transformers: a `factor` that is there but null is the ratio of the two context lengths
    factor = _number(params, "factor", n_ctx / context) if params.get("factor") is not None else n_ctx / context
    pos_freqs = _pos_freqs(base, head_dim)
    extrapolation = np.float32(1) / pos_freqs
    interpolation = np.float32(1) / (np.float32(factor) * pos_freqs)
    keep = np.float32(1) - _yarn_ramp(params, base, head_dim, context)
    inv_freq = interpolation * (np.float32(1) - keep) + extrapolation * keep
    return inv_freq, _yarn_attention_factor(params, factor)


def resolve(params, head_dim, n_ctx):
    """Frequencies of one model.

    params: dict in transformers' `rope_parameters` form: rope_type, rope_theta, and the type's own keys.
    head_dim: even number of elements of a head. n_ctx: max_position_embeddings.
    Returns (inv_freq float32 [head_dim / 2] in radians per position, attention factor float).
    Raises ConversionError for types and values that are not supported.
    """
    kind = params.get("rope_type") or "default"
    if not isinstance(kind, str) or kind not in SUPPORTED:
        kind = kind if isinstance(kind, str) else shown(kind)
        raise ConversionError(f"rope type '{kind:.80}' is not supported; supported: {', '.join(SUPPORTED)}")
    base = _number(params, "rope_theta")
    if base <= 1:
        raise ConversionError(f"rope parameter 'rope_theta' must be above 1: {base!r}")
    attention_factor = 1.0
    if kind == "yarn":
        try:
            with np.errstate(all="ignore"):  # looked at below
                inv_freq, attention_factor = _yarn(params, base, head_dim, n_ctx)
        except (ValueError, OverflowError, ZeroDivisionError) as e:
            raise ConversionError(f"yarn's parameters have no meaning: {e}: {shown(params)}") from e
    else:
        inv_freq = np.float32(1) / _pos_freqs(base, head_dim)
    with np.errstate(all="ignore"):  # looked at below
        if kind == "linear":
            inv_freq = inv_freq / np.float32(_number(params, "factor"))
        elif kind == "llama3":
            inv_freq = _llama3(inv_freq, params)
    inv_freq = np.ascontiguousarray(inv_freq, dtype=np.float32)
    if not (np.isfinite(inv_freq).all() and (inv_freq > 0).all() and abs(attention_factor) < 1e37):
        raise ConversionError(f"rope parameters give frequencies that are not positive numbers: {shown(params)}")
    return inv_freq, float(attention_factor)


def apply_factors(inv_freq, factors):
    """GGUF's `rope_freqs.weight`: each frequency is divided by its factor. Both float32 [head_dim / 2]."""
    if factors.shape != inv_freq.shape:
        raise ConversionError(f"rope_freqs.weight has {factors.size} values, {inv_freq.size} expected")
    if not np.isfinite(factors).all() or not (factors > 0).all():
        raise ConversionError("rope_freqs.weight has values that are not positive numbers")
    with np.errstate(over="ignore"):  # ModelConfig.validate looks at them
        return (inv_freq / factors.astype(np.float32)).astype(np.float32)
