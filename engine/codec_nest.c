/* The nest codec (docs/format.md, "Codec nest"): encoder and scalar decoder. This is the specification that every
 * other decoder is compared with, so it stays short. */
#include <stdlib.h>

#include "codec.h"

const uint8_t nest_magnitude[8] = {4, 13, 22, 31, 43, 61, 85, 119};

enum { MIN_G = 4, MAX_S = 7 };

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
    return 7;
  if (d < 3)
    return 6 - 2 * (uint32_t)d + high;
  return d == 3;
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

static uint32_t group_exponent(const uint16_t *w) {
  uint32_t top = MIN_G;
  for (int k = 0; k < NEST_COLS; k++)
    if (exponent_of(w[k]) > top)
      top = exponent_of(w[k]);
  if (top == MIN_G)
    return top;
  return draft_error(w, top, top - 1) < draft_error(w, top, top) ? top - 1 : top;
}

typedef struct BitWriter {
  uint8_t *p;
  size_t n; /* bits written */
} BitWriter;

static inline void put_bit(BitWriter *s, uint32_t bit) {
  if (s->n % 8 == 0)
    s->p[s->n / 8] = 0;
  s->p[s->n / 8] |= (uint8_t)((bit & 1u) << (s->n % 8));
  s->n++;
}

/* The side fields of one half line; escapes are collected forwards. */
static void encode_half_line(const uint16_t *w, const uint8_t *cell, const uint8_t *group, BitWriter *bits,
                             uint8_t *escapes, size_t *n_escapes) {
  uint8_t s[64];
  for (int n = 0; n < 64; n++)
    if (cell[n] == 7)
      put_bit(bits, exponent_of(w[n]) > group[row_of((uint32_t)n)]);
  for (int n = 0; n < 64; n++)
    if (cell[n] < 2 || exponent_of(w[n]) > group[row_of((uint32_t)n)])
      put_bit(bits, mantissa_of(w[n]) >> 6);
  for (int n = 0; n < 64; n++) {
    uint32_t s_full = cell[n] ? 0 : (uint32_t)group[row_of((uint32_t)n)] - exponent_of(w[n]) - 4;
    s[n] = (uint8_t)(s_full < MAX_S ? s_full : MAX_S);
    if (s[n] == MAX_S)
      escapes[(*n_escapes)++] = (uint8_t)exponent_of(w[n]);
  }
  for (int plane = 0; plane < 3; plane++)
    for (int n = 0; n < 64; n++)
      if (cell[n] == 0)
        put_bit(bits, s[n] >> plane);
}

/* tile [16][64]; a, x, b, c point at the tile's own bytes. Returns the record's size. */
static size_t encode_tile(uint16_t tile[NEST_ROWS][NEST_COLS], uint8_t *a, uint8_t *x, uint8_t *b, uint8_t *c,
                          uint8_t *record) {
  uint8_t escapes[NEST_MAX_ESCAPES];
  size_t n_escapes = 0;
  BitWriter bits = {record, 0};
  for (int r = 0; r < NEST_ROWS; r++)
    x[r] = (uint8_t)group_exponent(tile[r]);
  memset(a, 0, 512), memset(b, 0, 512), memset(c, 0, 256);
  for (uint32_t j = 0; j < 8; j++)
    for (uint32_t h = 0; h < 2; h++) {
      uint16_t w[64];
      uint8_t cell[64];
      for (uint32_t n = 0; n < 64; n++) {
        w[n] = tile[row_of(n)][col_of(j, n, h)];
        cell[n] = (uint8_t)cell_of(w[n], x[row_of(n)]);
        uint32_t nibble = (uint32_t)(w[n] >> 15) << 3 | cell[n];
        a[64 * j + n] |= (uint8_t)(nibble << (4 * h));
        b[64 * j + n] |= (uint8_t)((mantissa_of(w[n]) >> 2 & 15u) << (4 * h));
        c[64 * (j / 2) + n] |= (uint8_t)((mantissa_of(w[n]) & 3u) << (4 * (j % 2) + 2 * h));
      }
      encode_half_line(w, cell, x, &bits, escapes, &n_escapes);
    }
  size_t size = (bits.n + 7) / 8;
  while (n_escapes) /* the first one last */
    record[size++] = escapes[--n_escapes];
  return size;
}

