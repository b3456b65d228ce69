"""Reads GGUF files: a strict parser of its own, and the gguf package's dequantisation.

The gguf package's reader trusts the counts in a file; this one checks each against the bytes that are left.
"""

import math
import struct

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from ..errors import ConversionError
from . import arch, rope, vocab
from .source import PLAIN, RawFile, Source, TensorRef, from_f32, settle_tie

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_HEADER_LIMIT = 1 << 30  # bytes of metadata that are looked at
_QUANTISED = {t for t in quants._type_traits if t.name != "BF16"}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


# ---- container ----------------------------------------------------------------------------------------------


class _Cursor:
    """Reads little-endian values from the front of a file, never past its end."""

    def __init__(self, file):
        self.file, self.at = file, 0
        self._data, self._grow = b"", 1 << 20

    def take(self, size):
        """The next `size` bytes."""
        end = self.at + size
        if end > self.file.size:
            raise ConversionError(
                f"{self.file.path}: truncated: {size} bytes of metadata at {self.at} "
                f"do not fit into a file of {self.file.size} bytes"
            )
        if end > _HEADER_LIMIT:
            raise ConversionError(f"{self.file.path}: more than {_HEADER_LIMIT >> 20} MiB of metadata")
        if end > len(self._data):  # in doubling steps, so that small files and large vocabularies are both quick
            self._grow = max(2 * self._grow, end)
            self._data = self.file.read(0, min(self._grow, self.file.size)).tobytes()
        piece = self._data[self.at : end]
        self.at = end
        return piece

    def unpack(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def text(self):
        (size,) = self.unpack("Q")
        return self.take(size).decode("utf-8", errors="strict")

    def array(self, path):
        kind, count = self.unpack("IQ")
        if kind in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[kind])
            if count * size > self.file.size - self.at:
                raise ConversionError(f"{path}: an array of {count} values does not fit into the file")
            return np.frombuffer(self.take(count * size), np.dtype("<" + _SCALARS[kind])).tolist()
        if kind == _STRING:
            if count * 8 > self.file.size - self.at:
                raise ConversionError(f"{path}: an array of {count} texts does not fit into the file")
            return [self.text() for _ in range(count)]
        raise ConversionError(f"{path}: an array of type {kind} is not supported")


def _metadata(cursor, count, path):
    values = {}
    for _ in range(count):
        key, (kind,) = cursor.text(), cursor.unpack("I")
        if key in values:
            raise ConversionError(f"{path}: the key {key} is there twice")
        if kind in _SCALARS:
            (values[key],) = cursor.unpack(_SCALARS[kind])
        elif kind == _STRING:
            values[key] = cursor.text()
        elif kind == _ARRAY:
            values[key] = cursor.array(path)
        else:
            raise ConversionError(f"{path}: the key {key} has the unknown type {kind}")
    return values


def _tensor_table(cursor, count, path):
    """[(name, shape in rows-first order, type, offset)]"""
    table, seen = [], set()
    for _ in range(count):
        name, (n_dims,) = cursor.text(), cursor.unpack("I")
        if name in seen:
            raise ConversionError(f"{path}: the tensor {name} is there twice")
        if not 1 <= n_dims <= 4:
            raise ConversionError(f"{path}: tensor {name} has {n_dims} dimensions")
        dims = cursor.unpack(f"{n_dims}Q")
        kind, offset = cursor.unpack("IQ")
        seen.add(name)
        table.append((name, dims[::-1], kind, offset))
    return table


def parse(file):
    """(metadata dict, tensor table, offset of the tensor data) of an opened GGUF file (RawFile).

    Raises ConversionError for anything but a whole, little-endian file of version 2 or 3.
    """
    cursor, path = _Cursor(file), file.path
    if file.size < 24 or cursor.take(4) != b"GGUF":
        raise ConversionError(f"{path}: not a GGUF file")
    (version,) = cursor.unpack("I")
    if version not in (2, 3):
        big = " (a big-endian file?)" if version and version % 65536 == 0 else ""
        raise ConversionError(f"{path}: GGUF version {version}{big} is not supported; supported: 2, 3, little-endian")
    n_tensors, n_values = cursor.unpack("QQ")
    if n_values * 13 > file.size or n_tensors * 24 > file.size:  # the least that an entry takes
        raise ConversionError(
            f"{path}: {n_values} keys and {n_tensors} tensors do not fit into a file of {file.size} bytes"
        )
    try:
        metadata = _metadata(cursor, n_values, path)
        table = _tensor_table(cursor, n_tensors, path)
    except UnicodeDecodeError as e:
        raise ConversionError(f"{path}: damaged: a text in the metadata is not UTF-8") from e
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align < 1 or align & (align - 1) or align > 1 << 20:
        raise ConversionError(f"{path}: general.alignment {align!r} is not a power of two")
    return metadata, table, (cursor.at + align - 1) // align * align


# ---- hyperparameters ----------------------------------------------------------------------------------------


