/* The codecs cass1 and cass2 (docs/format.md, "Codecs cass1 and cass2"): encoder and scalar decoder. This is the
 * specification that every other decoder is compared with, hardware's too, so it stays short. */
#include "codec_cass.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

enum { BLOCK_BITS = 8 * CASS_BLOCK, ESCAPE = CASS_CODES };

static inline uint32_t exponent_of(uint32_t w) { return (w >> 7) & 255u; }
static inline uint32_t mantissa_of(uint32_t w) { return w & 127u; }

/* What a row's fields are made of: sign and n bits, the lowest of which is bit `low` of a word. */
typedef struct Field {
  uint32_t n, low;
} Field;
static inline Field kept_field(bool mx, uint32_t mantissa_bits) { return (Field){mantissa_bits + mx, 7 - mantissa_bits}; }
static inline Field pruned_field(bool mx, bool raw) { return (Field){raw ? 15 : mx ? 8 : 7, 0}; }

static inline uint32_t lowest(uint64_t mask) { return (uint32_t)__builtin_ctzll(mask); }
#define FOR_EACH_BIT(k, mask)                                                                                          \
  for (uint64_t left_ = (mask), k = 0; left_ && (k = lowest(left_), true); left_ &= left_ - 1)

/* ---- decoder: bits ------------------------------------------------------------------------------------ */

/* A block for every kind that has no more than one left. A kind without blocks, and a segment at its end, give zeros. */
void cass_fill(CassStream *s) {
  for (int k = 0; k < CASS_KINDS; k++) {
    CassQueue *q = &s->queue[k];
    if (q->end - q->at > BLOCK_BITS)
      continue;
    uint32_t from = q->at / 8, n = q->end / 8 - from;
    memmove(q->bits, q->bits + from, n);
    size_t got = q->blocks ? min_size(CASS_BLOCK, (size_t)(s->end - s->next)) : 0;
    memcpy(q->bits + n, s->next, got);
    memset(q->bits + n + got, 0, CASS_BLOCK - got);
    s->next += got, q->blocks -= q->blocks != 0;
    q->at %= 8, q->end = 8 * (n + CASS_BLOCK);
  }
}

/* ---- decoder: rows ------------------------------------------------------------------------------------ */

/* Exponents of the weights in mask, by rank. Returns those that are escapes. */
static uint64_t take_exponents(CassStream *s, uint64_t mask, uint16_t out[NEST_COLS]) {
  uint64_t escaped = 0;
  FOR_EACH_BIT(k, mask) {
    uint32_t rank = lowest(cass_peek(&s->queue[CASS_EXPONENT]) | 1u << ESCAPE);
    s->queue[CASS_EXPONENT].at += rank + 1;
    if (rank == ESCAPE)
      escaped |= (uint64_t)1 << k;
    else
      out[k] |= (uint16_t)(s->codebook[rank] << 7);
  }
  return escaped;
}

static void take_fields(CassStream *s, uint64_t mask, Field f, uint16_t out[NEST_COLS]) {
  FOR_EACH_BIT(k, mask) {
    uint32_t v = cass_take(&s->queue[CASS_MANTISSA], f.n + 1), magnitude = v & ((1u << f.n) - 1);
    out[k] |= (uint16_t)(v >> f.n << 15 | magnitude << f.low);
  }
}

static void take_escapes(CassStream *s, uint64_t mask, uint16_t out[NEST_COLS]) {
  FOR_EACH_BIT(k, mask)
    out[k] |= (uint16_t)(cass_take(&s->queue[CASS_MANTISSA], 8) << 7);
}

/* What a draft reads where the dropped bits were. */
static void add_half(const CassReader *r, uint64_t kept, uint16_t out[NEST_COLS]) {
  if (r->half)
    FOR_EACH_BIT(k, kept)
      if (!r->mx || out[k] & 0x7fffu)
        out[k] |= (uint16_t)(64u >> r->mantissa_bits);
}

