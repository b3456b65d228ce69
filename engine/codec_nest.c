/* The nest codec (docs/format.md, "Codec nest"): encoder and scalar decoder. This is the specification that every
 * other decoder is compared with, so it stays short. */
#include <stdlib.h>

#include "codec_cass.h"

const uint8_t nest_magnitude[8] = {22, 31, 43, 61, 85, 119, 13, 4};

/* The middle of the values with that cell and mantissa bits 5..2; CELL_EIGHTH's is in the middle of what T may be, too. */
const uint8_t nest_key_magnitude[8][16] = {
    {16, 17, 17, 18, 18, 19, 19, 20, 20, 21, 21, 22, 22, 23, 23, 24},
    {24, 25, 25, 26, 26, 27, 27, 28, 28, 29, 29, 30, 30, 31, 31, 32},
    {32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47},
    {48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63},
    {65, 67, 69, 71, 73, 75, 77, 79, 81, 83, 85, 87, 89, 91, 93, 95},
    {97, 99, 101, 103, 105, 107, 109, 111, 113, 115, 117, 119, 121, 123, 125, 127},
    {10, 10, 11, 11, 11, 11, 12, 12, 12, 12, 13, 13, 13, 13, 14, 14},
    {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}};

enum { MIN_G = 4, MAX_S = 13, Q_ZERO = 0, Q_ESCAPE = 15 };
const uint8_t nest_exponent[8] = {16, 16, 17, 17, 18, 18, 15, 0}, nest_bit6[8] = {0, 1, 0, 1, 0, 1, 0, 0};

/* The tile's weight that nibble h of byte n of line j stands for. */
static inline uint32_t row_of(uint32_t n) { return n / 4; }
static inline uint32_t col_of(uint32_t j, uint32_t n, uint32_t h) { return 8 * j + 2 * (n % 4) + h; }
static inline uint32_t exponent_of(uint16_t w) { return (w >> 7) & 255u; }
static inline uint32_t mantissa_of(uint16_t w) { return w & 127u; }

/* ---- encoder ------------------------------------------------------------------------------------ */

static uint32_t cell_of(uint16_t w, uint32_t group) {
  int d = (int)group - (int)exponent_of(w);
  uint32_t high = mantissa_of(w) >= 64;
  if (d < 0)
    return CELL_TOP;
  if (d < 3)
    return 4 - 2 * (uint32_t)d + high;
  return d == 3 ? CELL_EIGHTH : CELL_SMALL;
}

/* Sum of squared draft errors of 64 weights for group exponent G = top or top - 1, in a fixed unit, in integers so
 * that every machine chooses alike. Exponents are taken relative to top; differences past 12 do not count. */
static uint64_t draft_error(const uint16_t *w, uint32_t top, uint32_t group) {
  uint64_t sum = 0;
  for (int k = 0; k < NEST_COLS; k++) {
    uint32_t below = top - exponent_of(w[k]);
    int64_t value = exponent_of(w[k]) ? (int64_t)((128 + mantissa_of(w[k])) * 70) << 12 >> (below > 12 ? 12 : below) : 0;
    int64_t draft = (int64_t)nest_magnitude[cell_of(w[k], group)] << 7 << 12 >> (top - group);
    sum += (uint64_t)((value - draft) * (value - draft));
  }
  return sum;
}

static float draft_magnitude(uint32_t cell, uint32_t group) {
  return (float)nest_magnitude[cell] * (1.0f / 70.0f) * f32_from_bits(group << 23);
}

/* The same with columns of different importance, in units of 2^(top - 127); past 60 binades weights count as 0. */
static double weighted_error(const uint16_t *w, const float *importance, uint32_t top, uint32_t group) {
  double sum = 0;
  for (int k = 0; k < NEST_COLS; k++) {
    uint32_t e = exponent_of(w[k]), below = top - e;
    double value = e && below <= 60 ? (double)(128 + mantissa_of(w[k])) / (double)((uint64_t)128 << below) : 0;
    double draft = nest_magnitude[cell_of(w[k], group)] / 70.0 / (double)(1u << (top - group));
    sum += (double)importance[k] * (value - draft) * (value - draft);
  }
  return sum;
}

