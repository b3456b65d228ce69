/* AVX2, FMA, BMI2. Same bits as kernels_cpu/scalar.c. */
#include "sets.h"
#include "side_bits.h"

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
ALWAYS_INLINE __m256 V_HALVES(const __m256 *v) { return _mm256_add_ps(v[0], v[1]); }

#include "simd_ops.h"

#define SELECT(mask, a, b) _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b))

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

static void simd_quantize(QuantActs *q, const float *x, size_t ldx, uint32_t m, uint32_t n_group) {
  for (uint32_t i = 0; i < m; i++)
    for (uint32_t g = 0; g < n_group; g++) {
      size_t at = (size_t)i * n_group + g;
      quantize_group(q->q + at * NEST_COLS, q->scale + at, q->sum + at, x + i * ldx + (size_t)g * NEST_COLS);
    }
}

/* ---- nest: 64 weights to exact bits ----------------------------------------------------------------- */

typedef struct TileDecoder {
  __m256i group[2]; /* G of row r in bytes 4r .. 4r + 3 */
  const uint8_t *a, *b, *c;
  SideReader side;
} TileDecoder;

ALWAYS_INLINE void tile_decoder_init(TileDecoder *d, const Matrix *w, size_t t) {
  d->a = w->a + 512 * t, d->b = w->b + 512 * t, d->c = w->c + 256 * t;
  side_reader_init(&d->side, w, t);
  const __m256i spread = table16(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  for (int i = 0; i < 2; i++) {
    __m256i rows = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(w->x + 16 * t + 8 * i)));
    d->group[i] = _mm256_shuffle_epi8(rows, spread);
  }
}

ALWAYS_INLINE uint64_t bits_of(__m256i low, __m256i high) {
  return (uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32;
}

/* Bits 32 i .. 32 i + 31 as bytes 0xff or 0. */
ALWAYS_INLINE __m256i bytes_of(uint64_t bits, int i) {
  const __m256i which = _mm256_add_epi8(
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3),
      _mm256_set1_epi8((char)(4 * i)));
  const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
  __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi64x((long long)bits), which);
  return _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
}

/* Puts escape bytes, the first one just before *escape, into the exponents e [64] of the weights with s = 7. */
static __attribute__((noinline, cold)) void patch_escapes(__m256i e[2], uint64_t mask, const uint8_t *escape) {
  uint8_t bytes[64];
  store(bytes, e[0]), store(bytes + 32, e[1]);
  for (; mask; mask &= mask - 1)
    bytes[__builtin_ctzll(mask)] = *--escape;
  e[0] = load(bytes), e[1] = load(bytes + 32);
}

/* Half line h of a line. even [2] gets columns (h, h + 4) of the line's eight, odd [2] (h + 2, h + 6): two words of
 * the dword of each row. a [2], b [2], c [2]: bytes whose low bits are this half line's. */
