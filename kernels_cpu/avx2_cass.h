/* Tiles of cass1 and cass2 with AVX2 and BMI2: PDEP spreads fields and exponents to the columns of a bitmap, four at a time.
 * Same bits as cass_next_tile, whatever the parts hold. Part of avx2.c. */
#ifndef CASS_AVX2_CASS_H
#define CASS_AVX2_CASS_H

typedef struct RowWords {
  _Alignas(32) uint16_t w[NEST_COLS];
} RowWords;

static const uint64_t each_word = 0x0001000100010001u;

/* All bits of the words of four columns that are in a mask's low four. */
ALWAYS_INLINE uint64_t words_of(uint64_t mask) { return _pdep_u64(mask, each_word) * 0xffff; }

ALWAYS_INLINE void store_words(RowWords *out, uint32_t k, uint64_t words) { memcpy(out->w + k, &words, sizeof words); }

/* Fields of so many bits, of the weights in mask, by column; zero elsewhere. */
ALWAYS_INLINE void take_fields(CassQueue *q, uint64_t mask, uint32_t width, RowWords *out) {
  const uint64_t field = each_word * ((1u << width) - 1);
  uint32_t at = q->at;
  for (uint32_t k = 0; k < NEST_COLS; k += 4, mask >>= 4) {
    const uint8_t *p = q->bits + at / 8;
    uint64_t bits = load_u64(p) >> at % 8 | load_u64(p + 8) << 1 << (63 - at % 8); /* << 1 <<: by 64 is to zero */
    store_words(out, k, _pdep_u64(_pdep_u64(bits, field), words_of(mask & 15)));
    at += width * (uint32_t)_mm_popcnt_u64(mask & 15);
  }
  q->at = at;
}

/* Exponents of the weights in mask, by column; returns the escapes, which have zero. */
ALWAYS_INLINE uint64_t take_exponents(CassStream *s, uint64_t mask, RowWords *out) {
  CassQueue *q = &s->queue[CASS_EXPONENT];
  uint8_t e[NEST_COLS + 4];
  uint32_t n = (uint32_t)_mm_popcnt_u64(mask), i = 0;
  uint64_t escapes = 0;
  while (i < n) {
    uint64_t window = cass_peek(q);
    uint32_t used = 0;
    for (; i < n && used + CASS_CODES + 1 <= 57; i++) {
      uint32_t rank = (uint32_t)_tzcnt_u64(window | 1u << CASS_CODES);
      e[i] = rank < CASS_CODES ? s->codebook[rank] : 0;
      escapes |= (uint64_t)(rank == CASS_CODES) << i;
      window >>= rank + 1, used += rank + 1;
    }
    q->at += used;
  }
  const uint8_t *next = e;
  for (uint32_t k = 0; k < NEST_COLS; k += 4) {
    uint64_t four = mask >> k & 15;
    store_words(out, k, _pdep_u64(_pdep_u64(load_u32(next), each_word * 0xff), words_of(four)));
    next += _mm_popcnt_u64(four);
  }
  return _pdep_u64(escapes, mask);
}

/* words |= fields of a sign and n bits, the lowest of which becomes bit `low`. */
ALWAYS_INLINE void add_fields(RowWords *words, const RowWords *field, uint32_t n, uint32_t low) {
  const __m256i magnitude = _mm256_set1_epi16((short)((1u << n) - 1)), sign = _mm256_set1_epi16((short)0x8000);
  const __m128i up = _mm_cvtsi32_si128((int)(15 - n)), by = _mm_cvtsi32_si128((int)low);
  for (uint32_t k = 0; k < NEST_COLS; k += 16) {
    __m256i v = load(field->w + k), word = _mm256_sll_epi16(_mm256_and_si256(v, magnitude), by);
    word = _mm256_or_si256(word, _mm256_and_si256(_mm256_sll_epi16(v, up), sign));
    store(words->w + k, _mm256_or_si256(load(words->w + k), word));
  }
}

/* words |= v << by */
ALWAYS_INLINE void add_shifted(RowWords *words, const RowWords *v, int by) {
  for (uint32_t k = 0; k < NEST_COLS; k += 16)
    store(words->w + k, _mm256_or_si256(load(words->w + k), _mm256_sll_epi16(load(v->w + k), _mm_cvtsi32_si128(by))));
}