/* importance [64], or NULL. */
static uint32_t group_exponent(const uint16_t *w, const float *importance, bool always_top) {
  uint32_t top = MIN_G, largest = 0;
  for (int k = 0; k < NEST_COLS; k++)
    if (exponent_of(w[k]) > top)
      top = exponent_of(w[k]);
  for (int k = 0; k < NEST_COLS; k++)
    if (exponent_of(w[k]) == top && mantissa_of(w[k]) > largest)
      largest = mantissa_of(w[k]);
  if (always_top || top == MIN_G || largest >= 64) /* with one less, cell CELL_TOP would end below the largest weight */
    return top;
  if (importance)
    return weighted_error(w, importance, top, top - 1) < weighted_error(w, importance, top, top) ? top - 1 : top;
  return draft_error(w, top, top - 1) < draft_error(w, top, top) ? top - 1 : top;
}

/* A tile's record while it is made: its nibbles q, T bits and escape bytes. */
typedef struct Record {
  uint8_t q[NEST_TILE], t[NEST_TILE / 8], escape[NEST_TILE];
  uint32_t n_q, n_t, n_escape, flags;
} Record;

static void put_weight(Record *s, uint16_t w, uint32_t cell, uint32_t group) {
  uint32_t e = exponent_of(w);
  if (cell < CELL_TOP)
    return;
  s->t[s->n_t / 8] |= (uint8_t)((cell == CELL_TOP ? e > group : mantissa_of(w) >> 6) << s->n_t % 8);
  s->n_t++;
  if (cell != CELL_SMALL)
    return;
  uint32_t q = e == 0 ? Q_ZERO : group - e - 4 > MAX_S ? Q_ESCAPE : e + NEST_BIAS - group;
  if (q == Q_ESCAPE)
    s->flags |= NEST_HAS_ESCAPE, s->escape[s->n_escape++] = (uint8_t)e;
  s->q[s->n_q++] = (uint8_t)q;
}

static size_t write_record(const Record *s, uint8_t *out) {
  uint32_t header = s->n_q | s->flags;
  size_t n = NEST_HEADER;
  out[0] = (uint8_t)header, out[1] = (uint8_t)(header >> 8);
  for (uint32_t i = 0; i < s->n_q; i += 2)
    out[n++] = (uint8_t)(s->q[i] | (i + 1 < s->n_q ? s->q[i + 1] << 4 : 0));
  memcpy(out + n, s->t, (s->n_t + 7) / 8);
  n += (s->n_t + 7) / 8;
  for (uint32_t i = s->n_escape; i; i--) /* the first one last */
    out[n++] = s->escape[i - 1];
  return n;
}

/* The low six mantissa bits of half line hl = 0..3 of two lines; b points at byte n of their planes. */
static void put_low6(uint8_t *b, uint32_t hl, uint32_t low6) {
  if (hl < 3) {
    b[64 * hl] |= (uint8_t)low6;
    return;
  }
  b[0] |= (uint8_t)(low6 >> 4 << 6), b[64] |= (uint8_t)((low6 >> 2 & 3u) << 6), b[128] |= (uint8_t)((low6 & 3u) << 6);
}

static uint32_t get_low6(const uint8_t *b, uint32_t hl) {
  return hl < 3 ? b[64 * hl] & 63u : (uint32_t)(b[0] >> 6) << 4 | (uint32_t)(b[64] >> 6) << 2 | b[128] >> 6;
}

/* tile [16][64]; a, x, b point at the tile's own bytes; hot: bit k says that column k is, its weights are zero.
 * Returns the record's size. */
