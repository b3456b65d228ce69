/* AVX2, FMA, BMI2. Same bits as kernels_cpu/scalar.c. */
#include <immintrin.h>

#include "sets.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#define V __m256
#define V_WIDTH 8
#define V_LOAD _mm256_loadu_ps
#define V_STORE _mm256_storeu_ps
#define V_SET1 _mm256_set1_ps
#define V_ADD _mm256_add_ps
#define V_SUB _mm256_sub_ps
#define V_MUL _mm256_mul_ps
#define V_DIV _mm256_div_ps
#define V_FMA _mm256_fmadd_ps
#define V_MAX _mm256_max_ps
#define V_MIN _mm256_min_ps

ALWAYS_INLINE __m256 V_BF16(const uint16_t *p) {
  __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
ALWAYS_INLINE __m256 V_POW2(__m256 n) {
  __m256i e = _mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
ALWAYS_INLINE __m256 V_ZERO_BELOW(__m256 x, float limit, __m256 v) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_LT_OQ), v);
}

#include "x86_ops.h"

#include "tiled.h"

ALWAYS_INLINE void simd_sums(float out[SCORES], V lane[SCORES][VECTORS], float scale) {
  __m128 s[SCORES];
  for (int i = 0; i < SCORES; i++) {
    __m256 halves = _mm256_add_ps(lane[i][0], lane[i][1]);
    s[i] = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  }
  _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
  __m128 sum = _mm_add_ps(_mm_add_ps(s[0], s[2]), _mm_add_ps(s[1], s[3]));
  _mm_storeu_ps(out, _mm_mul_ps(sum, _mm_set1_ps(scale)));
}

static inline __m256i load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline void store(void *p, __m256i v) { _mm256_storeu_si256((__m256i *)p, v); }
static inline __m256i table16(__m128i t) { return _mm256_broadcastsi128_si256(t); }

/* As ops_quantize_group. */
ALWAYS_INLINE void quantize_group(int8_t *q, float *scale, int32_t *sum, const float *x) {
  const __m256 magic = _mm256_set1_ps(12582912.0f), sign = _mm256_set1_ps(-0.0f);
  const __m256i low = _mm256_set1_epi32(255), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256 tops = _mm256_setzero_ps();
  for (int i = 0; i < 8; i++)
    tops = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(x + 8 * i)), tops);
  float lane[8], top = 0;
  _mm256_storeu_ps(lane, tops);
  for (int i = 0; i < 8; i++)
    top = lane[i] > top ? lane[i] : top;
  float inverse = top > 0 ? 127.0f / top : 0.0f;
  inverse = inverse > 3e38f ? 0.0f : inverse;
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < 2; i++) {
    __m256i n[4];
    for (int k = 0; k < 4; k++) {
      __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + 32 * i + 8 * k), _mm256_set1_ps(inverse));
      v = _mm256_max_ps(_mm256_sub_ps(_mm256_add_ps(v, magic), magic), _mm256_set1_ps(-127.0f)); /* NaN: -127 */
      n[k] = _mm256_cvttps_epi32(v);
      total = _mm256_add_epi32(total, n[k]);
      n[k] = _mm256_and_si256(n[k], low);
    }
    __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(n[0], n[1]), _mm256_packus_epi32(n[2], n[3]));
    store(q + 32 * i, _mm256_permutevar8x32_epi32(bytes, order));
  }
  int32_t sums[8];
  store(sums, total);
  *sum = sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
  *scale = top * (1.0f / 8890.0f);
}

/* ---- nest: tiles to exact bits ----------------------------------------------------------------------- */

/* q of each weight of CELL_SMALL in turn: its bit 0 as bit 7, its bits 3..1 as bits 2..0. */
typedef uint8_t Exponents[NEST_TILE + 64];
enum { CODE_ZERO = 0x40, CODE_ESCAPE = 0x87 }; /* the latter where the header says so */

