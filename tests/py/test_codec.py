"""The codec `nest` (docs/format.md): round trips of any bits at any size through the C decoder and through the numpy
reader, the draft's values against a computation from the weights alone, and sizes."""

import struct

import numpy as np
import pytest
from cass_reader import MAGNITUDE, Nest, Tensor, crc32c
from checkpoints import bf16_to_f32, f32_to_bf16
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pycass import CassFile
from pycass._pycass import ffi, lib

EVERY = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
PART_TYPES = (16, 17, 18, 19)
LARGEST_RECORD = 2 + 1008 // 2 + 1024 // 8 + 1008  # all weights but one a row are escapes, and that one has a T


def bytes_of(array):
    return ffi.cast("uint8_t *", ffi.from_buffer(array))


def bound(rows, cols):
    sizes = ffi.new("pycass_nest_sizes *")
    return lib.pycass_nest_bound(rows, cols, sizes), sizes


def encode(bits):
    """{part type: bytes}, with a guard behind every buffer."""
    bits = np.ascontiguousarray(bits, np.uint16)
    status, sizes = bound(*bits.shape)
    assert status == lib.PYCASS_OK
    lengths = [sizes.a, sizes.x, sizes.b, sizes.side_bound]
    buffers = [np.full(n + 64, 0xA5, np.uint8) for n in lengths]
    side_size = ffi.new("size_t *")
    w = ffi.cast("uint16_t *", ffi.from_buffer(bits))
    assert lib.pycass_nest_encode(w, *bits.shape, *map(bytes_of, buffers), side_size) == lib.PYCASS_OK
    assert all((b[n:] == 0xA5).all() for b, n in zip(buffers, lengths)), "written behind a buffer"
    assert side_size[0] <= sizes.side_bound
    lengths[3] = side_size[0]
    return {kind: b[:n].tobytes() for kind, b, n in zip(PART_TYPES, buffers, lengths)}


def decode_draft(parts, shape):
    out = np.empty(shape, np.float32)
    a, x = (np.frombuffer(parts[k], np.uint8).copy() for k in (16, 17))
    status = lib.pycass_nest_decode_draft(bytes_of(a), bytes_of(x), *shape, ffi.cast("float *", ffi.from_buffer(out)))
    assert status == lib.PYCASS_OK
    return out


# ---- a writer of the container, from docs/format.md alone ----


def pad(data, n):
    return data + bytes(-len(data) % n)


def container(matrices):
    """A whole .cass file of matrices {name: (shape, CRC, {part type: bytes})}; enough for pycass_file_open."""
    sections = {1: b"", 2: b""}
    directory = struct.pack("<II", len(matrices), 0)
    for name, (shape, crc, parts) in matrices.items():
        raw = name.encode()
        directory += struct.pack("<HBBB3xQQII", len(raw), 1, 2, len(parts), *shape, crc, 0) + raw
        for kind, data in parts.items():
            section = 1 if kind < 18 else 2
            directory += struct.pack("<IIQQQ", kind, section, len(sections[section]), len(data), 0)
            sections[section] = pad(sections[section] + data, 64)
    config = struct.pack("<11I2f12x2f", 1, 10, 10, 10, 8, 8, 1, 2, 1, 4, 0, 1e-5, 1.0, 1.0, 0.1)
    bodies = [(1, sections[1]), (2, sections[2]), (3, config), (4, directory), (5, b"{}")]
    table, data, at = b"", b"", 4096
    for kind, body in bodies:
        gap = -at % (4096 if kind < 3 else 64)
        at += gap
        table += struct.pack("<IIQQQ", kind, crc32c(body), at, len(body), 0)
        data, at = data + bytes(gap) + body, at + len(body)
    header = b"\x89CASS\r\n\x1a" + struct.pack("<IIQII", 2, 4096, at, 5, 0) + table
    header = header + bytes(4092 - len(header))
    return header + struct.pack("<I", crc32c(header)) + data


def decode_in_c(matrices, tmp_path_factory):
    """The bits that CassFile gives back, {name: array}."""
    path = tmp_path_factory.mktemp("codec") / "m.cass"
    path.write_bytes(container({n: (w.shape, crc32c(w.tobytes()), encode(w)) for n, w in matrices.items()}))
    with CassFile(path) as f:
        f.verify()
        return {name: f.bf16(name) for name in f.tensors}