/* The rest of the kept weights, then the pruned ones. */
static void take_verification(CassReader *r, uint64_t kept, uint64_t pruned, uint16_t out[NEST_COLS]) {
  cass_fill(&r->v);
  uint64_t escaped = r->mx || r->raw ? 0 : take_exponents(&r->v, pruned, out);
  FOR_EACH_BIT(k, kept)
    out[k] |= (uint16_t)cass_take(&r->v.queue[CASS_MANTISSA], 7 - r->mantissa_bits);
  take_fields(&r->v, pruned, pruned_field(r->mx, r->raw), out);
  take_escapes(&r->v, escaped, out);
}

uint16_t cass_normalise(uint32_t v, uint32_t group) {
  uint32_t sign = v & 0x8000u, m = v & 255u;
  if (!m)
    return (uint16_t)sign;
  uint32_t zeros = (uint32_t)__builtin_clz(m) - 24;
  if (zeros < group)
    return (uint16_t)(sign | (group - zeros) << 7 | ((m << zeros) & 127u));
  return (uint16_t)(sign | (group ? m << (group - 1) : 0)); /* denormal; a group of 0 is damaged */
}

static void decode_row(CassReader *r, uint64_t columns, uint16_t out[NEST_COLS]) {
  CassStream *s = &r->s;
  memset(out, 0, NEST_COLS * sizeof *out);
  cass_fill(s);
  uint64_t kept = cass_peek(&s->queue[CASS_BITMAP]) & columns, escaped = 0;
  uint32_t group[2] = {0, 0};
  s->queue[CASS_BITMAP].at += 64;
  if (r->mx)
    group[0] = cass_take(&s->queue[CASS_EXPONENT], 8), group[1] = cass_take(&s->queue[CASS_EXPONENT], 8);
  else
    escaped = take_exponents(s, kept, out);
  take_fields(s, kept, kept_field(r->mx, r->mantissa_bits), out);
  take_escapes(s, escaped, out);
  if (r->draft)
    add_half(r, kept, out);
  else
    take_verification(r, kept, columns & ~kept, out);
  for (uint32_t k = 0; r->mx && k < NEST_COLS; k++)
    out[k] = cass_normalise(out[k], group[k / CASS_MX_GROUP]);
}

static void stream_init(CassStream *s, const uint8_t *part, size_t table, uint32_t block, uint64_t bitmaps) {
  const uint8_t *entry = part + table + (size_t)block * CASS_ENTRY;
  *s = (CassStream){.next = part + (size_t)load_u32(entry) * CASS_ALIGN,
                    .end = part + (size_t)load_u32(entry + CASS_ENTRY) * CASS_ALIGN,
                    .codebook = entry + 8};
  s->queue[CASS_BITMAP].blocks = bitmaps;
  s->queue[CASS_EXPONENT].blocks = load_u32(entry + 4);
  s->queue[CASS_MANTISSA].blocks = UINT64_MAX;
}

void cass_reader_init(CassReader *r, const Matrix *w, uint32_t block) {
  assert(block < w->n_block);
  r->draft = !w->ver, r->mx = w->codec == PYCASS_CODEC_CASS2;
  r->mantissa_bits = w->spec[0], r->half = w->spec[1] & CASS_HALF, r->raw = w->spec[1] & CASS_RAW;
  r->rows = w->rows - block * NEST_ROWS, r->cols = w->cols;
  stream_init(&r->s, w->spec, CASS_HEADER, block, w->n_group);
  if (w->ver)
    stream_init(&r->v, w->ver, 0, block, 0);
}

void cass_next_rows(CassReader *r, uint16_t out[NEST_ROWS][NEST_COLS]) {
  for (uint32_t i = 0; i < NEST_ROWS; i++)
    decode_row(r, cass_columns(r, i), out[i]);
  cass_skip_tile(r);
}

void cass_next_tile(CassReader *r, TileWords out) {
  uint16_t rows[NEST_ROWS][NEST_COLS];
  cass_next_rows(r, rows);
  for (uint32_t i = 0; i < NEST_ROWS; i++)
    for (uint32_t k = 0; k < NEST_COLS; k++)
      out[k / 8 * 2 + k % 2][tile_word(i, k % 8 / 2)] = rows[i][k];
}