/* Fields and, if they are coded, exponents of the weights in mask; lower: bits of other weights that come between. */
ALWAYS_INLINE void take_weights(CassStream *s, uint64_t mask, bool coded, uint32_t n, uint32_t low, uint64_t others,
                                uint32_t lower, RowWords *words) {
  CassQueue *q = &s->queue[CASS_MANTISSA];
  RowWords part;
  uint64_t escaped = 0;
  if (coded) {
    escaped = take_exponents(s, mask, &part);
    add_shifted(words, &part, 7);
  }
  if (lower) {
    take_fields(q, others, lower, &part);
    add_shifted(words, &part, 0);
  }
  take_fields(q, mask, n + 1, &part);
  add_fields(words, &part, n, low);
  for (; escaped; escaped &= escaped - 1)
    words->w[__builtin_ctzll(escaped)] |= (uint16_t)(cass_take(q, 8) << 7);
}

ALWAYS_INLINE void add_half(const CassReader *r, uint64_t kept, RowWords *words) {
  const __m256i zero = _mm256_setzero_si256();
  RowWords half;
  for (uint32_t k = 0; k < NEST_COLS; k += 4)
    store_words(&half, k, words_of(kept >> k & 15) & each_word * (64u >> r->mantissa_bits));
  for (uint32_t k = 0; k < NEST_COLS; k += 16) {
    __m256i v = load(words->w + k), add = load(half.w + k);
    if (r->mx) /* not where the rest is zero */
      add = _mm256_andnot_si256(_mm256_cmpeq_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x7fff)), zero), add);
    store(words->w + k, _mm256_or_si256(v, add));
  }
}

/* As cass_normalise. */
ALWAYS_INLINE __m256i normalise(__m256i v, uint32_t group) {
  const __m256i g = _mm256_set1_epi16((short)group), none = _mm256_setzero_si256();
  __m256i sign = _mm256_and_si256(v, _mm256_set1_epi16((short)0x8000)), m = _mm256_and_si256(v, _mm256_set1_epi16(255));
  __m256i shifted = m, e = g; /* shifted up to bit 7, by 4, 2 and 1 where that fits */
  for (int by = 4; by; by /= 2) {
    __m256i fits = _mm256_cmpgt_epi16(_mm256_set1_epi16((short)(256 >> by)), shifted);
    shifted = _mm256_blendv_epi8(shifted, _mm256_slli_epi16(shifted, by), fits);
    e = _mm256_sub_epi16(e, _mm256_and_si256(fits, _mm256_set1_epi16((short)by)));
  }
  __m256i normal = _mm256_or_si256(_mm256_slli_epi16(e, 7), _mm256_and_si256(shifted, _mm256_set1_epi16(127)));
  __m256i denormal = _mm256_sll_epi16(m, _mm_cvtsi32_si128(group ? (int)group - 1 : 16));
  __m256i out = _mm256_blendv_epi8(denormal, normal, _mm256_cmpgt_epi16(e, none));
  return _mm256_or_si256(sign, _mm256_andnot_si256(_mm256_cmpeq_epi16(m, none), out));
}

ALWAYS_INLINE void next_row(CassReader *r, uint64_t columns, RowWords *words) {
  const uint32_t b = r->mantissa_bits;
  uint32_t group[2] = {0, 0};
  if (cass_due(&r->s))
    cass_fill(&r->s);
  uint64_t kept = cass_peek(&r->s.queue[CASS_BITMAP]) & columns;
  r->s.queue[CASS_BITMAP].at += 64;
  memset(words, 0, sizeof *words);
  if (r->mx)
    group[0] = cass_take(&r->s.queue[CASS_EXPONENT], 8), group[1] = cass_take(&r->s.queue[CASS_EXPONENT], 8);
  take_weights(&r->s, kept, !r->mx, b + r->mx, 7 - b, 0, 0, words);
  if (r->draft) {
    if (r->half)
      add_half(r, kept, words);
  } else {
    if (cass_due(&r->v))
      cass_fill(&r->v);
    take_weights(&r->v, columns & ~kept, !r->mx && !r->raw, r->raw ? 15 : 7 + r->mx, 0, kept, 7 - b, words);
  }
  for (uint32_t k = 0; r->mx && k < NEST_COLS; k += 16)
    store(words->w + k, normalise(load(words->w + k), group[k / CASS_MX_GROUP]));
}

/* As cass_next_tile. */
static __attribute__((noinline)) void set_cass_next_tile(CassReader *r, TileWords out) {
  RowWords rows[NEST_ROWS];
  for (uint32_t i = 0; i < NEST_ROWS; i++)
    next_row(r, cass_columns(r, i), &rows[i]);
  cass_skip_tile(r);
  raw_words(rows[0].w, NEST_COLS, out);
}

#endif
