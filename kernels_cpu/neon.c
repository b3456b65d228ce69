/* NEON of Armv8.2 with dot products, without bf16, i8mm or SVE (Cortex-A76, A78AE and later). Same bits as
 * kernels_cpu/scalar.c. */
#include <arm_neon.h>

#include "sets.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#define V float32x4_t
#define V_WIDTH 4
#define V_LOAD vld1q_f32
#define V_STORE vst1q_f32
#define V_SET1 vdupq_n_f32
#define V_ADD vaddq_f32
#define V_SUB vsubq_f32
#define V_MUL vmulq_f32
#define V_DIV vdivq_f32
#define V_FMA(a, b, c) vfmaq_f32(c, a, b)

/* Not vmaxq and vminq, nor their numeric forms: these differ in what they make of NaN and of zeros' signs. */
ALWAYS_INLINE V V_MAX(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
ALWAYS_INLINE V V_MIN(V a, V b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
ALWAYS_INLINE V V_BF16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
ALWAYS_INLINE V V_POW2(V n) {
  int32x4_t e = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return vreinterpretq_f32_s32(vshlq_n_s32(e, 23));
}
ALWAYS_INLINE V V_ZERO_BELOW(V x, float limit, V v) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, vdupq_n_f32(limit))));
}

#include "simd_ops.h"

#include "tiled.h"

ALWAYS_INLINE void simd_sums(float out[SCORES], V lane[SCORES][VECTORS], float scale) {
  V s[SCORES];
  for (int i = 0; i < SCORES; i++) {
    V a = vaddq_f32(lane[i][0], lane[i][2]), b = vaddq_f32(lane[i][1], lane[i][3]);
    V four = vaddq_f32(a, b);
    s[i] = vaddq_f32(four, vextq_f32(four, four, 2)); /* 0 + 2, 1 + 3, and the same again */
  }
  V even = vcombine_f32(vget_low_f32(s[0]), vget_low_f32(s[1])), odd = vcombine_f32(vget_low_f32(s[2]), vget_low_f32(s[3]));
  vst1q_f32(out, vmulq_f32(vpaddq_f32(even, odd), vdupq_n_f32(scale)));
}

/* Four floats to BF16, as bf16_from_f32. */
ALWAYS_INLINE uint16x4_t round_words(float32x4_t v) {
  uint32x4_t u = vreinterpretq_u32_f32(v), top = vshrq_n_u32(u, 16);
  uint32x4_t rounded = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), vandq_u32(top, vdupq_n_u32(1)));
  uint32x4_t nan = vorrq_u32(top, vdupq_n_u32(0x40));
  return vmovn_u32(vbslq_u32(vceqq_f32(v, v), vshrq_n_u32(rounded, 16), nan));
}

/* As ops_round: eight columns, of two half lines, at a time. */
static void simd_round(uint16_t *panels, const float *x, uint32_t n_group) {
  for (size_t j = 0; j < 8 * (size_t)n_group; j++, panels += 2 * PANEL_TOKENS * 4) {
    float32x4x2_t v = vld2q_f32(x + 8 * j);
    vst1_u16(panels, round_words(vmulq_f32(v.val[0], vdupq_n_f32(PANEL_SCALE))));
    vst1_u16(panels + PANEL_TOKENS * 4, round_words(vmulq_f32(v.val[1], vdupq_n_f32(PANEL_SCALE))));
  }
}

