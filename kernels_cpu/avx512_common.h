/* What the avx512 and amx sets share: the decoder, the products and some float operations for AVX-512 F, BW, DQ, VL,
 * VBMI, VBMI2 and VNNI. Each of the two compiles its own copy, since their flags differ. Same bits as
 * kernels_cpu/scalar.c. */
#ifndef CASS_AVX512_COMMON_H
#define CASS_AVX512_COMMON_H

#include "side_bits.h"

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
ALWAYS_INLINE __m256 V_HALVES(const __m512 *v) {
  return _mm256_add_ps(_mm512_castps512_ps256(*v), _mm512_extractf32x8_ps(*v, 1));
}

#include "simd_ops.h"

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

static void simd_quantize(QuantActs *q, const float *x, size_t ldx, uint32_t m, uint32_t n_group) {
  for (uint32_t i = 0; i < m; i++)
    for (uint32_t g = 0; g < n_group; g++) {
      size_t at = (size_t)i * n_group + g;
      quantize_group(q->q + at * NEST_COLS, q->scale + at, q->sum + at, x + i * ldx + (size_t)g * NEST_COLS);
    }
}

/* Bits of a where mask is 1, else of b. One of the three is overwritten: a in SELECT_A, b in SELECT_B. */
#define SELECT_A(mask, a, b) _mm512_ternarylogic_epi32(a, b, mask, 0xe4)
#define SELECT_B(mask, a, b) _mm512_ternarylogic_epi32(b, a, mask, 0xd8)

/* A constant that the compiler does not know, so that it stays in a register or on the stack and is not made anew, from
 * a general register, at every use. */
ALWAYS_INLINE __m512i constant(__m512i v) {
  __asm__("" : "+v"(v));
  return v;
}
ALWAYS_INLINE __m512i constant8(int v) { return constant(_mm512_set1_epi8((char)v)); }

/* ---- nest: a line of 128 weights to exact bits ------------------------------------------------------ */

typedef struct Constants {
  __m512i delta;                        /* e - G by cell, 1 for every cell 7 (those that are not over lose it again) */
  __m512i one, two, four;
  __m512i cell7[2], cell01[2];          /* of the low and high nibbles */
  __m512i odd[2];
  __m512i c_bits, low6, bit6, bit7, low_byte;
  __m512i reverse;                      /* 63 .. 0 */
} Constants;

static const uint8_t reversed[64] = {63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48,
                                     47, 46, 45, 44, 43, 42, 41, 40, 39, 38, 37, 36, 35, 34, 33, 32,
                                     31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16,
                                     15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0};

ALWAYS_INLINE Constants constants(void) {
  /* vpermb looks at six bits of an index: the table is repeated, so the other nibble's bits may stay */
  __m512i delta = _mm512_broadcast_i32x4(_mm_setr_epi8(-4, -3, -2, -2, -1, -1, 0, 1, -4, -3, -2, -2, -1, -1, 0, 1));
  Constants k = {constant(delta), constant8(1), constant8(2), constant8(4), {constant8(0x07), constant8(0x70)},
                 {constant8(0x06), constant8(0x60)}, {constant8(0x01), constant8(0x10)}, constant8(3), constant8(0x3f),
                 constant8(0x40), constant8(0x80), constant(_mm512_set1_epi16(0xff)), _mm512_loadu_si512(reversed)};
  return k;
}

/* What the lines of a tile share. */
typedef struct TileDecoder {
  __m512i group; /* G of row r in bytes 4r .. 4r + 3 */
  const uint8_t *a, *b, *c;
  SideReader side;
} TileDecoder;

ALWAYS_INLINE void tile_decoder_init(TileDecoder *d, const Matrix *w, size_t t) {
  d->a = w->a + 512 * t, d->b = w->b + 512 * t, d->c = w->c + 256 * t;
  side_reader_init(&d->side, w, t);
  const __m512i spread = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  __m512i rows = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w->x + 16 * t)));
  d->group = _mm512_shuffle_epi8(rows, spread);
}

/* Puts escape bytes, the first one just before *escape and the others backwards from it, into the exponents of the
 * weights with s = 7. It reads the 64 bytes before escape: no more than NEST_MAX_ESCAPES in a tile. */
ALWAYS_INLINE __m512i patch_escapes(__m512i e, uint64_t mask, const uint8_t *escape, const Constants *k) {
  __m512i bytes = _mm512_permutexvar_epi8(k->reverse, _mm512_loadu_si512(escape - 64));
  return _mm512_mask_expand_epi8(e, mask, bytes);
}