/* A tile while it is decoded. */
typedef struct TileDecoder {
  const uint8_t *a, *x, *b;
  const uint8_t *bits;          /* T */
  size_t pos;                   /* in T */
  const uint8_t *first, *small; /* Exponents: the first, the next */
  const uint8_t *escape;        /* past the next one, backwards */
  uint32_t header;
  __m256i group[4];             /* (G - NEST_BIAS) << 7 by word of the four vectors of a half line */
} TileDecoder;

ALWAYS_INLINE void tile_decoder_init(TileDecoder *d, Exponents exponents, const Matrix *w, size_t t) {
  const __m256i rows01 = table16(_mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3));
  const __m256i rows23 = table16(_mm_setr_epi8(4, 5, 4, 5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7));
  d->a = w->a + 512 * t, d->x = w->x + 16 * t, d->b = w->b + 768 * t;
  __m256i group = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)d->x));
  group = _mm256_slli_epi16(_mm256_sub_epi16(group, _mm256_set1_epi16(NEST_BIAS)), 7);
  __m256i upper = _mm256_permute4x64_epi64(group, 0x50), lower = _mm256_permute4x64_epi64(group, 0xfa);
  d->group[0] = _mm256_shuffle_epi8(upper, rows01), d->group[1] = _mm256_shuffle_epi8(lower, rows01);
  d->group[2] = _mm256_shuffle_epi8(upper, rows23), d->group[3] = _mm256_shuffle_epi8(lower, rows23);

  const uint8_t *record = w->side + load_u32(w->side + 4 * t), *nibbles = record + NEST_HEADER;
  nest_prefetch(d->a, d->b, record);
  d->header = record[0] | (uint32_t)record[1] << 8;
  uint32_t count = d->header & NEST_COUNT;
  count = count < NEST_TILE ? count : NEST_TILE;
  __m256i code = table16(_mm_setr_epi8(0, -128, 1, -127, 2, -126, 3, -125, 4, -124, 5, -123, 6, -122, 7, -121));
  code = _mm256_or_si256(code, table16(_mm_cvtsi32_si128(CODE_ZERO)));
  for (uint32_t i = 0; i < count; i += 64) /* 64 at a time, so that the number of turns is easily foretold */
    for (uint32_t k = i; k < i + 64; k += 32) {
      __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(nibbles + k / 2)));
      v = _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi16(v, 4)), _mm256_set1_epi8(15));
      store(exponents + k, _mm256_shuffle_epi8(code, v));
    }
  d->bits = nibbles + (count + 1) / 2, d->pos = 0, d->first = d->small = exponents;
  d->escape = w->side + load_u32(w->side + 4 * t + 4);
}

/* True if plane A asked for as many nibbles q as the record has; else it is damaged and the specification must decide. */
ALWAYS_INLINE bool tile_decoder_fits(const TileDecoder *d) {
  return (uint32_t)(d->small - d->first) == (d->header & NEST_COUNT);
}

/* NEST_BIAS - G, modulo 512, by byte: what a word must have for its exponent to become zero with the group's. */
typedef struct Cancel {
  __m256i low[2];  /* bit 0, as what it takes to make bit 7 of CODE_ZERO */
  __m256i high[2]; /* the others */
} Cancel;

ALWAYS_INLINE Cancel cancel(const uint8_t *x) {
  const __m256i spread = table16(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  Cancel c;
  for (int i = 0; i < 2; i++) {
    __m256i group = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(x + 8 * i)));
    group = _mm256_shuffle_epi8(group, spread);
    c.low[i] = _mm256_and_si256(_mm256_slli_epi16(group, 6), _mm256_set1_epi8(0x80 - CODE_ZERO));
    c.high[i] = _mm256_sub_epi8(_mm256_set1_epi8(NEST_BIAS / 2), _mm256_avg_epu8(group, _mm256_setzero_si256()));
  }
  return c;
}

