/* The specification of a kernel set, in plain C. */
#include "ops.h"
#include "sets.h"

/* A tile as the product takes it, and what its rows' sums are multiplied by. reader: at tile t, of a cass matrix. */
static void decode_tile(const Matrix *w, size_t t, CassReader *reader, TileWords out, float unit[NEST_ROWS]) {
  for (int r = 0; r < NEST_ROWS; r++)
    unit[r] = 1;
  if (matrix_is_cass(w)) {
    cass_next_tile(reader, out);
    return;
  }
  if (w->codec == PYCASS_CODEC_RAW) {
    raw_decode_tile(w, t, out);
    return;
  }
  if (!nest_is_relative(w, t)) {
    nest_decode_tile(w, t, out);
    return;
  }
  nest_decode_relative(w, t, out);
  for (int r = 0; r < NEST_ROWS; r++)
    unit[r] = f32_from_bits((uint32_t)(w->x[16 * t + (size_t)r] - NEST_BIAS + 127) << 23);
}

/* a += the product of row r of a half line with a token's activations [4]. */
static void multiply_words(float a[2], const uint16_t *half_line, uint32_t r, const uint16_t *x) {
  for (uint32_t i = 0; i < 2; i++)
    for (uint32_t c = 2 * i + 2; c-- > 2 * i;)
      a[i] = fmaf(bf16_to_f32(half_line[tile_word(r, c)]), bf16_to_f32(x[c]), a[i]);
}

/* a += the product of row r of a tile with a token's activations [16][PANEL_TOKENS][4]. */
static void multiply_row(float a[2], TileWords tile, uint32_t r, const uint16_t *x) {
  for (uint32_t hl = 0; hl < 16; hl++, x += PANEL_TOKENS * 4)
    multiply_words(a, tile[hl], r, x);
}

/* s += the product of row r of a row block's hot columns with a token's activations. */
static void multiply_hot(float s[2], const Matrix *w, size_t block, uint32_t r, const Acts *acts, size_t token) {
  for (uint32_t i = 0; i < w->n_hot / 4; i++)
    multiply_words(s, hot_half_line(w, block, i), r, acts->hot + panel_at(token, 1, 0) + i * PANEL_TOKENS * 4);
}

static void matmul(float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, uint32_t block0, uint32_t block1) {
  enum { TOKENS = 64 };
  for (uint32_t block = block0; block < block1; block++)
    for (uint32_t i0 = 0; i0 < m; i0 += TOKENS) {
      uint32_t count = m - i0 < TOKENS ? m - i0 : TOKENS;
      float s[TOKENS][NEST_ROWS][2] = {{{0}}};
      CassReader reader;
      if (matrix_is_cass(w))
        cass_reader_init(&reader, w, block);
      for (uint32_t i = 0; i < count; i++)
        for (uint32_t r = 0; r < NEST_ROWS; r++)
          multiply_hot(s[i][r], w, block, r, acts, i0 + i);
      for (uint32_t g = 0; g < w->n_group; g++) {
        TileWords tile;
        float unit[NEST_ROWS];
        decode_tile(w, (size_t)block * w->n_group + g, &reader, tile, unit);
        for (uint32_t i = 0; i < count; i++)
          for (uint32_t r = 0; r < NEST_ROWS; r++) {
            float a[2] = {0, 0};
            multiply_row(a, tile, r, acts->panels + panel_at(i0 + i, w->n_group, g));
            for (int k = 0; k < 2; k++)
              s[i][r][k] = fmaf(a[k], unit[r], s[i][r][k]);
          }
      }
      for (uint32_t i = 0; i < count; i++)
        for (uint32_t r = 0; r < NEST_ROWS; r++)
          y[(i0 + i) * ldy + (size_t)block * NEST_ROWS + r] = (s[i][r][0] + s[i][r][1]) * (1 / PANEL_SCALE);
    }
}

/* Integer dot product of row r of tile t with q [64]. */
static int32_t draft_dot(const uint8_t *a, uint32_t r, const int8_t *q) {
  int32_t sum = 0;
  for (uint32_t j = 0; j < 8; j++)
    for (uint32_t b = 0; b < 4; b++) {
      uint8_t v = a[64 * j + 4 * r + b];
      int32_t low = nest_magnitude[v & 7], high = nest_magnitude[v >> 4 & 7];
      sum += (v & 8 ? -low : low) * q[8 * j + 2 * b] + (v & 128 ? -high : high) * q[8 * j + 2 * b + 1];
    }
  return sum;
}

static void matmul_draft(float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, uint32_t block0,
                         uint32_t block1) {
  for (uint32_t block = block0; block < block1; block++)
    for (uint32_t i = 0; i < m; i++)
      for (uint32_t r = 0; r < NEST_ROWS; r++) {
        float hot[2] = {0, 0};
        multiply_hot(hot, w, block, r, acts, i);
        float s = (hot[0] + hot[1]) * (1 / PANEL_SCALE) + (w->bias ? w->bias[(size_t)block * NEST_ROWS + r] : 0);
        for (uint32_t g = 0; g < w->n_group; g++) {
          size_t t = (size_t)block * w->n_group + g, at = (size_t)i * w->n_group + g;
          float scale = acts->scale[at] * f32_from_bits((uint32_t)w->x[16 * t + r] << 23);
          s = fmaf((float)draft_dot(w->a + 512 * t, r, acts->q + at * NEST_COLS), scale, s);
        }
        y[i * ldy + (size_t)block * NEST_ROWS + r] = s;
      }
}

const Kernels kernels_scalar = {
    .name = "scalar", .nest_decode_tile = nest_decode_tile, .cass_next_tile = cass_next_tile, .matmul = matmul,
    .matmul_draft = matmul_draft, OPS_TABLE};
