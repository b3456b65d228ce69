"""What the two readers have in common: files read by (offset, size), tensors read by rows as BF16."""

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass, field

import numpy as np

from .._pycass import ffi, lib
from ..errors import ConversionError

CHUNK_WEIGHTS = 4 << 20  # weights handled at a time: 16 MiB as F32


@contextlib.contextmanager
def in_words(message):
    """Turns whatever a library raises, panics of Rust code included, into a ConversionError."""
    try:
        yield
    except ConversionError:
        raise
    except BaseException as e:
        if isinstance(e, Exception) or type(e).__name__ == "PanicException":
            raise ConversionError(f"{message}: {e}") from e
        raise


def require_regular(path):
    """Raises ConversionError for a folder, FIFO, device or socket, without opening it; OSError as os.stat does."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ConversionError(f"{path}: is not a regular file")


class RawFile:
    """A file read at given offsets; safe for several threads. Raises ConversionError when it cannot be read."""

    def __init__(self, path):
        self.path = os.fspath(path)
        try:
            require_regular(self.path)  # opening a FIFO would wait
            self.fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as e:
            raise ConversionError(f"{self.path}: {e.strerror}") from e
        self.size = os.fstat(self.fd).st_size

    def read(self, offset, size):
        """uint8 [size], writable. A range outside of the file is a ConversionError before anything is allocated."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ConversionError(
                f"{self.path}: truncated: bytes {offset}..{offset + size} lie outside of a file of {self.size} bytes"
            )
        out = np.empty(size, np.uint8)
        view, done = memoryview(out), 0
        while done < size:
            try:
                n = os.preadv(self.fd, [view[done : done + (1 << 30)]], offset + done)
            except OSError as e:
                raise ConversionError(f"{self.path}: {e.strerror}") from e
            if n == 0:
                raise ConversionError(f"{self.path}: truncated while it was read")
            done += n
        return out

    def close(self):
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