/* Half line h of a line. *even gets columns (h, h + 4) of the line's eight, *odd (h + 2, h + 6): two words of the
 * dword of each row. a, b are the line's bytes, not_a their complement, c such that this half line's two bits are the
 * low ones. */
ALWAYS_INLINE void decode_half_line(TileDecoder *d, const Constants *k, const int h, __m512i a, __m512i not_a,
                                    __m512i b, __m512i c, __m512i *even, __m512i *odd) {
  HalfLine f;
  f.cell7 = _mm512_testn_epi8_mask(not_a, k->cell7[h]);
  f.cell01 = _mm512_testn_epi8_mask(a, k->cell01[h]);
  f.odd = _mm512_test_epi8_mask(a, k->odd[h]);
  read_half_line(&d->side, &f);

  __m512i e = _mm512_permutexvar_epi8(h ? _mm512_srli_epi16(a, 4) : a, k->delta);
  e = _mm512_add_epi8(e, d->group);
  e = _mm512_mask_sub_epi8(e, f.minus1, e, k->one);
  e = _mm512_mask_sub_epi8(e, f.minus2, e, k->two);
  e = _mm512_mask_sub_epi8(e, f.minus4, e, k->four);
  if (UNLIKELY(f.escapes != 0)) {
    e = patch_escapes(e, f.escapes, d->side.escape, k);
    d->side.escape -= __builtin_popcountll(f.escapes);
  }
  /* mantissa: bits 5..2, 1..0, 6 */
  __m512i m = SELECT_B(k->c_bits, c, h ? _mm512_srli_epi16(b, 2) : _mm512_slli_epi16(b, 2));
  m = _mm512_and_si512(m, k->low6);
  m = _mm512_mask_add_epi8(m, f.top, m, k->bit6);
  /* the bytes of the words: sign and the upper bits of e; the last bit of e and the mantissa */
  __m512i high = SELECT_B(k->bit7, h ? a : _mm512_slli_epi16(a, 4), _mm512_srli_epi16(e, 1));
  __m512i low = SELECT_B(k->bit7, _mm512_slli_epi16(e, 7), m);
  *even = SELECT_B(k->low_byte, low, _mm512_slli_epi16(high, 8));
  *odd = SELECT_A(k->low_byte, _mm512_srli_epi16(low, 8), high);
}

/* Lines 2i (odd = 0) and 2i + 1 (odd = 1): their four pairs. c is line i of C. */
ALWAYS_INLINE void decode_line(TileDecoder *d, const Constants *k, uint32_t j, const int odd, __m512i c,
                               __m512i pair[4]) {
  __m512i a = _mm512_loadu_si512(d->a + 64 * j), b = _mm512_loadu_si512(d->b + 64 * j);
  __m512i not_a = _mm512_ternarylogic_epi32(a, a, a, 0x55);
  decode_half_line(d, k, 0, a, not_a, b, odd ? _mm512_srli_epi16(c, 4) : c, &pair[0], &pair[2]);
  decode_half_line(d, k, 1, a, not_a, b, _mm512_srli_epi16(c, odd ? 6 : 2), &pair[1], &pair[3]);
}

static __attribute__((noinline)) void set_nest_decode_tile(const Matrix *w, size_t t, TilePairs out) {
  const Constants k = constants();
  TileDecoder d;
  tile_decoder_init(&d, w, t);
  for (uint32_t j = 0; j < 8; j += 2) {
    __m512i c = _mm512_loadu_si512(d.c + 32 * j), pair[8];
    decode_line(&d, &k, j, 0, c, pair);
    decode_line(&d, &k, j + 1, 1, c, pair + 4);
    for (int i = 0; i < 8; i++)
      _mm512_storeu_si512(out[4 * j + (uint32_t)i], pair[i]);
  }
}

/* ---- raw ------------------------------------------------------------------------------------------- */

/* 16 rows of 16 dwords, transposed in place. */
ALWAYS_INLINE void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) /* r[4q + c]: columns c, 4 + c, .. of rows 4q .. 4q + 3 */
    for (int h = 0; h < 2; h++) {
      r[i + 2 * h] = _mm512_unpacklo_epi64(t[i + h], t[i + 2 + h]);
      r[i + 2 * h + 1] = _mm512_unpackhi_epi64(t[i + h], t[i + 2 + h]);
    }
  for (int c = 0; c < 4; c++) {
    __m512i low01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), high01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    __m512i low23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    __m512i high23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
  for (int i = 0; i < 16; i++)
    r[i] = t[i];
}