/* Weights of CELL_SMALL whose exponent is an escape byte: makes their bytes such that adding the group's gives it.
 * Returns where the next escape is. */
static __attribute__((noinline, cold)) const uint8_t *set_escapes(const uint8_t *escape, const uint8_t *x,
                                                                  const __m256i q[2], __m256i low[2], __m256i high[2]) {
  uint8_t code[64], l[64], h[64];
  for (int i = 0; i < 2; i++)
    store(code + 32 * i, q[i]), store(l + 32 * i, low[i]), store(h + 32 * i, high[i]);
  for (int n = 0; n < 64; n++)
    if (code[n] == CODE_ESCAPE) {
      uint32_t e = *--escape + NEST_BIAS - (uint32_t)x[n / 4];
      l[n] = (uint8_t)((l[n] & 0x7fu) | e << 7);
      h[n] = (uint8_t)((h[n] & 0x80u) + (e >> 1));
    }
  for (int i = 0; i < 2; i++)
    low[i] = load(l + 32 * i), high[i] = load(h + 32 * i);
  return escape;
}

/* By cell. Bit 7: it has a T bit. Taken off a number 0..16, FLAGS_SMALL leaves in bits 3..0 that number less 1 and clears
 * bit 7, the others set bit 7: as a byte shuffle wants its indices. */
enum { FLAGS_NONE = 0x60, FLAGS_T = 0x80, FLAGS_SMALL = 0xf1 };

/* The exponents of 32 weights, 0 but for CELL_SMALL. AVX2 cannot expand bytes, so each one's place among those of its 16
 * weights is counted: in dwords by a product, then across them. */
ALWAYS_INLINE __m256i expand(TileDecoder *d, __m256i flags) {
  const __m256i dword1 = table16(_mm_setr_epi8(-1, -1, -1, -1, 3, 3, 3, 3, 7, 7, 7, 7, 11, 11, 11, 11));
  const __m256i dword2 = table16(_mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 3, 3, 3, 3, 7, 7, 7, 7));
  __m256i small = _mm256_cmpeq_epi8(flags, _mm256_set1_epi8((char)FLAGS_SMALL));
  uint32_t mask = (uint32_t)_mm256_movemask_epi8(small);
  /* 255 * 0xfefefeff = 1 modulo 2^32 */
  __m256i n = _mm256_mullo_epi32(small, _mm256_set1_epi32((int)(0x01010101u * 0xfefefeffu)));
  n = _mm256_add_epi8(n, _mm256_shuffle_epi8(n, dword1));
  n = _mm256_add_epi8(n, _mm256_shuffle_epi8(n, dword2));
  __m128i lower = _mm_loadu_si128((const __m128i *)d->small);
  __m128i upper = _mm_loadu_si128((const __m128i *)(d->small + __builtin_popcount(mask & 0xffff)));
  d->small += __builtin_popcount(mask);
  return _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(lower), upper, 1), _mm256_sub_epi8(n, flags));
}

/* The T bits of 64 weights whose flags these are, bit n for weight n. */
ALWAYS_INLINE uint64_t read_t(TileDecoder *d, const __m256i flags[2]) {
  uint64_t has_t = (uint32_t)_mm256_movemask_epi8(flags[0]) | (uint64_t)(uint32_t)_mm256_movemask_epi8(flags[1]) << 32;
  uint32_t n = (uint32_t)__builtin_popcountll(has_t);
  uint64_t bits = load_u64(d->bits + (d->pos >> 3)) >> (d->pos & 7);
  if (UNLIKELY(n > 57)) /* a ninth byte; << 1 << makes a shift by 64 a shift to zero */
    bits |= (uint64_t)d->bits[(d->pos >> 3) + 8] << 1 << (63 - (d->pos & 7));
  d->pos += n;
  return _pdep_u64(bits, has_t);
}

