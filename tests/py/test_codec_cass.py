"""The codecs `cass1` and `cass2` (docs/format.md): round trips of any bits through the C decoder and through the plain
reader, what the draft keeps, damage, sizes, and files that must decode for ever."""

import itertools

import numpy as np
import pytest
from cass_reader import Cass, Tensor
from checkpoints import bf16_to_f32, f32_to_bf16
from conftest import GOLDEN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_codec import KINDS, random_bits

from pycass._pycass import ffi
from pycass.convert import cass_parts
from pycass.convert.cass_parts import CASS1, CASS2, CODECS, CassOptions
from pycass.errors import ConversionError

EVERY = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
sizes = st.tuples(st.integers(1, 36), st.integers(1, 140))
choices = st.builds(
    CassOptions, st.floats(0, 0.99), st.integers(0, 7), st.booleans(), st.sampled_from(["coded", "coded", "raw"])
)


def rounded(bits, name):
    """What the codec keeps of bits."""
    bits = bits.copy()
    if name == "cass2":
        cass_parts.round_cass2(bits)
    return bits


def mx(bits):
    """What cass2 keeps, by its definition: multiples of a group's unit, what is between them cut off."""
    rows, cols = bits.shape
    padded = np.zeros((rows, -cols % 32 + cols), np.uint16)
    padded[:, :cols] = bits
    groups = padded.reshape(rows, -1, 32)
    e = (groups >> 7 & 255).astype(np.int64)
    top = np.maximum(e.max(axis=2, keepdims=True), 1)
    s = (groups & 127) + np.where(e > 0, 128, 0)
    m = np.where(top - np.maximum(e, 1) < 8, s >> np.minimum(top - np.maximum(e, 1), 8), 0)
    return m.reshape(rows, -1)[:, :cols], top.repeat(32, axis=2).reshape(rows, -1)[:, :cols]


def kept_by_score(bits, options, norms):
    """The bitmap: all but the n lowest scores of a row, the first of equal ones going first."""
    scores = bf16_to_f32(bits & 0x7FFF)
    with np.errstate(all="ignore"):
        scores = scores if norms is None else scores * norms
    order = np.argsort(np.where(np.isnan(scores), np.inf, scores), axis=1, kind="stable")
    inf = np.isinf(scores) & ~np.isnan(scores)
    assert not (inf.any() and np.isnan(scores).any()), "numpy's order of these is another"
    n = int(np.float64(np.float32(options.prune)) * bits.shape[1] + 0.5)
    kept = np.ones(bits.shape, bool)
    np.put_along_axis(kept, order[:, :n], False, axis=1)
    return kept


def check(bits, name, options, norms=None):
    """Encodes a matrix and compares everything that comes back."""
    if name == "cass2" and options.pruned == "raw":
        options = CassOptions(options.prune, options.mantissa_bits, options.half)
    parts = cass_parts.encode(bits, CODECS[name], options, norms)
    want = rounded(bits, name)
    plain = Cass(Tensor("w", name, bits.shape, 0, dict(zip((32, 33), (p.tobytes() for p in parts)))))
    assert np.array_equal(plain.bits(), want), "plain reader"
    assert np.array_equal(cass_parts.decode(CODECS[name], *parts, bits.shape), want), "C decoder"
    assert np.array_equal(cass_parts.decode(CODECS[name], parts[0], None, bits.shape), plain.draft()), "the draft"
    return parts, plain


@EVERY
@given(
    shape=sizes, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), name=st.sampled_from(list(CODECS)),
    options=choices, weighed=st.booleans(),
)  # fmt: skip
def test_round_trip(shape, kind, seed, name, options, weighed):
    norms = np.random.default_rng(seed).random(shape[1], np.float32) if weighed else None
    check(random_bits(kind, seed, shape), name, options, norms)


@EVERY
@given(
    bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=140), rows=st.integers(1, 5),
    name=st.sampled_from(list(CODECS)), options=choices,
)  # fmt: skip
def test_round_trip_of_chosen_bits(bits, rows, name, options):
    flat = np.array([bits[i % len(bits)] for i in range(rows * len(bits))], np.uint16)
    check(flat.reshape(rows, -1), name, options)


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("shape", [(1, 1), (15, 63), (16, 64), (17, 65), (1, 129), (33, 1), (16, 32), (31, 33)])
def test_sizes_around_a_tile(shape, name):
    for kind in KINDS:
        check(random_bits(kind, 1, shape), name, CassOptions())