/* ---- checks -------------------------------------------------------------------------------------------- */

/* Segments follow each other from the end of the table to the end of the part. */
static bool table_fits(const uint8_t *part, size_t size, size_t table, uint32_t n_block) {
  size_t first = round_up(table + ((size_t)n_block + 1) * CASS_ENTRY, CASS_ALIGN) / CASS_ALIGN;
  if (size / CASS_ALIGN < first || load_u32(part + table) != first)
    return false;
  for (uint32_t b = 0; b < n_block; b++) {
    const uint8_t *entry = part + table + (size_t)b * CASS_ENTRY;
    if (load_u32(entry + CASS_ENTRY) < load_u32(entry))
      return false;
  }
  return (uint64_t)load_u32(part + table + (size_t)n_block * CASS_ENTRY) * CASS_ALIGN == size;
}

pycass_status cass_check_parts(const Matrix *w, size_t spec_size, size_t ver_size) {
  if (spec_size < CASS_HEADER || !table_fits(w->spec, spec_size, CASS_HEADER, w->n_block))
    return cass_fail(PYCASS_ERR_CORRUPT, "cass: the speculation part's table is damaged");
  uint32_t known = w->codec == PYCASS_CODEC_CASS1 ? CASS_HALF | CASS_RAW : CASS_HALF, reserved = w->spec[2] | w->spec[3];
  for (int i = 8; i < CASS_HEADER; i++)
    reserved |= w->spec[i];
  if (w->spec[0] > 7 || w->spec[1] & ~known || reserved || load_u32(w->spec + 4) > w->cols)
    return cass_fail(PYCASS_ERR_CORRUPT, "cass: the speculation part's header is damaged");
  if (w->ver && !table_fits(w->ver, ver_size, 0, w->n_block))
    return cass_fail(PYCASS_ERR_CORRUPT, "cass: the verification part's table is damaged");
  return PYCASS_OK;
}

/* ---- encoder: bits ------------------------------------------------------------------------------------- */

/* A segment while it is made. Blocks are laid out when the decoder will want them, and filled as bits come. */
typedef struct SinkQueue {
  uint8_t *block[4];         /* block i is block[i % 4]: at most three have room */
  uint64_t laid, put, stored; /* bits: of the blocks, given to put(), of these written to blocks */
  uint64_t blocks;            /* still to lay */
  uint64_t waiting;           /* put but not stored */
} SinkQueue;
typedef struct Sink {
  uint8_t *end;
  SinkQueue queue[CASS_KINDS];
} Sink;

/* As cass_fill. */
static void lay(Sink *s) {
  for (int k = 0; k < CASS_KINDS; k++) {
    SinkQueue *q = &s->queue[k];
    if (q->laid - q->put > BLOCK_BITS || !q->blocks)
      continue;
    q->blocks--;
    q->block[q->laid / BLOCK_BITS % 4] = s->end;
    memset(s->end, 0, CASS_BLOCK);
    s->end += CASS_BLOCK, q->laid += BLOCK_BITS;
  }
}

static void put(SinkQueue *q, uint32_t v, uint32_t n) {
  assert(n <= 32 && q->laid >= q->put + n);
  q->waiting |= (uint64_t)v << (q->put - q->stored);
  q->put += n;
  if (q->put - q->stored < 32)
    return;
  memcpy(q->block[q->stored / BLOCK_BITS % 4] + q->stored % BLOCK_BITS / 8, &q->waiting, 4);
  q->stored += 32, q->waiting >>= 32;
}

/* Returns the segment's end: what follows the last byte that is not zero is left out. */
static uint8_t *finish(Sink *s, uint8_t *start) {
  for (int k = 0; k < CASS_KINDS; k++) {
    SinkQueue *q = &s->queue[k];
    if (q->put > q->stored)
      memcpy(q->block[q->stored / BLOCK_BITS % 4] + q->stored % BLOCK_BITS / 8, &q->waiting, 4);
  }
  uint8_t *end = s->end;
  while (end > start && !end[-1])
    end--;
  size_t n = (size_t)(end - start), whole = round_up(n, CASS_ALIGN);
  memset(end, 0, whole - n);
  return start + whole;
}