/* Columns 32 half .. 32 half + 31 of the tile's 16 rows; zero past the matrix. Fetches those of the next row block,
 * since hardware does not follow 16 rows; past the matrix that does nothing. */
ALWAYS_INLINE void load_raw(const Matrix *w, size_t t, size_t half, __m512i r[16]) {
  size_t r0 = t / w->n_group * NEST_ROWS, k0 = t % w->n_group * NEST_COLS + 32 * half;
  size_t rows = min_size(NEST_ROWS, w->rows - r0), cols = w->cols > k0 ? min_size(32, w->cols - k0) : 0;
  const uint16_t *p = w->raw + r0 * w->cols + k0;
  for (size_t i = NEST_ROWS; i < 2 * NEST_ROWS; i++)
    _mm_prefetch((const char *)((uintptr_t)p + 2 * i * w->cols), _MM_HINT_T1);
  if (rows == NEST_ROWS && cols == 32) {
    for (size_t i = 0; i < 16; i++)
      r[i] = _mm512_loadu_si512(p + i * w->cols);
    return;
  }
  for (size_t i = 0; i < 16; i++)
    r[i] = i < rows && cols ? _mm512_maskz_loadu_epi16((__mmask32)(0xffffffffu >> (32 - cols)), p + i * w->cols)
                            : _mm512_setzero_si512();
}

/* As raw_decode_tile: columns (k, k + 4) of each eight become neighbours, then dwords are transposed. */
static __attribute__((noinline)) void set_raw_decode_tile(const Matrix *w, size_t t, TilePairs out) {
  const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  for (size_t half = 0; half < 2; half++) {
    __m512i r[16];
    load_raw(w, t, half, r);
    for (int i = 0; i < 16; i++)
      r[i] = _mm512_shuffle_epi8(r[i], pairs);
    transpose16(r);
    for (int i = 0; i < 16; i++)
      _mm512_storeu_si512(out[16 * half + (size_t)i], r[i]);
  }
}

static void set_decode_tile(const Matrix *w, size_t t, TilePairs out) {
  if (w->codec == PYCASS_CODEC_NEST)
    set_nest_decode_tile(w, t, out);
  else
    set_raw_decode_tile(w, t, out);
}

/* ---- target product --------------------------------------------------------------------------------- */

enum { MATMUL_TOKENS = 64, MATMUL_DIRECT = 4, MATMUL_CHUNK = 8 };

/* The pairs of a line times n tokens, x from the line's first column on. s[2t], s[2t + 1]: accumulators of token t. */
ALWAYS_INLINE void multiply_line(__m512 *s, const __m512i pair[4], const float *x, size_t ldx, const int n) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  for (int i = 0; i < 4; i++) {
    __m512 w0 = _mm512_castsi512_ps(_mm512_slli_epi32(pair[i], 16));
    __m512 w1 = _mm512_castsi512_ps(_mm512_and_si512(pair[i], upper));
    for (int t = 0; t < n; t++) {
      s[2 * t] = _mm512_fmadd_ps(w0, _mm512_set1_ps(x[(size_t)t * ldx + (size_t)i]), s[2 * t]);
      s[2 * t + 1] = _mm512_fmadd_ps(w1, _mm512_set1_ps(x[(size_t)t * ldx + (size_t)i + 4]), s[2 * t + 1]);
    }
  }
}

/* A row block times n <= 4 tokens, the weights never leaving registers. */
ALWAYS_INLINE void nest_block_n(float *y, size_t ldy, const Matrix *w, size_t block, const float *x, size_t ldx,
                                const int n) {
  const Constants k = constants();
  __m512 s[2 * MATMUL_DIRECT];
  for (int t = 0; t < 2 * n; t++)
    s[t] = _mm512_setzero_ps();
  for (size_t g = 0; g < w->n_group; g++) {
    TileDecoder d;
    tile_decoder_init(&d, w, block * w->n_group + g);
    for (uint32_t j = 0; j < 8; j += 2) {
      __m512i c = _mm512_loadu_si512(d.c + 32 * j), pair[4];
      decode_line(&d, &k, j, 0, c, pair);
      multiply_line(s, pair, x + g * NEST_COLS + 8 * j, ldx, n);
      decode_line(&d, &k, j + 1, 1, c, pair);
      multiply_line(s, pair, x + g * NEST_COLS + 8 * j + 8, ldx, n);
    }
  }
  for (int t = 0; t < n; t++)
    _mm512_storeu_ps(y + (size_t)t * ldy, _mm512_add_ps(s[2 * t], s[2 * t + 1]));
}

