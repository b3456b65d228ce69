"""A second reader of .cass files, in numpy, made from docs/format.md alone. Slow, and strict: it checks
everything that the text promises, so that the writer and the C reader are tested against the text."""

import json
import struct
from dataclasses import dataclass

import numpy as np

MAGIC = b"\x89CASS\r\n\x1a"
NAMES = ["speculation", "verification", "config", "directory", "json"]
MAGNITUDE = np.array([4, 13, 22, 31, 43, 61, 85, 119], np.float64)  # units of 2^(G-127) / 70


def _crc_tables():
    table = np.zeros((8, 256), np.uint32)
    for i in range(256):
        c = i
        for _ in range(8):
            c = c >> 1 ^ (0x82F63B78 if c & 1 else 0)
        table[0, i] = c
    for k in range(1, 8):
        table[k] = table[0][table[k - 1] & 0xFF] ^ table[k - 1] >> np.uint32(8)
    return [[int(v) for v in row] for row in table]


_TABLES = _crc_tables()


def crc32c(data):
    """CRC-32C, eight bytes at a time; about 5 MB/s."""
    data = bytes(data)
    crc, (t0, t1, t2, t3, t4, t5, t6, t7) = 0xFFFFFFFF, _TABLES
    whole = len(data) // 8 * 8
    for a, b in struct.iter_unpack("<II", data[:whole]):
        a ^= crc
        crc = (
            t7[a & 255]
            ^ t6[a >> 8 & 255]
            ^ t5[a >> 16 & 255]
            ^ t4[a >> 24]
            ^ t3[b & 255]
            ^ t2[b >> 8 & 255]
            ^ t1[b >> 16 & 255]
            ^ t0[b >> 24]
        )
    for byte in data[whole:]:
        crc = crc >> 8 ^ t0[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


@dataclass
class Tensor:
    name: str
    codec: str
    shape: tuple
    crc: int
    parts: dict  # type -> bytes


class Reader:
    """Parses a whole file. .config (dict), .json, .tensors (name -> Tensor), .bf16(name), .draft(name)."""

    def __init__(self, path, check_sections=True):
        with open(path, "rb") as f:
            self.data = f.read()
        self._header(check_sections)
        self._config(self.section["config"])
        self._directory(self.section["directory"])
        self.json = json.loads(self.section["json"].decode("utf-8"))
        assert isinstance(self.json, dict)

    def _header(self, check_sections):
        d = self.data
        assert d[:8] == MAGIC
        version, header, size, count, reserved = struct.unpack_from("<IIQII", d, 8)
        assert (version, header, size, count, reserved) == (1, 4096, len(d), 5, 0)
        assert not any(d[192:4092])
        assert struct.unpack_from("<I", d, 4092)[0] == crc32c(d[:4092])
        self.section, self.offset, end = {}, {}, 4096
        for i, name in enumerate(NAMES):
            kind, crc, offset, length, reserved = struct.unpack_from("<IIQQQ", d, 32 + 32 * i)
            assert kind == i + 1 and reserved == 0
            assert offset % (4096 if i < 2 else 64) == 0 and offset >= end and offset + length <= len(d)
            assert not any(d[end:offset]), "bytes between sections are zero"
            self.section[name], self.offset[name], end = d[offset : offset + length], offset, offset + length
            if check_sections:
                assert crc32c(self.section[name]) == crc, name
        assert end == len(d)

    def _config(self, s):
        names = "family n_vocab n_token n_ctx_train n_embd n_ff n_layer n_head n_head_kv head_dim flags".split()
        c = dict(zip(names, struct.unpack_from("<11I", s)))
        c["rms_eps"], c["rope_attention_factor"] = struct.unpack_from("<2f", s, 44)
        assert not any(s[52:64]) and len(s) == 64 + 2 * c["head_dim"] and c["head_dim"] % 2 == 0
        c["rope_inv_freq"] = np.frombuffer(s, "<f4", offset=64)
        assert c["family"] in (1, 2, 3) and 1 <= c["n_token"] <= c["n_vocab"] <= 1 << 24
        assert c["n_head"] % c["n_head_kv"] == 0 and c["rms_eps"] > 0 and c["flags"] < 8
        self.config = c

    def _directory(self, s):
        count, reserved = struct.unpack_from("<II", s)
        assert reserved == 0
        self.tensors, at, used = {}, 8, {1: [], 2: []}
        for _ in range(count):
            length, codec, dims, n_parts, r0, n0, n1, crc, r1 = struct.unpack_from("<HBBB3sQQII", s, at)
            assert r0 == bytes(3) and r1 == 0 and 1 <= length <= 255 and dims in (1, 2) and 1 <= n_parts <= 16
            assert codec in (0, 1) and (n1 == 0) == (dims == 1)
            name, at = s[at + 32 : at + 32 + length].decode("utf-8"), at + 32 + length
            parts = {}
            for _ in range(n_parts):
                kind, section, offset, size, reserved = struct.unpack_from("<IIQQQ", s, at)
                body = self.section[NAMES[section - 1]]
                assert section in (1, 2) and offset % 64 == 0 and offset + size <= len(body) and reserved == 0
                assert kind not in parts
                used[section].append((offset, offset + size))
                parts[kind], at = body[offset : offset + size], at + 32
            assert name not in self.tensors
            self.tensors[name] = Tensor(name, ["raw", "nest"][codec], (n0, n1)[:dims], crc, parts)
        assert at == len(s)
        for spans in used.values():
            spans.sort()
            assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])), "parts do not overlap"

    def bf16(self, name, check=True):
        """The tensor's bits, uint16 of its shape."""
        t = self.tensors[name]
        if t.codec == "raw":
            assert list(t.parts) == [1]
            out = np.frombuffer(t.parts[1], "<u2").reshape(t.shape)
        else:
            out = Nest(t).bits()
        if check:
            assert crc32c(np.ascontiguousarray(out).tobytes()) == t.crc, name
        return out

    def draft(self, name):
        """The draft's values of a nest tensor, float64 of its shape."""
        return Nest(self.tensors[name]).draft()