/* ---- encoder: which weights are kept --------------------------------------------------------------------- */

/* Scores |w| norm as integers of the same order. NaN is the largest. */
static void make_keys(const uint16_t *w, const float *norms, uint32_t n, uint32_t *key) {
  for (uint32_t k = 0; k < n; k++) {
    float score = bf16_to_f32(w[k] & 0x7fffu) * (norms ? norms[k] : 1.0f);
    key[k] = score != score ? 0x7fffffffu : f32_bits(score);
  }
}

/* The count-th smallest key, 1 <= count <= n; *equal: how many of its equals belong to the smallest `count`. Key bits 30..20
 * first, then 20..10, then 10..0. */
static uint32_t nth_key(const uint32_t *key, uint32_t n, uint32_t count, uint32_t *equal) {
  enum { LOW = (1 << 11) - 1 };
  uint32_t prefix = 0, mask = 0;
  for (int shift = 20; shift >= 0; shift -= 10) {
    uint32_t histogram[LOW + 1] = {0}, digit = 0;
    for (uint32_t k = 0; k < n; k++)
      histogram[key[k] >> shift & LOW] += (key[k] & mask) == prefix;
    while (histogram[digit] < count)
      count -= histogram[digit++];
    prefix |= digit << shift, mask |= (uint32_t)LOW << shift;
  }
  *equal = count;
  return prefix;
}

/* kept [ceil(n / 64)]: a row's bitmap without the `count` weights of the lowest scores; of equal ones the first go. */
static void select_kept(const uint32_t *key, uint32_t n, uint32_t count, uint64_t *kept) {
  uint32_t equal = 0, limit = count ? nth_key(key, n, count, &equal) : 0;
  memset(kept, 0, round_up(n, 64) / 8);
  for (uint32_t k = 0; k < n; k++) {
    bool pruned = count && (key[k] < limit || (key[k] == limit && equal));
    equal -= pruned && key[k] == limit;
    kept[k / 64] |= (uint64_t)!pruned << k % 64;
  }
}

/* ---- encoder: row blocks ----------------------------------------------------------------------------------- */

/* The largest exponent of n weights, at least 1: that of denormals. */
static uint32_t group_exponent(const uint16_t *w, uint32_t n) {
  uint32_t top = 1;
  for (uint32_t k = 0; k < n; k++)
    top = exponent_of(w[k]) > top ? exponent_of(w[k]) : top;
  return top;
}

/* Sign and eight magnitude bits relative to the group's exponent. */
static uint32_t to_mx(uint32_t w, uint32_t group) {
  uint32_t e = exponent_of(w), below = group - (e ? e : 1);
  return (w & 0x8000u) | (e ? 128 + mantissa_of(w) : mantissa_of(w)) >> (below < 8 ? below : 8);
}

void pycass_cass2_round(uint16_t *w, uint64_t rows, uint64_t cols) {
  for (uint64_t r = 0; r < rows; r++)
    for (uint64_t k = 0; k < cols; k += CASS_MX_GROUP) {
      uint16_t *group = w + r * cols + k;
      uint32_t n = (uint32_t)min_size(CASS_MX_GROUP, cols - k), top = group_exponent(group, n);
      for (uint32_t i = 0; i < n; i++)
        group[i] = cass_normalise(to_mx(group[i], top), top);
    }
}

/* The row block that is encoded, and tools. */
typedef struct Encoder {
  const pycass_cass_params *params;
  bool mx;
  uint32_t rows, cols, n_group; /* rows: of this block */
  uint16_t *w;                  /* [16][cols] */
  uint64_t *kept;               /* [16][n_group] */
  uint32_t *key;                /* [cols] */
  uint8_t rank[2][256];         /* by exponent: of the kept ones, of the pruned ones */
  Sink s, v;
} Encoder;