def check(bits, tmp_path_factory):
    """Encodes one matrix and compares everything that comes back."""
    parts = encode(bits)
    nest = Nest(Tensor("w", "nest", bits.shape, 0, parts))
    assert np.array_equal(nest.bits(), bits), "numpy reader"
    assert np.array_equal(decode_in_c({"w": bits}, tmp_path_factory)["w"], bits), "C decoder"
    check_draft(bits, decode_draft(parts, bits.shape), nest)
    return parts


# ---- the draft, from the weights ----


def draft_of(bits, g):
    """The draft's values of groups [n, 64] with exponents g [n, 1], as the table of docs/format.md says."""
    e, m = (bits >> 7 & 255).astype(np.int64), (bits & 127).astype(np.int64)
    d, high = g - e, m >= 64
    cell = np.select(
        [(d == -1) | ((d == 0) & high), d == 0, (d == 1) & high, d == 1, (d == 2) & high, d == 2, d == 3],
        [5, 4, 3, 2, 1, 0, 6], 7,
    )  # fmt: skip
    return np.where(bits >> 15 == 1, -1, 1) * MAGNITUDE[cell] * np.exp2(g - 127.0) / 70


def check_draft(bits, draft, nest):
    """The exponents in the file are a right choice, and the draft's values follow from them. Groups with an infinity
    or a NaN (G may be 255 there) have no draft to speak of: such models are not converted."""
    rows, cols = bits.shape
    padded = np.zeros((-rows % 16 + rows, -cols % 64 + cols), np.uint16)
    padded[:rows, :cols] = bits
    groups = padded.reshape(padded.shape[0], -1, 64)
    tiles = nest.g.reshape(padded.shape[0] // 16, padded.shape[1] // 64, 16).swapaxes(1, 2)
    g = tiles.reshape(*groups.shape[:2], 1)
    usable = np.broadcast_to(g < 255, groups.shape).reshape(padded.shape)[:rows, :cols]
    with np.errstate(over="ignore"):
        expected = draft_of(groups, g).reshape(padded.shape)[:rows, :cols].astype(np.float32)
        read = nest.draft().astype(np.float32)
    assert np.array_equal(draft[usable], expected[usable]) and np.array_equal(read, expected)
    top = (groups >> 7 & 255).max(axis=2, keepdims=True).astype(np.int64)
    low, high = np.maximum(top - 1, 4), np.maximum(top, 4)
    assert ((g == low) | (g == high)).all()
    values = bf16_to_f32(np.where(top < 255, groups, 0)).astype(np.float64)
    errors = [((values - draft_of(groups, x)) ** 2).sum(axis=2) for x in (low, high)]
    is_low, finite = (g == low)[..., 0], (top < 255)[..., 0]
    chosen, other = np.where(is_low, *errors), np.where(is_low, *errors[::-1])
    # the encoder takes what is more than 12 binades below the largest for 12 below: nearly a tie can go either way
    slack = 2e-3 * np.exp2(2.0 * (top[..., 0] - 127)) + 1e-5 * other
    assert (chosen <= other + slack)[finite].all(), "the group exponent with the smaller error"
    assert (g == high)[..., 0][finite & (errors[0] == errors[1])].all(), "E0 on a tie"


# ---- round trips ----

sizes = st.tuples(st.integers(1, 70), st.integers(1, 200))


def random_bits(kind, seed, shape):
    """Matrices of different nature."""
    rng = np.random.default_rng(seed)
    if kind == "any":
        return rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    if kind == "trained":
        return f32_to_bf16(rng.standard_normal(shape) * np.exp2(rng.integers(-12, 4, (shape[0], 1))))
    if kind == "tiny exponents":
        return (rng.integers(0, 14, shape) << 7 | rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15).astype(
            np.uint16
        )
    if kind == "few values":
        return rng.choice(rng.integers(0, 1 << 16, 3).astype(np.uint16), shape)
    if kind == "wide":
        return f32_to_bf16(rng.standard_normal(shape) * np.exp2(rng.uniform(-40, 40, shape)))
    sparse = f32_to_bf16(rng.standard_normal(shape))
    sparse[rng.random(shape) < 0.9] = rng.choice(np.array([0, 0x8000, 1, 0x807F], np.uint16))
    return sparse


KINDS = ["any", "trained", "tiny exponents", "few values", "wide", "sparse"]


@EVERY
@given(shape=sizes, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1))
def test_round_trip(shape, kind, seed, tmp_path_factory):
    check(random_bits(kind, seed, shape), tmp_path_factory)


