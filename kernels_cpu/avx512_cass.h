/* Tiles of cass1 and cass2 with AVX-512 (VBMI, VBMI2), a tile row at a time. Same bits as cass_next_tile, whatever the parts
 * hold. Part of avx512_common.h. */
#ifndef CASS_AVX512_CASS_H
#define CASS_AVX512_CASS_H

/* Where fields of `width` bits begin, as seen from any bit of a byte: four of them from a qword of gathered bytes. */
typedef struct FieldBits {
  uint32_t width;        /* at most 9, or 16 */
  bool sign;             /* whether the highest bit is one */
  __m512i index, shift;
  __m512i magnitude;     /* the other bits, by word */
  __m128i up, low;       /* by how much sign and magnitude are shifted to their places */
} FieldBits;

/* Fields of n bits, and a sign or not; their lowest bit becomes bit `low` of a word. */
ALWAYS_INLINE FieldBits field_bits(uint32_t n, bool sign, uint32_t low) {
  uint32_t width = n + sign;
  const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8));
  const __m512i bytes = _mm512_set1_epi64(0x0706050403020100), fields = _mm512_set1_epi64(0x0800080008000800);
  __m512i bit = _mm512_mullo_epi16(_mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28), _mm512_set1_epi64(width));
  __m512i byte = _mm512_shuffle_epi8(_mm512_srli_epi16(bit, 3), first);
  __m512i shift = _mm512_shuffle_epi8(_mm512_and_si512(bit, _mm512_set1_epi64(7)), first);
  __m512i within = _mm512_set1_epi64((long long)(width * 0x0303020201010000u));
  return (FieldBits){width,
                     sign,
                     _mm512_add_epi8(byte, bytes),
                     _mm512_add_epi8(shift, _mm512_add_epi8(within, fields)),
                     _mm512_set1_epi16((short)((1u << n) - 1)),
                     _mm_cvtsi32_si128((int)(15 - n)),
                     _mm_cvtsi32_si128((int)low)};
}

/* The 32 fields from bit `at` on, as words; above their bits there is anything. */
ALWAYS_INLINE __m512i load_fields(const CassQueue *q, uint32_t at, const FieldBits *f) {
  const uint8_t *p = q->bits + at / 8;
  __m512i v = _mm512_loadu_si512(p);
  if (f->width == 16) {
    __m512i high = _mm512_sll_epi16(_mm512_loadu_si512(p + 2), _mm_cvtsi32_si128((int)(16 - at % 8)));
    return _mm512_or_si512(_mm512_srl_epi16(v, _mm_cvtsi32_si128((int)(at % 8))), high);
  }
  __m512i from = _mm512_add_epi8(f->shift, _mm512_set1_epi8((char)(at % 8)));
  return _mm512_multishift_epi64_epi8(from, _mm512_permutexvar_epi8(f->index, v));
}

ALWAYS_INLINE void take_fields(CassQueue *q, uint64_t mask, const FieldBits *f, __m512i words[2]) {
  uint32_t at = q->at;
  for (int h = 0; h < 2; h++, mask >>= 32) {
    __m512i v = load_fields(q, at, f);
    at += f->width * (uint32_t)__builtin_popcount((uint32_t)mask);
    __m512i word = _mm512_sll_epi16(_mm512_and_si512(v, f->magnitude), f->low);
    if (f->sign)
      word = OR_AND(word, _mm512_sll_epi16(v, f->up), _mm512_set1_epi16((short)0x8000));
    words[h] = _mm512_or_si512(words[h], _mm512_maskz_expand_epi16((__mmask32)mask, word));
  }
  q->at = at;
}