/* As ops_quantize_group. */
ALWAYS_INLINE void quantize_group(int8_t *q, float *scale, int32_t *sum, const float *x) {
  const V magic = vdupq_n_f32(12582912.0f);
  V tops = vdupq_n_f32(0);
  for (int i = 0; i < 16; i++)
    tops = V_MAX(vabsq_f32(vld1q_f32(x + 4 * i)), tops);
  float top = vmaxvq_f32(tops), inverse = top > 0 ? 127.0f / top : 0.0f;
  inverse = inverse > 3e38f ? 0.0f : inverse;
  int32x4_t total = vdupq_n_s32(0);
  for (int i = 0; i < 4; i++) {
    int32x4_t n[4];
    for (int k = 0; k < 4; k++) {
      V v = vsubq_f32(vaddq_f32(vmulq_f32(vld1q_f32(x + 16 * i + 4 * k), vdupq_n_f32(inverse)), magic), magic);
      n[k] = vcvtq_s32_f32(V_MAX(v, vdupq_n_f32(-127.0f))); /* NaN: -127 */
      total = vaddq_s32(total, n[k]);
    }
    int16x8_t low = vcombine_s16(vmovn_s32(n[0]), vmovn_s32(n[1])), high = vcombine_s16(vmovn_s32(n[2]), vmovn_s32(n[3]));
    vst1q_s8(q + 16 * i, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  }
  *sum = vaddvq_s32(total);
  *scale = top * (1.0f / 8890.0f);
}

/* ---- nest: tiles to exact bits ----------------------------------------------------------------------- */

/* A byte for each bit or nibble of a record's streams, and room for a vector past the last one that plane A can ask for. */
typedef uint8_t Stream[NEST_TILE + 64];
enum { ESCAPED = 31 }; /* the exponent that marks an escape byte; all others are smaller */

/* A tile while it is decoded. */
typedef struct TileDecoder {
  const uint8_t *a, *x, *b;
  const uint8_t *q, *t;       /* the next of the two streams: exponents of CELL_SMALL, T bits as 0x40 or 0 */
  const uint8_t *q_end, *t_end;
  const uint8_t *escape;      /* past the next one, backwards */
  bool has_escape;
  /* by nibble: what it has of the streams, as Ranks want it; nest_exponent and nest_bit6; 128 but for CELL_SMALL */
  uint8x16_t flags, exponent, bit6, not_small;
} TileDecoder;

/* A constant that the compiler does not know, so that it is not loaded anew at every use. */
ALWAYS_INLINE uint8x16_t constant(uint8x16_t v) {
  __asm__("" : "+w"(v));
  return v;
}

ALWAYS_INLINE void tables_init(TileDecoder *d) {
  d->flags = constant((uint8x16_t){0, 0, 0, 0, 0, 1, 1, 17, 0, 0, 0, 0, 0, 1, 1, 17});
  d->exponent = constant((uint8x16_t){16, 16, 17, 17, 18, 18, 15, 0, 16, 16, 17, 17, 18, 18, 15, 0});
  d->bit6 = constant((uint8x16_t){0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0});
  d->not_small = constant((uint8x16_t){128, 128, 128, 128, 128, 128, 128, 0, 128, 128, 128, 128, 128, 128, 128, 0});
}

/* count nibbles to bytes, up to 32 more. */
ALWAYS_INLINE void expand_nibbles(uint8_t *out, const uint8_t *in, uint32_t count, bool has_escape) {
  for (uint32_t i = 0; i < count; i += 32) {
    uint8x16_t v = vld1q_u8(in + i / 2), low = vandq_u8(v, vdupq_n_u8(15)), high = vshrq_n_u8(v, 4);
    uint8x16_t q[2] = {vzip1q_u8(low, high), vzip2q_u8(low, high)};
    for (uint32_t k = 0; k < 2; k++) {
      if (UNLIKELY(has_escape))
        q[k] = vorrq_u8(q[k], vandq_u8(vceqq_u8(q[k], vdupq_n_u8(15)), vdupq_n_u8(ESCAPED)));
      vst1q_u8(out + i + 16 * k, q[k]);
    }
  }
}

/* The bits of n bytes to bytes, up to 56 bits more. */
ALWAYS_INLINE void expand_bits(uint8_t *out, const uint8_t *in, size_t n) {
  const uint8x16_t spread = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  const int8x16_t to_bit6 = {6, 5, 4, 3, 2, 1, 0, -1, 6, 5, 4, 3, 2, 1, 0, -1};
  for (size_t i = 0; i < n; i += 8) {
    uint8x16_t v = vreinterpretq_u8_u64(vdupq_n_u64(load_u64(in + i)));
    for (uint8_t k = 0; k < 4; k++) {
      uint8x16_t bits = vshlq_u8(vqtbl1q_u8(v, vaddq_u8(spread, vdupq_n_u8(2 * k))), to_bit6);
      vst1q_u8(out + 8 * i + 16 * k, vandq_u8(bits, vdupq_n_u8(0x40)));
    }
  }
}

ALWAYS_INLINE void tile_decoder_init(TileDecoder *d, Stream q, Stream t, const Matrix *w, size_t tile) {
  d->a = w->a + 512 * tile, d->x = w->x + 16 * tile, d->b = w->b + 768 * tile;
  const uint8_t *record = w->side + load_u32(w->side + 4 * tile), *nibbles = record + NEST_HEADER;
  nest_prefetch(d->a, d->b, record);
  uint32_t header = record[0] | (uint32_t)record[1] << 8, n_q = header & NEST_COUNT, count = n_q < NEST_TILE ? n_q : NEST_TILE;
  d->has_escape = header & NEST_HAS_ESCAPE;
  d->escape = w->side + load_u32(w->side + 4 * tile + 4);
  const uint8_t *bits = nibbles + (count + 1) / 2;
  size_t n = d->escape > bits ? min_size((size_t)(d->escape - bits), NEST_TILE / 8) : 0; /* escapes, too: no matter */
  expand_nibbles(q, nibbles, count, d->has_escape);
  expand_bits(t, bits, n);
  tables_init(d);
  d->q = q, d->q_end = q + n_q, d->t = t, d->t_end = t + 8 * n;
}

/* True if plane A asked for as many nibbles q as the record has, and for no T bits that it has not; else it is damaged and
 * the specification must decide. */
ALWAYS_INLINE bool tile_decoder_fits(const TileDecoder *d) { return d->q == d->q_end && d->t <= d->t_end; }

/* The low six mantissa bits of half line hl = 0..3 of a triple of lines, byte b points at; the upper two bits are anything. */
ALWAYS_INLINE uint8x16_t low6_of(const uint8_t *b, const uint32_t hl) {
  if (hl < 3)
    return vld1q_u8(b + 64 * hl);
  uint8x16_t v = vsriq_n_u8(vld1q_u8(b + 64), vld1q_u8(b + 128), 2); /* the fourth one's are the upper two of each byte */
  return vshrq_n_u8(vsriq_n_u8(vld1q_u8(b), v, 2), 2);
}

/* Nibbles of half line hl of 16 bytes of a line. */
ALWAYS_INLINE uint8x16_t nibbles_of(uint8x16_t line, const uint32_t hl) {
  return hl % 2 ? vshrq_n_u8(line, 4) : vandq_u8(line, vdupq_n_u8(15));
}

/* How many T bits (low nibbles) and nibbles q (high ones) come before each weight of its 16 weights, and where the two
 * streams are at each 16. */
typedef struct Ranks {
  uint8x16_t before[4];
  const uint8_t *t[4], *q[4];
} Ranks;

/* flags: by weight 1 for a T bit, 16 for a nibble. No sum below carries into the next nibble or byte. */
ALWAYS_INLINE Ranks rank(TileDecoder *d, const uint8x16_t flags[4]) {
  const uint32x4_t add_up = vdupq_n_u32(0x01010100);
  const uint64_t low = 0x0f0f0f0f0f0f0f0fu, sum_up = 0x0101010101010101u;
  uint8x16_t by4 = vpaddq_u8(vpaddq_u8(flags[0], flags[1]), vpaddq_u8(flags[2], flags[3]));
  uint8x16_t before = vreinterpretq_u8_u32(vmulq_u32(vreinterpretq_u32_u8(by4), add_up)); /* of dwords in their 16 */
  uint16x8_t upper = vreinterpretq_u16_u8(vzip1q_u8(before, before)), lower = vreinterpretq_u16_u8(vzip2q_u8(before, before));
  uint16x8_t base[4] = {vzip1q_u16(upper, upper), vzip2q_u16(upper, upper), vzip1q_u16(lower, lower), vzip2q_u16(lower, lower)};
  uint64_t by8 = vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(by4, by4)), 0);
  uint64_t t = (by8 & low) * sum_up, q = (by8 >> 4 & low) * sum_up; /* byte k: of the first 8 (k + 1) */
  Ranks r;
  for (uint32_t i = 0; i < 4; i++) {
    r.before[i] = vreinterpretq_u8_u32(vmlaq_u32(vreinterpretq_u32_u16(base[i]), vreinterpretq_u32_u8(flags[i]), add_up));
    r.t[i] = d->t + (i ? t >> (16 * i - 8) & 255 : 0), r.q[i] = d->q + (i ? q >> (16 * i - 8) & 255 : 0);
  }
  d->t += t >> 56, d->q += q >> 56;
  return r;
}