/* Bits 32 i .. 32 i + 31 as bytes 0x40 or 0. */
ALWAYS_INLINE __m256i bit6_of(uint64_t bits, int i) {
  const __m256i which = _mm256_add_epi8(
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3),
      _mm256_set1_epi8((char)(4 * i)));
  const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
  __m256i v = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi64x((long long)bits), which), bit);
  return _mm256_and_si256(_mm256_cmpeq_epi8(v, bit), _mm256_set1_epi8(0x40));
}

/* The low six mantissa bits of half line hl = 0..3 of two lines; b points at byte 32 i of their planes. */
ALWAYS_INLINE __m256i low6_of(const uint8_t *b, const uint32_t hl) {
  if (hl < 3)
    return _mm256_and_si256(load(b + 64 * hl), _mm256_set1_epi8(0x3f));
  const __m256i top = _mm256_set1_epi8((char)0xc0); /* the fourth one's bits are the upper two of each byte */
  __m256i v = _mm256_and_si256(_mm256_srli_epi16(load(b + 128), 2), _mm256_set1_epi8(0x30));
  v = _mm256_srli_epi16(_mm256_or_si256(v, _mm256_and_si256(load(b + 64), top)), 2);
  return _mm256_srli_epi16(_mm256_or_si256(v, _mm256_and_si256(load(b), top)), 2);
}

/* Half line hl = 0..3 of lines 2 pair and 2 pair + 1. none: NULL for the relative form. out: rows 0, 1, 4,
 * 5, then 8, 9, 12, 13, then 2, 3, 6, 7, then the others. */
ALWAYS_INLINE void decode_half_line(TileDecoder *d, const Cancel *none, uint32_t pair, const uint32_t hl, __m256i out[4]) {
  /* by nibble: FLAGS_*, then the bytes of the word for G = NEST_BIAS and mantissa bits 5..0 = 0, as nest_exponent and
   * nest_bit6 have it */
  const __m256i nibble_flags = table16(_mm_set1_epi64x((long long)0xf180806060606060u));
  const __m256i nibble_low = table16(_mm_setr_epi8(0, 64, -128, -64, 0, 64, -128, 0, 0, 64, -128, -64, 0, 64, -128, 0));
  const __m256i nibble_high =
      table16(_mm_setr_epi8(8, 8, 8, 8, 9, 9, 7, 0, -120, -120, -120, -120, -119, -119, -121, -128));
  const uint8_t *a = d->a + 128 * pair + 64 * (hl / 2), *b = d->b + 192 * pair;
  __m256i nibble[2], flags[2], q[2], low[2], high[2];
  for (int i = 0; i < 2; i++) {
    __m256i line = load(a + 32 * i);
    nibble[i] = _mm256_and_si256(hl % 2 ? _mm256_srli_epi16(line, 4) : line, _mm256_set1_epi8(15));
    flags[i] = _mm256_shuffle_epi8(nibble_flags, nibble[i]);
  }
  uint64_t t = read_t(d, flags);
  for (int i = 0; i < 2; i++) {
    q[i] = expand(d, flags[i]);
    low[i] = _mm256_or_si256(_mm256_shuffle_epi8(nibble_low, nibble[i]), low6_of(b + 32 * i, hl));
    low[i] = _mm256_add_epi8(low[i], bit6_of(t, i));
    __m256i bit7 = none ? _mm256_add_epi8(q[i], none->low[i]) : q[i];
    low[i] = _mm256_or_si256(low[i], _mm256_and_si256(bit7, _mm256_set1_epi8((char)0x80)));
    high[i] = _mm256_or_si256(_mm256_shuffle_epi8(nibble_high, nibble[i]), _mm256_and_si256(q[i], _mm256_set1_epi8(7)));
    if (none) {
      __m256i zero = _mm256_cmpeq_epi8(q[i], _mm256_set1_epi8(CODE_ZERO));
      high[i] = _mm256_add_epi8(high[i], _mm256_and_si256(zero, none->high[i]));
    }
  }
  if (none && UNLIKELY(d->header & NEST_HAS_ESCAPE)) {
    __m256i l[2] = {low[0], low[1]}, h[2] = {high[0], high[1]}; /* copies, so that low and high stay in registers */
    d->escape = set_escapes(d->escape, d->x, q, l, h);
    low[0] = l[0], low[1] = l[1], high[0] = h[0], high[1] = h[1];
  }
  for (int i = 0; i < 2; i++) {
    out[i] = _mm256_unpacklo_epi8(low[i], high[i]), out[2 + i] = _mm256_unpackhi_epi8(low[i], high[i]);
    if (none) {
      out[i] = _mm256_add_epi16(out[i], d->group[i]);
      out[2 + i] = _mm256_add_epi16(out[2 + i], d->group[2 + i]);
    }
  }
}