/* The same for raw: neighbouring columns are transposed together and then go to the same accumulator. */
ALWAYS_INLINE void raw_block_n(float *y, size_t ldy, const Matrix *w, size_t block, const float *x, size_t ldx,
                               const int n) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  __m512 s[2 * MATMUL_DIRECT];
  for (int t = 0; t < 2 * n; t++)
    s[t] = _mm512_setzero_ps();
  for (size_t half = 0; half < 2 * (size_t)w->n_group; half++) {
    const float *xh = x + 32 * half;
    __m512i r[16];
    load_raw(w, block * w->n_group + half / 2, half % 2, r);
    transpose16(r);
    for (int i = 0; i < 16; i++) {
      __m512 w0 = _mm512_castsi512_ps(_mm512_slli_epi32(r[i], 16));
      __m512 w1 = _mm512_castsi512_ps(_mm512_and_si512(r[i], upper));
      for (int t = 0; t < n; t++) {
        __m512 *st = &s[2 * t + (i % 4 >= 2)];
        *st = _mm512_fmadd_ps(w0, _mm512_set1_ps(xh[(size_t)t * ldx + 2 * (size_t)i]), *st);
        *st = _mm512_fmadd_ps(w1, _mm512_set1_ps(xh[(size_t)t * ldx + 2 * (size_t)i + 1]), *st);
      }
    }
  }
  for (int t = 0; t < n; t++)
    _mm512_storeu_ps(y + (size_t)t * ldy, _mm512_add_ps(s[2 * t], s[2 * t + 1]));
}

ALWAYS_INLINE void direct_block_n(float *y, size_t ldy, const Matrix *w, size_t block, const float *x, size_t ldx,
                                  const int n) {
  if (w->codec == PYCASS_CODEC_NEST)
    nest_block_n(y, ldy, w, block, x, ldx, n);
  else
    raw_block_n(y, ldy, w, block, x, ldx, n);
}

static void direct_block(float *y, size_t ldy, const Matrix *w, size_t block, const float *x, size_t ldx, uint32_t m) {
  switch (m) {
  case 1: direct_block_n(y, ldy, w, block, x, ldx, 1); break;
  case 2: direct_block_n(y, ldy, w, block, x, ldx, 2); break;
  case 3: direct_block_n(y, ldy, w, block, x, ldx, 3); break;
  default: direct_block_n(y, ldy, w, block, x, ldx, 4); break;
  }
}

/* A decoded tile times n <= 8 tokens; sums [n][2] wait in memory between tiles. The activations are copied, so that
 * they are at constant distances from one address. */
ALWAYS_INLINE void tile_chunk_n(__m512 *sums, TilePairs tile, const float *x, size_t ldx, const int n) {
  _Alignas(64) float acts[MATMUL_CHUNK][NEST_COLS];
  __m512 s[2 * MATMUL_CHUNK];
  for (int t = 0; t < n; t++)
    for (int i = 0; i < NEST_COLS; i += 16)
      _mm512_store_ps(acts[t] + i, _mm512_loadu_ps(x + (size_t)t * ldx + i));
  for (int t = 0; t < 2 * n; t++)
    s[t] = sums[t];
  for (int j = 0; j < 8; j++) {
    __m512i pair[4];
    for (int i = 0; i < 4; i++)
      pair[i] = _mm512_loadu_si512(tile[4 * j + i]);
    multiply_line(s, pair, acts[0] + 8 * j, NEST_COLS, n);
  }
  for (int t = 0; t < 2 * n; t++)
    sums[t] = s[t];
}

/* Not inlined, like the decoders: together they spill. */
static __attribute__((noinline)) void tile_chunk(__m512 *sums, TilePairs tile, const float *x, size_t ldx, uint32_t n) {
  switch (n) {
  case 1: tile_chunk_n(sums, tile, x, ldx, 1); break;
  case 2: tile_chunk_n(sums, tile, x, ldx, 2); break;
  case 3: tile_chunk_n(sums, tile, x, ldx, 3); break;
  case 4: tile_chunk_n(sums, tile, x, ldx, 4); break;
  case 5: tile_chunk_n(sums, tile, x, ldx, 5); break;
  case 6: tile_chunk_n(sums, tile, x, ldx, 6); break;
  case 7: tile_chunk_n(sums, tile, x, ldx, 7); break;
  default: tile_chunk_n(sums, tile, x, ldx, 8); break;
  }
}