static const uint8_t place_bytes[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                        22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
                                        44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

/* Damaged code words, by the specification. ranks [n] */
static __attribute__((noinline, cold)) void damaged_ranks(CassQueue *q, uint32_t n, uint8_t *ranks) {
  for (uint32_t i = 0; i < n; i++) {
    ranks[i] = (uint8_t)__builtin_ctzll(cass_peek(q) | 1u << CASS_CODES);
    q->at += ranks[i] + 1u;
  }
}

/* As take_ranks, of code words that take more bits. */
static __attribute__((noinline)) __m512i take_long_ranks(CassQueue *q, uint64_t mask) {
  const __m512i place = _mm512_loadu_si512(place_bytes), none = _mm512_set1_epi8(-1);
  uint8_t ranks[2 * NEST_COLS];
  uint32_t n = (uint32_t)__builtin_popcountll(mask), at = q->at;
  uint64_t damaged = 0;
  for (uint32_t got = 0; got < n && !damaged;) {
    uint64_t window = load_u64(q->bits + at / 8) >> at % 8;
    uint32_t ones = (uint32_t)__builtin_popcountll(window), want = n - got, some = ones < want ? ones : want;
    __m512i one = _mm512_maskz_compress_epi8(_cvtu64_mask64(window), place);
    __m512i before = _mm512_mask_permutexvar_epi8(none, ~(__mmask64)1, _mm512_add_epi8(place, none), one);
    __m512i rank = _mm512_add_epi8(_mm512_sub_epi8(one, before), none);
    _mm512_storeu_si512(ranks + got, rank);
    damaged = _cvtmask64_u64(_mm512_cmpgt_epu8_mask(rank, _mm512_set1_epi8(CASS_CODES))) & _bzhi_u64(~0ull, some);
    damaged |= !window;
    at += ones < want ? 64 - (uint32_t)_lzcnt_u64(window) : (uint32_t)_tzcnt_u64(_pdep_u64(1ull << (want - 1), window)) + 1;
    got += some;
  }
  if (damaged)
    damaged_ranks(q, n, ranks);
  else
    q->at = at;
  return _mm512_maskz_expand_epi8(_cvtu64_mask64(mask), _mm512_loadu_si512(ranks));
}

/* Ranks of the weights in mask, by column: distances between the ones of the next 128 bits. */
ALWAYS_INLINE __m512i take_ranks(CassQueue *q, uint64_t mask) {
  const __m512i place = _mm512_loadu_si512(place_bytes), none = _mm512_set1_epi8(-1);
  const uint8_t *p = q->bits + q->at / 8;
  uint32_t shift = q->at % 8, n = (uint32_t)__builtin_popcountll(mask);
  uint64_t word[3] = {load_u64(p), load_u64(p + 8), load_u64(p + 16)}; /* << 1 <<: a shift by 64 is one to zero */
  uint64_t low = word[0] >> shift | word[1] << 1 << (63 - shift), high = word[1] >> shift | word[2] << 1 << (63 - shift);
  uint32_t ones = (uint32_t)__builtin_popcountll(low);
  __m512i one = _mm512_maskz_compress_epi8(_cvtu64_mask64(low), place);
  __m512i more = _mm512_maskz_compress_epi8(_cvtu64_mask64(high), _mm512_add_epi8(place, _mm512_set1_epi8(64)));
  __m512i later = _mm512_sub_epi8(place, _mm512_set1_epi8((char)ones));
  one = _mm512_mask_permutexvar_epi8(one, ~_cvtu64_mask64(_bzhi_u64(~0ull, ones)), later, more);
  __m512i before = _mm512_mask_permutexvar_epi8(none, ~(__mmask64)1, _mm512_add_epi8(place, none), one);
  __m512i rank = _mm512_add_epi8(_mm512_sub_epi8(one, before), none);
  __mmask64 wanted = _cvtu64_mask64(_bzhi_u64(~0ull, n));
  bool there = ones + (uint32_t)__builtin_popcountll(high) >= n;
  if (UNLIKELY(!there || _mm512_mask_cmpgt_epu8_mask(wanted, rank, _mm512_set1_epi8(CASS_CODES))))
    return take_long_ranks(q, mask);
  uint32_t in_low = (uint32_t)_tzcnt_u64(_pdep_u64(1ull << ((n - 1) & 63), low)) + 1;
  uint32_t in_high = (uint32_t)_tzcnt_u64(_pdep_u64(1ull << ((n - 1 - ones) & 63), high)) + 65;
  q->at += !n ? 0 : n <= ones ? in_low : in_high;
  return _mm512_maskz_expand_epi8(_cvtu64_mask64(mask), rank);
}

/* Exponents of the weights in mask; returns the escapes, which have none yet. */
ALWAYS_INLINE uint64_t take_exponents(CassStream *s, uint64_t mask, __m512i words[2]) {
  const __m512i codes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)s->codebook)); /* and what follows them */
  __m512i ranks = take_ranks(&s->queue[CASS_EXPONENT], mask);
  uint64_t escaped = _cvtmask64_u64(_mm512_mask_cmpeq_epi8_mask(_cvtu64_mask64(mask), ranks, _mm512_set1_epi8(CASS_CODES)));
  __m512i e = _mm512_maskz_shuffle_epi8(_cvtu64_mask64(mask & ~escaped), codes, ranks);
  for (int h = 0; h < 2; h++) {
    __m256i half = h ? _mm512_extracti64x4_epi64(e, 1) : _mm512_castsi512_si256(e);
    words[h] = _mm512_or_si512(words[h], _mm512_slli_epi16(_mm512_cvtepu8_epi16(half), 7));
  }
  return escaped;
}

static __attribute__((noinline, cold)) void take_escapes(CassQueue *q, uint64_t mask, uint16_t e[NEST_COLS]) {
  memset(e, 0, NEST_COLS * sizeof *e);
  for (; mask; mask &= mask - 1)
    e[__builtin_ctzll(mask)] = (uint16_t)(cass_take(q, 8) << 7);
}

ALWAYS_INLINE void add_escapes(CassQueue *q, uint64_t mask, __m512i words[2]) {
  if (UNLIKELY(mask != 0)) {
    uint16_t e[NEST_COLS];
    take_escapes(q, mask, e);
    for (int h = 0; h < 2; h++)
      words[h] = _mm512_or_si512(words[h], _mm512_loadu_si512(e + 32 * h));
  }
}