ALWAYS_INLINE void store_half_line(TileDecoder *d, const Cancel *none, uint32_t pair, const uint32_t hl, TileWords out) {
  __m256i v[4];
  decode_half_line(d, none, pair, hl, v);
  for (int k = 0; k < 4; k++)
    store(out[4 * pair + hl] + 16 * k, v[k]);
}

ALWAYS_INLINE void store_tile(TileDecoder *d, const Cancel *none, TileWords out) {
  for (uint32_t pair = 0; pair < 4; pair++) { /* written out, since compilers keep a loop of four a loop */
    store_half_line(d, none, pair, 0, out);
    store_half_line(d, none, pair, 1, out);
    store_half_line(d, none, pair, 2, out);
    store_half_line(d, none, pair, 3, out);
  }
}

static __attribute__((noinline)) void set_nest_decode_tile(const Matrix *w, size_t t, TileWords out) {
  Exponents exponents;
  TileDecoder d;
  tile_decoder_init(&d, exponents, w, t);
  Cancel none = cancel(d.x);
  store_tile(&d, &none, out);
  if (UNLIKELY(!tile_decoder_fits(&d)))
    nest_decode_tile(w, t, out);
}

/* 2^(G - NEST_BIAS) by dword of the four vectors of a half line. */
ALWAYS_INLINE void units(Sums unit, const TileDecoder *d) {
  for (int i = 0; i < 4; i++) {
    __m256i exponent = _mm256_and_si256(d->group[i], _mm256_set1_epi32((int)0xffff0000u));
    store(unit + 8 * i, _mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)));
  }
}

static __attribute__((noinline)) void nest_relative_tile(const Matrix *w, size_t t, Tile *out) {
  Exponents exponents;
  TileDecoder d;
  tile_decoder_init(&d, exponents, w, t);
  units(out->unit, &d);
  store_tile(&d, NULL, out->words);
  if (UNLIKELY(!tile_decoder_fits(&d)))
    nest_decode_relative(w, t, out->words);
}

/* ---- raw ------------------------------------------------------------------------------------------- */

/* 16 rows of 64 columns: qwords of four columns, of pairs of rows. */
ALWAYS_INLINE void raw_words(const uint16_t *p, size_t stride, TileWords out) {
  const __m256i columns = table16(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  for (size_t k = 0; k < 4; k++)
    for (size_t i = 0; i < 4; i++) {
      size_t r = i / 2 * 2 + i % 2 * 8;
      __m256i v[4];
      for (size_t n = 0; n < 4; n++)
        v[n] = _mm256_shuffle_epi8(load(p + (r + n / 2 * 4 + n % 2) * stride + 16 * k), columns);
      __m256i even[2] = {_mm256_unpacklo_epi64(v[0], v[1]), _mm256_unpacklo_epi64(v[2], v[3])};
      __m256i odd[2] = {_mm256_unpackhi_epi64(v[0], v[1]), _mm256_unpackhi_epi64(v[2], v[3])};
      uint16_t *to = out[4 * k] + 16 * i;
      store(to, _mm256_permute2x128_si256(even[0], even[1], 0x20));
      store(to + 64, _mm256_permute2x128_si256(odd[0], odd[1], 0x20));
      store(to + 128, _mm256_permute2x128_si256(even[0], even[1], 0x31));
      store(to + 192, _mm256_permute2x128_si256(odd[0], odd[1], 0x31));
    }
}

#include "avx2_cass.h"

/* ---- target product --------------------------------------------------------------------------------- */

ALWAYS_INLINE __m256 odd_words(__m256i v) {
  return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000u)));
}
ALWAYS_INLINE __m256 even_words(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }

/* A half line times n tokens. s[4 t ..]: of each row s0 and s1, for the rows of the four vectors. */
ALWAYS_INLINE void multiply_half_line(__m256 *s, const __m256i w[4], const uint16_t *x, const int n) {
  __m256 odd[MATMUL_CHUNK], even[MATMUL_CHUNK];
  for (int t = 0; t < n; t++) {
    __m256i v = _mm256_set1_epi64x((long long)load_u64((const uint8_t *)(x + 4 * t)));
    odd[t] = odd_words(v), even[t] = even_words(v);
  }
  for (int k = 0; k < 4; k++)
    for (int t = 0; t < n; t++) {
      s[4 * t + k] = _mm256_fmadd_ps(odd_words(w[k]), odd[t], s[4 * t + k]);
      s[4 * t + k] = _mm256_fmadd_ps(even_words(w[k]), even[t], s[4 * t + k]);
    }
}

/* sums += s * unit */
ALWAYS_INLINE void add_sums(Sums sums, const __m256 s[4], const Sums unit) {
  for (int i = 0; i < 4; i++)
    _mm256_storeu_ps(sums + 8 * i, _mm256_fmadd_ps(s[i], _mm256_loadu_ps(unit + 8 * i), _mm256_loadu_ps(sums + 8 * i)));
}

/* sums += a row block's hot columns times a token whose activations begin at hot */
static void multiply_hot(Sums sums, const Matrix *w, size_t block, const uint16_t *hot) {
  __m256 s[4];
  for (int k = 0; k < 4; k++)
    s[k] = _mm256_loadu_ps(sums + 8 * k);
  for (uint32_t i = 0; i < w->n_hot / 4; i++) {
    const uint16_t *words = hot_half_line(w, block, i);
    __m256i v[4];
    for (int k = 0; k < 4; k++)
      v[k] = load(words + 16 * k);
    multiply_half_line(s, v, hot + i * PANEL_TOKENS * 4, 1);
  }
  for (int k = 0; k < 4; k++)
    _mm256_storeu_ps(sums + 8 * k, s[k]);
}

/* s0 + s1 of the 16 rows, without the panels' scale */
ALWAYS_INLINE void finish_sums(float *y, const Sums sums) {
  for (int i = 0; i < 16; i += 8) {
    __m256 a = _mm256_loadu_ps(sums + i), b = _mm256_loadu_ps(sums + 16 + i);
    __m256 sum = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
    _mm256_storeu_ps(y + i, _mm256_mul_ps(sum, _mm256_set1_ps(1 / PANEL_SCALE)));
  }
}

ALWAYS_INLINE void decode_multiply(__m256 s[4], TileDecoder *d, const Cancel *none, uint32_t pair, const uint32_t hl,
                                   const uint16_t *panel) {
  __m256i v[4];
  decode_half_line(d, none, pair, hl, v);
  multiply_half_line(s, v, panel + (4 * pair + hl) * PANEL_TOKENS * 4, 1);
}

ALWAYS_INLINE void multiply_tile(__m256 s[4], TileDecoder *d, const Cancel *none, const uint16_t *panel) {
  for (uint32_t pair = 0; pair < 4; pair++) {
    decode_multiply(s, d, none, pair, 0, panel);
    decode_multiply(s, d, none, pair, 1, panel);
    decode_multiply(s, d, none, pair, 2, panel);
    decode_multiply(s, d, none, pair, 3, panel);
  }
}

