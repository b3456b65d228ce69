/* Nest side bits with BMI2, for the x86 sets: the fields of a half line become masks, bit n for weight n. */
#ifndef CASS_SIDE_BITS_H
#define CASS_SIDE_BITS_H

#include <immintrin.h>

#include "codec.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

typedef struct SideReader {
  const uint8_t *bits;
  size_t pos;            /* in bits */
  const uint8_t *escape; /* past the next one, backwards */
} SideReader;

typedef struct HalfLine {
  uint64_t cell7, cell01, odd;      /* in: c = 7, c < 2, c & 1 */
  uint64_t top;                     /* out: mantissa bit 6 */
  uint64_t minus1, minus2, minus4;  /* what comes off the exponents G - 4 of cell 0 (minus s) and G + 1 of cell 7 */
  uint64_t escapes;                 /* s = 7 */
} HalfLine;

ALWAYS_INLINE void side_reader_init(SideReader *s, const Matrix *w, size_t t) {
  s->bits = w->side + load_u32(w->side + 4 * t);
  s->pos = 0;
  s->escape = w->side + load_u32(w->side + 4 * t + 4);
}

/* 57 bits at least. */
ALWAYS_INLINE uint64_t side_peek(const uint8_t *bits, size_t pos) { return load_u64(bits + (pos >> 3)) >> (pos & 7); }

/* 64 bits: a field of more than 57 can need a ninth byte. */
static inline uint64_t side_peek64(const uint8_t *bits, size_t pos) {
  uint64_t v = side_peek(bits, pos);
  return pos & 7 ? v | (uint64_t)bits[(pos >> 3) + 8] << (64 - (pos & 7)) : v;
}

/* Any counts, a load for every field; returns the new position. */
static __attribute__((noinline, cold)) size_t read_long_half_line(SideReader s, HalfLine *f) {
  uint64_t cell0 = f->cell01 & ~f->odd;
  size_t n0 = (size_t)__builtin_popcountll(cell0);
  uint64_t over = _pdep_u64(side_peek64(s.bits, s.pos), f->cell7);
  s.pos += (size_t)__builtin_popcountll(f->cell7);
  uint64_t has_top = f->cell01 | over;
  f->top = _pdep_u64(side_peek64(s.bits, s.pos), has_top) | (f->odd & ~has_top);
  s.pos += (size_t)__builtin_popcountll(has_top);
  uint64_t s0 = _pdep_u64(side_peek64(s.bits, s.pos), cell0);
  f->minus2 = _pdep_u64(side_peek64(s.bits, s.pos + n0), cell0);
  f->minus4 = _pdep_u64(side_peek64(s.bits, s.pos + 2 * n0), cell0);
  f->escapes = s0 & f->minus2 & f->minus4;
  f->minus1 = s0 | (f->cell7 & ~over);
  return s.pos + 3 * n0;
}

/* The position depends on over, so on a load; all else hangs on the masks alone. That chain bounds the decoder's
 * speed, hence two loads a half line where the fields fit (almost always on trained weights). */
ALWAYS_INLINE void read_half_line(SideReader *s, HalfLine *f) {
  uint64_t cell0 = f->cell01 & ~f->odd;
  size_t n7 = (size_t)__builtin_popcountll(f->cell7), n0 = (size_t)__builtin_popcountll(cell0);
  size_t n7_01 = n7 + (size_t)__builtin_popcountll(f->cell01);
  if (UNLIKELY(n7 + n7_01 > 57 || n0 > 19)) {
    HalfLine any = *f; /* a copy, so that f and s stay in registers */
    s->pos = read_long_half_line(*s, &any);
    *f = any;
    return;
  }
  uint64_t bits = side_peek(s->bits, s->pos);
  uint64_t over = _pdep_u64(bits, f->cell7), has_top = f->cell01 | over;
  size_t pos = s->pos + n7_01 + (size_t)__builtin_popcountll(_bzhi_u64(bits, (uint32_t)n7));
  f->top = _pdep_u64(bits >> n7, has_top) | (f->odd & ~has_top);
  bits = side_peek(s->bits, pos);
  uint64_t s0 = _pdep_u64(bits, cell0);
  f->minus2 = _pdep_u64(bits >> n0, cell0);
  f->minus4 = _pdep_u64(bits >> 2 * n0, cell0);
  s->pos = pos + 3 * n0;
  f->escapes = s0 & f->minus2 & f->minus4;
  f->minus1 = s0 | (f->cell7 & ~over);
}

#endif