/* As cass_normalise. */
ALWAYS_INLINE __m512i normalise(__m512i v, uint32_t group) {
  const __m512i zeros_of = _mm512_broadcast_i32x4(_mm_setr_epi8(4, 3, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m512i g = _mm512_set1_epi16((short)group), four = _mm512_set1_epi16(4), low = _mm512_set1_epi16(255);
  __m512i sign = _mm512_and_si512(v, _mm512_set1_epi16((short)0x8000)), m = _mm512_and_si512(v, low);
  __m512i zeros = _mm512_and_si512(_mm512_shuffle_epi8(zeros_of, _mm512_srli_epi16(m, 4)), low);
  __m512i less = _mm512_and_si512(_mm512_shuffle_epi8(zeros_of, _mm512_and_si512(m, _mm512_set1_epi16(15))), low);
  zeros = _mm512_mask_add_epi16(zeros, _mm512_cmpeq_epi16_mask(zeros, four), zeros, less);
  __m512i mantissa = _mm512_and_si512(_mm512_sllv_epi16(m, zeros), _mm512_set1_epi16(127));
  __m512i normal = _mm512_or_si512(_mm512_slli_epi16(_mm512_sub_epi16(g, zeros), 7), mantissa);
  __m512i denormal = _mm512_sllv_epi16(m, _mm512_sub_epi16(g, _mm512_set1_epi16(1)));
  __m512i out = _mm512_mask_mov_epi16(denormal, _mm512_cmplt_epu16_mask(zeros, g), normal);
  return _mm512_or_si512(sign, _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(m, m), out));
}

typedef struct CassFields {
  FieldBits upper, lower, pruned;
} CassFields;

ALWAYS_INLINE void add_half(const CassReader *r, uint64_t kept, __m512i words[2]) {
  const __m512i half = _mm512_set1_epi16((short)(64u >> r->mantissa_bits));
  for (int h = 0; r->half && h < 2; h++) {
    __mmask32 mask = (__mmask32)(kept >> 32 * h);
    if (r->mx)
      mask &= _mm512_test_epi16_mask(words[h], _mm512_set1_epi16(0x7fff));
    words[h] = _mm512_or_si512(words[h], _mm512_maskz_mov_epi16(mask, half));
  }
}

ALWAYS_INLINE void next_row(CassReader *r, const CassFields *f, uint64_t columns, __m512i words[2]) {
  CassQueue *mantissa = &r->s.queue[CASS_MANTISSA];
  uint32_t group[2] = {0, 0};
  if (cass_due(&r->s))
    cass_fill(&r->s);
  uint64_t kept = load_u64(r->s.queue[CASS_BITMAP].bits + r->s.queue[CASS_BITMAP].at / 8) & columns, escaped = 0;
  r->s.queue[CASS_BITMAP].at += 64;
  words[0] = words[1] = _mm512_setzero_si512();
  if (r->mx)
    group[0] = cass_take(&r->s.queue[CASS_EXPONENT], 8), group[1] = cass_take(&r->s.queue[CASS_EXPONENT], 8);
  else
    escaped = take_exponents(&r->s, kept, words);
  take_fields(mantissa, kept, &f->upper, words);
  add_escapes(mantissa, escaped, words);
  if (r->draft) {
    add_half(r, kept, words);
  } else {
    uint64_t pruned = columns & ~kept;
    mantissa = &r->v.queue[CASS_MANTISSA];
    if (cass_due(&r->v))
      cass_fill(&r->v);
    escaped = r->mx || r->raw ? 0 : take_exponents(&r->v, pruned, words);
    take_fields(mantissa, kept, &f->lower, words);
    take_fields(mantissa, pruned, &f->pruned, words);
    add_escapes(mantissa, escaped, words);
  }
  for (int h = 0; r->mx && h < 2; h++)
    words[h] = normalise(words[h], group[h]);
}

/* As cass_next_tile. */
static __attribute__((noinline)) void set_cass_next_tile(CassReader *r, TileWords out) {
  _Alignas(64) uint16_t rows[NEST_ROWS][NEST_COLS];
  const uint32_t b = r->mantissa_bits;
  const CassFields f = {field_bits(b + r->mx, true, 7 - b), field_bits(7 - b, false, 0), field_bits(r->raw ? 15 : 7 + r->mx, true, 0)};
  for (uint32_t i = 0; i < NEST_ROWS; i++) {
    __m512i words[2];
    next_row(r, &f, cass_columns(r, i), words);
    _mm512_store_si512(rows[i], words[0]), _mm512_store_si512(rows[i] + 32, words[1]);
  }
  cass_skip_tile(r);
  Matrix m = matrix_shape(PYCASS_CODEC_RAW, NEST_ROWS, NEST_COLS);
  m.raw = rows[0];
  set_raw_decode_tile(&m, 0, out);
}

#endif