/* A row block times m <= 64 tokens: each tile is decoded once, into L1. */
static void tiled_block(float *y, size_t ldy, const Matrix *w, size_t block, const float *x, size_t ldx, uint32_t m) {
  __m512 sums[2 * MATMUL_TOKENS];
  for (uint32_t i = 0; i < 2 * m; i++)
    sums[i] = _mm512_setzero_ps();
  for (size_t g = 0; g < w->n_group; g++) {
    _Alignas(64) TilePairs tile;
    set_decode_tile(w, block * w->n_group + g, tile);
    for (uint32_t i = 0; i < m; i += MATMUL_CHUNK)
      tile_chunk(sums + 2 * i, tile, x + i * ldx + g * NEST_COLS, ldx, m - i < MATMUL_CHUNK ? m - i : MATMUL_CHUNK);
  }
  for (uint32_t i = 0; i < m; i++)
    _mm512_storeu_ps(y + i * ldy, _mm512_add_ps(sums[2 * i], sums[2 * i + 1]));
}

static inline void set_matmul(float *y, size_t ldy, const Matrix *w, const float *x, size_t ldx, uint32_t m,
                              uint32_t block0, uint32_t block1) {
  for (uint32_t i = 0; i < m; i += MATMUL_TOKENS) {
    uint32_t n = m - i < MATMUL_TOKENS ? m - i : MATMUL_TOKENS;
    for (size_t block = block0; block < block1; block++) {
      float *out = y + i * ldy + block * NEST_ROWS;
      if (n <= MATMUL_DIRECT)
        direct_block(out, ldy, w, block, x + i * ldx, ldx, n);
      else
        tiled_block(out, ldy, w, block, x + i * ldx, ldx, n);
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

/* A row block times n <= 8 tokens, on top of y where g0 > 0. With 128 added the magnitudes are unsigned bytes, as
 * dpbusd wants them; the sum of q takes it off again. */
ALWAYS_INLINE void draft_block_n(float *y, size_t ldy, const DraftPart *d, size_t block, const int n) {
  const __m512i magnitude = _mm512_broadcast_i32x4(
      _mm_setr_epi8(4, 13, 22, 31, 43, 61, 85, 119, -4, -13, -22, -31, -43, -61, -85, -119));
  const __m512i value = _mm512_xor_si512(magnitude, _mm512_set1_epi8((char)0x80));
  const size_t n_group = d->w->n_group;
  __m512 s[DRAFT_CHUNK];
  for (int t = 0; t < n; t++)
    s[t] = d->g0 ? _mm512_loadu_ps(y + (size_t)t * ldy) : _mm512_setzero_ps();
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

static void set_matmul_draft(float *y, size_t ldy, const Matrix *w, const QuantActs *acts, uint32_t m, uint32_t block0,
                             uint32_t block1) {
  _Alignas(64) DraftGroup q[DRAFT_GROUPS];
  for (uint32_t i0 = 0; i0 < m; i0 += DRAFT_TOKENS) {
    uint32_t count = m - i0 < DRAFT_TOKENS ? m - i0 : DRAFT_TOKENS;
    size_t stride = DRAFT_GROUPS / count;
    for (size_t g0 = 0; g0 < w->n_group; g0 += stride) {
      size_t n = min_size(stride, w->n_group - g0);
      for (uint32_t t = 0; t < count; t++)
        draft_gather(q + t * stride, acts->q + ((size_t)(i0 + t) * w->n_group + g0) * NEST_COLS, n);
      for (size_t block = block0; block < block1; block++)
        for (uint32_t t = 0; t < count; t += DRAFT_CHUNK) {
          size_t at = (size_t)(i0 + t) * w->n_group;
          DraftPart d = {w, q + t * stride, acts->scale + at, acts->sum + at, stride, g0, g0 + n};
          draft_block(y + (i0 + t) * ldy + block * NEST_ROWS, ldy, &d, block,
                      count - t < DRAFT_CHUNK ? count - t : DRAFT_CHUNK);
        }
    }
  }
}

#endif