@dataclass
class TensorRef:
    """Where a tensor's values are. A 1-D tensor is handled as one row."""

    name: str  # in the checkpoint's Hugging Face form
    shape: tuple
    file: RawFile
    offset: int
    row_bytes: int
    decode: object  # uint8 [rows, row_bytes] -> (BF16 uint16 [rows, cols], how many values changed)
    dtype: str  # for the report
    permutation: np.ndarray = None  # stored row (2-D) or element (1-D) of each row; None: as stored

    @property
    def rows(self):
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self):
        return self.shape[-1]

    def read(self, r0, r1):
        """Rows r0..r1 as (BF16 uint16 [r1 - r0, cols], how many values were not exactly BF16)."""
        if self.permutation is None or len(self.shape) == 1:
            raw = self.file.read(self.offset + r0 * self.row_bytes, (r1 - r0) * self.row_bytes)
            bits, changed = self.decode(raw.reshape(r1 - r0, self.row_bytes))
            if self.permutation is not None:
                bits = np.ascontiguousarray(bits[:, self.permutation])
        else:
            wanted = self.permutation[r0:r1]
            low, high = int(wanted.min()), int(wanted.max()) + 1
            raw = self.file.read(self.offset + low * self.row_bytes, (high - low) * self.row_bytes)
            bits, changed = self.decode(np.ascontiguousarray(raw.reshape(high - low, self.row_bytes)[wanted - low]))
        self._require_finite(bits, r0)
        return bits, changed

    def chunks(self, multiple=16):
        """Row ranges (r0, r1) that cover the tensor, each but the last a multiple of `multiple` rows."""
        step = max(multiple, CHUNK_WEIGHTS // self.cols // multiple * multiple)
        return [(r, min(r + step, self.rows)) for r in range(0, self.rows, step)]

    def _require_finite(self, bits, r0):
        at = lib.pycass_bf16_find_nonfinite(ffi.from_buffer("uint16_t[]", bits), bits.size)
        if at < bits.size:
            r, c = divmod(at, self.cols)
            where = f"[{r0 + r}, {c}]" if len(self.shape) == 2 else f"[{c}]"
            raise ConversionError(
                f"tensor {self.name}{where} is infinite or not a number (or beyond BF16's range): "
                "a model with such weights cannot be run"
            )


def from_bf16(raw):
    return np.ascontiguousarray(raw).view("<u2").astype(np.uint16, copy=False), 0


def from_f16(raw):
    values = np.ascontiguousarray(raw).view(np.uint16)
    out = np.empty(values.shape, np.uint16)
    changed = lib.pycass_bf16_from_f16(
        ffi.from_buffer("uint16_t[]", out, require_writable=True), ffi.from_buffer("uint16_t[]", values), values.size
    )
    return out, int(changed)


def from_f32(raw):
    """uint8 or float32 rows -> BF16, to nearest even."""
    values = np.ascontiguousarray(raw)
    values = values if values.dtype == np.float32 else values.view(np.float32)
    out = np.empty(values.shape, np.uint16)
    changed = lib.pycass_bf16_from_f32(
        ffi.from_buffer("uint16_t[]", out, require_writable=True), ffi.from_buffer("float[]", values), values.size
    )
    return out, int(changed)


PLAIN = {"BF16": (2, from_bf16), "F16": (2, from_f16), "F32": (4, from_f32)}  # bytes per value, decoder


@dataclass
class Source:
    """An opened checkpoint. `tensors` holds what the model needs and nothing else, in the file's order."""

    name: str
    format: str  # "safetensors", "gguf" or "cass"
    config: object  # arch.ModelConfig
    tensors: dict = field(default_factory=dict)
    json: dict = field(default_factory=dict)  # the JSON section without provenance
    files: list = field(default_factory=list)  # RawFile of each weight file
    notes: list = field(default_factory=list)
    quantized: bool = False
    rounded: bool = False  # a .cass file some of whose values were
    calibration: object = None  # calibration.Calibration, if the source has one

    def dtypes(self):
        """The source's data types by descending number of weights, as in "Q4_K, Q6_K, F32"."""
        weight = {}
        for t in self.tensors.values():
            weight[t.dtype] = weight.get(t.dtype, 0) + t.rows * t.cols
        return ", ".join(sorted(weight, key=lambda d: -weight[d]))

    def sha256(self, stop=lambda: False):
        """Hex digest over the bytes of all weight files, in the order of their names."""
        digest = hashlib.sha256()
        for file in sorted(self.files, key=lambda f: f.path):
            for offset in range(0, file.size, 8 << 20):
                if stop():
                    return None
                digest.update(file.read(offset, min(8 << 20, file.size - offset)))
        return digest.hexdigest()

    def close(self):
        for file in self.files:
            file.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def same_bits(a, b):
    """Whether two tensors hold the same BF16 values; reads them by pieces."""
    return a.shape == b.shape and all(np.array_equal(a.read(*c)[0], b.read(*c)[0]) for c in a.chunks())


def settle_tie(cfg, tensors, declared):
    """Sets cfg.tied from what the config declares (True, False, None) and whether the source has an lm_head.

    Drops a second copy of the embedding from `tensors`.
    """
    head = tensors.get("lm_head.weight")
    if head is None:
        if declared is False:
            raise ConversionError("lm_head.weight is missing, and config.json says tie_word_embeddings: false")
        if declared is None:
            cfg.notes.append("there is no lm_head.weight: the embedding is the output matrix")
        cfg.tied = True
        return
    cfg.tied = False
    embedding = tensors.get("model.embed_tokens.weight")
    if declared and embedding is not None:
        if same_bits(embedding, head):
            cfg.tied = True
            del tensors["lm_head.weight"]
        else:
            cfg.notes.append(
                "lm_head.weight differs from the embedding although the source says that they are tied: "
                "it is stored, untied, and used as the output matrix"
            )
