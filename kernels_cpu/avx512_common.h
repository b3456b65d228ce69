/* What the avx512, avx512bf16 and amx sets share: the decoder, the products and some float operations for AVX-512 F, BW,
 * DQ, VL, VBMI, VBMI2, VNNI and GFNI. Each compiles its own copy, since their flags differ. Same bits as
 * kernels_cpu/scalar.c. */
#ifndef CASS_AVX512_COMMON_H
#define CASS_AVX512_COMMON_H

#include <immintrin.h>

#include "codec_cass.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#define V __m512
#define V_WIDTH 16
#define V_LOAD _mm512_loadu_ps
#define V_STORE _mm512_storeu_ps
#define V_SET1 _mm512_set1_ps
#define V_ADD _mm512_add_ps
#define V_SUB _mm512_sub_ps
#define V_MUL _mm512_mul_ps
#define V_DIV _mm512_div_ps
#define V_FMA _mm512_fmadd_ps
#define V_MAX _mm512_max_ps
#define V_MIN _mm512_min_ps

ALWAYS_INLINE __m512 V_BF16(const uint16_t *p) {
  __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
ALWAYS_INLINE __m512 V_POW2(__m512 n) {
  __m512i e = _mm512_add_epi32(_mm512_cvttps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
ALWAYS_INLINE __m512 V_ZERO_BELOW(__m512 x, float limit, __m512 v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ), _mm512_setzero_ps());
}

#include "x86_ops.h"

/* Lanes i + lanes i + 8 of a, then of b. */
ALWAYS_INLINE __m512 add_halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

ALWAYS_INLINE void simd_sums(float out[SCORES], V lane[SCORES][VECTORS], float scale) {
  __m512 a = add_halves(lane[0][0], lane[1][0]), b = add_halves(lane[2][0], lane[3][0]);
  __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); /* of each, i + i + 4 */
  s = _mm512_add_ps(s, _mm512_permute_ps(s, _MM_SHUFFLE(1, 0, 3, 2)));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, _MM_SHUFFLE(2, 3, 0, 1)));
  const __m512i first = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
  _mm_storeu_ps(out, _mm_mul_ps(_mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)), _mm_set1_ps(scale)));
}

/* As ops_quantize_group. */
ALWAYS_INLINE void quantize_group(int8_t *q, float *scale, int32_t *sum, const float *x) {
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  __m512 v[4], tops = _mm512_setzero_ps();
  for (int i = 0; i < 4; i++) {
    v[i] = _mm512_loadu_ps(x + 16 * i);
    tops = _mm512_max_ps(_mm512_abs_ps(v[i]), tops);
  }
  float top = _mm512_reduce_max_ps(tops), inverse = top > 0 ? 127.0f / top : 0.0f;
  inverse = inverse > 3e38f ? 0.0f : inverse;
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < 4; i++) {
    __m512 r = _mm512_sub_ps(_mm512_add_ps(_mm512_mul_ps(v[i], _mm512_set1_ps(inverse)), magic), magic);
    __m512i n = _mm512_cvttps_epi32(_mm512_max_ps(r, _mm512_set1_ps(-127.0f))); /* NaN: -127 */
    total = _mm512_add_epi32(total, n);
    _mm_storeu_si128((__m128i *)(q + 16 * i), _mm512_cvtepi32_epi8(n));
  }
  *sum = _mm512_reduce_add_epi32(total);
  *scale = top * (1.0f / 8890.0f);
}

/* A constant that the compiler does not know, so that it stays in a register or on the stack and is not made anew, from
 * a general register, at every use. */
ALWAYS_INLINE __m512i constant(__m512i v) {
  __asm__("" : "+v"(v));
  return v;
}
ALWAYS_INLINE __m512i constant8(int v) { return constant(_mm512_set1_epi8((char)v)); }

/* ---- nest: tiles to exact bits ----------------------------------------------------------------------- */

#define OR_AND(a, b, c) _mm512_ternarylogic_epi32(a, b, c, 0xf8)  /* a | b & c */
#define SELECT(mask, a, b) _mm512_ternarylogic_epi32(mask, a, b, 0xca)

typedef struct Constants {
  __m512i nibble;
  __m512i low, high;     /* by nibble: the bytes of the word for G = NEST_BIAS and mantissa bits 5..0 = 0 */
  __m512i low6, bit6, bit7, low3;
  __m512i reverse, bit, gather; /* for cell_bits */
} Constants;

/* From nest_exponent and nest_bit6; the sign is bit 7 of the high byte. */
static const uint8_t low_byte[16] = {0x00, 0x40, 0x80, 0xc0, 0x00, 0x40, 0x80, 0x00, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x40, 0x80, 0x00};
static const uint8_t high_byte[16] = {0x08, 0x08, 0x08, 0x08, 0x09, 0x09, 0x07, 0x00, 0x88, 0x88, 0x88, 0x88, 0x89, 0x89, 0x87, 0x80};
static const uint8_t gather_bytes[64] = {0, 8,  16, 24, 32, 40, 48, 56, 1, 9,  17, 25, 33, 41, 49, 57,
                                         2, 10, 18, 26, 34, 42, 50, 58, 3, 11, 19, 27, 35, 43, 51, 59,
                                         4, 12, 20, 28, 36, 44, 52, 60, 5, 13, 21, 29, 37, 45, 53, 61,
                                         6, 14, 22, 30, 38, 46, 54, 62, 7, 15, 23, 31, 39, 47, 55, 63};

ALWAYS_INLINE Constants constants(void) {
  return (Constants){constant8(15),
                     constant(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)low_byte))),
                     constant(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)high_byte))),
                     constant8(0x3f),
                     constant8(0x40),
                     constant8(0x80),
                     constant8(7),
                     constant(_mm512_broadcast_i32x4(_mm_setr_epi8(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8))),
                     constant(_mm512_set1_epi64((long long)0x8040201008040201u)),
                     constant(_mm512_loadu_si512(gather_bytes))};
}