class _Keys:
    """The metadata of one architecture, by short key, with its types checked."""

    def __init__(self, metadata, architecture, path):
        self._metadata, self._prefix, self._path = metadata, architecture + ".", path

    def raw(self, key):
        return self._metadata.get(self._prefix + key)

    def number(self, key, default=None, kind=float):
        value = self.raw(key)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one value per layer, all the same
        value = default if value is None else value
        if value is None:
            raise ConversionError(f"{self._path}: {self._prefix}{key} is missing")
        if (
            isinstance(value, (bool, str, list))
            or (kind is int and not isinstance(value, int))
            or not math.isfinite(value)
        ):
            what = (
                "differs by layer, which is not supported" if isinstance(value, list) else f"is not a number: {value!r}"
            )
            raise ConversionError(f"{self._path}: {self._prefix}{key} {what}")
        return kind(value)

    def integer(self, key, default=None):
        return self.number(key, default, int)


def _refuse_unsupported(keys, head_dim):
    if keys.integer("expert_count", 0):
        raise ConversionError(
            f"{keys._path}: expert_count {keys.integer('expert_count')}: mixtures of experts are not supported; "
            "supported: dense models"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise ConversionError(
                f"{keys._path}: {key} {keys.integer(key)} differs from the head's size {head_dim}, which is not "
                "supported; supported: the whole head"
            )
    for key in ("logit_scale", "attention.scale", "embedding_scale", "residual_scale", "attn_logit_softcapping"):
        if keys.raw(key):
            raise ConversionError(f"{keys._path}: {key} is not supported")


def _rope_parameters(keys, n_ctx):
    """GGUF's rope keys in transformers' form. llama3 has no keys: its factors are a tensor."""
    params = {
        "rope_type": keys.raw("rope.scaling.type") or "default",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
    }
    if params["rope_type"] == "none":
        params["rope_type"] = "default"
    old_linear = keys.number("rope.scale_linear", 0.0)
    if params["rope_type"] == "default" and old_linear not in (0.0, 1.0):
        params |= {"rope_type": "linear", "factor": old_linear}
    elif params["rope_type"] == "linear":
        params["factor"] = keys.number("rope.scaling.factor")
    elif params["rope_type"] == "yarn":
        params["factor"] = keys.number("rope.scaling.factor")
        params["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length", n_ctx)
        params["beta_fast"] = keys.number("rope.scaling.yarn_beta_fast", 32.0)
        params["beta_slow"] = keys.number("rope.scaling.yarn_beta_slow", 1.0)
        if keys.raw("rope.scaling.yarn_attn_factor") is not None or keys.raw("rope.scaling.attn_factor") is not None:
            scale = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0))
            params["attention_factor"] = scale * (0.1 * math.log(max(params["factor"], 1.0)) + 1.0)
    return params