static size_t encode_tile(uint16_t tile[NEST_ROWS][NEST_COLS], const float *importance, uint64_t hot, bool always_top,
                          uint8_t *a, uint8_t *x, uint8_t *b, uint8_t *record) {
  Record side = {.n_q = 0};
  for (int r = 0; r < NEST_ROWS; r++) {
    x[r] = (uint8_t)group_exponent(tile[r], importance, always_top);
    for (uint32_t k = 0; k < NEST_COLS; k++)
      if (hot >> k & 1u)
        tile[r][k] = (uint16_t)(x[r] << 7); /* a filler that needs no side bits */
  }
  memset(a, 0, 512), memset(b, 0, 768);
  for (uint32_t j = 0; j < 8; j++)
    for (uint32_t h = 0; h < 2; h++)
      for (uint32_t n = 0; n < 64; n++) {
        uint16_t w = tile[row_of(n)][col_of(j, n, h)];
        uint32_t group = x[row_of(n)], cell = cell_of(w, group);
        a[64 * j + n] |= (uint8_t)(((uint32_t)(w >> 15) << 3 | cell) << (4 * h));
        put_low6(b + 192 * (j / 2) + n, 2 * (j % 2) + h, mantissa_of(w) & 63u);
        put_weight(&side, w, cell, group);
      }
  return write_record(&side, record);
}

pycass_status pycass_nest_bound(uint64_t rows, uint64_t cols, pycass_nest_sizes *out) {
  if (!rows || !cols || rows > 1u << 28 || cols > 1u << 28)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "nest: a matrix of %llu x %llu is out of range",
                     (unsigned long long)rows, (unsigned long long)cols);
  uint64_t tiles = (rows + 15) / 16 * ((cols + 63) / 64);
  /* per tile: an offset, the record's header, 5 bits a weight at most, an escape each */
  uint64_t record = NEST_HEADER + NEST_TILE * 5 / 8 + NEST_MAX_ESCAPES;
  uint64_t bound = round_up(4 * (tiles + 1) + tiles * record + NEST_SIDE_SLACK, CASS_ALIGN);
  *out = (pycass_nest_sizes){512 * tiles, round_up(16 * tiles, CASS_ALIGN), 768 * tiles, bound};
  return PYCASS_OK;
}

static void load_tile(const uint16_t *w, uint64_t rows, uint64_t cols, uint64_t r0, uint64_t k0,
                      uint16_t tile[NEST_ROWS][NEST_COLS]) {
  memset(tile, 0, sizeof(uint16_t) * NEST_TILE);
  for (uint64_t r = r0; r < rows && r < r0 + NEST_ROWS; r++)
    memcpy(tile[r - r0], w + r * cols + k0, sizeof(uint16_t) * min_size(NEST_COLS, cols - k0));
}

pycass_status nest_check_hot(const uint32_t *hot, size_t n_hot, uint64_t cols) {
  bool bad = n_hot % HOT_UNIT || n_hot > HOT_MOST || n_hot > cols;
  for (size_t i = 0; !bad && i < n_hot; i++)
    bad = hot[i] >= cols || (i && hot[i] <= hot[i - 1]);
  return bad ? cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "nest: %zu hot columns that are not 0, 16, 32, 48 or 64 in ascending order",
                         n_hot)
             : PYCASS_OK;
}

/* What encoding a tile needs of the calibration: the columns' importance, and which are hot. */
typedef struct TileColumns {
  float importance[NEST_COLS];
  uint64_t hot;
} TileColumns;

static TileColumns tile_columns(const pycass_nest_calibration *c, size_t k0, size_t cols) {
  TileColumns out = {.hot = 0};
  for (size_t k = 0; k < NEST_COLS; k++)
    out.importance[k] = c->importance && k0 + k < cols ? c->importance[k0 + k] : 1.0f;
  for (size_t i = 0; i < c->n_hot; i++)
    if (c->hot[i] >= k0 && c->hot[i] < k0 + NEST_COLS)
      out.hot |= (uint64_t)1 << (c->hot[i] - k0), out.importance[c->hot[i] - k0] = 0;
  return out;
}

static void clear_hot(uint16_t tile[NEST_ROWS][NEST_COLS], uint64_t hot) {
  for (uint32_t k = 0; k < NEST_COLS; k++)
    for (int r = 0; r < NEST_ROWS && hot >> k & 1u; r++)
      tile[r][k] = 0;
}