/* A tile while it is decoded. Masks travel between vectors and general registers through memory and are made for the
 * whole tile first: a kmov to a general register takes two cycles of one port on Zen 4. */
typedef struct TileDecoder {
  const uint8_t *a, *b;
  const uint8_t *bits;   /* T */
  size_t pos;            /* in T */
  const uint8_t *small;  /* the next of exponents[] */
  const uint8_t *escape; /* past the next one, backwards */
  uint32_t header;
  __m512i group[2];      /* (G - NEST_BIAS) << 7 by word of the two vectors of a half line */
  _Alignas(64) uint64_t cell[8][8]; /* by line: bits 0, 1, 2 of the cells of its low nibbles, signs, the same of the high */
  _Alignas(64) uint8_t exponents[NEST_TILE + 128]; /* of CELL_SMALL: q's bit 0 as bit 7, its bits 3..1 as bits 2..0 */
} TileDecoder;

/* Bit i of each byte becomes qword i. */
ALWAYS_INLINE __m512i cell_bits(__m512i line, const Constants *k) {
  __m512i v = _mm512_gf2p8affine_epi64_epi8(k->bit, _mm512_shuffle_epi8(line, k->reverse), 0); /* 8 x 8 bits transposed */
  return _mm512_permutexvar_epi8(k->gather, v);
}

/* (G - NEST_BIAS) << 7 by word of the two vectors of a half line. */
ALWAYS_INLINE void group_words(const Matrix *w, size_t t, __m512i out[2]) {
  static const uint16_t rows[32] = {0, 0, 0, 0, 1, 1, 1, 1, 4,  4,  4,  4,  5,  5,  5,  5,
                                    8, 8, 8, 8, 9, 9, 9, 9, 12, 12, 12, 12, 13, 13, 13, 13};
  const __m512i row = _mm512_loadu_si512(rows);
  __m256i group = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(w->x + 16 * t)));
  __m512i word = _mm512_castsi256_si512(_mm256_slli_epi16(_mm256_sub_epi16(group, _mm256_set1_epi16(NEST_BIAS)), 7));
  out[0] = _mm512_permutexvar_epi16(row, word);
  out[1] = _mm512_permutexvar_epi16(_mm512_add_epi16(row, _mm512_set1_epi16(2)), word);
}

ALWAYS_INLINE void tile_decoder_init(TileDecoder *d, const Matrix *w, size_t t, const Constants *k) {
  const __m512i place = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, -128, 1, -127, 2, -126, 3, -125, 4, -124, 5, -123, 6, -122, 7, -121));
  d->a = w->a + 512 * t, d->b = w->b + 768 * t;
  for (int j = 0; j < 8; j++)
    _mm512_store_si512(d->cell[j], cell_bits(_mm512_loadu_si512(d->a + 64 * j), k));

  group_words(w, t, d->group);

  const uint8_t *record = w->side + load_u32(w->side + 4 * t), *nibbles = record + NEST_HEADER;
  nest_prefetch(d->a, d->b, record);
  d->header = record[0] | (uint32_t)record[1] << 8;
  uint32_t count = d->header & NEST_COUNT;
  count = count < NEST_TILE ? count : NEST_TILE;
  for (uint32_t i = 0; i < count; i += 64) {
    __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(nibbles + i / 2)));
    v = _mm512_and_si512(_mm512_or_si512(v, _mm512_slli_epi16(v, 4)), k->nibble);
    _mm512_store_si512(d->exponents + i, _mm512_shuffle_epi8(place, v));
  }
  d->bits = nibbles + (count + 1) / 2, d->pos = 0, d->small = d->exponents;
  d->escape = w->side + load_u32(w->side + 4 * t + 4);
}

/* True if plane A asked for as many nibbles q as the record has; else it is damaged and the specification must decide. */
ALWAYS_INLINE bool tile_decoder_fits(const TileDecoder *d) {
  return (uint32_t)(d->small - d->exponents) == (d->header & NEST_COUNT);
}

/* NEST_BIAS - G, modulo 512, by byte: what a word must have for its exponent to become zero with the group's. */
typedef struct Cancel {
  __m512i low, high; /* bit 0 as bit 7, the others */
} Cancel;

ALWAYS_INLINE Cancel cancel(const Matrix *w, size_t t) {
  const __m512i spread = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  __m512i group = _mm512_shuffle_epi8(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w->x + 16 * t))), spread);
  return (Cancel){_mm512_and_si512(_mm512_slli_epi16(group, 7), _mm512_set1_epi8((char)0x80)),
                  _mm512_sub_epi8(_mm512_set1_epi8(NEST_BIAS / 2), _mm512_avg_epu8(group, _mm512_setzero_si512()))};
}

/* Weights of CELL_SMALL whose exponent is an escape byte: makes their bytes such that adding the group's gives it. */
static __attribute__((noinline, cold)) void set_escapes(TileDecoder *d, __mmask64 small, __m512i q, Cancel none,
                                                        __m512i low_high[2]) {
  __mmask64 is = _mm512_mask_cmpeq_epi8_mask(small, q, _mm512_set1_epi8((char)0x87));
  __m512i low = low_high[0], high = low_high[1];
  uint8_t order[64];
  for (int i = 0; i < 64; i++)
    order[i] = (uint8_t)(63 - i);
  __m512i e = _mm512_permutexvar_epi8(_mm512_loadu_si512(order), _mm512_loadu_si512(d->escape - 64));
  e = _mm512_maskz_expand_epi8(is, e);
  d->escape -= __builtin_popcountll(_cvtmask64_u64(is));
  __m512i bit7 = _mm512_set1_epi8((char)0x80), bit0 = _mm512_and_si512(_mm512_slli_epi16(e, 7), bit7);
  __m512i sum = _mm512_add_epi8(_mm512_and_si512(_mm512_srli_epi16(e, 1), _mm512_set1_epi8(0x7f)), none.high);
  sum = _mm512_mask_add_epi8(sum, _mm512_test_epi8_mask(bit0, none.low), sum, _mm512_set1_epi8(1)); /* carry */
  /* q = 15 has set bits that are not part of e */
  low = _mm512_xor_si512(_mm512_andnot_si512(bit7, low), _mm512_xor_si512(bit0, none.low));
  high = _mm512_add_epi8(_mm512_andnot_si512(_mm512_set1_epi8(7), high), sum);
  low_high[0] = _mm512_mask_mov_epi8(low_high[0], is, low), low_high[1] = _mm512_mask_mov_epi8(low_high[1], is, high);
}