/* A half line, before its words are made. */
typedef struct HalfLine {
  uint8x16_t nibble[4], flags[4];
  Ranks rank;
  const uint8_t *b;
} HalfLine;

/* Half line hl = 0..3 of lines 2 pair and 2 pair + 1. */
ALWAYS_INLINE HalfLine next_half_line(TileDecoder *d, uint32_t pair, const uint32_t hl) {
  HalfLine h = {.b = d->b + 192 * pair};
  for (int i = 0; i < 4; i++) {
    h.nibble[i] = nibbles_of(vld1q_u8(d->a + 128 * pair + 64 * (hl / 2) + 16 * i), hl);
    h.flags[i] = vqtbl1q_u8(d->flags, h.nibble[i]);
  }
  h.rank = rank(d, h.flags);
  return h;
}

/* Four rows of it in relative form (codec.h), that is words 8 i and words 32 + 8 i of TileWords, and seven more each. */
ALWAYS_INLINE uint16x8x2_t decode_rows(const TileDecoder *d, const HalfLine *h, const uint32_t hl, const int i) {
  /* where there is nothing to look up, indices are past the table: tbl gives 0 then, tbx what was there */
  uint8x16_t t_at = vbslq_u8(vdupq_n_u8(15), h->rank.before[i], vceqzq_u8(h->flags[i]));
  uint8x16_t q_at = vsriq_n_u8(vqtbl1q_u8(d->not_small, h->nibble[i]), h->rank.before[i], 4);
  uint8x16_t t = vqtbl1q_u8(vld1q_u8(h->rank.t[i]), t_at);
  uint8x16_t exponent = vqtbx1q_u8(vqtbl1q_u8(d->exponent, h->nibble[i]), vld1q_u8(h->rank.q[i]), q_at);
  uint8x16_t low = vsliq_n_u8(low6_of(h->b + 16 * i, hl), vqtbl1q_u8(d->bit6, h->nibble[i]), 6);
  low = vaddq_u8(vsliq_n_u8(low, exponent, 7), t); /* of CELL_TOP, whose exponent is even, this may carry */
  uint8x16_t high = vsriq_n_u8(vshlq_n_u8(h->nibble[i], 4), exponent, 1);
  return (uint16x8x2_t){{vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))}};
}

/* Does DO(pair, hl) for the 16 half lines of a tile, hl known when this is compiled. */
#define EACH_HALF_LINE(DO)                                                                                             \
  for (uint32_t pair_ = 0; pair_ < 4; pair_++) {                                                                       \
    DO(pair_, 0);                                                                                                      \
    DO(pair_, 1);                                                                                                      \
    DO(pair_, 2);                                                                                                      \
    DO(pair_, 3);                                                                                                      \
  }

