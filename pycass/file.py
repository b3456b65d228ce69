"""Reading `.cass` files: configuration, tensors, and their original bits."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pycass._pycass import ffi, lib
from pycass.errors import FormatError, InvalidArgument, check

_CODECS = {
    lib.PYCASS_CODEC_RAW: "raw",
    lib.PYCASS_CODEC_NEST: "nest",
    lib.PYCASS_CODEC_CASS1: "cass1",
    lib.PYCASS_CODEC_CASS2: "cass2",
}
_FAMILIES = {1: "llama", 2: "qwen2", 3: "qwen3"}


@dataclass(frozen=True)
class Config:
    """The hyperparameters of a model; terms as in docs/format.md, CONFIG."""

    family: str
    n_vocab: int
    n_token: int
    n_ctx_train: int
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    tied_embedding: bool
    rounded: bool
    quantized: bool
    rms_eps: float
    rope_attention_factor: float
    rope_inv_freq: tuple[float, ...]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the directory. `shape` is the checkpoint's; bytes are those of its parts."""

    name: str
    shape: tuple[int, ...]
    codec: str
    speculation_bytes: int
    verification_bytes: int
    bf16_crc32c: int
    index: int


class _Tensors(Mapping):
    def __init__(self, infos: dict[str, TensorInfo]):
        self._infos = infos

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)


def config_of(file) -> Config:
    """The `Config` of a `pycass_file *`."""
    c = lib.pycass_file_config(file)
    inv_freq = lib.pycass_file_rope_inv_freq(file)
    return Config(
        family=_FAMILIES.get(c.family, str(c.family)),
        n_vocab=c.n_vocab,
        n_token=c.n_token,
        n_ctx_train=c.n_ctx_train,
        n_embd=c.n_embd,
        n_ff=c.n_ff,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_head_kv=c.n_head_kv,
        head_dim=c.head_dim,
        tied_embedding=bool(c.flags & lib.PYCASS_FLAG_TIED_EMBEDDING),
        rounded=bool(c.flags & lib.PYCASS_FLAG_ROUNDED),
        quantized=bool(c.flags & lib.PYCASS_FLAG_QUANTIZED),
        rms_eps=c.rms_eps,
        rope_attention_factor=c.rope_attention_factor,
        rope_inv_freq=tuple(ffi.unpack(inv_freq, c.head_dim // 2)),
    )


def json_of(file, path: str) -> dict:
    """The JSON section of a `pycass_file *`, as an object."""
    size = ffi.new("size_t *")
    text = bytes(ffi.buffer(lib.pycass_file_json(file, size), size[0]))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: corrupt file: its JSON section cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: corrupt file: its JSON section is not an object")
    return value


class CassFile:
    """An open `.cass` file. A context manager; use by several threads is safe until `close`."""

    def __init__(self, path):
        self.path = os.fsdecode(path)
        if "\0" in self.path:
            raise InvalidArgument(f"{self.path!r} is not a path")
        out = ffi.new("pycass_file **")
        check(lib.pycass_file_open(os.fsencode(self.path), out), self.path)
        self._file = ffi.gc(out[0], lib.pycass_file_close)
        self.config = config_of(self._file)
        self.json = json_of(self._file, self.path)
        self.tensors: Mapping[str, TensorInfo] = _Tensors(dict(self._list()))

    def _handle(self):
        if self._file is None:
            raise InvalidArgument(f"{self.path} is closed")
        return self._file

    def _list(self) -> Iterator[tuple[str, TensorInfo]]:
        t = ffi.new("pycass_tensor_info *")
        for i in range(lib.pycass_file_tensor_count(self._file)):
            check(lib.pycass_file_tensor(self._file, i, t))
            try:
                name = ffi.string(t.name).decode()
            except UnicodeDecodeError:
                raise FormatError(f"{self.path}: corrupt file: tensor {i}'s name is not UTF-8") from None
            shape = tuple(t.shape[d] for d in range(t.n_dims))
            yield name, TensorInfo(
                name, shape, _CODECS[t.codec], t.speculation_bytes, t.verification_bytes, t.bf16_crc32c, i
            )

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise InvalidArgument(f"{self.path} has no tensor {name}")
        return self.tensors[name]

    def bf16(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """The tensor's original bits: uint16, of the checkpoint's shape, or of rows [first, last) of it. A vector is one
        row."""
        info = self._info(name)
        r0, r1 = rows or (0, info.shape[0] if len(info.shape) == 2 else 1)
        out = np.empty(info.shape if rows is None else (max(r1 - r0, 0), info.shape[-1]), dtype=np.uint16)
        pointer = ffi.cast("uint16_t *", ffi.from_buffer(out))
        check(lib.pycass_file_tensor_bf16(self._handle(), info.index, r0, r1, pointer, out.size), self.path)
        return out

    def part(self, name: str, kind: int) -> bytes | None:
        """A part of a tensor by its type (docs/format.md), or None."""
        size = ffi.new("size_t *")
        data = lib.pycass_file_tensor_part(self._handle(), self._info(name).index, kind, size)
        return None if data == ffi.NULL else bytes(ffi.buffer(data, size[0]))

    def check_sections(self) -> None:
        """Checks the checksum of every section. Raises FormatError."""
        check(lib.pycass_file_verify(self._handle()), self.path)

    def verify(self) -> None:
        """Checks the checksum of every section, then every tensor's decoded bits against its own.

        Raises FormatError with the name of the first that differs.
        """
        self.check_sections()
        for name, info in self.tensors.items():
            bits = self.bf16(name)
            crc = lib.pycass_crc32c(0, ffi.from_buffer(bits), bits.nbytes)
            if crc != info.bf16_crc32c:
                raise FormatError(f"{self.path}: tensor {name} does not decode to the bits that were converted")

    def close(self) -> None:
        """Unmaps the file; further use is an error."""
        if self._file is not None:
            ffi.release(self._file)
            self._file = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
