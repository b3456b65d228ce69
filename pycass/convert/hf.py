"""Reads a Hugging Face checkpoint: a directory with config.json, safetensors and a tokenizer."""

import json
import os
import re
from pathlib import Path

from safetensors import safe_open

from ..errors import ConversionError
from . import arch, vocab
from .source import PLAIN, RawFile, Source, TensorRef, in_words, require_regular, settle_tie

_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a buffer that old checkpoints carry along
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_HEADER_LIMIT = 100_000_000  # the safetensors library's own limit


def read_json(path, required=False):
    """The object in a JSON file; {} when it does not exist and is not required."""
    try:
        require_regular(path)
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        if required:
            raise ConversionError(f"{path}: no such file") from None
        return {}
    except (OSError, UnicodeDecodeError) as e:
        raise ConversionError(f"{path}: {e}") from e
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConversionError(f"{path}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: not an object")
    return value


# ---- which files ------------------------------------------------------------------------------------------


def _from_index(folder, index_path, notes):
    """[(path, names that it must hold)] of a sharded checkpoint."""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index_path}: no weight_map")
    shards = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise ConversionError(f"{index_path}: '{file}' is not a file name of this folder")
        shards.setdefault(file, set()).add(name)
    missing = [f for f in sorted(shards) if not (folder / f).is_file()]
    if missing:
        raise ConversionError(f"{folder}: shard {missing[0]} is missing ({len(missing)} of {len(shards)} shards)")
    for extra in sorted({p.name for p in folder.glob("*.safetensors")} - set(shards)):
        if _SHARD.search(extra):
            raise ConversionError(f"{folder / extra}: a shard that {index_path.name} does not list")
        notes.append(f"{extra} is not listed in {index_path.name} and was not read")
    return [(folder / f, shards[f]) for f in sorted(shards)]


def weight_files(folder, notes):
    """[(path, set of tensor names or None)]. Raises ConversionError when files are missing or contradict."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file() and not single.is_file():
        return _from_index(folder, index, notes)
    found = sorted(folder.glob("*.safetensors"))
    shards = [p.name for p in found if _SHARD.search(p.name)]
    if shards:
        raise ConversionError(
            f"{folder}: shard {shards[0]} but no {index.name}"
            if not single.is_file()
            else f"{folder}: both {single.name} and shards ({shards[0]}): remove one of them"
        )
    if not single.is_file() and len(found) == 1:
        single = found[0]
    if not single.is_file():
        other = next((p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in sorted(folder.glob(pattern))), None)
        hint = f" ({other}: save the model as safetensors first)" if other else ""
        raise ConversionError(f"{folder}: no model.safetensors{hint}")
    notes.extend(f"{p.name} was not read" for p in found if p != single)
    return [(single, None)]


# ---- one file ---------------------------------------------------------------------------------------------


def _header(file):
    """The header's JSON and the offset of the data. The safetensors library has validated it before."""
    if file.size < 8:
        raise ConversionError(f"{file.path}: truncated: no safetensors header")
    size = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if size > min(_HEADER_LIMIT, file.size - 8):
        raise ConversionError(f"{file.path}: the header's size ({size}) is beyond the file or the limit")
    try:
        return json.loads(file.read(8, size).tobytes().decode("utf-8")), 8 + size
    except (ValueError, RecursionError) as e:
        raise ConversionError(f"{file.path}: damaged header: {e}") from e


def _tensor(file, name, entry, data_offset):
    """TensorRef of one header entry, every number checked against the file."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
    except (KeyError, TypeError, ValueError):
        raise ConversionError(f"{file.path}: damaged header entry of tensor {name}") from None
    if dtype not in PLAIN:
        raise ConversionError(f"{file.path}: tensor {name} is of type {dtype}; supported: {', '.join(PLAIN)}")
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers) or len(shape) not in (1, 2) or 0 in shape:
        raise ConversionError(f"{file.path}: tensor {name} has the shape {list(shape)}: one or two dimensions expected")
    item, decode = PLAIN[dtype]
    count = shape[0] * (shape[1] if len(shape) == 2 else 1)
    if end - begin != count * item or data_offset + end > file.size:
        raise ConversionError(
            f"{file.path}: tensor {name}: its size does not agree with its shape or the file is truncated"
        )
    return TensorRef(name, shape, file, data_offset + begin, shape[-1] * item, decode, dtype)


def _open_shard(path, files):
    """{name: TensorRef} of one safetensors file, which is appended to files."""
    # opening validates the whole header: sizes, order, overlaps
    with in_words(f"{path}: not a whole safetensors file"), safe_open(path, framework="np") as f:
        names = set(f.keys())
    file = RawFile(path)
    files.append(file)
    header, data_offset = _header(file)
    header.pop("__metadata__", None)
    if set(header) != names:
        raise ConversionError(f"{path}: the header changed while it was read, or names a tensor twice")
    return {
        name: _tensor(file, name, entry, data_offset) for name, entry in header.items() if not _IGNORED.search(name)
    }


def _collect(folder, notes, files):
    """{name: TensorRef} of all shards; files is filled as they are opened."""
    tensors = {}
    for path, listed in weight_files(folder, notes):
        found = _open_shard(path, files)
        if listed is not None:
            lost = sorted(n for n in listed - set(found) if not _IGNORED.search(n))
            if lost:
                raise ConversionError(f"{path}: tensor {lost[0]} is missing, which the index promises")
            stray = sorted(set(found) - listed)
            if stray:
                raise ConversionError(
                    f"{path}: stray tensor {stray[0]}: "
                    + ("twice in the checkpoint" if stray[0] in tensors else "the index does not list it here")
                )
        for name, tensor in found.items():
            if name in tensors:
                raise ConversionError(f"{path}: tensor {name} is in {tensors[name].file.path} too")
            tensors[name] = tensor
    return tensors


def open_hf(folder, allow_missing_tokenizer=False):
    """Source of a Hugging Face directory. Raises ConversionError for everything it cannot take as it is."""
    folder = Path(folder)
    config = read_json(folder / "config.json", required=True)
    cfg = arch.from_hf(config)
    source = Source(folder.resolve().name, "safetensors", cfg)
    try:
        tensors = _collect(folder, source.notes, source.files)
        settle_tie(cfg, tensors, config.get("tie_word_embeddings"))
        order = arch.check_tensors(cfg, {n: t.shape for n, t in tensors.items()})
        source.tensors = {n: tensors[n] for n in order}
        source.json = vocab.from_hf(folder, config, read_json, cfg, allow_missing_tokenizer)
        source.notes += cfg.notes
    except BaseException:
        source.close()
        raise
    return source