/* Hot columns as half lines, [block][n_hot / 4][64]. */
static void encode_hot(const uint16_t *w, size_t rows, size_t cols, const pycass_nest_calibration *c, uint16_t *out) {
  memset(out, 0, (rows + 15) / 16 * 16 * c->n_hot * sizeof *out);
  for (size_t r = 0; r < rows; r++)
    for (size_t i = 0; i < c->n_hot; i++)
      out[(r / NEST_ROWS * (c->n_hot / 4) + i / 4) * 64 + tile_word(r % NEST_ROWS, i % 4)] = w[r * cols + c->hot[i]];
}

static float bf16_finite(uint16_t w) { return exponent_of(w) == 255 ? 0 : bf16_to_f32(w); }

/* What the draft's weights miss of the mean product, by row: hot columns miss nothing. */
static void encode_bias(const uint16_t *w, size_t rows, size_t cols, const pycass_nest_calibration *c, const uint8_t *x,
                        float *out) {
  size_t groups = (cols + 63) / 64;
  memset(out, 0, (rows + 15) / 16 * 16 * sizeof *out);
  for (size_t r = 0; r < rows; r++) {
    double sum = 0;
    for (size_t k = 0, i = 0; k < cols; k++) {
      if (i < c->n_hot && c->hot[i] == k) {
        i++;
        continue;
      }
      uint16_t v = w[r * cols + k];
      uint32_t group = x[(r / NEST_ROWS * groups + k / NEST_COLS) * NEST_ROWS + r % NEST_ROWS];
      float draft = draft_magnitude(cell_of(v, group), group);
      sum += ((double)bf16_finite(v) - (double)(v >> 15 ? -draft : draft)) * (double)c->mean[k];
    }
    out[r] = (float)sum;
  }
}

pycass_status pycass_nest_encode(const uint16_t *w, uint64_t rows, uint64_t cols, uint8_t *a, uint8_t *x, uint8_t *b,
                                 uint8_t *side, size_t *side_size) {
  return pycass_nest_encode_calibrated(w, rows, cols, NULL, a, x, b, side, side_size, NULL, NULL);
}

pycass_status pycass_nest_encode_calibrated(const uint16_t *w, uint64_t rows, uint64_t cols,
                                            const pycass_nest_calibration *calibration, uint8_t *a, uint8_t *x, uint8_t *b,
                                            uint8_t *side, size_t *side_size, uint16_t *hot, float *bias) {
  static const pycass_nest_calibration none = {0};
  const pycass_nest_calibration *c = calibration ? calibration : &none;
  pycass_nest_sizes sizes;
  RETURN_IF(pycass_nest_bound(rows, cols, &sizes));
  RETURN_IF(nest_check_hot(c->hot, c->n_hot, cols));
  bool weighted = c->importance || c->n_hot;
  size_t groups = (cols + 63) / 64, tiles = (rows + 15) / 16 * groups;
  size_t end = 4 * (tiles + 1);
  memset(x, 0, sizes.x);
  for (size_t t = 0; t < tiles; t++) {
    uint16_t tile[NEST_ROWS][NEST_COLS];
    size_t k0 = t % groups * NEST_COLS;
    load_tile(w, rows, cols, t / groups * NEST_ROWS, k0, tile);
    TileColumns columns = {.hot = 0};
    if (weighted)
      columns = tile_columns(c, k0, cols);
    clear_hot(tile, columns.hot);
    if (end > UINT32_MAX - NEST_TILE * 2)
      return cass_fail(PYCASS_ERR_UNSUPPORTED, "nest: a matrix of %llu x %llu has too much side data",
                       (unsigned long long)rows, (unsigned long long)cols);
    uint32_t offset = (uint32_t)end;
    memcpy(side + 4 * t, &offset, 4);
    end += encode_tile(tile, weighted ? columns.importance : NULL, columns.hot, false, a + 512 * t, x + 16 * t, b + 768 * t,
                       side + end);
  }
  uint32_t offset = (uint32_t)end;
  memcpy(side + 4 * tiles, &offset, 4);
  *side_size = round_up(end + NEST_SIDE_SLACK, CASS_ALIGN);
  memset(side + end, 0, *side_size - end);
  if (c->n_hot)
    encode_hot(w, rows, cols, c, hot);
  if (c->mean)
    encode_bias(w, rows, cols, c, x, bias);
  return PYCASS_OK;
}