class Nest:
    """The codec `nest`. Arrays over the weights have the axes [tile, row in tile, column in tile]."""

    def __init__(self, t):
        assert sorted(t.parts) == [16, 17, 18, 19, 20]
        self.shape = t.shape
        self.grid = -(-t.shape[0] // 16), -(-t.shape[1] // 64)
        n = self.n = self.grid[0] * self.grid[1]
        a, x, b, c, self.side = (np.frombuffer(t.parts[k], np.uint8) for k in (16, 17, 18, 19, 20))
        assert len(a) == 512 * n and len(b) == 512 * n and len(c) == 256 * n
        assert len(x) == -(-16 * n // 64) * 64 and not x[16 * n :].any()
        self.a, self.b = self._nibbles(a), self._nibbles(b)
        self.g = x[: 16 * n].reshape(n, 16, 1).astype(np.int64)
        self.low = self._low_bits(c)
        self.sign, self.cell = self.a >> 3, self.a & 7

    def _nibbles(self, plane):
        """[tile, row, column] of a plane in A's geometry: line j, row r, byte b, low nibble first."""
        p = plane.reshape(self.n, 8, 16, 4)
        p = np.stack([p & 15, p >> 4], -1)  # tile, line, row, byte, half
        return p.transpose(0, 2, 1, 3, 4).reshape(self.n, 16, 64).astype(np.int64)

    def _low_bits(self, c):
        """Mantissa bits 1..0: line i of C serves lines 2i and 2i + 1 of A, two bits per nibble."""
        p = c.reshape(self.n, 4, 64)
        lines = np.stack([p & 15, p >> 4], 2).reshape(self.n, 8, 64)  # per line of A: two bits low half, two bits high
        p = np.stack([lines & 3, lines >> 2 & 3], -1).reshape(self.n, 8, 16, 4, 2)
        return p.transpose(0, 2, 1, 3, 4).reshape(self.n, 16, 64).astype(np.int64)

    def _order(self):
        """(row, column) of each weight of a tile in the order of the side bits: line, half, byte."""
        line, half, byte = np.meshgrid(np.arange(8), np.arange(2), np.arange(64), indexing="ij")
        return (byte // 4).ravel(), (8 * line + 2 * (byte % 4) + half).ravel()

    def _record(self, t, cells):
        """(over, top, s, escape) of one tile, each [1024] in side order; cells likewise."""
        offsets = self.offsets
        record = self.side[offsets[t] : offsets[t + 1]]
        bits = np.unpackbits(record, bitorder="little")
        at, escapes = 0, 0
        over, top, s = np.zeros(1024, bool), cells & 1, np.zeros(1024, np.int64)
        escape = np.zeros(1024, np.int64)

        def take(mask, into, base, shift=0):
            nonlocal at
            n = int(mask.sum())
            into[base : base + 64][mask] |= (
                (bits[at : at + n].astype(into.dtype) << shift) if shift else bits[at : at + n].astype(into.dtype)
            )
            at += n

        for base in range(0, 1024, 64):
            c = cells[base : base + 64]
            take(c == 7, over, base)
            has_top = (c < 2) | over[base : base + 64]
            top[base : base + 64][has_top] = 0
            take(has_top, top, base)
            for shift in range(3):
                take(c == 0, s, base, shift)
            for n in np.flatnonzero(s[base : base + 64] == 7):
                escapes += 1
                escape[base + n] = record[len(record) - escapes]
        assert -(-at // 8) + escapes == len(record), "a record has its side bits and its escapes, and nothing else"
        assert not bits[at : (-(-at // 8)) * 8].any()
        return over, top, s, escape

    def _check_side(self):
        table = 4 * (self.n + 1)
        self.offsets = self.side[:table].view("<u4").astype(np.int64)
        assert self.offsets[0] == table and (np.diff(self.offsets) >= 0).all()
        end = int(self.offsets[-1])
        assert len(self.side) == -(-(end + 1024) // 64) * 64 and not self.side[end:].any()

    def _untile(self, tiles):
        r, k = self.grid
        whole = tiles.reshape(r, k, 16, 64).transpose(0, 2, 1, 3).reshape(16 * r, 64 * k)
        padding = whole.copy()
        padding[: self.shape[0], : self.shape[1]] = 0
        return whole[: self.shape[0], : self.shape[1]], padding

    def bits(self):
        """The weights' BF16 bits, uint16 [rows, cols]."""
        self._check_side()
        assert (self.g >= 4).all()
        rows, cols = self._order()
        fields = np.zeros((4, self.n, 16, 64), np.int64)
        for t in range(self.n):
            fields[:, t, rows, cols] = np.stack(self._record(t, self.cell[t, rows, cols]))
        over, top, s, escape = fields
        c = self.cell
        drop = np.select([c >= 6, c >= 4, c >= 2, c == 1], [0, 1, 2, 3], 4)
        e = self.g - drop
        e = np.where(over > 0, self.g + 1, e)
        e = np.where(c == 0, np.where(s == 7, escape, self.g - 4 - s), e)
        assert ((0 <= e) & (e <= 255)).all()
        bits, padding = self._untile((self.sign << 15 | e << 7 | top << 6 | self.b << 2 | self.low).astype(np.uint16))
        assert not padding.any(), "padding is zero"
        return bits

    def draft(self):
        """The draft's values, float64 [rows, cols]."""
        values = MAGNITUDE[self.cell] / 70 * np.exp2(self.g.astype(np.float64) - 127) * np.where(self.sign == 1, -1, 1)
        return self._untile(values)[0]