/* count [2][256]: how often the kept and the pruned weights have each exponent */
static void count_exponents(const Encoder *e, uint64_t count[2][256]) {
  memset(count, 0, 2 * 256 * sizeof **count);
  for (uint32_t r = 0; r < e->rows; r++)
    for (uint32_t k = 0; k < e->cols; k++) {
      uint64_t kept = e->kept[(size_t)r * e->n_group + k / 64] >> k % 64 & 1;
      count[!kept][exponent_of(e->w[(size_t)r * e->cols + k])]++;
    }
}

/* The most frequent exponents first, of equal ones the smaller; zeros where there are no more. Returns the bits that all
 * exponents take. */
static uint64_t make_codebook(const uint64_t count[256], uint8_t codebook[CASS_CODES], uint8_t rank[256]) {
  uint64_t left[256], bits = 0;
  memcpy(left, count, sizeof left);
  memset(rank, ESCAPE, 256);
  for (uint32_t i = 0; i < CASS_CODES; i++) {
    uint32_t best = 0;
    for (uint32_t e = 1; e < 256; e++)
      best = left[e] > left[best] ? e : best;
    codebook[i] = left[best] ? (uint8_t)best : 0;
    if (left[best])
      rank[best] = (uint8_t)i;
    bits += left[best] * (i + 1), left[best] = 0;
  }
  for (uint32_t e = 0; e < 256; e++)
    bits += left[e] * (ESCAPE + 1);
  return bits;
}

/* These three as their namesakes of the decoder. */
static uint64_t put_exponents(Sink *s, const uint8_t rank[256], uint64_t mask, const uint16_t *w) {
  uint64_t escaped = 0;
  FOR_EACH_BIT(k, mask) {
    uint32_t i = rank[exponent_of(w[k])];
    put(&s->queue[CASS_EXPONENT], 1u << i, i + 1);
    escaped |= (uint64_t)(i == ESCAPE) << k;
  }
  return escaped;
}

static void put_fields(Sink *s, uint64_t mask, Field f, const uint16_t *word) {
  FOR_EACH_BIT(k, mask) {
    uint32_t magnitude = (uint32_t)word[k] >> f.low & ((1u << f.n) - 1);
    put(&s->queue[CASS_MANTISSA], (uint32_t)(word[k] >> 15) << f.n | magnitude, f.n + 1);
  }
}

static void put_escapes(Sink *s, uint64_t mask, const uint16_t *w) {
  FOR_EACH_BIT(k, mask)
    put(&s->queue[CASS_MANTISSA], exponent_of(w[k]), 8);
}

static void put_speculation(Encoder *e, uint64_t kept, const uint16_t word[NEST_COLS], const uint32_t group[2]) {
  Sink *s = &e->s;
  uint64_t escaped = 0;
  lay(s);
  put(&s->queue[CASS_BITMAP], (uint32_t)kept, 32), put(&s->queue[CASS_BITMAP], (uint32_t)(kept >> 32), 32);
  if (e->mx)
    put(&s->queue[CASS_EXPONENT], group[0] | group[1] << 8, 16);
  else
    escaped = put_exponents(s, e->rank[0], kept, word);
  put_fields(s, kept, kept_field(e->mx, e->params->mantissa_bits), word);
  put_escapes(s, escaped, word);
}

static void put_verification(Encoder *e, uint64_t kept, uint64_t pruned, const uint16_t word[NEST_COLS]) {
  Sink *v = &e->v;
  bool raw = e->params->pruned_raw;
  uint32_t dropped = 7 - e->params->mantissa_bits;
  lay(v);
  uint64_t escaped = e->mx || raw ? 0 : put_exponents(v, e->rank[1], pruned, word);
  FOR_EACH_BIT(k, kept)
    put(&v->queue[CASS_MANTISSA], word[k] & ((1u << dropped) - 1), dropped);
  put_fields(v, pruned, pruned_field(e->mx, raw), word);
  put_escapes(v, escaped, word);
}