size_t nest_encode_columns(const uint16_t *v, size_t stride, uint32_t n_channel, bool top, uint8_t *a, uint8_t *x, uint8_t *b,
                           uint8_t *side) {
  uint32_t n_tile = (n_channel + NEST_ROWS - 1) / NEST_ROWS, end = 4 * (n_tile + 1);
  for (uint32_t t = 0; t < n_tile; t++) {
    uint16_t tile[NEST_ROWS][NEST_COLS] = {{0}};
    for (uint32_t k = 0; k < NEST_COLS; k++)
      for (uint32_t r = 0; r < NEST_ROWS && NEST_ROWS * t + r < n_channel; r++)
        tile[r][k] = v[k * stride + NEST_ROWS * t + r];
    memcpy(side + 4 * t, &end, 4);
    end += (uint32_t)encode_tile(tile, NULL, 0, top, a + 512 * t, x + 16 * t, b + 768 * t, side + end);
  }
  memcpy(side + 4 * n_tile, &end, 4);
  return end;
}

/* ---- scalar decoder ----------------------------------------------------------------------------- */

pycass_status nest_check_side(const uint8_t *side, size_t size, size_t n_tiles) {
  if (size < 4 * (n_tiles + 1) + NEST_SIDE_SLACK)
    return cass_fail(PYCASS_ERR_CORRUPT, "nest: the side part is too short");
  uint32_t previous = (uint32_t)(4 * (n_tiles + 1));
  if (load_u32(side) != previous)
    return cass_fail(PYCASS_ERR_CORRUPT, "nest: the first side offset is wrong");
  for (size_t t = 1; t <= n_tiles; t++) {
    uint32_t offset = load_u32(side + 4 * t);
    if (offset < previous || offset > size - NEST_SIDE_SLACK)
      return cass_fail(PYCASS_ERR_CORRUPT, "nest: side offset %zu is out of order or out of bounds", t);
    previous = offset;
  }
  return PYCASS_OK;
}

/* One weight; q is its nibble if its cell is CELL_SMALL, t its T bit if it has one. */
static uint16_t decode_weight(uint32_t nibble, uint32_t low6, uint32_t group, uint32_t t, uint32_t q, uint32_t flags,
                              const uint8_t **escape) {
  uint32_t cell = nibble & 7u, sign = (nibble >> 3 & 1u) << 15;
  bool zero = cell == CELL_SMALL && q == Q_ZERO;
  bool escaped = cell == CELL_SMALL && q == Q_ESCAPE && flags & NEST_HAS_ESCAPE;
  if (zero || escaped)
    return (uint16_t)(sign | (escaped ? (uint32_t)*--*escape : 0u) << 7 | t << 6 | low6);
  uint32_t e = (cell == CELL_SMALL ? q : nest_exponent[cell]) + group - NEST_BIAS;
  return (uint16_t)(sign + (e << 7) + (nest_bit6[cell] + t) * 64u + low6);
}