/* Half line: its nibbles, mantissa bits 5..0 (in the low six bits of a byte), bits 0..2 of its cells. none: NULL for the
 * relative form. out: rows 0, 1, 4, 5, 8, 9, 12, 13, then the others. */
ALWAYS_INLINE void decode_half_line(TileDecoder *d, const Constants *k, const Cancel *none, __m512i nibble, __m512i low6,
                                    const uint64_t cell[3], __m512i out[2]) {
  uint64_t has_t = cell[2] & (cell[1] | cell[0]), small = cell[2] & cell[1] & cell[0];
  uint32_t n = (uint32_t)__builtin_popcountll(has_t);
  uint64_t bits = load_u64(d->bits + (d->pos >> 3)) >> (d->pos & 7);
  if (UNLIKELY(n > 57)) /* a ninth byte; << 1 << makes a shift by 64 a shift to zero */
    bits |= (uint64_t)d->bits[(d->pos >> 3) + 8] << 1 << (63 - (d->pos & 7));
  d->pos += n;
  __m512i q = _mm512_maskz_expand_epi8(_cvtu64_mask64(small), _mm512_loadu_si512(d->small));
  d->small += __builtin_popcountll(small);

  __m512i low = OR_AND(_mm512_shuffle_epi8(k->low, nibble), low6, k->low6);
  low = _mm512_mask_add_epi8(low, _cvtu64_mask64(_pdep_u64(bits, has_t)), low, k->bit6);
  low = OR_AND(low, q, k->bit7);
  __m512i high = OR_AND(_mm512_shuffle_epi8(k->high, nibble), q, k->low3);
  if (none) {
    __mmask64 is = _mm512_mask_testn_epi8_mask(_cvtu64_mask64(small), q, q);
    low = _mm512_mask_add_epi8(low, is, low, none->low);
    high = _mm512_mask_add_epi8(high, is, high, none->high);
    if (UNLIKELY(d->header & NEST_HAS_ESCAPE)) {
      __m512i any[2] = {low, high}; /* a copy, so that low and high stay in registers */
      set_escapes(d, _cvtu64_mask64(small), q, *none, any);
      low = any[0], high = any[1];
    }
  }
  out[0] = _mm512_unpacklo_epi8(low, high), out[1] = _mm512_unpackhi_epi8(low, high);
  if (none)
    out[0] = _mm512_add_epi16(out[0], d->group[0]), out[1] = _mm512_add_epi16(out[1], d->group[1]);
}

/* Of four half lines the last one's mantissa bits 5..0, which are the upper two of the others' bytes. */
ALWAYS_INLINE __m512i fourth_low6(const __m512i b[3]) {
  __m512i low6 = SELECT(_mm512_set1_epi8(0x30), _mm512_srli_epi16(b[0], 2), _mm512_srli_epi16(b[1], 4));
  return SELECT(_mm512_set1_epi8(0x3c), low6, _mm512_srli_epi16(b[2], 6));
}

/* Lines 2 i and 2 i + 1: four half lines. */
ALWAYS_INLINE void decode_lines(TileDecoder *d, const Constants *k, const Cancel *none, uint32_t i, __m512i out[4][2]) {
  const uint8_t *b = d->b + 192 * i;
  __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 64), b2 = _mm512_loadu_si512(b + 128);
  __m512i a = _mm512_loadu_si512(d->a + 128 * i);
  decode_half_line(d, k, none, _mm512_and_si512(a, k->nibble), b0, d->cell[2 * i], out[0]);
  decode_half_line(d, k, none, _mm512_and_si512(_mm512_srli_epi16(a, 4), k->nibble), b1, d->cell[2 * i] + 4, out[1]);
  a = _mm512_loadu_si512(d->a + 128 * i + 64);
  decode_half_line(d, k, none, _mm512_and_si512(a, k->nibble), b2, d->cell[2 * i + 1], out[2]);
  const __m512i b3 = fourth_low6((const __m512i[3]){b0, b1, b2});
  decode_half_line(d, k, none, _mm512_and_si512(_mm512_srli_epi16(a, 4), k->nibble), b3, d->cell[2 * i + 1] + 4, out[3]);
}

ALWAYS_INLINE void store_tile(TileDecoder *d, const Constants *k, const Cancel *none, TileWords out) {
  for (uint32_t i = 0; i < 4; i++) {
    __m512i v[4][2];
    decode_lines(d, k, none, i, v);
    for (uint32_t hl = 0; hl < 4; hl++) {
      _mm512_storeu_si512(out[4 * i + hl], v[hl][0]);
      _mm512_storeu_si512(out[4 * i + hl] + 32, v[hl][1]);
    }
  }
}

static __attribute__((noinline)) void set_nest_decode_tile(const Matrix *w, size_t t, TileWords out) {
  const Constants k = constants();
  TileDecoder d;
  tile_decoder_init(&d, w, t, &k);
  Cancel none = cancel(w, t);
  store_tile(&d, &k, &none, out);
  if (UNLIKELY(!tile_decoder_fits(&d)))
    nest_decode_tile(w, t, out);
}

/* ---- blocks of a KV cache ----------------------------------------------------------------------------- */

enum { DRAFT_HEADS = 3 }; /* that read a block's keys together, as registers allow */
static const uint8_t key_order[64] = {0, 4, 8,  12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60,
                                      1, 5, 9,  13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61,
                                      2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62,
                                      3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63};