/* 64 columns of a row, of which n exist. */
static void encode_row(Encoder *e, const uint16_t *w, uint32_t n, uint64_t kept) {
  uint16_t word[NEST_COLS]; /* what fields are cut from */
  uint32_t group[2] = {0, 0};
  uint64_t columns = n < NEST_COLS ? ((uint64_t)1 << n) - 1 : ~(uint64_t)0;
  memcpy(word, w, n * sizeof *word);
  for (uint32_t h = 0; e->mx && h < 2; h++) {
    uint32_t from = h * CASS_MX_GROUP, to = (uint32_t)min_size(n, from + CASS_MX_GROUP);
    group[h] = group_exponent(w + min_size(from, n), to > from ? to - from : 0);
    for (uint32_t k = from; k < to; k++)
      word[k] = (uint16_t)to_mx(w[k], group[h]);
  }
  put_speculation(e, kept, word, group);
  put_verification(e, kept, columns & ~kept, word);
}

static void sink_init(Sink *s, uint8_t *start, uint64_t bitmaps, uint64_t exponent_bits) {
  *s = (Sink){.end = start};
  s->queue[CASS_BITMAP].blocks = bitmaps;
  s->queue[CASS_EXPONENT].blocks = (exponent_bits + BLOCK_BITS - 1) / BLOCK_BITS;
  s->queue[CASS_MANTISSA].blocks = UINT64_MAX;
}

static void choose_kept(Encoder *e, const float *norms) {
  uint32_t count = (uint32_t)((double)e->params->prune * e->cols + 0.5);
  for (uint32_t r = 0; r < e->rows; r++) {
    make_keys(e->w + (size_t)r * e->cols, norms, e->cols, e->key);
    select_kept(e->key, e->cols, count, e->kept + (size_t)r * e->n_group);
  }
}

/* A table's entry of a segment that begins at `start` of a part. */
static void put_entry(uint8_t *entry, const uint8_t *part, const uint8_t *start, uint64_t exponent_blocks,
                      const uint8_t *codebook) {
  uint32_t at[2] = {(uint32_t)((size_t)(start - part) / CASS_ALIGN), (uint32_t)exponent_blocks};
  memcpy(entry, at, 8);
  memcpy(entry + 8, codebook, CASS_CODES);
}

/* part, entry, end: of speculation and verification data: the parts, their tables' entries of this row block, and where
 * its segments go; these move on. */
static void encode_block(Encoder *e, uint8_t *part[2], uint8_t *entry[2], uint8_t *end[2], pycass_cass_stats *stats) {
  uint64_t count[2][256], bits[2] = {(uint64_t)e->n_group * NEST_ROWS * 16, 0};
  uint8_t codebook[2][CASS_CODES] = {{0}};
  count_exponents(e, count);
  for (int i = 0; i < (e->mx ? 0 : e->params->pruned_raw ? 1 : 2); i++)
    bits[i] = make_codebook(count[i], codebook[i], e->rank[i]);
  sink_init(&e->s, end[0], e->n_group, bits[0]), sink_init(&e->v, end[1], 0, bits[1]);
  put_entry(entry[0], part[0], end[0], e->s.queue[CASS_EXPONENT].blocks, codebook[0]);
  put_entry(entry[1], part[1], end[1], e->v.queue[CASS_EXPONENT].blocks, codebook[1]);
  for (uint32_t g = 0; g < e->n_group; g++)
    for (uint32_t r = 0; r < NEST_ROWS; r++) {
      bool there = r < e->rows;
      uint32_t from = g * NEST_COLS, n = there ? (uint32_t)min_size(e->cols - from, NEST_COLS) : 0;
      encode_row(e, e->w + (size_t)r * e->cols + from, n, there ? e->kept[(size_t)r * e->n_group + g] : 0);
    }
  end[0] = finish(&e->s, end[0]), end[1] = finish(&e->v, end[1]);
  for (int i = 0; stats && i < 2; i++) {
    stats->exponent_bits[i] += bits[i];
    for (int x = 0; x < 256; x++)
      stats->count[i][x] += count[i][x];
  }
}

