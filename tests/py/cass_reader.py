"""A second reader of .cass files, in numpy, made from docs/format.md alone. Slow, and strict: it checks
everything that the text promises, so that the writer and the C reader are tested against the text."""

import json
import struct
from dataclasses import dataclass

import numpy as np

MAGIC = b"\x89CASS\r\n\x1a"
CODECS = ["raw", "nest", "cass1", "cass2"]
NAMES = ["speculation", "verification", "config", "directory", "json"]
MAGNITUDE = np.array([22, 31, 43, 61, 85, 119, 13, 4], np.float64)  # by cell, in units of 2^(G-127) / 70
EXPONENT, BIT6 = np.array([16, 16, 17, 17, 18, 18, 15, 0]), np.array([0, 1, 0, 1, 0, 1, 0, 0])  # E, M6


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
        assert (version, header, size, count, reserved) == (2, 4096, len(d), 5, 0)
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
            assert codec in (0, 1, 2, 3) and (n1 == 0) == (dims == 1)
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
            self.tensors[name] = Tensor(name, CODECS[codec], (n0, n1)[:dims], crc, parts)
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
        elif t.codec != "nest":
            out = Cass(t).bits()
        else:
            out = Nest(t).bits()
        if check:
            assert crc32c(np.ascontiguousarray(out).tobytes()) == t.crc, name
        return out

    def draft(self, name):
        """The draft's values of a coded tensor, float64 of its shape."""
        t = self.tensors[name]
        if t.codec == "nest":
            return Nest(t).draft()
        return (Cass(t).draft().astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Nest:
    """The codec `nest`. Arrays over the weights have the axes [tile, half line, weight in it]; untile() puts them in
    their places."""

    def __init__(self, t):
        known = {kind for kind in t.parts if not kind >> 31}
        assert known - {20, 21, 22} == {16, 17, 18, 19} and (20 in known) == (21 in known)
        self.shape = t.shape
        self.grid = -(-t.shape[0] // 16), -(-t.shape[1] // 64)
        n = self.n = self.grid[0] * self.grid[1]
        a, x, b, self.side = (np.frombuffer(t.parts[k], np.uint8) for k in (16, 17, 18, 19))
        assert len(a) == 512 * n and len(b) == 768 * n
        assert len(x) == -(-16 * n // 64) * 64 and not x[16 * n :].any()
        lines = a.reshape(n, 8, 64).astype(np.int64)
        nibbles = np.stack([lines & 15, lines >> 4], 2).reshape(n, 16, 64)
        self.sign, self.cell = nibbles >> 3, nibbles & 7
        self.g = x[: 16 * n].reshape(n, 16, 1).astype(np.int64)  # [tile, row, 1]
        self.group = self.g.reshape(n, 1, 16).repeat(4, axis=2)  # [tile, 1, weight in a half line]: 4 each of a row
        self.low6 = self._low_bits(b.reshape(n, 4, 3, 64).astype(np.int64))
        self._calibration(t.parts)

    def _calibration(self, parts):
        """self.hot: columns; self.hot_bits [rows, n_hot]; self.bias [rows] or None; self.is_hot [tile, 1, column]."""
        rows, cols = self.shape
        self.hot = np.frombuffer(parts.get(20, b""), "<u4").astype(np.int64)
        n, padded = len(self.hot), 16 * self.grid[0]
        assert n in ((16, 32, 48, 64) if 20 in parts else (0,)) and (np.diff(self.hot) > 0).all() and (self.hot < cols).all()
        words = np.frombuffer(parts.get(21, b""), "<u2").reshape(self.grid[0], n // 4, 64)
        self.hot_bits = np.zeros((padded, n), np.uint16)
        for r in range(16):
            for c in range(4):
                self.hot_bits[r::16, c::4] = words[:, :, r // 2 % 2 * 32 + r // 4 * 8 + r % 2 * 4 + c]
        assert not self.hot_bits[rows:].any()
        self.hot_bits = self.hot_bits[:rows]
        self.bias = None
        if 22 in parts:
            bias = np.frombuffer(parts[22], "<f4")
            assert len(bias) == padded and not bias[rows:].any()
            self.bias = bias[:rows]
        mask = np.zeros(64 * self.grid[1], bool)
        mask[self.hot] = True
        self.is_hot = np.tile(mask.reshape(self.grid[1], 1, 64), (self.grid[0], 1, 1))

    def _low_bits(self, b):
        """Mantissa bits 5..0. b: [tile, triple, line, byte]"""
        fourth = (b[:, :, 0] >> 6) << 4 | (b[:, :, 1] >> 6) << 2 | b[:, :, 2] >> 6
        return np.concatenate([b & 63, fourth[:, :, None]], 2).reshape(self.n, 16, 64)

    def _check_side(self):
        table = 4 * (self.n + 1)
        self.offsets = self.side[:table].view("<u4").astype(np.int64)
        assert self.offsets[0] == table and (np.diff(self.offsets) >= 0).all()
        end = int(self.offsets[-1])
        assert len(self.side) == -(-(end + 1024) // 64) * 64 and not self.side[end:].any()

    def _record(self, t):
        """(T, q, escape) of tile t, each [1024] in the order of the half lines; zero where a weight has none."""
        record, cell = self.side[self.offsets[t] : self.offsets[t + 1]], self.cell[t].ravel()
        small, has_t = cell == 7, cell >= 5
        header, n, n_t = int(record[:2].view("<u2")[0]), int(small.sum()), int(has_t.sum())
        nibbles, bits, escapes = np.split(record[2:], np.cumsum([(n + 1) // 2, (n_t + 7) // 8]))
        nibbles = np.stack([nibbles & 15, nibbles >> 4], 1).ravel()
        bits = np.unpackbits(bits, bitorder="little")
        assert not nibbles[n:].any() and not bits[n_t:].any(), "what fills bytes is zero"
        out = np.zeros((3, 1024), np.int64)
        out[0, has_t], out[1, small] = bits[:n_t], nibbles[:n]
        escaped = small & (out[1] == 15)
        assert header == n | bool(escaped.any()) << 14
        assert len(escapes) == escaped.sum(), "a record has its escapes, and nothing else"
        out[2, escaped] = escapes[::-1]
        return out

    def _check_choices(self, bits):
        """Every weight is in its cell, its exponent where it belongs, and the groups' exponents are allowed ones."""
        e, m = bits >> 7 & 255, bits & 127
        d, high = self.group - e, m >= 64
        conditions = [d == 2, d == 1, (d == 0) | (d == -1), d == 3]
        cell = np.select(conditions, [0 + high, 2 + high, np.where(d == 0, 4 + high, 5), np.full_like(d, 6)], 7)
        assert (cell == self.cell).all() and (d >= -1).all() and (self.g >= 4).all()
        fills = self.is_hot.repeat(16, axis=1)
        e, m, g = self.untile(e), self.untile(m), self.g.repeat(64, axis=2)
        assert (e == g)[fills].all() and not m[fills].any() and not self.untile(self.sign)[fills].any()
        e, m = np.where(fills, 0, e), np.where(fills, 0, m)
        e0 = e.reshape(self.n, 16, 64).max(axis=2, keepdims=True)
        largest = np.where(e.reshape(self.n, 16, 64) == e0, m.reshape(self.n, 16, 64), 0).max(axis=2, keepdims=True)
        assert ((self.g == np.maximum(e0, 4)) | ((self.g == e0 - 1) & (largest < 64))).all()
        return d

    def untile(self, values):
        """[tile, row, column] of values in the order of the half lines."""
        line, half, row, byte = np.meshgrid(np.arange(8), np.arange(2), np.arange(16), np.arange(4), indexing="ij")
        out = np.empty((self.n, 16, 64), values.dtype)
        out[:, row.ravel(), (8 * line + 2 * byte + half).ravel()] = values.reshape(self.n, 1024)
        return out

    def _matrix(self, values):
        """The matrix of values in the order of the half lines, and what lies in its padding."""
        r, k = self.grid
        whole = self.untile(values).reshape(r, k, 16, 64).transpose(0, 2, 1, 3).reshape(16 * r, 64 * k)
        padding = whole.copy()
        padding[: self.shape[0], : self.shape[1]] = 0
        return whole[: self.shape[0], : self.shape[1]], padding

    def bits(self):
        """The weights' BF16 bits, uint16 [rows, cols]."""
        self._check_side()
        t, q, escape = np.stack([self._record(i) for i in range(self.n)], 1).reshape(3, self.n, 16, 64)
        e = np.where(self.cell == 7, q, EXPONENT[self.cell]) + self.group - 18
        words = (e << 7) + ((BIT6[self.cell] + t) << 6) + self.low6
        special = (self.cell == 7) & ((q == 0) | (q == 15))
        words = np.where(special, escape << 7 | t << 6 | self.low6, words)
        assert (words >> 15 == 0).all() and (words >= 0).all()
        d = self._check_choices(words)
        assert (escape[q == 15] > 0).all() and (d[q == 15] > 17).all(), "escapes only where there is no q"
        bits, padding = self._matrix((self.sign << 15 | words).astype(np.uint16))
        for column in self.hot:
            padding[self.shape[0] :, column] = 0  # the filler goes on there
        assert not padding.any(), "padding is zero"
        bits[:, self.hot] = self.hot_bits
        return bits

    def draft(self):
        """The draft's values without the bias, float64 [rows, cols]."""
        scale = np.exp2(self.group.astype(np.float64) - 127) / 70
        values = self._matrix(MAGNITUDE[self.cell] * scale * np.where(self.sign == 1, -1, 1))[0]
        values[:, self.hot] = (self.hot_bits.astype(np.uint32) << 16).view(np.float32)
        return values


class Segment:
    """The bit streams of a row block, read in superblocks."""

    BITMAP, EXPONENT, MANTISSA = range(3)

    def __init__(self, data, bitmap_blocks, exponent_blocks):
        assert len(data) % 64 == 0 and (not data or any(data[-64:])), "no more than one unit of zeros at the end"
        self.data, self.at = data, 0
        self.left = [bitmap_blocks, exponent_blocks, float("inf")]
        self.value, self.size = [0, 0, 0], [0, 0, 0]  # of the queues, bits

    def superblock(self):
        for kind in range(3):
            if self.size[kind] <= 1024 and self.left[kind]:
                block = self.data[self.at : self.at + 128]
                self.value[kind] |= int.from_bytes(block, "little") << self.size[kind]
                self.size[kind] += 1024
                self.left[kind] -= 1
                self.at += 128

    def take(self, kind, n):
        assert n <= self.size[kind], "a superblock has what a tile row needs"
        value = self.value[kind] & ((1 << n) - 1)
        self.value[kind] >>= n
        self.size[kind] -= n
        return value

    def rank(self):
        zeros = 0
        while zeros < 12 and not self.take(self.EXPONENT, 1):
            zeros += 1
        return zeros if zeros < 12 else 12 if self.take(self.EXPONENT, 1) else None

    def end(self):
        assert self.left[:2] == [0, 0] and not any(self.value) and self.at >= len(self.data), "everything is used"
        assert self.size[self.EXPONENT] < 2048


class Cass:
    """The codecs `cass1` and `cass2`, weight by weight."""

    def __init__(self, t):
        assert sorted(k for k in t.parts if k < 1 << 31) == [32, 33]
        spec, ver = t.parts[32], t.parts[33]
        self.b, flags, reserved, self.n_pruned = struct.unpack_from("<BBHI", spec)
        assert self.b < 8 and flags < 4 and reserved == 0 and not any(spec[8:64]) and self.n_pruned <= t.shape[1]
        self.half, self.raw, self.mx = flags & 1, flags >> 1, t.codec == "cass2"
        assert not (self.raw and self.mx)
        self.rows, self.cols = t.shape
        self.blocks, self.groups = -(-self.rows // 16), -(-self.cols // 64)
        self.spec, self.ver = self._table(spec, 64), self._table(ver, 0)
        self.exact, self.seen = np.zeros((2, 16 * self.blocks, 64 * self.groups), np.uint16)
        self.kept = np.zeros(self.exact.shape, bool)
        for block in range(self.blocks):
            self._block(block)

    def _table(self, part, at):
        """[(codebook, segment's bytes, exponent blocks)] of the row blocks."""
        entries = [struct.unpack_from("<II12s", part, at + 20 * i) for i in range(self.blocks + 1)]
        end = at + 20 * (self.blocks + 1)
        first = -(-end // 64)
        assert not any(part[end : 64 * first]) and entries[0][0] == first
        assert entries[-1] == (len(part) // 64, 0, bytes(12)) and len(part) % 64 == 0
        return [(e[2], part[64 * e[0] : 64 * n[0]], e[1]) for e, n in zip(entries, entries[1:])]

    def _block(self, block):
        (codes, data, n_exponent), (pruned_codes, pruned_data, n_pruned) = self.spec[block], self.ver[block]
        s, v = Segment(data, self.groups, n_exponent), Segment(pruned_data, 0, n_pruned)
        assert not (self.mx and any(codes)) and not ((self.mx or self.raw) and any(pruned_codes))
        for tile in range(self.groups):
            for r in range(16):
                row = 16 * block + r
                there = range(min(64, self.cols - 64 * tile)) if row < self.rows else range(0)
                self._row(row, 64 * tile, there, s, v, codes, pruned_codes)
        s.end()
        v.end()

    def _exponents(self, segment, columns, codes):
        """{column: exponent}, None for an escape."""
        ranks = {k: segment.rank() for k in columns}
        assert None not in ranks.values()
        return {k: codes[r] if r < 12 else None for k, r in ranks.items()}

    def _row(self, row, k0, there, s, v, codes, pruned_codes):
        s.superblock()
        v.superblock()
        bitmap, b = s.take(Segment.BITMAP, 64), self.b
        kept = [k for k in range(64) if bitmap >> k & 1]
        assert all(k in there for k in kept), "no weight of the padding is kept"
        pruned = [k for k in there if k not in kept]
        n, m = (b + 1, 8) if self.mx else (b, 7)  # bits of an upper field's magnitude, of the whole one
        if self.mx:
            groups = [s.take(Segment.EXPONENT, 8) for _ in range(2)]
            e = {k: groups[k // 32] for k in there}
            assert min(groups) >= 1
        else:
            e = self._exponents(s, kept, codes)
        fields = {k: s.take(Segment.MANTISSA, n + 1) for k in kept}
        self._escapes(s, kept, e)
        if not self.mx and not self.raw:
            e |= self._exponents(v, pruned, pruned_codes)
        lower = {k: v.take(Segment.MANTISSA, 7 - b) for k in kept}
        rest = {k: v.take(Segment.MANTISSA, 16 if self.raw else m + 1) for k in pruned}
        if not self.raw:
            self._escapes(v, pruned, e)
        for k in kept:
            sign, top = fields[k] >> n, (fields[k] & ((1 << n) - 1)) << (7 - b)
            half = 64 >> b if self.half and not (self.mx and top == 0) else 0
            self.exact[row, k0 + k] = self._word(sign, e[k], top | lower[k])
            self.seen[row, k0 + k] = self._word(sign, e[k], top | half)
            self.kept[row, k0 + k] = True
        for k in pruned:
            word = rest[k]
            self.exact[row, k0 + k] = word if self.raw else self._word(word >> m, e[k], word & ((1 << m) - 1))

    @staticmethod
    def _escapes(segment, columns, e):
        for k in columns:
            if e[k] is None:
                e[k] = segment.take(Segment.MANTISSA, 8)

    def _word(self, sign, e, magnitude):
        if not self.mx:
            return sign << 15 | e << 7 | magnitude
        if magnitude == 0:
            return sign << 15
        z = 8 - magnitude.bit_length()
        if z < e:
            return sign << 15 | (e - z) << 7 | (magnitude << z) & 127
        return sign << 15 | magnitude << (e - 1)

    def bits(self):
        """The weights' BF16 bits, uint16 [rows, cols]."""
        assert (~self.kept[: self.rows, : self.cols]).sum(axis=1).tolist() == [self.n_pruned] * self.rows
        return self.exact[: self.rows, : self.cols]

    def draft(self):
        """The draft's, uint16 [rows, cols]."""
        return self.seen[: self.rows, : self.cols]