/* A row block of a nest matrix times one token, the weights never leaving registers. False if it is damaged. */
static bool nest_block(float *y, const Matrix *w, size_t block, const uint16_t *panel, const uint16_t *hot) {
  bool fits = true;
  Sums sums = {0}, unit;
  if (w->n_hot)
    multiply_hot(sums, w, block, hot);
  for (size_t g = 0; g < w->n_group; g++, panel += PANEL_WORDS) {
    Exponents exponents;
    TileDecoder d;
    __m256 s[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    tile_decoder_init(&d, exponents, w, block * w->n_group + g);
    if (UNLIKELY(!nest_is_relative(w, block * w->n_group + g))) {
      Cancel none = cancel(d.x);
      multiply_tile(s, &d, &none, panel);
      no_units(unit);
    } else {
      multiply_tile(s, &d, NULL, panel);
      units(unit, &d);
    }
    add_sums(sums, s, unit);
    fits &= tile_decoder_fits(&d);
  }
  finish_sums(y, sums);
  return fits;
}

/* Tiles of groups in turn times n <= 2 tokens; the sums wait in memory meanwhile. */
ALWAYS_INLINE void tiles_chunk_n(Sums *sums, const Tile *tile, size_t n_tile, const uint16_t *panel, const int n) {
  for (; n_tile; n_tile--, tile++) {
    __m256 s[4 * MATMUL_CHUNK];
    s[0] = s[1] = s[2] = s[3] = s[4] = s[5] = s[6] = s[7] = _mm256_setzero_ps();
    for (int hl = 0; hl < 16; hl++, panel += PANEL_TOKENS * 4) {
      __m256i w[4];
      for (int k = 0; k < 4; k++)
        w[k] = load(tile->words[hl] + 16 * k);
      multiply_half_line(s, w, panel, n);
    }
    add_sums(sums[0], s, tile->unit);
    if (n > 1)
      add_sums(sums[1], s + 4, tile->unit);
  }
}

/* ---- draft product ---------------------------------------------------------------------------------- */

/* Activations of a group as the nibbles want them: of each eight columns the even ones, then the odd ones. */
typedef struct DraftGroup {
  int8_t q[NEST_COLS];
} DraftGroup;
enum { DRAFT_GROUPS = 512, DRAFT_TOKENS = 16, DRAFT_CHUNK = 4 };

static void draft_gather(DraftGroup *out, const int8_t *q, size_t n) {
  const __m256i order = table16(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  for (size_t i = 0; i < 2 * n; i++)
    store(out[i / 2].q + 32 * (i % 2), _mm256_shuffle_epi8(load(q + 32 * i), order));
}

/* sum += w . q by dwords: |w| as unsigned bytes times q with w's sign. 2 * 119 * 127 fits 16 bits. */
ALWAYS_INLINE __m256i dot4(__m256i sum, __m256i w, __m256i size, const int8_t *q) {
  __m256i signed_q = _mm256_sign_epi8(_mm256_set1_epi32((int)load_u32((const uint8_t *)q)), w);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_q), _mm256_set1_epi16(1)));
}

/* What a block of the draft's product needs: groups [g0, g1) and the tokens' activations for them, [n][stride]. */
typedef struct DraftPart {
  const Matrix *w;
  const DraftGroup *q;
  const float *scale; /* [n][n_group] */
  size_t stride, g0, g1;
} DraftPart;