/* ---- encoder: matrices -------------------------------------------------------------------------------------- */

static pycass_status check_params(pycass_codec codec, const pycass_cass_params *p, const float *norms, uint64_t cols) {
  bool cass2 = codec == PYCASS_CODEC_CASS2;
  if (codec != PYCASS_CODEC_CASS1 && !cass2)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "cass: codec %d is neither cass1 nor cass2", (int)codec);
  if (!(p->prune >= 0 && p->prune < 1) || p->mantissa_bits > 7 || p->half > 1 || p->pruned_raw > 1)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "cass: prune is in [0, 1), mantissa_bits in 0..7, flags are 0 or 1");
  if (cass2 && p->pruned_raw)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "cass2 has no raw pruned weights: they share exponents too");
  for (uint64_t k = 0; norms && k < cols; k++)
    if (!(norms[k] >= 0 && norms[k] <= 3.4e38f))
      return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "cass: norm %llu is negative or not finite", (unsigned long long)k);
  return PYCASS_OK;
}

static size_t table_size(uint64_t n_block) { return (n_block + 1) * CASS_ENTRY; }

pycass_status pycass_cass_bound(uint64_t rows, uint64_t cols, pycass_cass_sizes *out) {
  if (!rows || !cols || rows > 1u << 28 || cols > 1u << 28)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "cass: a matrix of %llu x %llu is out of range",
                     (unsigned long long)rows, (unsigned long long)cols);
  uint64_t blocks = (rows + 15) / 16, groups = (cols + 63) / 64;
  /* a tile has 1 block of bitmap, at most 13 of exponents and 16 of mantissas; two more of these are read ahead */
  uint64_t segment = CASS_BLOCK * ((1 + CASS_CODES + 1 + 16) * groups + 4);
  *out = (pycass_cass_sizes){round_up(CASS_HEADER + table_size(blocks), CASS_ALIGN) + blocks * segment,
                             round_up(table_size(blocks), CASS_ALIGN) + blocks * segment};
  return PYCASS_OK;
}

static pycass_status encode_blocks(Encoder *e, const uint16_t *w, uint64_t rows, const float *norms, uint8_t *part[2],
                                   uint8_t *end[2], pycass_cass_stats *stats) {
  uint8_t *entry[2] = {part[0] + CASS_HEADER, part[1]};
  for (uint64_t r0 = 0; r0 < rows; r0 += NEST_ROWS) {
    e->rows = (uint32_t)min_size(NEST_ROWS, rows - r0);
    memcpy(e->w, w + r0 * e->cols, (size_t)e->rows * e->cols * sizeof *w);
    if (e->mx)
      pycass_cass2_round(e->w, e->rows, e->cols);
    choose_kept(e, norms);
    encode_block(e, part, entry, end, stats);
    entry[0] += CASS_ENTRY, entry[1] += CASS_ENTRY;
    if ((size_t)(end[0] - part[0]) / CASS_ALIGN > UINT32_MAX || (size_t)(end[1] - part[1]) / CASS_ALIGN > UINT32_MAX)
      return cass_fail(PYCASS_ERR_UNSUPPORTED, "cass: the matrix is too large for its offsets");
  }
  static const uint8_t none[CASS_CODES];
  put_entry(entry[0], part[0], end[0], 0, none), put_entry(entry[1], part[1], end[1], 0, none);
  return PYCASS_OK;
}