def test_every_bf16_pattern():
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(512, 128).T.reshape(256, 256)
    for name in CODECS:
        parts = cass_parts.encode(bits, CODECS[name], CassOptions())
        assert np.array_equal(cass_parts.decode(CODECS[name], *parts, bits.shape), rounded(bits, name))


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("value", [0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0xFF80, 0x7FC0, 0xFFFF])
def test_constant_matrices(value, name):
    _, plain = check(np.full((18, 70), value, np.uint16), name, CassOptions(0.25))
    assert not plain.kept[:18, :18].any() and plain.kept[:18, 18:70].all(), "of equal scores the first are pruned"


@pytest.mark.parametrize("name", list(CODECS))
def test_255_exponents(name):
    """More than a codebook holds, in rows that each have all of them."""
    bits = (np.arange(16 * 512) % 255 << 7 | np.arange(16 * 512) % 127).astype(np.uint16).reshape(16, 512)
    parts, _ = check(bits, name, CassOptions())
    assert name == "cass2" or 8 * len(parts[0]) > 14 * bits.size, "escapes are long"


# ---- what the draft is made of ----


@EVERY
@given(shape=sizes, seed=st.integers(0, 2**32 - 1), name=st.sampled_from(list(CODECS)), options=choices)
def test_kept_weights(shape, seed, name, options):
    """The lowest scores are pruned; kept weights lose their lower bits."""
    norms = np.random.default_rng(seed).random(shape[1], np.float32).round(1)
    bits = random_bits("trained", seed, shape)
    _, plain = check(bits, name, options, norms)
    kept = kept_by_score(rounded(bits, name), options, norms)
    assert np.array_equal(plain.kept[: shape[0], : shape[1]], kept)
    draft, b = plain.draft(), options.mantissa_bits
    assert not draft[~kept].any()
    if name == "cass1":
        half = 64 >> b if options.half else 0
        assert np.array_equal(draft[kept], (bits[kept] & (0xFF80 | (127 << (7 - b)) & 127)) | half)
    else:
        m, top = mx(bits)
        upper = m >> (7 - b) << (7 - b)
        upper = np.where(upper, upper | (64 >> b if options.half else 0), 0)
        want = np.ldexp(upper.astype(np.float64), top - 134) * np.where(bits >> 15, -1, 1)
        assert np.array_equal(bf16_to_f32(draft)[kept], want.astype(np.float32)[kept])


@EVERY
@given(shape=sizes, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1))
def test_cass2_rounds_as_defined(shape, kind, seed):
    bits = random_bits(kind, seed, shape)
    m, top = mx(bits)
    finite = top < 255
    got = rounded(bits, "cass2")
    want = np.where(bits >> 15, -1, 1) * np.ldexp(np.where(finite, m, 0).astype(np.float64), np.where(finite, top, 0) - 134)
    assert np.array_equal(bf16_to_f32(np.where(finite, got, 0).astype(np.uint16)).astype(np.float64), want)
    assert np.array_equal(got >> 15, bits >> 15) and np.array_equal(rounded(got, "cass2"), got)


# ---- pieces of a matrix ----


@pytest.mark.parametrize("name", list(CODECS))
def test_rows_encoded_apart_are_those_encoded_together(name):
    """cass_parts.Part joins what chunks of rows give to the part that the whole matrix gives."""
    bits = random_bits("trained", 4, (150, 300))
    whole = cass_parts.encode(bits, CODECS[name], CassOptions())
    files = [np.zeros(1 << 20, np.uint8) for _ in whole]

    def write_to(file):
        def write(at, data):
            file[at : at + len(data)] = data

        return write

    parts = [cass_parts.Part(write_to(f), 128, head, 10) for f, head in zip(files, (cass_parts.HEADER, 0))]
    for r0, r1 in ((0, 48), (48, 64), (64, 150)):
        for part, data in zip(parts, cass_parts.encode(bits[r0:r1], CODECS[name], CassOptions())):
            part.add(data, r1 - r0)
    for part, file, want in zip(parts, files, whole):
        assert np.array_equal(file[128 : 128 + part.size], want)


# ---- damage ----


@EVERY
@given(
    name=st.sampled_from(list(CODECS)), options=choices, seed=st.integers(0, 2**32 - 1), which=st.booleans(), data=st.data()
)  # fmt: skip
def test_any_byte_changed(name, options, seed, which, data):
    """Refused, or decoded to something; header and tables are looked at closely."""
    bits = random_bits("trained", seed, (33, 100))
    options = CassOptions(options.prune, options.mantissa_bits, options.half)
    parts = [p.copy() for p in cass_parts.encode(bits, CODECS[name], options)]
    part = parts[which]
    at = data.draw(st.one_of(st.integers(0, min(200, len(part) - 1)), st.integers(0, len(part) - 1)))
    part[at] ^= data.draw(st.integers(1, 255))
    try:
        out = cass_parts.decode(CODECS[name], *parts, bits.shape)
    except ConversionError as e:
        assert "damaged" in str(e) and at < 64 + 20 * 4
    else:
        assert out.shape == bits.shape