/* Four columns of 16 words each, of a half line. */
ALWAYS_INLINE void store_columns(__m512i w0, __m512i w1, uint16_t *out, size_t ld) {
  /* row r, column c: word tile_word(r, c); 32 and up are of w1 */
  static const uint16_t first[32] = {0, 4, 32, 36, 8,  12, 40, 44, 16, 20, 48, 52, 24, 28, 56, 60,
                                     1, 5, 33, 37, 9,  13, 41, 45, 17, 21, 49, 53, 25, 29, 57, 61};
  const __m512i index = _mm512_loadu_si512(first);
  __m512i c01 = _mm512_permutex2var_epi16(w0, index, w1);
  __m512i c23 = _mm512_permutex2var_epi16(w0, _mm512_add_epi16(index, _mm512_set1_epi16(2)), w1);
  _mm256_storeu_si256((__m256i *)out, _mm512_castsi512_si256(c01));
  _mm256_storeu_si256((__m256i *)(out + 2 * ld), _mm512_extracti64x4_epi64(c01, 1));
  _mm256_storeu_si256((__m256i *)(out + 4 * ld), _mm512_castsi512_si256(c23));
  _mm256_storeu_si256((__m256i *)(out + 6 * ld), _mm512_extracti64x4_epi64(c23, 1));
}

/* Keys of a block as the draft takes them, plus 128, [half line][tile]: of four positions 16 channels each. */
ALWAYS_INLINE void draft_keys(const Matrix *w, uint32_t n_tile, uint8_t *out) {
  const __m512i to_positions = constant(_mm512_loadu_si512(key_order));
  const __m512i first = constant(_mm512_xor_si512(_mm512_loadu_si512(nest_key_magnitude), _mm512_set1_epi8((char)0x80)));
  const __m512i second = constant(_mm512_xor_si512(_mm512_loadu_si512(nest_key_magnitude[4]), _mm512_set1_epi8((char)0x80)));
  const __m512i low4 = constant8(15);
  for (size_t t = 0; t < n_tile; t++)
    for (size_t i = 0; i < 4; i++) {
      const uint8_t *a = w->a + 512 * t + 128 * i, *b = w->b + 768 * t + 192 * i;
      __m512i low6[4] = {_mm512_loadu_si512(b), _mm512_loadu_si512(b + 64), _mm512_loadu_si512(b + 128)};
      low6[3] = fourth_low6(low6);
      for (size_t hl = 0; hl < 4; hl++) {
        __m512i line = _mm512_loadu_si512(a + 64 * (hl / 2));
        __m512i index = SELECT(low4, _mm512_srli_epi16(low6[hl], 2), hl % 2 ? line : _mm512_slli_epi16(line, 4));
        __m512i key = _mm512_permutex2var_epi8(first, index, second);
        key = _mm512_mask_sub_epi8(key, _mm512_movepi8_mask(index), _mm512_setzero_si512(), key);
        _mm512_store_si512(out + 64 * ((4 * i + hl) * n_tile + t), _mm512_permutexvar_epi8(to_positions, key));
      }
    }
}

/* Heads' queries for one block (ops_query): 16 channels of each tile, n = 256 high + low. */
typedef struct DraftQuery {
  _Alignas(16) int8_t high[KEY_DIM_MOST], low[KEY_DIM_MOST];
  int32_t sum; /* of n */
  float scale;
} DraftQuery;

static void draft_query(DraftQuery *out, const AttentionArgs *a, uint32_t h, const Matrix *w) {
  __m512 u[KEY_DIM_MOST / 16] = {0}, tops = _mm512_setzero_ps(); /* zeros: GCC 12 at -O3 warns otherwise */
  uint32_t n_tile = (a->head_dim + 15) / 16;
  for (uint32_t t = 0; t < n_tile; t++) {
    __mmask16 there = (__mmask16)(0xffffu >> (a->head_dim - 16 * t < 16 ? 16 - (a->head_dim - 16 * t) : 0));
    __m512 q = _mm512_maskz_loadu_ps(there, a->q + (size_t)h * a->head_dim + 16 * t);
    __m512i g = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w->x + 16 * t)));
    u[t] = _mm512_maskz_mul_ps(there, q, _mm512_castsi512_ps(_mm512_slli_epi32(g, 23)));
    tops = _mm512_max_ps(_mm512_abs_ps(u[t]), tops);
  }
  float top = _mm512_reduce_max_ps(tops), inverse = top > 0 ? (float)QUERY_MOST / top : 0.0f;
  inverse = inverse > 3e38f ? 0.0f : inverse;
  const __m512 magic = _mm512_set1_ps(12582912.0f), least = _mm512_set1_ps(-(float)QUERY_MOST);
  __m512i total = _mm512_setzero_si512();
  for (uint32_t t = 0; t < n_tile; t++) {
    __m512 r = _mm512_sub_ps(_mm512_add_ps(_mm512_mul_ps(u[t], _mm512_set1_ps(inverse)), magic), magic);
    __m512i n = _mm512_cvttps_epi32(_mm512_max_ps(r, least)); /* NaN: least */
    total = _mm512_add_epi32(total, n);
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
    _mm_store_si128((__m128i *)(out->high + 16 * t), _mm512_cvtepi32_epi8(high));
    _mm_store_si128((__m128i *)(out->low + 16 * t), _mm512_cvtepi32_epi8(n));
  }
  out->sum = _mm512_reduce_add_epi32(total), out->scale = top * (1.0f / (QUERY_MOST * 64));
}

/* Of a line's two half lines: sums of each position's four partial sums, in the order of positions. */
ALWAYS_INLINE __m256i key_sums(__m512i even, __m512i odd) {
  __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi32(even, odd), _mm512_unpackhi_epi32(even, odd));
  s = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, _MM_PERM_BADC));
  return _mm512_castsi512_si256(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6), s));
}