pycass_status pycass_cass_encode(pycass_codec codec, const pycass_cass_params *p, const uint16_t *w, uint64_t rows,
                                 uint64_t cols, const float *norms, uint8_t *spec, size_t *spec_size, uint8_t *ver,
                                 size_t *ver_size, pycass_cass_stats *stats) {
  pycass_cass_sizes sizes;
  RETURN_IF(pycass_cass_bound(rows, cols, &sizes));
  RETURN_IF(check_params(codec, p, norms, cols));
  Encoder e = {.params = p, .mx = codec == PYCASS_CODEC_CASS2, .cols = (uint32_t)cols, .n_group = (uint32_t)((cols + 63) / 64)};
  size_t heads[2] = {round_up(CASS_HEADER + table_size((rows + 15) / 16), CASS_ALIGN),
                     round_up(table_size((rows + 15) / 16), CASS_ALIGN)};
  uint8_t *part[2] = {spec, ver}, *end[2] = {spec + heads[0], ver + heads[1]};
  uint32_t pruned = (uint32_t)((double)p->prune * (double)cols + 0.5);
  memset(spec, 0, heads[0]), memset(ver, 0, heads[1]);
  spec[0] = (uint8_t)p->mantissa_bits, spec[1] = (uint8_t)((p->half ? CASS_HALF : 0) | (p->pruned_raw ? CASS_RAW : 0));
  memcpy(spec + 4, &pruned, 4);
  e.w = malloc(NEST_ROWS * cols * sizeof *e.w), e.key = malloc(cols * sizeof *e.key);
  e.kept = malloc(NEST_ROWS * e.n_group * sizeof *e.kept);
  pycass_status status = PYCASS_OK;
  if (!e.w || !e.key || !e.kept)
    status = cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory to encode rows of %llu", (unsigned long long)cols);
  else
    status = encode_blocks(&e, w, rows, norms, part, end, stats);
  free(e.w), free(e.key), free(e.kept);
  *spec_size = (size_t)(end[0] - spec), *ver_size = (size_t)(end[1] - ver);
  return status;
}

/* ---- decoder: matrices --------------------------------------------------------------------------------------- */

/* Rows [r0, r1) of one row block. out [r1 - r0][cols] */
static void block_rows(const Matrix *w, uint32_t r0, uint32_t r1, uint16_t *out) {
  CassReader reader;
  uint16_t tile[NEST_ROWS][NEST_COLS];
  cass_reader_init(&reader, w, r0 / NEST_ROWS);
  for (size_t k0 = 0; k0 < w->cols; k0 += NEST_COLS) {
    cass_next_rows(&reader, tile);
    for (uint32_t r = r0; r < r1; r++)
      memcpy(out + (size_t)(r - r0) * w->cols + k0, tile[r % NEST_ROWS], min_size(NEST_COLS, w->cols - k0) * sizeof *out);
  }
}

void cass_bits(const Matrix *w, uint32_t r0, uint32_t r1, uint16_t *out) {
  for (uint32_t r = r0, end; r < r1; r = end) {
    end = (uint32_t)min_size((size_t)(r / NEST_ROWS + 1) * NEST_ROWS, r1);
    block_rows(w, r, end, out + (size_t)(r - r0) * w->cols);
  }
}

void cass_row(const Matrix *w, uint32_t row, float *out) {
  CassReader reader;
  uint16_t tile[NEST_ROWS][NEST_COLS];
  cass_reader_init(&reader, w, row / NEST_ROWS);
  for (size_t k = 0; k < w->cols; k++) {
    if (k % NEST_COLS == 0)
      cass_next_rows(&reader, tile);
    out[k] = bf16_to_f32(tile[row % NEST_ROWS][k % NEST_COLS]);
  }
}

pycass_status pycass_cass_decode(pycass_codec codec, const uint8_t *spec, size_t spec_size, const uint8_t *ver,
                                 size_t ver_size, uint64_t rows, uint64_t cols, uint16_t *out) {
  pycass_cass_sizes sizes;
  RETURN_IF(pycass_cass_bound(rows, cols, &sizes));
  RETURN_IF(check_params(codec, &(pycass_cass_params){0}, NULL, 0));
  Matrix m = matrix_shape(codec, (uint32_t)rows, (uint32_t)cols);
  m.spec = spec, m.ver = ver;
  RETURN_IF(cass_check_parts(&m, spec_size, ver_size));
  cass_bits(&m, 0, m.rows, out);
  return PYCASS_OK;
}