@pytest.mark.parametrize("name", list(CODECS))
def test_truncated_parts_are_refused(name):
    bits = random_bits("trained", 2, (33, 100))
    parts = cass_parts.encode(bits, CODECS[name], CassOptions())
    for which in range(2):
        for n in range(len(parts[which])):
            cut = list(parts)
            cut[which] = parts[which][:n]
            with pytest.raises(ConversionError, match="damaged"):
                cass_parts.decode(CODECS[name], *cut, bits.shape)


# ---- sizes ----


def entropy(count):
    p = count[count > 0] / count.sum()
    return float(-(p * np.log2(p)).sum())


def test_trained_weights_take_what_the_format_says():
    bits = f32_to_bf16(0.02 * np.random.default_rng(3).standard_normal((512, 1024)))
    stats = ffi.new("pycass_cass_stats *")
    parts = cass_parts.encode(bits, CASS1, CassOptions(), stats=stats)
    spec, full = 8 * len(parts[0]) / bits.size, 8 * sum(map(len, parts)) / bits.size
    assert 4.2 < spec < 4.7 and full < 11.3
    counts = np.frombuffer(ffi.buffer(stats.count), np.uint64).reshape(2, 256).astype(np.float64)
    assert counts.sum() == bits.size and counts[1].sum() == 512 * 410
    for count, n in zip(counts, stats.exponent_bits):
        assert entropy(count) - 0.3 < n / count.sum() < entropy(count) + 0.4, "codebooks of row blocks may beat one"
    raw = cass_parts.encode(bits, CASS1, CassOptions(pruned="raw"))
    assert 13.1 < 8 * sum(map(len, raw)) / bits.size < 13.5
    cass2 = cass_parts.encode(bits, CASS2, CassOptions())
    assert 10.1 < 8 * sum(map(len, cass2)) / bits.size < 10.5


@pytest.mark.parametrize(
    "options", [CassOptions(1.0), CassOptions(-0.1), CassOptions(0.4, 8), CassOptions(0.4, -1), CassOptions(pruned="none")]
)
def test_options_out_of_range(options):
    with pytest.raises(ConversionError):
        options.check("cass1")


def test_cass2_has_no_raw_pruned_weights():
    CassOptions(pruned="raw").check("cass1")
    with pytest.raises(ConversionError, match="cass2"):
        CassOptions(pruned="raw").check("cass2")


# ---- golden files: what was written once is read for ever, and written the same again ----

GOLDEN_CASES = [
    (name, kind, options)
    for name, (kind, options) in itertools.product(
        CODECS, [("trained", CassOptions()), ("any", CassOptions(0.7, 5, False)), ("tiny exponents", CassOptions(0.2, 0))]
    )
] + [("cass1", "wide", CassOptions(pruned="raw"))]


def golden_case(i):
    name, kind, options = GOLDEN_CASES[i]
    return name, options, random_bits(kind, 100 + i, (17 + 3 * i, 130 - 9 * i))


def write_golden():
    """Makes tests/golden/cass.npz: only after a change of the format."""
    out = {}
    for i in range(len(GOLDEN_CASES)):
        name, options, bits = golden_case(i)
        parts = cass_parts.encode(bits, CODECS[name], options)
        out |= {f"{i}.bits": bits, f"{i}.spec": parts[0], f"{i}.ver": parts[1]}
        out[f"{i}.draft"] = cass_parts.decode(CODECS[name], parts[0], None, bits.shape)
    np.savez_compressed(GOLDEN / "cass.npz", **out)


@pytest.mark.parametrize("i", range(len(GOLDEN_CASES)))
def test_golden(i):
    name, options, _ = golden_case(i)
    with np.load(GOLDEN / "cass.npz") as stored:
        bits, spec, ver, draft = (stored[f"{i}.{k}"] for k in ("bits", "spec", "ver", "draft"))
    assert np.array_equal(cass_parts.decode(CODECS[name], spec, ver, bits.shape), rounded(bits, name))
    assert np.array_equal(cass_parts.decode(CODECS[name], spec, None, bits.shape), draft)
    plain = Cass(Tensor("w", name, bits.shape, 0, {32: spec.tobytes(), 33: ver.tobytes()}))
    assert np.array_equal(plain.bits(), rounded(bits, name)) and np.array_equal(plain.draft(), draft)
    assert all(np.array_equal(a, b) for a, b in zip(cass_parts.encode(bits, CODECS[name], options), (spec, ver)))