ALWAYS_INLINE void store_words(uint16_t *half_line, const uint16x8_t v[8]) {
  for (int k = 0; k < 8; k++)
    vst1q_u16(half_line + 8 * k, v[k]);
}

/* (G - NEST_BIAS) << 7 by word of the eight vectors of a half line. */
ALWAYS_INLINE void group_words(uint16x8_t group[8], const uint8_t *x) {
  uint8x16_t rows = vld1q_u8(x), first = {0, 16, 0, 16, 0, 16, 0, 16, 1, 16, 1, 16, 1, 16, 1, 16};
  for (int k = 0; k < 8; k++) {
    uint8_t row = (uint8_t)(k % 4 * 4 + k / 4 * 2);
    uint8x16_t at = vbslq_u8(vceqq_u8(first, vdupq_n_u8(16)), first, vaddq_u8(first, vdupq_n_u8(row)));
    group[k] = vshlq_n_u16(vsubq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(rows, at)), vdupq_n_u16(NEST_BIAS)), 7);
  }
}

/* Weights of CELL_SMALL whose exponent is an escape byte, marked in relative form: gives them that in out. */
static __attribute__((noinline, cold)) void set_escapes(TileDecoder *d, const uint16x8_t relative[8], uint16_t *out) {
  uint16_t words[64];
  store_words(words, relative);
  for (uint32_t n = 0; n < 64; n++) {
    uint32_t at = tile_word(n / 4, n % 4), word = words[at];
    if ((word >> 7 & 255u) == ESCAPED)
      out[at] = (uint16_t)((word & 0x807fu) | (uint32_t)*--d->escape << 7);
  }
}

/* From relative form: adds the groups' exponents, but not to zeros and denormals. */
ALWAYS_INLINE void exact_half_line(TileDecoder *d, const uint16x8_t group[8], uint32_t pair, const uint32_t hl, TileWords out) {
  uint16x8_t v[8], exact[8];
  HalfLine h = next_half_line(d, pair, hl);
  for (int i = 0; i < 4; i++) {
    uint16x8x2_t rows = decode_rows(d, &h, hl, i);
    v[i] = rows.val[0], v[4 + i] = rows.val[1];
  }
  for (int k = 0; k < 8; k++)
    exact[k] = vaddq_u16(v[k], vandq_u16(group[k], vtstq_u16(v[k], vdupq_n_u16(0x7f80))));
  store_words(out[4 * pair + hl], exact);
  if (UNLIKELY(d->has_escape))
    set_escapes(d, v, out[4 * pair + hl]);
}

static __attribute__((noinline)) void set_nest_decode_tile(const Matrix *w, size_t t, TileWords out) {
  Stream q_bytes, t_bytes;
  TileDecoder d;
  uint16x8_t group[8];
  tile_decoder_init(&d, q_bytes, t_bytes, w, t);
  group_words(group, d.x);
#define EXACT(pair, hl) exact_half_line(&d, group, pair, hl, out)
  EACH_HALF_LINE(EXACT)
  if (UNLIKELY(!tile_decoder_fits(&d)))
    nest_decode_tile(w, t, out);
}

ALWAYS_INLINE void relative_half_line(TileDecoder *d, uint32_t pair, const uint32_t hl, TileWords out) {
  HalfLine h = next_half_line(d, pair, hl);
  for (int i = 0; i < 4; i++) {
    uint16x8x2_t rows = decode_rows(d, &h, hl, i);
    vst1q_u16(out[4 * pair + hl] + 8 * i, rows.val[0]);
    vst1q_u16(out[4 * pair + hl] + 32 + 8 * i, rows.val[1]);
  }
}

/* 2^(G - NEST_BIAS) */
ALWAYS_INLINE void units(Sums unit, const uint8_t *x) {
  uint8x16_t rows = vld1q_u8(x);
  uint16x8_t half[2] = {vmovl_u8(vget_low_u8(rows)), vmovl_high_u8(rows)};
  for (int i = 0; i < 4; i++) {
    uint32x4_t e = i % 2 ? vmovl_high_u16(half[i / 2]) : vmovl_u16(vget_low_u16(half[i / 2]));
    e = vshlq_n_u32(vaddq_u32(e, vdupq_n_u32(127 - NEST_BIAS)), 23);
    vst1q_f32(unit + 4 * i, vreinterpretq_f32_u32(vzip1q_u32(e, e)));
    vst1q_f32(unit + 16 + 4 * i, vreinterpretq_f32_u32(vzip2q_u32(e, e)));
  }
}

static __attribute__((noinline)) void nest_relative_tile(const Matrix *w, size_t t, Tile *out) {
  Stream q_bytes, t_bytes;
  TileDecoder d;
  tile_decoder_init(&d, q_bytes, t_bytes, w, t);
  units(out->unit, d.x);
#define RELATIVE(pair, hl) relative_half_line(&d, pair, hl, out->words)
  EACH_HALF_LINE(RELATIVE)
  if (UNLIKELY(!tile_decoder_fits(&d)))
    nest_decode_relative(w, t, out->words);
}

/* ---- nest: blocks of a KV cache ------------------------------------------------------------------------ */