ALWAYS_INLINE void decode_half_line(TileDecoder *d, const __m256i *a, const __m256i *b, const __m256i *c,
                                    uint16_t even[NEST_ROWS][2], uint16_t odd[NEST_ROWS][2]) {
  /* e - G by cell, 1 for every cell 7: those that are not over lose it again */
  const __m256i delta = table16(_mm_setr_epi8(-4, -3, -2, -2, -1, -1, 0, 1, -4, -3, -2, -2, -1, -1, 0, 1));
  const __m256i cell = _mm256_set1_epi8(7), pair = _mm256_set1_epi8(6), bit7 = _mm256_set1_epi8((char)0x80);
  const __m256i zero = _mm256_setzero_si256(), low_byte = _mm256_set1_epi16(0xff);
  HalfLine f;
  f.cell7 = bits_of(_mm256_cmpeq_epi8(_mm256_and_si256(a[0], cell), cell),
                    _mm256_cmpeq_epi8(_mm256_and_si256(a[1], cell), cell));
  f.cell01 = bits_of(_mm256_cmpeq_epi8(_mm256_and_si256(a[0], pair), zero),
                     _mm256_cmpeq_epi8(_mm256_and_si256(a[1], pair), zero));
  f.odd = bits_of(_mm256_slli_epi16(a[0], 7), _mm256_slli_epi16(a[1], 7));
  read_half_line(&d->side, &f);

  __m256i e[2];
  for (int i = 0; i < 2; i++) {
    __m256i nibble = _mm256_and_si256(a[i], _mm256_set1_epi8(15));
    __m256i minus = bytes_of(f.minus4, i); /* -1 where set */
    minus = _mm256_add_epi8(_mm256_add_epi8(minus, minus), bytes_of(f.minus2, i));
    minus = _mm256_add_epi8(_mm256_add_epi8(minus, minus), bytes_of(f.minus1, i));
    e[i] = _mm256_add_epi8(_mm256_add_epi8(_mm256_shuffle_epi8(delta, nibble), d->group[i]), minus);
  }
  if (UNLIKELY(f.escapes != 0)) {
    __m256i any[2] = {e[0], e[1]}; /* a copy, so that e stays in registers */
    patch_escapes(any, f.escapes, d->side.escape);
    d->side.escape -= __builtin_popcountll(f.escapes);
    e[0] = any[0], e[1] = any[1];
  }
  for (int i = 0; i < 2; i++) {
    __m256i m = _mm256_and_si256(_mm256_slli_epi16(b[i], 2), _mm256_set1_epi8(0x3c));
    m = _mm256_or_si256(m, _mm256_and_si256(c[i], _mm256_set1_epi8(3)));
    m = _mm256_or_si256(m, _mm256_and_si256(bytes_of(f.top, i), _mm256_set1_epi8(0x40)));
    /* the bytes of the words: sign and the upper bits of e; the last bit of e and the mantissa */
    __m256i high = SELECT(bit7, _mm256_slli_epi16(a[i], 4), _mm256_srli_epi16(e[i], 1));
    __m256i low = _mm256_or_si256(_mm256_and_si256(bit7, _mm256_slli_epi16(e[i], 7)), m);
    store(even[8 * i], _mm256_or_si256(_mm256_and_si256(low_byte, low), _mm256_slli_epi16(high, 8)));
    store(odd[8 * i], _mm256_or_si256(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(low_byte, high)));
  }
}

static __attribute__((noinline)) void set_nest_decode_tile(const Matrix *w, size_t t, TilePairs out) {
  TileDecoder d;
  tile_decoder_init(&d, w, t);
  for (uint32_t j = 0; j < 8; j++) {
    const __m128i by = _mm_cvtsi32_si128((int)(4 * (j % 2)));
    __m256i a[2], b[2], c[2];
    for (int i = 0; i < 2; i++) {
      a[i] = load(d.a + 64 * j + 32 * i), b[i] = load(d.b + 64 * j + 32 * i);
      c[i] = _mm256_srl_epi16(load(d.c + 64 * (j / 2) + 32 * i), by);
    }
    decode_half_line(&d, a, b, c, out[4 * j], out[4 * j + 2]);
    for (int i = 0; i < 2; i++)
      a[i] = _mm256_srli_epi16(a[i], 4), b[i] = _mm256_srli_epi16(b[i], 4), c[i] = _mm256_srli_epi16(c[i], 2);
    decode_half_line(&d, a, b, c, out[4 * j + 1], out[4 * j + 3]);
  }
}

/* ---- raw ------------------------------------------------------------------------------------------- */

/* 8 rows of 8 dwords, transposed. */
ALWAYS_INLINE void transpose8(__m256i r[8]) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) /* r[4q + c]: columns c and 4 + c of rows 4q .. 4q + 3 */
    for (int h = 0; h < 2; h++) {
      r[i + 2 * h] = _mm256_unpacklo_epi64(t[i + h], t[i + 2 + h]);
      r[i + 2 * h + 1] = _mm256_unpackhi_epi64(t[i + h], t[i + 2 + h]);
    }
  for (int c = 0; c < 4; c++) {
    __m256i low = _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
    r[4 + c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x31);
    r[c] = low;
  }
}