ALWAYS_INLINE void scores_draft_n(const AttentionArgs *a, const uint8_t *keys, const DraftQuery *q, uint32_t n_tile,
                                  uint32_t pos, uint32_t head, const int n) {
  for (size_t line = 0; line < 8; line++) {
    __m512i high[2][DRAFT_HEADS], low[2][DRAFT_HEADS];
    for (int h = 0; h < n; h++)
      for (int i = 0; i < 2; i++)
        high[i][h] = low[i][h] = _mm512_setzero_si512();
    for (uint32_t t = 0; t < n_tile; t++) {
      __m512i even = _mm512_load_si512(keys + 64 * (2 * line * n_tile + t));
      __m512i odd = _mm512_load_si512(keys + 64 * ((2 * line + 1) * n_tile + t));
      for (int h = 0; h < n; h++) {
        __m512i qh = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(q[h].high + 16 * t)));
        __m512i ql = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(q[h].low + 16 * t)));
        high[0][h] = _mm512_dpbusd_epi32(high[0][h], even, qh), low[0][h] = _mm512_dpbusd_epi32(low[0][h], even, ql);
        high[1][h] = _mm512_dpbusd_epi32(high[1][h], odd, qh), low[1][h] = _mm512_dpbusd_epi32(low[1][h], odd, ql);
      }
    }
    for (int h = 0; h < n; h++) {
      __m512i even = _mm512_add_epi32(_mm512_slli_epi32(high[0][h], 8), low[0][h]);
      __m512i odd = _mm512_add_epi32(_mm512_slli_epi32(high[1][h], 8), low[1][h]);
      __m256i sum = _mm256_sub_epi32(key_sums(even, odd), _mm256_set1_epi32(128 * q[h].sum));
      __m256 s = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(q[h].scale)), _mm256_set1_ps(a->scale));
      _mm256_storeu_ps(a->scores + (head + (size_t)h) * a->ld_scores + pos + 8 * line, s);
    }
  }
}

/* As ops_scores_draft. With 128 added the keys are unsigned bytes, as dpbusd wants them; the sum of n takes it off again. */
static void set_scores_draft(const AttentionArgs *a, const Matrix *w, uint32_t pos) {
  _Alignas(64) uint8_t keys[KEY_DIM_MOST * NEST_COLS];
  uint32_t n_tile = (a->head_dim + 15) / 16;
  draft_keys(w, n_tile, keys);
  for (uint32_t h = 0; h < a->n_head; h += DRAFT_HEADS) {
    uint32_t n = a->n_head - h < DRAFT_HEADS ? a->n_head - h : DRAFT_HEADS;
    DraftQuery q[DRAFT_HEADS];
    for (uint32_t i = 0; i < n; i++)
      draft_query(&q[i], a, h + i, w);
    switch (n) {
    case 1: scores_draft_n(a, keys, q, n_tile, pos, h, 1); break;
    case 2: scores_draft_n(a, keys, q, n_tile, pos, h, 2); break;
    default: scores_draft_n(a, keys, q, n_tile, pos, h, DRAFT_HEADS);
    }
  }
}

static void set_nest_columns(const Matrix *w, size_t t0, size_t t1, uint16_t *out, size_t ld) {
  for (size_t t = t0; t < t1; t++, out += NEST_ROWS) {
    _Alignas(64) TileWords tile; /* straight from registers it is slower: decoding needs them all */
    set_nest_decode_tile(w, t, tile);
    for (size_t hl = 0; hl < 16; hl++)
      store_columns(_mm512_load_si512(tile[hl]), _mm512_load_si512(tile[hl] + 32), out + (8 * (hl / 2) + hl % 2) * ld, ld);
  }
}

/* As nest_is_relative. */
ALWAYS_INLINE bool is_relative(const TileDecoder *d, const Matrix *w, size_t t) {
  __m128i group = _mm_loadu_si128((const __m128i *)(w->x + 16 * t));
  return !(d->header & NEST_HAS_ESCAPE) && !_mm_cmpgt_epu8_mask(group, _mm_set1_epi8((char)NEST_RELATIVE_MOST));
}

/* 2^(G - NEST_BIAS) by dword of the two vectors of a half line. */
ALWAYS_INLINE void units(__m512 unit[2], const TileDecoder *d) {
  for (int i = 0; i < 2; i++) {
    __m512i exponent = _mm512_and_si512(d->group[i], _mm512_set1_epi32((int)0xffff0000u));
    unit[i] = _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(127 << 23)));
  }
}

/* A tile as products take it, and what its sums are multiplied by. */
static __attribute__((noinline)) void nest_product_tile(const Matrix *w, size_t t, TileWords out, __m512 unit[2]) {
  const Constants k = constants();
  TileDecoder d;
  tile_decoder_init(&d, w, t, &k);
  if (UNLIKELY(!is_relative(&d, w, t))) {
    unit[0] = unit[1] = _mm512_set1_ps(1);
    set_nest_decode_tile(w, t, out);
    return;
  }
  units(unit, &d);
  store_tile(&d, &k, NULL, out);
  if (UNLIKELY(!tile_decoder_fits(&d)))
    nest_decode_relative(w, t, out);
}

/* ---- raw ------------------------------------------------------------------------------------------- */

/* 32 columns of a tile's row; zero past the matrix. */
ALWAYS_INLINE __m512i load_raw(const uint16_t *p, bool there, size_t cols) {
  if (there && cols == 32)
    return _mm512_loadu_si512(p);
  return there && cols ? _mm512_maskz_loadu_epi16((__mmask32)(0xffffffffu >> (32 - cols)), p) : _mm512_setzero_si512();
}

/* As raw_decode_tile. Fetches the tile of the next row block, since hardware does not follow 16 rows; past the matrix
 * that does nothing. */