/* As nest_columns. */
static void set_nest_columns(const Matrix *w, size_t t0, size_t t1, uint16_t *out, size_t ld) {
  for (size_t t = t0; t < t1; t++, out += NEST_ROWS) {
    TileWords tile;
    set_nest_decode_tile(w, t, tile);
    for (size_t hl = 0; hl < 16; hl++) {
      uint16x8x4_t rows01 = vld4q_u16(tile[hl]), rows23 = vld4q_u16(tile[hl] + 32); /* of each four, by column */
      for (size_t c = 0; c < 4; c++) {
        uint32x4_t a = vreinterpretq_u32_u16(rows01.val[c]), b = vreinterpretq_u32_u16(rows23.val[c]);
        uint16_t *to = out + (hl / 2 * 8 + hl % 2 + 2 * c) * ld;
        vst1q_u16(to, vreinterpretq_u16_u32(vzip1q_u32(a, b)));
        vst1q_u16(to + 8, vreinterpretq_u16_u32(vzip2q_u32(a, b)));
      }
    }
  }
}

/* ---- raw ------------------------------------------------------------------------------------------- */

/* 16 rows of 64 columns. */
ALWAYS_INLINE void raw_words(const uint16_t *p, size_t stride, TileWords out) {
  for (uint32_t r = 0; r < NEST_ROWS; r += 2, p += 2 * stride)
    for (uint32_t j = 0; j < 8; j++) {
      uint16x8_t upper = vld1q_u16(p + 8 * j), lower = vld1q_u16(p + stride + 8 * j);
      vst1q_u16(out[2 * j] + tile_word(r, 0), vuzp1q_u16(upper, lower));
      vst1q_u16(out[2 * j + 1] + tile_word(r, 0), vuzp2q_u16(upper, lower));
    }
}

/* Bit streams are read as scalar code does: vectors do not pay. */
static void set_cass_next_tile(CassReader *r, TileWords out) { cass_next_tile(r, out); }

/* ---- target product --------------------------------------------------------------------------------- */

ALWAYS_INLINE V odd_words(uint16x8_t v) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(v), vdupq_n_u32(0xffff0000u)));
}
ALWAYS_INLINE V even_words(uint16x8_t v) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(v), 16)); }

/* A token's four activations of a half line: columns +2 and +6, then +0 and +4, each pair twice. */
typedef struct Pairs {
  V odd, even;
} Pairs;
ALWAYS_INLINE Pairs pairs_of(const uint16_t *x) {
  uint16x8_t v = vreinterpretq_u16_u64(vdupq_n_u64(load_u64((const uint8_t *)x)));
  return (Pairs){odd_words(v), even_words(v)};
}

/* Two rows of a half line times a token: s0 and s1 of each. */
ALWAYS_INLINE V multiply_rows(V s, uint16x8_t w, Pairs x) {
  return vfmaq_f32(vfmaq_f32(s, odd_words(w), x.odd), even_words(w), x.even);
}

/* A half line times n tokens. s[8 t ..]: of each row s0 and s1, for the rows of the eight vectors. */
ALWAYS_INLINE void multiply_half_line(V *s, const uint16_t *half_line, const uint16_t *x, const int n) {
  Pairs pairs[MATMUL_CHUNK];
  for (int t = 0; t < n; t++)
    pairs[t] = pairs_of(x + 4 * t);
  for (int k = 0; k < 8; k++)
    for (int t = 0; t < n; t++)
      s[8 * t + k] = multiply_rows(s[8 * t + k], vld1q_u16(half_line + 8 * k), pairs[t]);
}

ALWAYS_INLINE void clear_sums(V *s, const int n) {
  for (int k = 0; k < n; k++)
    s[k] = vdupq_n_f32(0);
}

/* sums += s * unit */
ALWAYS_INLINE void add_sums(Sums sums, const V s[8], const Sums unit) {
  for (int k = 0; k < 8; k++)
    vst1q_f32(sums + 4 * k, vfmaq_f32(vld1q_f32(sums + 4 * k), s[k], vld1q_f32(unit + 4 * k)));
}

/* sums = a row block's hot columns times a token whose activations begin at hot */
static void multiply_hot(Sums sums, const Matrix *w, size_t block, const uint16_t *hot) {
  V s[8];
  clear_sums(s, 8);
  for (uint32_t i = 0; i < w->n_hot / 4; i++)
    multiply_half_line(s, hot_half_line(w, block, i), hot + i * PANEL_TOKENS * 4, 1);
  for (int k = 0; k < 8; k++)
    vst1q_f32(sums + 4 * k, s[k]);
}

/* s0 + s1 of the 16 rows, without the panels' scale */
ALWAYS_INLINE void finish_sums(float *y, const Sums sums) {
  for (int i = 0; i < 16; i += 4) {
    V sum = vpaddq_f32(vld1q_f32(sums + i), vld1q_f32(sums + 16 + i));
    vst1q_f32(y + i, vmulq_f32(sum, vdupq_n_f32(1 / PANEL_SCALE)));
  }
}

ALWAYS_INLINE void decode_multiply(V s[8], TileDecoder *d, uint32_t pair, const uint32_t hl, const uint16_t *panel) {
  Pairs x = pairs_of(panel + (4 * pair + hl) * PANEL_TOKENS * 4);
  HalfLine h = next_half_line(d, pair, hl);
  for (int i = 0; i < 4; i++) {
    uint16x8x2_t rows = decode_rows(d, &h, hl, i);
    s[i] = multiply_rows(s[i], rows.val[0], x), s[4 + i] = multiply_rows(s[4 + i], rows.val[1], x);
  }
}