/* As raw_decode_tile: columns (k, k + 4) of each eight become neighbours, then dwords are transposed. */
static void raw_pairs(const uint16_t *p, size_t stride, TilePairs out) {
  const __m256i pairs = table16(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  for (size_t k = 0; k < 4; k++)
    for (size_t half = 0; half < 2; half++) {
      __m256i r[8];
      for (size_t i = 0; i < 8; i++)
        r[i] = _mm256_shuffle_epi8(load(p + (8 * half + i) * stride + 16 * k), pairs);
      transpose8(r);
      for (size_t i = 0; i < 8; i++)
        store(out[8 * k + i][8 * half], r[i]);
    }
}

static void set_decode_tile(const Matrix *w, size_t t, TilePairs out) {
  if (w->codec == PYCASS_CODEC_NEST) {
    set_nest_decode_tile(w, t, out);
    return;
  }
  size_t r0 = t / w->n_group * NEST_ROWS, k0 = t % w->n_group * NEST_COLS;
  size_t rows = min_size(NEST_ROWS, w->rows - r0), cols = min_size(NEST_COLS, w->cols - k0);
  const uint16_t *p = w->raw + r0 * w->cols + k0;
  for (size_t r = NEST_ROWS; r < 2 * NEST_ROWS; r++) /* the next row block, since hardware does not follow 16 rows */
    for (size_t k = 0; k < 2; k++)
      _mm_prefetch((const char *)((uintptr_t)p + 2 * r * w->cols + 64 * k), _MM_HINT_T1);
  if (rows == NEST_ROWS && cols == NEST_COLS) {
    raw_pairs(p, w->cols, out);
    return;
  }
  uint16_t padded[NEST_ROWS][NEST_COLS] = {{0}};
  for (size_t r = 0; r < rows; r++)
    memcpy(padded[r], p + r * w->cols, cols * sizeof *p);
  raw_pairs(padded[0], NEST_COLS, out);
}

/* ---- target product --------------------------------------------------------------------------------- */

enum { MATMUL_TOKENS = 64, MATMUL_CHUNK = 6, HALVES = 2 * NEST_ROWS / 8 };

typedef float GroupActs[MATMUL_CHUNK][NEST_COLS];

/* Rows [8 r, 8 (r + n_rows)) of a decoded tile times n tokens. sums [n][4]: s0 and s1 of rows 0..7, then of 8..15. */
ALWAYS_INLINE void tile_chunk_n(__m256 *sums, TilePairs tile, GroupActs x, const int r, const int n_rows,
                                const int n) {
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
  __m256 s[2 * MATMUL_CHUNK];
  for (int t = 0; t < n; t++)
    for (int i = 0; i < 2 * n_rows; i++)
      s[2 * n_rows * t + i] = sums[HALVES * t + 2 * r + i];
  for (int j = 0; j < 8; j++)
    for (int k = 0; k < 4; k++)
      for (int i = 0; i < n_rows; i++) {
        __m256i pair = load(tile[4 * j + k][8 * (r + i)]);
        __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
        __m256 w1 = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
        for (int t = 0; t < n; t++) {
          const float *xj = x[t] + 8 * j + k;
          __m256 *st = s + 2 * n_rows * t + 2 * i;
          st[0] = _mm256_fmadd_ps(w0, _mm256_broadcast_ss(xj), st[0]);
          st[1] = _mm256_fmadd_ps(w1, _mm256_broadcast_ss(xj + 4), st[1]);
        }
      }
  for (int t = 0; t < n; t++)
    for (int i = 0; i < 2 * n_rows; i++)
      sums[HALVES * t + 2 * r + i] = s[2 * n_rows * t + i];
}

/* One or two tokens take all rows at once, since two accumulators alone would wait for each other's latency. The
 * activations are copied, so that they are at constant distances from one address. */
static __attribute__((noinline)) void tile_chunk(__m256 *sums, TilePairs tile, const float *x, size_t ldx, uint32_t n) {
  _Alignas(32) GroupActs acts;
  for (uint32_t t = 0; t < n; t++)
    for (int i = 0; i < NEST_COLS; i += 8)
      _mm256_store_ps(acts[t] + i, _mm256_loadu_ps(x + t * ldx + i));
  if (n == 1)
    tile_chunk_n(sums, tile, acts, 0, 2, 1);
  else if (n == 2)
    tile_chunk_n(sums, tile, acts, 0, 2, 2);
  else
    for (int r = 0; r < 2; r++)
      switch (n) {
      case 3: tile_chunk_n(sums, tile, acts, r, 1, 3); break;
      case 4: tile_chunk_n(sums, tile, acts, r, 1, 4); break;
      case 5: tile_chunk_n(sums, tile, acts, r, 1, 5); break;
      default: tile_chunk_n(sums, tile, acts, r, 1, 6); break;
      }
}

/* A row block times m <= 64 tokens: each tile is decoded once, into L1. */
static void block_product(float *y, size_t ldy, const Matrix *w, size_t block, const float *x, size_t ldx, uint32_t m) {
  __m256 sums[HALVES * MATMUL_TOKENS];
  for (uint32_t i = 0; i < HALVES * m; i++)
    sums[i] = _mm256_setzero_ps();
  for (size_t g = 0; g < w->n_group; g++) {
    _Alignas(64) TilePairs tile;
    set_decode_tile(w, block * w->n_group + g, tile);
    for (uint32_t i = 0; i < m; i += MATMUL_CHUNK)
      tile_chunk(sums + HALVES * i, tile, x + i * ldx + g * NEST_COLS, ldx,
                 m - i < MATMUL_CHUNK ? m - i : MATMUL_CHUNK);
  }
  for (uint32_t i = 0; i < m; i++)
    for (uint32_t r = 0; r < 2; r++)
      _mm256_storeu_ps(y + i * ldy + 8 * r, _mm256_add_ps(sums[HALVES * i + 2 * r], sums[HALVES * i + 2 * r + 1]));
}

static void set_matmul(float *y, size_t ldy, const Matrix *w, const float *x, size_t ldx, uint32_t m, uint32_t block0,
                       uint32_t block1) {
  for (uint32_t i = 0; i < m; i += MATMUL_TOKENS)
    for (size_t block = block0; block < block1; block++)
      block_product(y + i * ldy + block * NEST_ROWS, ldy, w, block, x + i * ldx, ldx,
                    m - i < MATMUL_TOKENS ? m - i : MATMUL_TOKENS);
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

/* A row block times n <= 4 tokens, on top of y where g0 > 0. */
ALWAYS_INLINE void draft_block_n(float *y, size_t ldy, const DraftPart *d, size_t block, const int n) {
  const __m256i value = table16(_mm_setr_epi8(4, 13, 22, 31, 43, 61, 85, 119, -4, -13, -22, -31, -43, -61, -85, -119));
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256 s[2 * DRAFT_CHUNK];
  for (int t = 0; t < 2 * n; t++)
    s[t] = d->g0 ? _mm256_loadu_ps(y + (size_t)(t / 2) * ldy + 8 * (t % 2)) : _mm256_setzero_ps();
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
          DraftPart d = {w, q + t * stride, acts->scale + (size_t)(i0 + t) * w->n_group, stride, g0, g0 + n};
          draft_block(y + (i0 + t) * ldy + block * NEST_ROWS, ldy, &d, block,
                      count - t < DRAFT_CHUNK ? count - t : DRAFT_CHUNK);
        }
    }
  }
}

const Kernels kernels_avx2 = {.name = "avx2",
                              .nest_decode_tile = set_nest_decode_tile,
                              .matmul = set_matmul,
                              .matmul_draft = set_matmul_draft,
                              SIMD_OPS_TABLE};