def _config(metadata, rows, path):
    """ModelConfig of the metadata; rows: of the embedding."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in arch.FAMILIES:
        raise ConversionError(
            f"{path}: the architecture '{architecture}' is not supported; supported: {', '.join(arch.FAMILIES)}"
        )
    keys = _Keys(metadata, architecture, path)
    n_embd, n_head = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if n_head < 1 or (keys.raw("attention.key_length") is None and n_embd % n_head):
        raise ConversionError(f"{path}: {n_embd} dimensions cannot be shared by {n_head} heads")
    cfg = arch.ModelConfig(
        family=architecture,
        n_vocab=rows,
        n_ctx_train=keys.integer("context_length"),
        n_embd=n_embd,
        n_ff=keys.integer("feed_forward_length"),
        n_layer=keys.integer("block_count"),
        n_head=n_head,
        n_head_kv=keys.integer("attention.head_count_kv", n_head),
        head_dim=keys.integer("attention.key_length", n_embd // n_head),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
    )
    if cfg.n_head_kv < 1:
        raise ConversionError(f"{path}: attention.head_count_kv {cfg.n_head_kv}")
    cfg.validate()
    _refuse_unsupported(keys, cfg.head_dim)
    arch.set_rope(cfg, _rope_parameters(keys, cfg.n_ctx_train))
    arch.limit_to_window(cfg, keys.integer("attention.sliding_window", 0) or None)
    cfg.validate()
    return cfg


# ---- tensors ------------------------------------------------------------------------------------------------


def _hf_name(name):
    """GGUF's tensor name -> Hugging Face's; None for what is not needed; unknown names as they are."""
    if name in _NAMES:
        return _NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal():
        if parts[2] in _LAYER_NAMES:
            return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
        if parts[2] in ("attn_rot_embd", "rope_freqs"):
            return None
    return name


def _unpermute(n_head, head_dim):
    """Stored row of each row: GGUF's llama files interleave the two halves of a head (pairs lie together)."""
    i = np.arange(n_head * head_dim)
    head, within = i // head_dim, i % head_dim
    return head * head_dim + within % (head_dim // 2) * 2 + within // (head_dim // 2)


def _permutation(cfg, hf_name):
    if cfg.family != "llama":
        return None
    if ".self_attn.q_proj." in hf_name:
        return _unpermute(cfg.n_head, cfg.head_dim)
    return _unpermute(cfg.n_head_kv, cfg.head_dim) if ".self_attn.k_proj." in hf_name else None


def _dequantiser(kind):
    def decode(raw):
        with np.errstate(all="ignore"):  # what is not finite is found afterwards
            return from_f32(quants.dequantize(raw, kind))

    return decode


def _tensor(file, data_offset, entry, hf_name):
    """TensorRef of a table entry, every number checked against the file."""
    name, shape, number, offset = entry
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ConversionError(f"{file.path}: tensor {name} is of the unknown type {number}") from None
    if kind.name not in PLAIN and kind not in _QUANTISED:
        supported = ", ".join([*PLAIN, *sorted(t.name for t in _QUANTISED)])
        raise ConversionError(f"{file.path}: tensor {name} is of type {kind.name}; supported: {supported}")
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    block, size = GGML_QUANT_SIZES[kind]
    if len(shape) > 2 or 0 in shape or max(shape) > 1 << 28 or shape[-1] % block:
        raise ConversionError(
            f"{file.path}: tensor {name} has the shape {list(shape)}, which is not possible for {kind.name}"
        )
    row_bytes, rows = shape[-1] // block * size, shape[0] if len(shape) == 2 else 1
    if data_offset + offset + rows * row_bytes > file.size:
        raise ConversionError(f"{file.path}: truncated: tensor {name} ends beyond the file")
    decode = PLAIN[kind.name][1] if kind.name in PLAIN else _dequantiser(kind)
    return TensorRef(hf_name, tuple(shape), file, data_offset + offset, row_bytes, decode, kind.name)


def _check_overlap(file, tensors):
    spans = sorted((t.offset, t.offset + t.rows * t.row_bytes, t.name) for t in tensors)
    for (_, end, a), (begin, _, b) in zip(spans, spans[1:]):
        if begin < end:
            raise ConversionError(f"{file.path}: damaged: the tensors {a} and {b} overlap")


def _collect(file, table, data_offset):
    """({HF name: TensorRef}, rope_freqs TensorRef or None)"""
    tensors, factors = {}, None
    for entry in table:
        if entry[0] == "rope_freqs.weight":
            factors = _tensor(file, data_offset, entry, entry[0])
            continue
        if entry[0] in ("rope_factors_long.weight", "rope_factors_short.weight"):
            raise ConversionError(
                f"{file.path}: {entry[0]}: rope type 'longrope' is not supported; "
                f"supported: {', '.join(rope.SUPPORTED)}"
            )
        hf_name = _hf_name(entry[0])
        if hf_name is not None:
            if hf_name in tensors:
                raise ConversionError(f"{file.path}: two tensors are named {hf_name}")
            tensors[hf_name] = _tensor(file, data_offset, entry, hf_name)
    _check_overlap(file, [*tensors.values(), *([factors] if factors else [])])
    return tensors, factors


def _apply_rope_factors(cfg, factors):
    """llama3's scaling: the frequencies' divisors are in the file, as F32."""
    if factors is None:
        return
    if factors.dtype != "F32" or len(factors.shape) != 1:
        raise ConversionError(f"{factors.file.path}: rope_freqs.weight is not a row of F32")
    values = factors.file.read(factors.offset, factors.row_bytes).view(np.float32)
    cfg.rope_inv_freq = rope.apply_factors(cfg.rope_inv_freq, values)
    cfg.validate()


def open_gguf(path):
    """Source of a GGUF file. Raises ConversionError for everything it cannot take as it is."""
    file = RawFile(path)
    try:
        metadata, table, data_offset = parse(file)
        if metadata.get("split.count", 0) not in (0, 1):
            raise ConversionError(f"{file.path}: one part of a split file; merge the parts first")
        tensors, factors = _collect(file, table, data_offset)
        embedding = tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise ConversionError(f"{file.path}: tensor token_embd.weight is missing from the source")
        cfg = _config(metadata, embedding.rows, file.path)
        _apply_rope_factors(cfg, factors)
        settle_tie(cfg, tensors, True if "lm_head.weight" not in tensors else None)
        order = arch.check_tensors(cfg, {n: t.shape for n, t in tensors.items()})
        for name in order:
            tensors[name].permutation = _permutation(cfg, name)
        blob = vocab.from_gguf(metadata, cfg, file.path)
        return Source(
            _stem(file.path),
            "gguf",
            cfg,
            {n: tensors[n] for n in order},
            blob,
            [file],
            list(cfg.notes),
            any(t.dtype not in PLAIN for t in tensors.values()),
        )
    except BaseException:
        file.close()
        raise


def _stem(path):
    return path.replace("\\", "/").rsplit("/", 1)[-1]