static __attribute__((noinline)) void set_raw_decode_tile(const Matrix *w, size_t t, TileWords out) {
  const __m512i columns = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  for (size_t half = 0; half < 2; half++) {
    size_t r0 = t / w->n_group * NEST_ROWS, k0 = t % w->n_group * NEST_COLS + 32 * half;
    size_t rows = min_size(NEST_ROWS, w->rows - r0), cols = w->cols > k0 ? min_size(32, w->cols - k0) : 0;
    const uint16_t *p = w->raw + r0 * w->cols + k0;
    for (size_t i = NEST_ROWS; i < 2 * NEST_ROWS; i++)
      _mm_prefetch((const char *)((uintptr_t)p + 2 * i * w->cols), _MM_HINT_T1);
    for (size_t u = 0; u < 2; u++) {
      __m512i v[8], x[8]; /* 8 rows of 8 qwords, transposed: neighbours, then pairs of neighbours */
      for (size_t i = 0; i < 8; i++) {
        size_t r = i / 2 * 4 + i % 2 + 2 * u;
        v[i] = _mm512_shuffle_epi8(load_raw(p + r * w->cols, r < rows, cols), columns);
      }
      for (int i = 0; i < 8; i += 2) {
        x[i] = _mm512_unpacklo_epi64(v[i], v[i + 1]);
        x[i + 1] = _mm512_unpackhi_epi64(v[i], v[i + 1]);
      }
      for (int i = 0; i < 2; i++) { /* x[i], x[i + 2], ..: half lines i, i + 2, i + 4, i + 6 of two rows each */
        __m512i low01 = _mm512_shuffle_i32x4(x[i], x[i + 2], 0x88), high01 = _mm512_shuffle_i32x4(x[i], x[i + 2], 0xdd);
        __m512i low23 = _mm512_shuffle_i32x4(x[i + 4], x[i + 6], 0x88);
        __m512i high23 = _mm512_shuffle_i32x4(x[i + 4], x[i + 6], 0xdd);
        uint16_t *to = out[8 * half + (size_t)i] + 32 * u;
        _mm512_storeu_si512(to, _mm512_shuffle_i32x4(low01, low23, 0x88));
        _mm512_storeu_si512(to + 2 * 64, _mm512_shuffle_i32x4(high01, high23, 0x88));
        _mm512_storeu_si512(to + 4 * 64, _mm512_shuffle_i32x4(low01, low23, 0xdd));
        _mm512_storeu_si512(to + 6 * 64, _mm512_shuffle_i32x4(high01, high23, 0xdd));
      }
    }
  }
}

#include "avx512_cass.h"

/* reader: at tile t, of a cass matrix. */
static void product_tile(const Matrix *w, size_t t, CassReader *reader, TileWords out, __m512 unit[2]) {
  if (w->codec == PYCASS_CODEC_NEST) {
    nest_product_tile(w, t, out, unit);
    return;
  }
  unit[0] = unit[1] = _mm512_set1_ps(1);
  if (matrix_is_cass(w))
    set_cass_next_tile(reader, out);
  else
    set_raw_decode_tile(w, t, out);
}

/* ---- target product --------------------------------------------------------------------------------- */

enum { MATMUL_TOKENS = 64, TILE_TOKENS = 8, SPAN = 4 };

/* sum += the products of the odd words of w and x, then of the even ones */
ALWAYS_INLINE __m512 dot(__m512 sum, __m512i w, __m512i x) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
#else
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, upper)),
                        _mm512_castsi512_ps(_mm512_and_si512(x, upper)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), sum);
#endif
}

/* A half line times n tokens. s[2 t], s[2 t + 1]: of each row s0 and s1, for the rows of the two vectors. */
ALWAYS_INLINE void multiply_half_line(__m512 *s, __m512i w0, __m512i w1, const uint16_t *x, const int n) {
  for (int t = 0; t < n; t++) {
    __m512i v = _mm512_set1_epi64((long long)load_u64((const uint8_t *)(x + 4 * t)));
    s[2 * t] = dot(s[2 * t], w0, v);
    s[2 * t + 1] = dot(s[2 * t + 1], w1, v);
  }
}

/* s0 + s1 of the 16 rows, without the panels' scale */
ALWAYS_INLINE __m512 finish_sums(const __m512 s[2]) {
  __m512 sum = _mm512_add_ps(_mm512_shuffle_ps(s[0], s[1], 0x88), _mm512_shuffle_ps(s[0], s[1], 0xdd));
  return _mm512_mul_ps(sum, _mm512_set1_ps(1 / PANEL_SCALE));
}

/* A row block's hot columns times n tokens whose activations begin at hot; the next block's words are fetched. */
ALWAYS_INLINE void multiply_hot(__m512 *s, const Matrix *w, size_t block, const uint16_t *hot, const int n) {
  const uint16_t *words = w->hot_words + block * w->n_hot * NEST_ROWS;
  for (uint32_t i = 0; i < w->n_hot / 4; i++, words += 64) {
    _mm_prefetch((const char *)((uintptr_t)words + 32 * (uintptr_t)w->n_hot), _MM_HINT_T1);
    _mm_prefetch((const char *)((uintptr_t)words + 32 * (uintptr_t)w->n_hot + 64), _MM_HINT_T1);
    multiply_half_line(s, _mm512_loadu_si512(words), _mm512_loadu_si512(words + 32), hot + i * PANEL_TOKENS * 4, n);
  }
}

ALWAYS_INLINE void multiply_tile(__m512 *s, TileDecoder *d, const Constants *k, const Cancel *none,
                                 const uint16_t *panel, const int n) {
  for (uint32_t i = 0; i < 4; i++) {
    __m512i v[4][2];
    decode_lines(d, k, none, i, v);
    for (uint32_t hl = 0; hl < 4; hl++)
      multiply_half_line(s, v[hl][0], v[hl][1], panel + (4 * i + hl) * PANEL_TOKENS * 4, n);
  }
}

/* A row block of a nest matrix times n tokens of a panel, the weights never leaving registers; m of them are stored. False if
 * it is damaged. */