/* group [16]: G of the rows. */
static void decode_tile(const Matrix *m, size_t t, const uint8_t *group, TileWords out) {
  const uint8_t *a = m->a + 512 * t, *b = m->b + 768 * t;
  const uint8_t *record = m->side + load_u32(m->side + 4 * t), *escape = m->side + load_u32(m->side + 4 * t + 4);
  uint32_t header = record[0] | (uint32_t)record[1] << 8, count = header & NEST_COUNT;
  count = count < NEST_TILE ? count : NEST_TILE;
  const uint8_t *nibbles = record + NEST_HEADER, *bits = nibbles + (count + 1) / 2;
  uint32_t n_q = 0, n_t = 0;
  for (uint32_t hl = 0; hl < 16; hl++)
    for (uint32_t n = 0; n < 64; n++) {
      uint32_t nibble = a[64 * (hl / 2) + n] >> (4 * (hl % 2)) & 15u, cell = nibble & 7u, bit = 0, q = 0;
      if (cell >= CELL_TOP)
        bit = bits[n_t / 8] >> n_t % 8 & 1u, n_t++;
      if (cell == CELL_SMALL)
        q = n_q < count ? nibbles[n_q / 2] >> 4 * (n_q % 2) & 15u : 0, n_q++; /* count is less only if damaged */
      out[hl][tile_word(row_of(n), n % 4)] =
          decode_weight(nibble, get_low6(b + 192 * (hl / 4) + n, hl % 4), group[row_of(n)], bit, q, header,
                        &escape);
    }
}

void nest_decode_tile(const Matrix *m, size_t t, TileWords out) { decode_tile(m, t, m->x + 16 * t, out); }

void nest_decode_relative(const Matrix *m, size_t t, TileWords out) {
  uint8_t group[NEST_ROWS];
  memset(group, NEST_BIAS, sizeof group);
  decode_tile(m, t, group, out);
}

void nest_key_row(const Matrix *m, uint32_t row, int8_t out[NEST_COLS]) {
  size_t t = row / NEST_ROWS;
  for (uint32_t hl = 0; hl < 16; hl++)
    for (uint32_t n = 4 * (row % NEST_ROWS), i = 0; i < 4; n++, i++) {
      uint32_t nibble = m->a[512 * t + 64 * (hl / 2) + n] >> (4 * (hl % 2)) & 15u;
      int magnitude = nest_key_magnitude[nibble & 7u][get_low6(m->b + 768 * t + 192 * (hl / 4) + n, hl % 4) >> 2];
      out[col_of(hl / 2, n, hl % 2)] = (int8_t)(nibble & 8u ? -magnitude : magnitude);
    }
}

void raw_decode_tile(const Matrix *m, size_t t, TileWords out) {
  uint16_t tile[NEST_ROWS][NEST_COLS];
  load_tile(m->raw, m->rows, m->cols, t / m->n_group * NEST_ROWS, t % m->n_group * NEST_COLS, tile);
  for (uint32_t hl = 0; hl < 16; hl++)
    for (uint32_t n = 0; n < 64; n++)
      out[hl][tile_word(row_of(n), n % 4)] = tile[row_of(n)][col_of(hl / 2, n, hl % 2)];
}

/* Column k of row r. */
static inline uint16_t tile_at(TileWords tile, uint32_t r, uint32_t k) {
  return tile[k / 8 * 2 + k % 2][tile_word(r, k % 8 / 2)];
}

void nest_columns(const Matrix *m, size_t t0, size_t t1, uint16_t *out, size_t ld) {
  for (size_t t = t0; t < t1; t++, out += NEST_ROWS) {
    TileWords tile;
    nest_decode_tile(m, t, tile);
    for (uint32_t k = 0; k < NEST_COLS; k++)
      for (uint32_t r = 0; r < NEST_ROWS; r++)
        out[k * ld + r] = tile_at(tile, r, k);
  }
}

/* ---- rows, and whole draft matrices ------------------------------------------------------------- */

static inline float draft_value(const uint8_t *a, const uint8_t *x, size_t t, uint32_t r, uint32_t k) {
  uint32_t nibble = a[512 * t + 64 * (k / 8) + 4 * r + k % 8 / 2] >> (4 * (k % 2)) & 15u;
  float magnitude = draft_magnitude(nibble & 7u, x[16 * t + r]);
  return nibble & 8u ? -magnitude : magnitude;
}

static inline uint16_t hot_at(const Matrix *m, uint32_t row, uint32_t i) {
  return hot_half_line(m, row / NEST_ROWS, i / 4)[tile_word(row % NEST_ROWS, i % 4)];
}

static void put_hot(const Matrix *m, uint32_t row, float *out) {
  for (uint32_t i = 0; i < m->n_hot; i++)
    out[m->hot[i]] = bf16_to_f32(hot_at(m, row, i));
}