pycass_status pycass_nest_bound(uint64_t rows, uint64_t cols, pycass_nest_sizes *out) {
  if (!rows || !cols || rows > 1u << 28 || cols > 1u << 28)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "nest: a matrix of %llu x %llu is out of range",
                     (unsigned long long)rows, (unsigned long long)cols);
  uint64_t tiles = (rows + 15) / 16 * ((cols + 63) / 64);
  /* per tile: an offset, 5 bits a weight at most (T, three planes; O and T for over), an escape each */
  uint64_t bound = round_up(4 * (tiles + 1) + tiles * (640 + NEST_MAX_ESCAPES) + NEST_SIDE_SLACK, CASS_ALIGN);
  *out = (pycass_nest_sizes){512 * tiles, round_up(16 * tiles, CASS_ALIGN), 512 * tiles, 256 * tiles, bound};
  return PYCASS_OK;
}

static void load_tile(const uint16_t *w, uint64_t rows, uint64_t cols, uint64_t r0, uint64_t k0,
                      uint16_t tile[NEST_ROWS][NEST_COLS]) {
  memset(tile, 0, sizeof(uint16_t) * NEST_TILE);
  for (uint64_t r = r0; r < rows && r < r0 + NEST_ROWS; r++)
    memcpy(tile[r - r0], w + r * cols + k0, sizeof(uint16_t) * min_size(NEST_COLS, cols - k0));
}