/* sums += a tile in relative form times a token, the weights never leaving registers. False if the tile is damaged. */
static __attribute__((noinline)) bool nest_tile(Sums sums, const Matrix *w, size_t t, const uint16_t *panel) {
  Stream q_bytes, t_bytes;
  Sums unit;
  TileDecoder d;
  V s[8];
  tile_decoder_init(&d, q_bytes, t_bytes, w, t);
  clear_sums(s, 8);
#define MULTIPLY(pair, hl) decode_multiply(s, &d, pair, hl, panel)
  EACH_HALF_LINE(MULTIPLY)
  units(unit, d.x);
  add_sums(sums, s, unit);
  return tile_decoder_fits(&d);
}

/* Tiles of groups in turn times n <= 2 tokens; the sums wait in memory meanwhile. */
ALWAYS_INLINE void tiles_chunk_n(Sums *sums, const Tile *tile, size_t n_tile, const uint16_t *panel, const int n) {
  for (; n_tile; n_tile--, tile++) {
    V s[8 * MATMUL_CHUNK];
    clear_sums(s, 8 * n);
    for (int hl = 0; hl < 16; hl++, panel += PANEL_TOKENS * 4)
      multiply_half_line(s, tile->words[hl], panel, n);
    for (int t = 0; t < n; t++)
      add_sums(sums[t], s + 8 * t, tile->unit);
  }
}

/* A row block of a nest matrix times one token. False if it is damaged. */
static bool nest_block(float *y, const Matrix *w, size_t block, const uint16_t *panel, const uint16_t *hot) {
  bool fits = true;
  Sums sums = {0};
  if (w->n_hot)
    multiply_hot(sums, w, block, hot);
  for (size_t t = block * w->n_group; t < (block + 1) * w->n_group; t++, panel += PANEL_WORDS) {
    if (UNLIKELY(!nest_is_relative(w, t))) {
      Tile tile;
      nest_product_tile(w, t, &tile);
      tiles_chunk(&sums, &tile, 1, panel, 1);
    } else {
      fits &= nest_tile(sums, w, t, panel);
    }
  }
  finish_sums(y, sums);
  return fits;
}

/* ---- draft product ---------------------------------------------------------------------------------- */

enum { DRAFT_CHUNK = 4 }; /* tokens whose integer sums take 16 registers */

/* sum[t]: integer dot products of 16 rows of a tile with n tokens' q, [n][ld]. */
ALWAYS_INLINE void draft_dot(int32x4_t sum[DRAFT_CHUNK][4], const uint8_t *a, const int8_t *q, size_t ld, const int n) {
  const int8x16_t value = {22, 31, 43, 61, 85, 119, 13, 4, -22, -31, -43, -61, -85, -119, -13, -4};
  const uint8x16_t even_odd = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15}; /* as the nibbles of a line */
  for (int j = 0; j < 8; j += 2) {
    int8x16_t x[DRAFT_CHUNK];
    for (int t = 0; t < n; t++)
      x[t] = vqtbl1q_s8(vld1q_s8(q + (size_t)t * ld + 8 * j), even_odd);
    for (int i = 0; i < 4; i++) {
      uint8x16_t first = vld1q_u8(a + 64 * j + 16 * i), second = vld1q_u8(a + 64 * j + 64 + 16 * i);
      int8x16_t w[4] = {vqtbl1q_s8(value, nibbles_of(first, 0)), vqtbl1q_s8(value, nibbles_of(first, 1)),
                        vqtbl1q_s8(value, nibbles_of(second, 0)), vqtbl1q_s8(value, nibbles_of(second, 1))};
      for (int t = 0; t < n; t++) {
        sum[t][i] = vdotq_laneq_s32(sum[t][i], w[0], x[t], 0);
        sum[t][i] = vdotq_laneq_s32(sum[t][i], w[1], x[t], 1);
        sum[t][i] = vdotq_laneq_s32(sum[t][i], w[2], x[t], 2);
        sum[t][i] = vdotq_laneq_s32(sum[t][i], w[3], x[t], 3);
      }
    }
  }
}

/* 2^(G - 127) of 16 rows. */
ALWAYS_INLINE void draft_units(V unit[4], const uint8_t *x) {
  const uint8x16_t top = {16, 16, 16, 0, 16, 16, 16, 1, 16, 16, 16, 2, 16, 16, 16, 3}; /* to bits 31..24 */
  for (int i = 0; i < 4; i++) {
    uint8x16_t at = vaddq_u8(top, vdupq_n_u8((uint8_t)(4 * i)));
    unit[i] = vreinterpretq_f32_u32(vshrq_n_u32(vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(x), at)), 1));
  }
}