void matrix_row_draft(const Matrix *m, uint32_t row, float *out) {
  if (m->codec == PYCASS_CODEC_RAW) {
    matrix_row_exact(m, row, out);
    return;
  }
  if (matrix_is_cass(m)) {
    Matrix view = cass_draft_view(m);
    cass_row(&view, row, out);
    return;
  }
  size_t t0 = (size_t)(row / NEST_ROWS) * m->n_group;
  for (uint32_t k = 0; k < m->cols; k++)
    out[k] = draft_value(m->a, m->x, t0 + k / NEST_COLS, row % NEST_ROWS, k % NEST_COLS);
  put_hot(m, row, out);
}

void matrix_row_exact(const Matrix *m, uint32_t row, float *out) { matrix_row_decode(m, row, nest_decode_tile, out); }

void matrix_row_decode(const Matrix *m, uint32_t row, void (*decode)(const Matrix *, size_t, TileWords), float *out) {
  if (m->codec == PYCASS_CODEC_RAW) {
    for (uint32_t k = 0; k < m->cols; k++)
      out[k] = bf16_to_f32(m->raw[(size_t)row * m->cols + k]);
    return;
  }
  if (matrix_is_cass(m)) {
    cass_row(m, row, out);
    return;
  }
  for (uint32_t g = 0; g < m->n_group; g++) {
    TileWords tile;
    decode(m, (size_t)(row / NEST_ROWS) * m->n_group + g, tile);
    for (uint32_t k = 0; k < NEST_COLS && g * NEST_COLS + k < m->cols; k++)
      out[g * NEST_COLS + k] = bf16_to_f32(tile_at(tile, row % NEST_ROWS, k));
  }
  put_hot(m, row, out);
}

/* Rows [r0, r1) of tile t of row block r0 / 16, into out [..][cols]. */
static void tile_rows(const Matrix *m, size_t t, uint32_t r0, uint32_t r1, uint16_t *out) {
  TileWords tile;
  nest_decode_tile(m, t, tile);
  uint32_t k0 = (uint32_t)(t % m->n_group) * NEST_COLS, n = (uint32_t)min_size(NEST_COLS, m->cols - k0);
  for (uint32_t r = r0; r < r1; r++)
    for (uint32_t k = 0; k < n; k++)
      out[(size_t)(r - r0) * m->cols + k0 + k] = tile_at(tile, r % NEST_ROWS, k);
}

void matrix_bits(const Matrix *m, uint32_t r0, uint32_t r1, uint16_t *out) {
  if (m->codec == PYCASS_CODEC_RAW) {
    memcpy(out, m->raw + (size_t)r0 * m->cols, (size_t)(r1 - r0) * m->cols * sizeof *out);
    return;
  }
  if (matrix_is_cass(m)) {
    cass_bits(m, r0, r1, out);
    return;
  }
  for (uint32_t r = r0, end; r < r1; r = end) {
    size_t block = r / NEST_ROWS;
    end = (uint32_t)min_size((block + 1) * NEST_ROWS, r1);
    for (size_t g = 0; g < m->n_group; g++)
      tile_rows(m, block * m->n_group + g, r, end, out + (size_t)(r - r0) * m->cols);
    for (uint32_t row = r; row < end; row++)
      for (uint32_t i = 0; i < m->n_hot; i++)
        out[(size_t)(row - r0) * m->cols + m->hot[i]] = hot_at(m, row, i);
  }
}

pycass_status pycass_nest_decode_draft(const uint8_t *a, const uint8_t *x, uint64_t rows, uint64_t cols, float *out) {
  pycass_nest_sizes sizes;
  RETURN_IF(pycass_nest_bound(rows, cols, &sizes));
  Matrix m = matrix_shape(PYCASS_CODEC_NEST, (uint32_t)rows, (uint32_t)cols);
  m.a = a, m.x = x;
  for (uint32_t r = 0; r < m.rows; r++)
    matrix_row_draft(&m, r, out + (size_t)r * cols);
  return PYCASS_OK;
}