ALWAYS_INLINE bool nest_block_n(float *y, size_t ldy, const Matrix *w, size_t block, const uint16_t *panel,
                                const uint16_t *hot, uint32_t m, const int n) {
  const Constants k = constants();
  bool fits = true;
  __m512 sums[2 * PANEL_TOKENS], a[2 * PANEL_TOKENS], unit[2];
  for (int t = 0; t < 2 * n; t++)
    sums[t] = _mm512_setzero_ps();
  multiply_hot(sums, w, block, hot, n);
  for (size_t g = 0; g < w->n_group; g++, panel += PANEL_WORDS) {
    TileDecoder d;
    tile_decoder_init(&d, w, block * w->n_group + g, &k);
    for (int t = 0; t < 2 * n; t++)
      a[t] = _mm512_setzero_ps();
    if (UNLIKELY(!is_relative(&d, w, block * w->n_group + g))) {
      Cancel none = cancel(w, block * w->n_group + g);
      multiply_tile(a, &d, &k, &none, panel, n);
      unit[0] = unit[1] = _mm512_set1_ps(1);
    } else {
      multiply_tile(a, &d, &k, NULL, panel, n);
      units(unit, &d);
    }
    for (int t = 0; t < 2 * n; t++)
      sums[t] = _mm512_fmadd_ps(a[t], unit[t % 2], sums[t]);
    fits &= tile_decoder_fits(&d);
  }
  for (int t = 0; t < n && t < (int)m; t++)
    _mm512_storeu_ps(y + (size_t)t * ldy, finish_sums(sums + 2 * t));
  return fits;
}

/* n <= 16. From 9 on, pairs of sizes share their code: a panel has room for 16, whatever lies in it. */
static bool nest_block(float *y, size_t ldy, const Matrix *w, size_t block, const uint16_t *panel, const uint16_t *hot,
                       uint32_t n) {
  switch (n) {
  case 1: return nest_block_n(y, ldy, w, block, panel, hot, n, 1);
  case 2: return nest_block_n(y, ldy, w, block, panel, hot, n, 2);
  case 3: return nest_block_n(y, ldy, w, block, panel, hot, n, 3);
  case 4: return nest_block_n(y, ldy, w, block, panel, hot, n, 4);
  case 5: return nest_block_n(y, ldy, w, block, panel, hot, n, 5);
  case 6: return nest_block_n(y, ldy, w, block, panel, hot, n, 6);
  case 7: return nest_block_n(y, ldy, w, block, panel, hot, n, 7);
  case 8: return nest_block_n(y, ldy, w, block, panel, hot, n, 8);
  case 9:
  case 10: return nest_block_n(y, ldy, w, block, panel, hot, n, 10);
  case 11:
  case 12: return nest_block_n(y, ldy, w, block, panel, hot, n, 12);
  case 13:
  case 14: return nest_block_n(y, ldy, w, block, panel, hot, n, 14);
  default: return nest_block_n(y, ldy, w, block, panel, hot, n, 16);
  }
}

/* A tile as products take it, and what its sums are multiplied by. */
typedef struct Tile {
  TileWords words;
  __m512 unit[2];
} Tile;

/* Tiles of groups in turn times n <= 8 tokens; sums [n][2] wait in memory meanwhile. */
ALWAYS_INLINE void tiles_panel_n(__m512 *sums, const Tile *tile, size_t n_tile, const uint16_t *panel, const int n) {
  __m512 a[2 * TILE_TOKENS], s[2 * TILE_TOKENS];
  for (int t = 0; t < 2 * n; t++)
    s[t] = sums[t];
  for (; n_tile; n_tile--, tile++) {
    for (int t = 0; t < 2 * n; t++)
      a[t] = _mm512_setzero_ps();
    for (int hl = 0; hl < 16; hl++, panel += PANEL_TOKENS * 4)
      multiply_half_line(a, _mm512_load_si512(tile->words[hl]), _mm512_load_si512(tile->words[hl] + 32), panel, n);
    for (int t = 0; t < 2 * n; t++)
      s[t] = _mm512_fmadd_ps(a[t], tile->unit[t % 2], s[t]);
  }
  for (int t = 0; t < 2 * n; t++)
    sums[t] = s[t];
}

/* Not inlined, like the decoders: together they spill. */
static __attribute__((noinline)) void tiles_panel(__m512 *sums, const Tile *tile, size_t n_tile, const uint16_t *panel,
                                                  uint32_t n) {
  switch (n) {
  case 1: tiles_panel_n(sums, tile, n_tile, panel, 1); break;
  case 2: tiles_panel_n(sums, tile, n_tile, panel, 2); break;
  case 3: tiles_panel_n(sums, tile, n_tile, panel, 3); break;
  case 4: tiles_panel_n(sums, tile, n_tile, panel, 4); break;
  case 5: tiles_panel_n(sums, tile, n_tile, panel, 5); break;
  case 6: tiles_panel_n(sums, tile, n_tile, panel, 6); break;
  case 7: tiles_panel_n(sums, tile, n_tile, panel, 7); break;
  default: tiles_panel_n(sums, tile, n_tile, panel, 8); break;
  }
}

/* A row block times m <= 64 tokens: each tile is decoded once, into L1, a few groups at a time. */
static void tiled_block(float *y, size_t ldy, const Matrix *w, size_t block, const uint16_t *panels, const uint16_t *hot,
                        uint32_t m) {
  __m512 sums[2 * MATMUL_TOKENS];
  for (uint32_t i = 0; i < 2 * m; i++)
    sums[i] = _mm512_setzero_ps();
  for (uint32_t i = 0; w->n_hot && i < m; i++)
    multiply_hot(sums + 2 * i, w, block, hot + panel_at(i, 1, 0), 1);
  CassReader reader;
  if (matrix_is_cass(w))
    cass_reader_init(&reader, w, (uint32_t)block);
  for (size_t g = 0; g < w->n_group; g += SPAN) {
    _Alignas(64) Tile tile[SPAN];
    size_t n = min_size(SPAN, w->n_group - g);
    for (size_t i = 0; i < n; i++)
      product_tile(w, block * w->n_group + g + i, &reader, tile[i].words, tile[i].unit);
    for (uint32_t i = 0; i < m; i += TILE_TOKENS)
      tiles_panel(sums + 2 * i, tile, n, panels + panel_at(i, w->n_group, g), m - i < TILE_TOKENS ? m - i : TILE_TOKENS);
  }
  for (uint32_t i = 0; i < m; i++)
    _mm512_storeu_ps(y + i * ldy, finish_sums(sums + 2 * i));
}