@EVERY
@given(bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=140), rows=st.integers(1, 5))
def test_round_trip_of_chosen_bits(bits, rows, tmp_path_factory):
    check(
        np.array([bits[i % len(bits)] for i in range(rows * len(bits))], np.uint16).reshape(rows, -1), tmp_path_factory
    )


@pytest.mark.parametrize(
    "shape", [(1, 1), (15, 63), (16, 64), (17, 65), (1, 129), (33, 1), (16, 63), (15, 64), (31, 128)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_around_a_tile(shape, kind, tmp_path_factory):
    check(random_bits(kind, 1, shape), tmp_path_factory)


@pytest.mark.parametrize("order", ["by value", "by mantissa", "shuffled"])
def test_every_bf16_pattern(order, tmp_path_factory):
    """All 65536, infinities and all NaNs among them, beside near and far neighbours."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if order == "by mantissa":
        bits = bits.reshape(512, 128).T.ravel()
    if order == "shuffled":
        bits = np.random.default_rng(5).permutation(bits)
    for shape in ((256, 256), (1024, 64), (64, 1024)):
        parts = encode(bits.reshape(shape))
        assert np.array_equal(Nest(Tensor("w", "nest", shape, 0, parts)).bits(), bits.reshape(shape))
        assert np.array_equal(decode_in_c({"w": bits.reshape(shape)}, tmp_path_factory)["w"], bits.reshape(shape))


@pytest.mark.parametrize(
    "value", [0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x01FF, 0x0200, 0x3F80, 0x7F7F, 0xFF80, 0x7FC0, 0xFFFF]
)
def test_constant_matrices(value, tmp_path_factory):
    check(np.full((18, 70), value, np.uint16), tmp_path_factory)


def test_most_side_bits_and_most_escapes(tmp_path_factory):
    """Tiles at the bounds: every weight an escape but one a row, and every weight over or with bit 6 stored."""
    escapes = np.full((32, 128), 0x00D5, np.uint16)
    escapes[:, ::64] = 0x7F7F
    side = check(escapes, tmp_path_factory)[19]
    assert len(side) == len(pad(bytes(4 * 5 + 4 * LARGEST_RECORD + 1024), 64))
    rng = np.random.default_rng(0)
    over = (rng.integers(0, 128, (32, 128)) | 0x4000).astype(np.uint16)
    over[:, 1::2] -= 0x80
    check(over, tmp_path_factory)
    far = (rng.integers(0, 128, (32, 128)) | (128 - rng.integers(4, 11, (32, 128))) << 7).astype(np.uint16)
    far[:, ::64] = 0x4000
    check(far, tmp_path_factory)


def test_several_matrices_of_one_file(tmp_path_factory):
    matrices = {f"w{i}": random_bits(kind, i, (5 + 13 * i, 200 - 31 * i)) for i, kind in enumerate(KINDS)}
    for name, bits in decode_in_c(matrices, tmp_path_factory).items():
        assert np.array_equal(bits, matrices[name])


@EVERY
@given(shape=sizes, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1))
def test_encoding_is_a_function_of_the_weights(shape, kind, seed):
    bits = random_bits(kind, seed, shape)
    assert encode(bits) == encode(bits.copy())
    assert encode(bits) != encode(
        bits ^ (np.arange(bits.size, dtype=np.uint64) == seed % bits.size).reshape(shape).astype(np.uint16)
    )


# ---- sizes ----


@EVERY
@given(rows=st.integers(1, 1 << 28), cols=st.integers(1, 1 << 28))
def test_bounds(rows, cols):
    status, s = bound(rows, cols)
    tiles = -(-rows // 16) * -(-cols // 64)
    assert status == lib.PYCASS_OK
    assert (s.a, s.x, s.b) == (512 * tiles, -(-16 * tiles // 64) * 64, 768 * tiles)
    assert s.side_bound >= 4 * (tiles + 1) + tiles * LARGEST_RECORD + 1024 and s.side_bound % 64 == 0


@pytest.mark.parametrize(
    "rows,cols", [(0, 1), (1, 0), (2**28 + 1, 1), (1, 2**28 + 1), (2**64 - 1, 2**64 - 1), (2**63, 2)]
)
def test_sizes_out_of_range(rows, cols):
    assert bound(rows, cols)[0] == lib.PYCASS_ERR_INVALID_ARGUMENT
    word = ffi.new("uint16_t[64]")
    buffers = [ffi.new("uint8_t[64]") for _ in range(4)]
    assert lib.pycass_nest_encode(word, rows, cols, *buffers, ffi.new("size_t *")) == lib.PYCASS_ERR_INVALID_ARGUMENT
    out = ffi.new("float[64]")
    assert lib.pycass_nest_decode_draft(*buffers[:2], rows, cols, out) == lib.PYCASS_ERR_INVALID_ARGUMENT


def test_trained_weights_take_what_the_format_says():
    """Normal weights of aligned size: 4.125 bits of speculation data, below 11.4 bits in all (0.715 of 16)."""
    bits = random_bits("trained", 3, (512, 1024))
    parts = encode(bits)
    assert 8 * (len(parts[16]) + len(parts[17])) / bits.size == 4.125
    assert 8 * sum(map(len, parts.values())) / bits.size < 0.715 * 16
    draft, values = decode_draft(parts, bits.shape), bf16_to_f32(bits)
    assert np.linalg.norm(draft - values) < 0.12 * np.linalg.norm(values)


# ---- conversions to BF16 ----


@EVERY
@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_float32_to_bf16(values):
    source = np.array(values, np.float32)
    out = np.empty(len(values), np.uint16)
    changed = lib.pycass_bf16_from_f32(
        ffi.cast("uint16_t *", ffi.from_buffer(out)), ffi.cast("float *", ffi.from_buffer(source)), len(values)
    )
    nan = np.isnan(source)
    assert np.array_equal(out[~nan], f32_to_bf16(source[~nan])) and np.isnan(bf16_to_f32(out[nan])).all()
    inexact = source.view(np.uint32) & 0xFFFF != 0
    assert changed == inexact.sum()


def test_every_float16_to_bf16():
    source = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty_like(source)
    pointers = [ffi.cast("uint16_t *", ffi.from_buffer(a)) for a in (out, source)]
    changed = lib.pycass_bf16_from_f16(*pointers, source.size)
    wide = source.view(np.float16).astype(np.float32)
    nan = np.isnan(wide)
    assert np.array_equal(out[~nan], f32_to_bf16(wide[~nan])) and np.isnan(bf16_to_f32(out[nan])).all()
    different = bf16_to_f32(out[~nan]) != wide[~nan]
    assert different.sum() <= changed <= different.sum() + nan.sum()


@pytest.mark.parametrize("n", [1, 7, 8, 16, 33, 64, 100])
def test_finding_what_is_not_finite(n):
    for at in range(n):
        for value in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81):
            bits = np.full(n, 0x7F7F, np.uint16)
            bits[at] = value
            assert lib.pycass_bf16_find_nonfinite(ffi.cast("uint16_t *", ffi.from_buffer(bits)), n) == at
    bits = np.full(n, 0xFF7F, np.uint16)
    assert lib.pycass_bf16_find_nonfinite(ffi.cast("uint16_t *", ffi.from_buffer(bits)), n) == n


@EVERY
@given(data=st.binary(max_size=300), cut=st.integers(0, 300))
def test_checksum(data, cut):
    """Against the table-driven one, and in two pieces."""
    cut = min(cut, len(data))
    whole = lib.pycass_crc32c(0, ffi.from_buffer(data), len(data))
    first = lib.pycass_crc32c(0, ffi.from_buffer(data[:cut]), cut)
    assert whole == crc32c(data) == lib.pycass_crc32c(first, ffi.from_buffer(data[cut:]), len(data) - cut)


def test_checksum_of_the_literature():
    assert lib.pycass_crc32c(0, b"123456789", 9) == 0xE3069283 == crc32c(b"123456789")
