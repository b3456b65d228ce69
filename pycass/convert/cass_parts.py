"""Parts of `cass1` and `cass2` tensors while they are written: the segments of row blocks, behind a table that says where
each begins. The parts' sizes are known at their end only."""

from dataclasses import dataclass

import numpy as np

from .._pycass import ffi, lib
from ..errors import ConversionError

CASS1, CASS2 = 2, 3
CODECS = {"cass1": CASS1, "cass2": CASS2}
PART_SPEC, PART_VER = 32, 33
HEADER = 64  # of a speculation part
ENTRY = np.dtype([("at", "<u4"), ("exponent_blocks", "<u4"), ("codebook", "u1", 12)])
UNIT = 64  # of ENTRY's "at"


@dataclass(frozen=True)
class CassOptions:
    """prune: the part of each row that the draft does without; mantissa_bits: that it reads, 0..7; half: it takes the others
    for 1000.., not for zeros; pruned: "coded", or "raw" for 16 bits each, as the paper has it (cass1 only)."""

    prune: float = 0.4
    mantissa_bits: int = 3
    half: bool = True
    pruned: str = "coded"

    def check(self, codec):
        """Raises ConversionError."""
        if not 0 <= self.prune < 1 or self.mantissa_bits not in range(8):
            raise ConversionError("prune is at least 0 and below 1, mantissa_bits is 0 to 7")
        if self.pruned not in ("coded", "raw"):
            raise ConversionError(f"pruned weights are 'coded' or 'raw', not '{self.pruned}'")
        if codec == "cass2" and self.pruned == "raw":
            raise ConversionError("cass2 has no raw pruned weights: they share exponents too")

    def params(self):
        """As a pycass_cass_params."""
        raw = self.pruned == "raw"
        return ffi.new("pycass_cass_params *", [self.prune, self.mantissa_bits, int(self.half), int(raw)])


def _check(status):
    if status:
        raise ConversionError("encoding failed: " + ffi.string(lib.pycass_error_detail()).decode())


def bounds(rows, cols):
    """(speculation, verification): the most bytes that the parts of a [rows, cols] matrix have."""
    sizes = ffi.new("pycass_cass_sizes *")
    _check(lib.pycass_cass_bound(rows, cols, sizes))
    return sizes.speculation_bound, sizes.verification_bound


def encode(bits, codec, options, norms=None, stats=None):
    """(speculation, verification) parts of a matrix or of rows of one, uint8 arrays. bits: BF16 uint16 [rows, cols];
    norms: float32 [cols], or None; stats: a pycass_cass_stats to add to, or None."""
    parts = [np.empty(n, np.uint8) for n in bounds(*bits.shape)]
    spec, ver = (ffi.from_buffer("uint8_t[]", p, require_writable=True) for p in parts)
    norms = ffi.NULL if norms is None else ffi.from_buffer("float[]", norms)
    sizes, w = ffi.new("size_t[2]"), ffi.from_buffer("uint16_t[]", bits)
    params, stats = options.params(), stats or ffi.NULL
    _check(lib.pycass_cass_encode(codec, params, w, *bits.shape, norms, spec, sizes, ver, sizes + 1, stats))
    return parts[0][: sizes[0]].copy(), parts[1][: sizes[1]].copy()


def decode(codec, spec, ver, shape):
    """BF16 bits uint16 of `shape` from a matrix's parts; what the draft reads if ver is None. Raises ConversionError."""
    out = np.empty(shape, np.uint16)
    parts = [ffi.from_buffer("uint8_t[]", spec), len(spec), ffi.NULL, 0]
    if ver is not None:
        parts[2:] = ffi.from_buffer("uint8_t[]", ver), len(ver)
    status = lib.pycass_cass_decode(codec, *parts, *shape, ffi.from_buffer("uint16_t[]", out))
    if status:
        raise ConversionError("decoding failed: " + ffi.string(lib.pycass_error_detail()).decode())
    return out


def round_cass2(bits):
    """Rounds bits [rows, cols] in place to what cass2 keeps; returns how many values changed."""
    before = bits.copy()
    lib.pycass_cass2_round(ffi.from_buffer("uint16_t[]", bits), *bits.shape)
    return int((bits != before).sum())


class Part:
    """A part in a file, from row blocks in turn. write(offset, data); at: where it begins."""

    def __init__(self, write, at, header, n_block):
        self.write, self.at, self.header, self.blocks = write, at, header, 0
        self.size = -(-(header + ENTRY.itemsize * (n_block + 1)) // UNIT) * UNIT

    def add(self, part, rows):
        """Appends the segments of `part`, which holds so many rows alone."""
        n = -(-rows // 16)
        table = part[self.header : self.header + ENTRY.itemsize * (n + 1)].view(ENTRY).copy()
        first = int(table["at"][0])
        if self.size // UNIT + int(table["at"][-1]) > 0xFFFFFFFF:
            raise ConversionError("a tensor is too large for the offsets of its part")
        table["at"] += self.size // UNIT - first  # the whole matrix's table is no shorter
        if self.blocks == 0:
            self.write(self.at, part[: self.header])
        # the last entry is the end, until the next rows put their first in its place
        self.write(self.at + self.header + ENTRY.itemsize * self.blocks, table.view(np.uint8))
        self.write(self.at + self.size, part[UNIT * first :])
        self.size += len(part) - UNIT * first
        self.blocks += n