/* A row block times n <= 4 tokens, on top of y. */
ALWAYS_INLINE void draft_block_n(float *y, size_t ldy, const DraftPart *d, size_t block, const int n) {
  const __m256i value = table16(_mm_setr_epi8(22, 31, 43, 61, 85, 119, 13, 4, -22, -31, -43, -61, -85, -119, -13, -4));
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256 s[2 * DRAFT_CHUNK];
  for (int t = 0; t < 2 * n; t++)
    s[t] = _mm256_loadu_ps(y + (size_t)(t / 2) * ldy + 8 * (t % 2));
  for (size_t g = d->g0; g < d->g1; g++) {
    size_t tile = block * d->w->n_group + g;
    for (int half = 0; half < 2; half++) {
      const uint8_t *a = d->w->a + 512 * tile + 32 * half, *x = d->w->x + 16 * tile + 8 * half;
      __m256i sum[DRAFT_CHUNK];
      for (int t = 0; t < n; t++)
        sum[t] = _mm256_setzero_si256();
      for (int j = 0; j < 8; j++) {
        __m256i v = load(a + 64 * j);
        __m256i low = _mm256_shuffle_epi8(value, _mm256_and_si256(v, nibble));
        __m256i high = _mm256_shuffle_epi8(value, _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
        __m256i low_size = _mm256_abs_epi8(low), high_size = _mm256_abs_epi8(high);
        for (int t = 0; t < n; t++) {
          const int8_t *q = d->q[(size_t)t * d->stride + g - d->g0].q + 8 * j;
          sum[t] = dot4(dot4(sum[t], low, low_size, q), high, high_size, q + 4);
        }
      }
      __m256 unit = _mm256_castsi256_ps(
          _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x)), 23));
      for (int t = 0; t < n; t++) {
        __m256 scale = _mm256_mul_ps(_mm256_set1_ps(d->scale[(size_t)t * d->w->n_group + g]), unit);
        s[2 * t + half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t]), scale, s[2 * t + half]);
      }
    }
  }
  for (int t = 0; t < 2 * n; t++)
    _mm256_storeu_ps(y + (size_t)(t / 2) * ldy + 8 * (t % 2), s[t]);
}

static void draft_block(float *y, size_t ldy, const DraftPart *d, size_t block, uint32_t n) {
  switch (n) {
  case 1: draft_block_n(y, ldy, d, block, 1); break;
  case 2: draft_block_n(y, ldy, d, block, 2); break;
  case 3: draft_block_n(y, ldy, d, block, 3); break;
  default: draft_block_n(y, ldy, d, block, 4); break;
  }
}

static void set_matmul_draft(float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, uint32_t block0,
                             uint32_t block1) {
  _Alignas(64) DraftGroup q[DRAFT_GROUPS];
  for (uint32_t i0 = 0; i0 < m; i0 += DRAFT_TOKENS) {
    uint32_t count = m - i0 < DRAFT_TOKENS ? m - i0 : DRAFT_TOKENS;
    size_t stride = DRAFT_GROUPS / count;
    for (size_t g0 = 0; g0 < w->n_group; g0 += stride) {
      size_t n = min_size(stride, w->n_group - g0);
      for (uint32_t t = 0; t < count; t++)
        draft_gather(q + t * stride, acts->q + ((size_t)(i0 + t) * w->n_group + g0) * NEST_COLS, n);
      for (size_t block = block0; block < block1; block++) {
        if (g0 == 0)
          draft_begin(y + i0 * ldy + block * NEST_ROWS, ldy, w, block, acts, i0, count);
        for (uint32_t t = 0; t < count; t += DRAFT_CHUNK) {
          DraftPart d = {w, q + t * stride, acts->scale + (size_t)(i0 + t) * w->n_group, stride, g0, g0 + n};
          draft_block(y + (i0 + t) * ldy + block * NEST_ROWS, ldy, &d, block,
                      count - t < DRAFT_CHUNK ? count - t : DRAFT_CHUNK);
        }
      }
    }
  }
}

const Kernels kernels_avx2 = {.name = "avx2",
                              .nest_decode_tile = set_nest_decode_tile,
                              .nest_columns = nest_columns,
                              .cass_next_tile = set_cass_next_tile,
                              .matmul = set_matmul,
                              .matmul_draft = set_matmul_draft,
                              .scores_draft = ops_scores_draft,
                              SIMD_OPS_TABLE};
