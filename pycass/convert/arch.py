"""What a model is made of: hyperparameters, the tensors that they call for, and what is refused."""

from dataclasses import dataclass, field

import numpy as np

from ..errors import ConversionError
from . import rope

FAMILIES = {"llama": 1, "qwen2": 2, "qwen3": 3}
# transformers' model_type -> family; Mistral computes what Llama computes
MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
FLAG_TIED, FLAG_ROUNDED, FLAG_QUANTIZED = 1, 2, 4

_LIMITS = {  # the CONFIG section's ranges (docs/format.md)
    "n_vocab": (1, 1 << 24),
    "n_ctx_train": (1, 1 << 24),
    "n_embd": (1, 1 << 16),
    "n_ff": (1, 1 << 20),
    "n_layer": (1, 1024),
    "n_head": (1, 1024),
    "n_head_kv": (1, 1024),
    "head_dim": (2, 1024),
}


@dataclass
class ModelConfig:
    """Hyperparameters as the CONFIG section has them. `notes`: what the user should know, in sentences."""

    family: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rms_eps: float
    rope_inv_freq: np.ndarray = None  # float32 [head_dim / 2]
    rope_attention_factor: float = 1.0
    rope: dict = field(default_factory=dict)  # what the frequencies were made from, for an override at load time
    tied: bool = False
    n_token: int = 0
    notes: list = field(default_factory=list)

    def validate(self):
        """Raises ConversionError naming the first value that the format or the engine does not take."""
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConversionError(f"{name} = {rope.shown(value)} is outside of {low}..{high}")
        if self.n_head % self.n_head_kv:
            raise ConversionError(
                f"{self.n_head} query heads cannot be shared evenly by {self.n_head_kv} key/value heads"
            )
        if self.head_dim % 2:
            raise ConversionError(f"head_dim = {self.head_dim} is odd: rotary embedding needs pairs")
        # as binary32, which is what the file holds and the engine checks; NaN fails every comparison
        if not 1e-37 < self.rms_eps < 2 or not np.float32(self.rms_eps) < 1:
            raise ConversionError(f"rms_eps = {self.rms_eps} is not a positive number below 1")
        factor = self.rope_attention_factor
        if not 1e-37 < factor < 2e6 or not np.float32(factor) < 1e6:
            raise ConversionError(f"rope's attention factor {factor} is not a positive number below 1e6")
        freq = self.rope_inv_freq
        if freq is not None and not ((freq >= 0) & (freq <= 1000)).all():
            at = int(np.argmin((freq >= 0) & (freq <= 1000)))
            raise ConversionError(
                f"rotary frequency {at} is {freq[at]} radians per position: outside of 0..1000, check rope_theta and "
                "the scaling's factors"
            )


def layer_tensors(cfg, layer):
    """{name: shape} of the tensors that layer `layer` must have."""
    e, q, kv, f = cfg.n_embd, cfg.n_head * cfg.head_dim, cfg.n_head_kv * cfg.head_dim, cfg.n_ff
    shapes = {
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
    if cfg.family == "qwen2":
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv))}
    if cfg.family == "qwen3":
        shapes |= {f"self_attn.{p}_norm.weight": (cfg.head_dim,) for p in "qk"}
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def expected_tensors(cfg):
    """{name: shape} of the whole model in the order of the file; `lm_head.weight` unless cfg.tied."""
    tensors = {"model.embed_tokens.weight": (cfg.n_vocab, cfg.n_embd)}
    for layer in range(cfg.n_layer):
        tensors |= layer_tensors(cfg, layer)
    tensors["model.norm.weight"] = (cfg.n_embd,)
    if not cfg.tied:
        tensors["lm_head.weight"] = (cfg.n_vocab, cfg.n_embd)
    return tensors