static inline void set_matmul(float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, uint32_t block0,
                              uint32_t block1) {
  for (uint32_t i = 0; i < m; i += MATMUL_TOKENS) {
    uint32_t n = m - i < MATMUL_TOKENS ? m - i : MATMUL_TOKENS;
    const uint16_t *part = acts->panels + panel_at(i, w->n_group, 0), *hot = w->n_hot ? acts->hot + panel_at(i, 1, 0) : NULL;
    for (size_t block = block0; block < block1; block++) {
      float *out = y + i * ldy + block * NEST_ROWS;
      bool direct = w->codec == PYCASS_CODEC_NEST && n <= PANEL_TOKENS;
      if (!direct || !nest_block(out, ldy, w, block, part, hot, n))
        tiled_block(out, ldy, w, block, part, hot, n);
    }
  }
}

/* ---- draft product ---------------------------------------------------------------------------------- */

/* Activations of a group as the nibbles want them: of each eight columns the even ones, then the odd ones. */
typedef struct DraftGroup {
  int8_t q[NEST_COLS];
} DraftGroup;
enum { DRAFT_GROUPS = 512, DRAFT_TOKENS = 16, DRAFT_CHUNK = 8 };

static void draft_gather(DraftGroup *out, const int8_t *q, size_t n) {
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  for (size_t g = 0; g < n; g++)
    _mm512_storeu_si512(out[g].q, _mm512_shuffle_epi8(_mm512_loadu_si512(q + g * NEST_COLS), order));
}

/* What a block of the draft's product needs: groups [g0, g1) and the tokens' activations for them. */
typedef struct DraftPart {
  const Matrix *w;
  const DraftGroup *q;  /* [n][stride] */
  const float *scale;   /* [n][n_group] */
  const int32_t *sum;   /* [n][n_group] */
  size_t stride, g0, g1;
} DraftPart;

/* What a row block's sums begin with: the product with hot columns, and the bias. */
static void draft_begin(float *y, size_t ldy, const Matrix *w, size_t block, const Acts *acts, size_t token, size_t n) {
  __m512 bias = w->bias ? _mm512_loadu_ps(w->bias + block * NEST_ROWS) : _mm512_setzero_ps();
  for (size_t t = 0; t < n; t++) {
    __m512 s[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (w->n_hot)
      multiply_hot(s, w, block, acts->hot + panel_at(token + t, 1, 0), 1);
    _mm512_storeu_ps(y + t * ldy, _mm512_add_ps(finish_sums(s), bias));
  }
}

/* A row block times n <= 8 tokens, on top of y. With 128 added the magnitudes are unsigned bytes, as
 * dpbusd wants them; the sum of q takes it off again. */
ALWAYS_INLINE void draft_block_n(float *y, size_t ldy, const DraftPart *d, size_t block, const int n) {
  const __m512i magnitude = _mm512_broadcast_i32x4(
      _mm_setr_epi8(22, 31, 43, 61, 85, 119, 13, 4, -22, -31, -43, -61, -85, -119, -13, -4));
  const __m512i value = _mm512_xor_si512(magnitude, _mm512_set1_epi8((char)0x80));
  const size_t n_group = d->w->n_group;
  __m512 s[DRAFT_CHUNK];
  for (int t = 0; t < n; t++)
    s[t] = _mm512_loadu_ps(y + (size_t)t * ldy);
  for (size_t g = d->g0; g < d->g1; g++) {
    const uint8_t *a = d->w->a + 512 * (block * n_group + g), *x = d->w->x + 16 * (block * n_group + g);
    __m512i sum0[DRAFT_CHUNK], sum1[DRAFT_CHUNK];
    for (int t = 0; t < n; t++) {
      sum0[t] = _mm512_set1_epi32(-128 * d->sum[(size_t)t * n_group + g]);
      sum1[t] = _mm512_setzero_si512();
    }
    for (int j = 0; j < 8; j++) {
      __m512i v = _mm512_loadu_si512(a + 64 * j);
      __m512i low = _mm512_permutexvar_epi8(v, value), high = _mm512_permutexvar_epi8(_mm512_srli_epi16(v, 4), value);
      for (int t = 0; t < n; t++) { /* few tokens: two chains each, for the latency */
        const uint8_t *q = (const uint8_t *)d->q[(size_t)t * d->stride + g - d->g0].q + 8 * j;
        __m512i *other = n > 3 ? &sum0[t] : &sum1[t];
        sum0[t] = _mm512_dpbusd_epi32(sum0[t], low, _mm512_set1_epi32((int)load_u32(q)));
        *other = _mm512_dpbusd_epi32(*other, high, _mm512_set1_epi32((int)load_u32(q + 4)));
      }
    }
    __m512 unit = _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x)), 23));
    for (int t = 0; t < n; t++) {
      __m512 scale = _mm512_mul_ps(_mm512_set1_ps(d->scale[(size_t)t * n_group + g]), unit);
      s[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sum0[t], sum1[t])), scale, s[t]);
    }
  }
  for (int t = 0; t < n; t++)
    _mm512_storeu_ps(y + (size_t)t * ldy, s[t]);
}

static void draft_block(float *y, size_t ldy, const DraftPart *d, size_t block, uint32_t n) {
  switch (n) {
  case 1: draft_block_n(y, ldy, d, block, 1); break;
  case 2: draft_block_n(y, ldy, d, block, 2); break;
  case 3: draft_block_n(y, ldy, d, block, 3); break;
  case 4: draft_block_n(y, ldy, d, block, 4); break;
  case 5: draft_block_n(y, ldy, d, block, 5); break;
  case 6: draft_block_n(y, ldy, d, block, 6); break;
  case 7: draft_block_n(y, ldy, d, block, 7); break;
  default: draft_block_n(y, ldy, d, block, 8); break;
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
          size_t at = (size_t)(i0 + t) * w->n_group;
          DraftPart d = {w, q + t * stride, acts->scale + at, acts->sum + at, stride, g0, g0 + n};
          draft_block(y + (i0 + t) * ldy + block * NEST_ROWS, ldy, &d, block,
                      count - t < DRAFT_CHUNK ? count - t : DRAFT_CHUNK);
        }
      }
    }
  }
}

#endif