/* A row block times n <= 4 tokens, on top of y. q [n][64 n_group], scale [n][n_group] */
ALWAYS_INLINE void draft_block_n(float *y, size_t ldy, const Matrix *w, size_t block, const int8_t *q, const float *scale,
                                 const int n) {
  for (size_t g = 0; g < w->n_group; g++) {
    size_t tile = block * w->n_group + g;
    int32x4_t sum[DRAFT_CHUNK][4];
    V unit[4];
    for (int t = 0; t < n; t++)
      for (int i = 0; i < 4; i++)
        sum[t][i] = vdupq_n_s32(0);
    draft_dot(sum, w->a + 512 * tile, q + g * NEST_COLS, (size_t)w->n_group * NEST_COLS, n);
    draft_units(unit, w->x + 16 * tile);
    for (int t = 0; t < n; t++)
      for (int i = 0; i < 4; i++) {
        float *to = y + (size_t)t * ldy + 4 * i;
        V by = vmulq_n_f32(unit[i], scale[(size_t)t * w->n_group + g]);
        vst1q_f32(to, vfmaq_f32(vld1q_f32(to), vcvtq_f32_s32(sum[t][i]), by));
      }
  }
}

static void draft_block(float *y, size_t ldy, const Matrix *w, size_t block, const int8_t *q, const float *scale, uint32_t n) {
  switch (n) {
  case 1: draft_block_n(y, ldy, w, block, q, scale, 1); break;
  case 2: draft_block_n(y, ldy, w, block, q, scale, 2); break;
  case 3: draft_block_n(y, ldy, w, block, q, scale, 3); break;
  default: draft_block_n(y, ldy, w, block, q, scale, DRAFT_CHUNK); break;
  }
}

static void set_matmul_draft(float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, uint32_t block0,
                             uint32_t block1) {
  for (size_t block = block0; block < block1; block++)
    for (uint32_t i = 0; i < m; i += DRAFT_CHUNK) {
      uint32_t n = m - i < DRAFT_CHUNK ? m - i : DRAFT_CHUNK;
      float *out = y + i * ldy + block * NEST_ROWS;
      size_t at = (size_t)i * w->n_group;
      draft_begin(out, ldy, w, block, acts, i, n);
      draft_block(out, ldy, w, block, acts->q + at * NEST_COLS, acts->scale + at, n);
    }
}

/* ---- scores of a draft ------------------------------------------------------------------------------- */

enum { DRAFT_HEADS = 4 }; /* that read a block's keys together: their sums for a line take 16 registers */

/* Four channels of a half line's four positions, as nest_key_row: a magnitude is its cell's least one and what the mantissa bits
 * 5..2, shifted by cell with rounding, add to it. low6: its upper two bits are anything. */
ALWAYS_INLINE int8x16_t draft_key(uint8x16_t nibble, uint8x16_t low6) {
  const uint8x16_t least = {16, 24, 32, 48, 65, 97, 10, 4, 16, 24, 32, 48, 65, 97, 10, 4};
  const int8x16_t shift = {-1, -1, 0, 0, 1, 1, -2, -8, -1, -1, 0, 0, 1, 1, -2, -8};
  uint8x16_t m = vshrq_n_u8(vshlq_n_u8(low6, 2), 4);
  uint8x16_t magnitude = vaddq_u8(vqtbl1q_u8(least, nibble), vrshlq_u8(m, vqtbl1q_s8(shift, nibble)));
  uint8x16_t negative = vcgtq_u8(nibble, vdupq_n_u8(7));
  return vreinterpretq_s8_u8(vsubq_u8(veorq_u8(magnitude, negative), negative));
}

/* A half line of a tile, by four channels: of each position in turn the four. */
ALWAYS_INLINE void draft_key_half_line(const Matrix *w, size_t t, uint32_t pair, const uint32_t hl, int8_t *out) {
  const uint8x16_t to_positions = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const uint8_t *a = w->a + 512 * t + 128 * pair + 64 * (hl / 2), *b = w->b + 768 * t + 192 * pair;
  for (int i = 0; i < 4; i++) {
    int8x16_t key = draft_key(nibbles_of(vld1q_u8(a + 16 * i), hl), low6_of(b + 16 * i, hl));
    vst1q_s8(out + 16 * i, vqtbl1q_s8(key, to_positions));
  }
}

/* Keys of a block, [half line][tile]. */
static void draft_keys(const Matrix *w, uint32_t n_tile, int8_t *out) {
  for (size_t t = 0; t < n_tile; t++) {
#define KEYS(pair, hl) draft_key_half_line(w, t, pair, hl, out + 64 * ((4 * pair + hl) * n_tile + t))
    EACH_HALF_LINE(KEYS)
  }
}

/* A head's query for one block (ops_query): n = 256 high + low, with zeros to a whole tile. */
typedef struct DraftQuery {
  int8_t high[KEY_DIM_MOST], low[KEY_DIM_MOST];
  float scale;
} DraftQuery;

/* 16 channels of n = rint(u * inverse) */
ALWAYS_INLINE void draft_query_split(DraftQuery *out, const float *u, float inverse, size_t c) {
  const V magic = vdupq_n_f32(12582912.0f), least = vdupq_n_f32(-(float)QUERY_MOST);
  int16x4_t high[4], low[4];
  for (int k = 0; k < 4; k++) {
    V r = vsubq_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(u + c + 4 * (size_t)k), inverse), magic), magic);
    int32x4_t n = vcvtq_s32_f32(V_MAX(r, least)); /* NaN: least */
    high[k] = vrshrn_n_s32(n, 8), low[k] = vmovn_s32(n);
  }
  for (int k = 0; k < 4; k += 2) {
    vst1_s8(out->high + c + 4 * (size_t)k, vmovn_s16(vcombine_s16(high[k], high[k + 1])));
    vst1_s8(out->low + c + 4 * (size_t)k, vmovn_s16(vcombine_s16(low[k], low[k + 1])));
  }
}