pycass_status pycass_nest_encode(const uint16_t *w, uint64_t rows, uint64_t cols, uint8_t *a, uint8_t *x, uint8_t *b,
                                 uint8_t *c, uint8_t *side, size_t *side_size) {
  pycass_nest_sizes sizes;
  RETURN_IF(pycass_nest_bound(rows, cols, &sizes));
  size_t groups = (cols + 63) / 64, tiles = (rows + 15) / 16 * groups;
  size_t end = 4 * (tiles + 1);
  memset(x, 0, sizes.x);
  for (size_t t = 0; t < tiles; t++) {
    uint16_t tile[NEST_ROWS][NEST_COLS];
    load_tile(w, rows, cols, t / groups * NEST_ROWS, t % groups * NEST_COLS, tile);
    if (end > UINT32_MAX - NEST_TILE * 2)
      return cass_fail(PYCASS_ERR_UNSUPPORTED, "nest: a matrix of %llu x %llu has too much side data",
                       (unsigned long long)rows, (unsigned long long)cols);
    uint32_t offset = (uint32_t)end;
    memcpy(side + 4 * t, &offset, 4);
    end += encode_tile(tile, a + 512 * t, x + 16 * t, b + 512 * t, c + 256 * t, side + end);
  }
  uint32_t offset = (uint32_t)end;
  memcpy(side + 4 * tiles, &offset, 4);
  *side_size = round_up(end + NEST_SIDE_SLACK, CASS_ALIGN);
  memset(side + end, 0, *side_size - end);
  return PYCASS_OK;
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

typedef struct BitReader {
  const uint8_t *p;
  size_t n;
} BitReader;

static inline uint32_t get_bit(BitReader *s) {
  uint32_t bit = s->p[s->n / 8] >> (s->n % 8) & 1u;
  s->n++;
  return bit;
}

/* nibble, b4, c2 [64] -> w [64]; *escape is the next escape byte, backwards. */
static void decode_half_line(const uint8_t *nibble, const uint8_t *low6, const uint8_t *group, BitReader *bits,
                             const uint8_t **escape, uint16_t *w) {
  uint8_t over[64] = {0}, top[64], s[64] = {0};
  for (int n = 0; n < 64; n++)
    if ((nibble[n] & 7) == 7)
      over[n] = (uint8_t)get_bit(bits);
  for (int n = 0; n < 64; n++)
    top[n] = (uint8_t)((nibble[n] & 7) < 2 || over[n] ? get_bit(bits) : nibble[n] & 1u);
  for (int plane = 0; plane < 3; plane++)
    for (int n = 0; n < 64; n++)
      if ((nibble[n] & 7) == 0)
        s[n] |= (uint8_t)(get_bit(bits) << plane);
  for (int n = 0; n < 64; n++) {
    uint32_t c = nibble[n] & 7u, e = group[row_of((uint32_t)n)] - 3u + (c >> 1) - (c == 0) + over[n] - s[n];
    if (s[n] == MAX_S)
      e = *--*escape;
    w[n] = (uint16_t)((nibble[n] >> 3 & 1u) << 15 | (e & 255u) << 7 | (uint32_t)top[n] << 6 | low6[n]);
  }
}

void nest_decode_tile(const Matrix *m, size_t t, TilePairs out) {
  const uint8_t *a = m->a + 512 * t, *b = m->b + 512 * t, *c = m->c + 256 * t;
  BitReader bits = {m->side + load_u32(m->side + 4 * t), 0};
  const uint8_t *escape = m->side + load_u32(m->side + 4 * t + 4);
  for (uint32_t j = 0; j < 8; j++)
    for (uint32_t h = 0; h < 2; h++) {
      uint8_t nibble[64], low6[64];
      uint16_t w[64];
      for (uint32_t n = 0; n < 64; n++) {
        nibble[n] = a[64 * j + n] >> (4 * h) & 15u;
        low6[n] = (uint8_t)((b[64 * j + n] >> (4 * h) & 15u) << 2 |
                            (c[64 * (j / 2) + n] >> (4 * (j % 2) + 2 * h) & 3u));
      }
      decode_half_line(nibble, low6, m->x + 16 * t, &bits, &escape, w);
      for (uint32_t n = 0; n < 64; n++) {
        uint32_t k = col_of(j, n, h) % 8;
        out[4 * j + k % 4][row_of(n)][k / 4] = w[n];
      }
    }
}

void raw_decode_tile(const Matrix *m, size_t t, TilePairs out) {
  uint16_t tile[NEST_ROWS][NEST_COLS];
  load_tile(m->raw, m->rows, m->cols, t / m->n_group * NEST_ROWS, t % m->n_group * NEST_COLS, tile);
  for (int r = 0; r < NEST_ROWS; r++)
    for (int k = 0; k < NEST_COLS; k++)
      out[k / 8 * 4 + k % 4][r][k % 8 / 4] = tile[r][k];
}

/* ---- rows, and whole draft matrices ------------------------------------------------------------- */

static inline float draft_value(const uint8_t *a, const uint8_t *x, size_t t, uint32_t r, uint32_t k) {
  uint32_t nibble = a[512 * t + 64 * (k / 8) + 4 * r + k % 8 / 2] >> (4 * (k % 2)) & 15u;
  float magnitude = (float)nest_magnitude[nibble & 7u] * (1.0f / 70.0f) * f32_from_bits((uint32_t)x[16 * t + r] << 23);
  return nibble & 8u ? -magnitude : magnitude;
}

void matrix_row_draft(const Matrix *m, uint32_t row, float *out) {
  if (m->codec == PYCASS_CODEC_RAW) {
    matrix_row_exact(m, row, out);
    return;
  }
  size_t t0 = (size_t)(row / NEST_ROWS) * m->n_group;
  for (uint32_t k = 0; k < m->cols; k++)
    out[k] = draft_value(m->a, m->x, t0 + k / NEST_COLS, row % NEST_ROWS, k % NEST_COLS);
}

void matrix_row_exact(const Matrix *m, uint32_t row, float *out) {
  if (m->codec == PYCASS_CODEC_RAW) {
    for (uint32_t k = 0; k < m->cols; k++)
      out[k] = bf16_to_f32(m->raw[(size_t)row * m->cols + k]);
    return;
  }
  for (uint32_t g = 0; g < m->n_group; g++) {
    TilePairs tile;
    nest_decode_tile(m, (size_t)(row / NEST_ROWS) * m->n_group + g, tile);
    for (uint32_t k = 0; k < NEST_COLS && g * NEST_COLS + k < m->cols; k++)
      out[g * NEST_COLS + k] = bf16_to_f32(tile[k / 8 * 4 + k % 4][row % NEST_ROWS][k % 8 / 4]);
  }
}

void matrix_bits(const Matrix *m, uint16_t *out) {
  if (m->codec == PYCASS_CODEC_RAW) {
    memcpy(out, m->raw, (size_t)m->rows * m->cols * sizeof *out);
    return;
  }
  for (size_t t = 0; t < matrix_tiles(m); t++) {
    TilePairs tile;
    nest_decode_tile(m, t, tile);
    size_t r0 = t / m->n_group * NEST_ROWS, k0 = t % m->n_group * NEST_COLS;
    for (size_t r = r0; r < m->rows && r < r0 + NEST_ROWS; r++)
      for (size_t k = 0; k < min_size(NEST_COLS, m->cols - k0); k++)
        out[r * m->cols + k0 + k] = tile[k / 8 * 4 + k % 4][r - r0][k % 8 / 4];
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