def check_tensors(cfg, found):
    """Compares {name: shape} with what cfg calls for; a missing, a stray or a misshapen tensor is an error."""
    expected = expected_tensors(cfg)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ConversionError(f"{_some(missing)} missing from the source")
    stray = [name for name in found if name not in expected]
    if stray:
        why = _why_stray(stray[0])
        raise ConversionError(f"{_some(stray)} not known in the family '{cfg.family}'{why}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ConversionError(f"tensor {name} has the shape {list(found[name])}, {list(shape)} expected")
    return expected


def _some(names):
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {names[0]}{more}"


def _why_stray(name):
    if name.endswith("o_proj.bias"):
        return ": a bias on the attention's output is not supported"
    if ".mlp." in name and name.endswith(".bias"):
        return ": biases in the feed-forward part are not supported"
    if "expert" in name or "block_sparse_moe" in name:
        return ": mixtures of experts are not supported"
    return ""


# ---- config.json ------------------------------------------------------------------------------------------


def _int(config, key, default=None):
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConversionError(
            f"config.json: '{key}' " + ("is missing" if value is None else f"is not a whole number: {rope.shown(value)}")
        )
    return value


def _float(config, key, default):
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConversionError(f"config.json: '{key}' is not a number: {rope.shown(value)}")
    try:
        return float(value)
    except OverflowError:
        where = f"config.json: '{key}'"
        raise ConversionError(f"{where} is not a number that a float holds: {rope.shown(value)}") from None


def _refuse_unsupported(config):
    """Raises for options of config.json that would change what the model computes."""
    if config.get("quantization_config"):
        method = (
            config["quantization_config"].get("quant_method", "?")
            if isinstance(config["quantization_config"], dict)
            else "?"
        )
        raise ConversionError(
            f"config.json: quantization_config ({method}): quantised checkpoints are not supported; "
            "use BF16, F16 or F32 safetensors, or a GGUF file"
        )
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ConversionError(f"config.json: hidden_act '{act}' is not supported; supported: silu")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            raise ConversionError(
                f"config.json: {key} = {config[key]}: mixtures of experts are not supported; supported: dense models"
            )
    if config.get("attention_bias") and config.get("model_type") != "qwen2":  # qwen2 has its own, and no such option
        raise ConversionError(
            "config.json: attention_bias: a bias on the attention's output is not supported; "
            "supported: no biases, or qwen2's on query, key and value"
        )
    if config.get("mlp_bias"):
        raise ConversionError(
            "config.json: mlp_bias: biases in the feed-forward part are not supported; supported: none"
        )


def rope_parameters(config):
    """config.json's rope settings, old style or new, as one flat dict in transformers' form."""
    params = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(params, dict):
        raise ConversionError(f"config.json: rope_scaling is not an object: {params!r}")
    if any(isinstance(v, dict) for v in params.values()):
        raise ConversionError(
            "config.json: rope parameters that differ by layer type are not supported; "
            f"supported: one set of type {', '.join(rope.SUPPORTED)}"
        )
    params = dict(params)
    params["rope_type"] = params.get("rope_type") or params.get("type") or "default"
    if params.get("rope_theta") is None:
        params["rope_theta"] = config["rope_theta"] if config.get("rope_theta") is not None else 10000.0
    partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConversionError(f"config.json: partial_rotary_factor {partial} is not supported; supported: 1")
    return params


def _attention_window(config, model_type, n_layer):
    """Positions that a token sees, or None for all."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        unknown = set(map(str, kinds)) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ConversionError(
                f"config.json: layer type '{sorted(unknown)[0]}' is not supported; supported: full_attention"
            )
    if window is None or model_type == "llama":
        return None
    if model_type != "mistral":
        if not config.get("use_sliding_window"):
            return None
        sliding = (
            "sliding_attention" in kinds if isinstance(kinds, list) else _int(config, "max_window_layers", 28) < n_layer
        )
        if not sliding:
            return None
    return _int(config, "sliding_window")


def limit_to_window(cfg, window):
    """Full attention equals a sliding window as long as the context fits into it: so the context is limited."""
    if window is not None and window < cfg.n_ctx_train:
        cfg.notes.append(
            f"attention over a sliding window of {window} positions is not supported: "
            f"the context is limited to it (the model's: {cfg.n_ctx_train})"
        )
        cfg.n_ctx_train = window


def set_rope(cfg, params):
    """Fills in the frequencies, and the longer context that yarn stands for."""
    if params["rope_type"] in ("llama3", "yarn"):
        params.setdefault("original_max_position_embeddings", cfg.n_ctx_train)
    cfg.rope = dict(params)
    cfg.rope_inv_freq, cfg.rope_attention_factor = rope.resolve(params, cfg.head_dim, cfg.n_ctx_train)
    if params["rope_type"] == "yarn" and params.get("factor"):
        stretched = params["original_max_position_embeddings"] * params["factor"]
        if cfg.n_ctx_train < stretched <= 1 << 24:
            cfg.notes.append(f"yarn stretches the context from {cfg.n_ctx_train} to {int(stretched)} positions")
            cfg.n_ctx_train = int(stretched)


def from_hf(config):
    """ModelConfig of a config.json (dict). `tied` is what the file says, to be settled with the tensors.

    Raises ConversionError naming what is not supported and what is.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ConversionError(
            f"config.json: model_type '{model_type}' is not supported; supported: {', '.join(MODEL_TYPES)}"
        )
    _refuse_unsupported(config)
    n_embd, n_head = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    if n_head < 1:
        raise ConversionError(f"config.json: num_attention_heads = {n_head}")
    default_dim = 128 if model_type == "qwen3" else n_embd // n_head
    if config.get("head_dim") is None and model_type != "qwen3" and n_embd % n_head:
        raise ConversionError(
            f"config.json: hidden_size {n_embd} is not a multiple of {n_head} heads, and there is no head_dim"
        )
    kv_default = (
        {"qwen2": 32, "qwen3": 32, "mistral": 8}.get(model_type, n_head)
        if "num_key_value_heads" not in config
        else n_head
    )
    cfg = ModelConfig(
        family=MODEL_TYPES[model_type],
        n_vocab=_int(config, "vocab_size"),
        n_ctx_train=_int(config, "max_position_embeddings"),
        n_embd=n_embd,
        n_ff=_int(config, "intermediate_size"),
        n_layer=_int(config, "num_hidden_layers"),
        n_head=n_head,
        n_head_kv=_int(config, "num_key_value_heads", kv_default),
        head_dim=_int(config, "head_dim", default_dim),
        rms_eps=_float(config, "rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    if cfg.n_head_kv < 1:
        raise ConversionError(f"config.json: num_key_value_heads = {cfg.n_head_kv}")
    cfg.validate()
    params = rope_parameters(config)
    if params["rope_type"] in ("llama3", "yarn") and config.get("original_max_position_embeddings") is not None:
        params["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    set_rope(cfg, params)
    limit_to_window(cfg, _attention_window(config, model_type, cfg.n_layer))
    cfg.validate()
    return cfg