static void draft_query(DraftQuery *out, const AttentionArgs *a, uint32_t h, const Matrix *w) {
  float u[KEY_DIM_MOST];
  size_t n = (a->head_dim + 15) / 16 * 16;
  memcpy(u, a->q + (size_t)h * a->head_dim, a->head_dim * sizeof *u);
  memset(u + a->head_dim, 0, (n - a->head_dim) * sizeof *u);
  V tops = vdupq_n_f32(0);
  for (size_t c = 0; c < n; c += 16) {
    V unit[4];
    draft_units(unit, w->x + c);
    for (size_t k = 0; k < 4; k++) {
      V v = vmulq_f32(vld1q_f32(u + c + 4 * k), unit[k]);
      tops = V_MAX(vabsq_f32(v), tops);
      vst1q_f32(u + c + 4 * k, v);
    }
  }
  float top = vmaxvq_f32(tops), inverse = top > 0 ? (float)QUERY_MOST / top : 0.0f;
  inverse = inverse > 3e38f ? 0.0f : inverse;
  for (size_t c = 0; c < n; c += 16)
    draft_query_split(out, u, inverse, c);
  out->scale = top * (1.0f / (QUERY_MOST * 64));
}

/* Integer sums of a half line's four positions. */
typedef struct KeySums {
  int32x4_t high, low;
} KeySums;

/* s += a half line of one tile times 16 channels of a query */
ALWAYS_INLINE void add_keys(KeySums *s, const int8x16_t key[4], int8x16_t high, int8x16_t low) {
  s->high = vdotq_laneq_s32(s->high, key[0], high, 0), s->low = vdotq_laneq_s32(s->low, key[0], low, 0);
  s->high = vdotq_laneq_s32(s->high, key[1], high, 1), s->low = vdotq_laneq_s32(s->low, key[1], low, 1);
  s->high = vdotq_laneq_s32(s->high, key[2], high, 2), s->low = vdotq_laneq_s32(s->low, key[2], low, 2);
  s->high = vdotq_laneq_s32(s->high, key[3], high, 3), s->low = vdotq_laneq_s32(s->low, key[3], low, 3);
}

/* A line's eight scores, of its two half lines. */
ALWAYS_INLINE void store_scores(float *out, const KeySums s[2], float query_scale, float scale) {
  int32x4_t even = vaddq_s32(vshlq_n_s32(s[0].high, 8), s[0].low), odd = vaddq_s32(vshlq_n_s32(s[1].high, 8), s[1].low);
  vst1q_f32(out, vmulq_n_f32(vmulq_n_f32(vcvtq_f32_s32(vzip1q_s32(even, odd)), query_scale), scale));
  vst1q_f32(out + 4, vmulq_n_f32(vmulq_n_f32(vcvtq_f32_s32(vzip2q_s32(even, odd)), query_scale), scale));
}

/* n heads, from head on */
ALWAYS_INLINE void scores_draft_n(const AttentionArgs *a, const int8_t *keys, const DraftQuery *q, uint32_t n_tile,
                                  uint32_t pos, uint32_t head, const int n) {
  for (size_t line = 0; line < 8; line++) {
    KeySums s[DRAFT_HEADS][2];
    for (int h = 0; h < n; h++)
      for (int i = 0; i < 2; i++)
        s[h][i].high = s[h][i].low = vdupq_n_s32(0);
    for (size_t t = 0; t < n_tile; t++)
      for (size_t i = 0; i < 2; i++) {
        int8x16x4_t key = vld1q_s8_x4(keys + 64 * ((2 * line + i) * n_tile + t));
        for (int h = 0; h < n; h++)
          add_keys(&s[h][i], key.val, vld1q_s8(q[h].high + 16 * t), vld1q_s8(q[h].low + 16 * t));
      }
    for (int h = 0; h < n; h++)
      store_scores(a->scores + (head + (size_t)h) * a->ld_scores + pos + 8 * line, s[h], q[h].scale, a->scale);
  }
}

/* As ops_scores_draft. */
static void set_scores_draft(const AttentionArgs *a, const Matrix *w, uint32_t pos) {
  int8_t keys[KEY_DIM_MOST * NEST_COLS];
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
    case 3: scores_draft_n(a, keys, q, n_tile, pos, h, 3); break;
    default: scores_draft_n(a, keys, q, n_tile, pos, h, DRAFT_HEADS); break;
    }
  }
}

const Kernels kernels_neon = {.name = "neon",
                              .nest_decode_tile = set_nest_decode_tile,
                              .nest_columns = set_nest_columns,
                              .cass_next_tile = set_cass_next_tile,
                              .matmul = set_matmul,
                              .matmul_draft = set_matmul_draft,
                              .scores_draft = set_scores_draft,
                              SIMD_OPS_TABLE};
