/* Target products of avx2 and neon, whose few registers hold two tokens' sums: a tile is decoded into L1, once for all tokens,
 * but for one token of a nest matrix. The including set defines what is declared static here without a body. */
#ifndef CASS_TILED_H
#define CASS_TILED_H

enum { MATMUL_TOKENS = 64, MATMUL_CHUNK = 2, SPAN = 4 };

/* Of each row of a half line's vectors the two sums, or what they are multiplied by. */
typedef float Sums[2 * NEST_ROWS];

/* A tile as products take it. */
typedef struct Tile {
  TileWords words;
  Sums unit;
} Tile;

static void set_nest_decode_tile(const Matrix *w, size_t t, TileWords out);
/* A tile in relative form, and its units. */
static void nest_relative_tile(const Matrix *w, size_t t, Tile *out);
static void set_cass_next_tile(CassReader *r, TileWords out);
/* 16 rows of 64 columns. */
ALWAYS_INLINE void raw_words(const uint16_t *p, size_t stride, TileWords out);
/* sums += a row block's hot columns times a token whose activations begin at hot */
static void multiply_hot(Sums sums, const Matrix *w, size_t block, const uint16_t *hot);
/* y = s0 + s1 of the 16 rows, without the panels' scale */
ALWAYS_INLINE void finish_sums(float *y, const Sums sums);
/* Tiles of groups in turn times n <= 2 tokens; the sums wait in memory meanwhile. */
ALWAYS_INLINE void tiles_chunk_n(Sums *sums, const Tile *tile, size_t n_tile, const uint16_t *panel, const int n);
/* A row block of a nest matrix times one token. False if it is damaged. */
static bool nest_block(float *y, const Matrix *w, size_t block, const uint16_t *panel, const uint16_t *hot);

ALWAYS_INLINE void no_units(Sums unit) {
  for (int i = 0; i < 2 * NEST_ROWS; i++)
    unit[i] = 1;
}

static void nest_product_tile(const Matrix *w, size_t t, Tile *out) {
  if (nest_is_relative(w, t)) {
    nest_relative_tile(w, t, out);
    return;
  }
  no_units(out->unit);
  set_nest_decode_tile(w, t, out->words);
}

/* As raw_decode_tile. Fetches the tile of the next row block, since hardware does not follow 16 rows; past the matrix
 * that does nothing. */
static __attribute__((noinline)) void set_raw_decode_tile(const Matrix *w, size_t t, TileWords out) {
  size_t r0 = t / w->n_group * NEST_ROWS, k0 = t % w->n_group * NEST_COLS;
  size_t rows = min_size(NEST_ROWS, w->rows - r0), cols = min_size(NEST_COLS, w->cols - k0);
  const uint16_t *p = w->raw + r0 * w->cols + k0;
  for (size_t r = NEST_ROWS; r < 2 * NEST_ROWS; r++)
    for (size_t k = 0; k < 2; k++)
      __builtin_prefetch((const void *)((uintptr_t)p + 2 * r * w->cols + 64 * k), 0, 2);
  if (rows == NEST_ROWS && cols == NEST_COLS) {
    raw_words(p, w->cols, out);
    return;
  }
  uint16_t padded[NEST_ROWS][NEST_COLS] = {{0}};
  for (size_t r = 0; r < rows; r++)
    memcpy(padded[r], p + r * w->cols, cols * sizeof *p);
  raw_words(padded[0], NEST_COLS, out);
}

/* reader: at tile t, of a cass matrix. */
static void product_tile(const Matrix *w, size_t t, CassReader *reader, Tile *out) {
  if (w->codec == PYCASS_CODEC_NEST) {
    nest_product_tile(w, t, out);
    return;
  }
  no_units(out->unit);
  if (matrix_is_cass(w))
    set_cass_next_tile(reader, out->words);
  else
    set_raw_decode_tile(w, t, out->words);
}

/* Not inlined, like the decoders: together they spill. */
static __attribute__((noinline)) void tiles_chunk(Sums *sums, const Tile *tile, size_t n_tile, const uint16_t *panel,
                                                  size_t n) {
  if (n == 1)
    tiles_chunk_n(sums, tile, n_tile, panel, 1);
  else
    tiles_chunk_n(sums, tile, n_tile, panel, 2);
}

/* A row block times m <= 64 tokens: each tile is decoded once, a few groups at a time. */
static void tiled_block(float *y, size_t ldy, const Matrix *w, size_t block, const uint16_t *panels, const uint16_t *hot,
                        uint32_t m) {
  _Alignas(32) Sums sums[MATMUL_TOKENS];
  memset(sums, 0, m * sizeof *sums);
  for (uint32_t i = 0; w->n_hot && i < m; i++)
    multiply_hot(sums[i], w, block, hot + panel_at(i, 1, 0));
  CassReader reader;
  if (matrix_is_cass(w))
    cass_reader_init(&reader, w, (uint32_t)block);
  for (size_t g = 0; g < w->n_group; g += SPAN) {
    _Alignas(64) Tile tile[SPAN];
    size_t n = min_size(SPAN, w->n_group - g);
    for (size_t i = 0; i < n; i++)
      product_tile(w, block * w->n_group + g + i, &reader, &tile[i]);
    for (uint32_t i = 0; i < m; i += MATMUL_CHUNK)
      tiles_chunk(sums + i, tile, n, panels + panel_at(i, w->n_group, g), min_size(MATMUL_CHUNK, m - i));
  }
  for (uint32_t i = 0; i < m; i++)
    finish_sums(y + i * ldy, sums[i]);
}

static void set_matmul(float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, uint32_t block0,
                       uint32_t block1) {
  for (uint32_t i = 0; i < m; i += MATMUL_TOKENS) {
    uint32_t n = m - i < MATMUL_TOKENS ? m - i : MATMUL_TOKENS;
    const uint16_t *part = acts->panels + panel_at(i, w->n_group, 0), *hot = w->n_hot ? acts->hot + panel_at(i, 1, 0) : NULL;
    for (size_t block = block0; block < block1; block++) {
      float *out = y + i * ldy + block * NEST_ROWS;
      bool direct = w->codec == PYCASS_CODEC_NEST && n == 1;
      if (!direct || !nest_block(out, w, block, part, hot))
        tiled_block(out, ldy, w, block, part, hot, n);
    }
  }
}

/* What a row block's sums of a draft begin with: the product with hot columns, and the bias. */
static void draft_begin(float *y, size_t ldy, const Matrix *w, size_t block, const Acts *acts, size_t token, size_t n) {
  for (size_t t = 0; t < n; t++, y += ldy) {
    Sums sums = {0};
    if (w->n_hot)
      multiply_hot(sums, w, block, acts->hot + panel_at(token + t, 1, 0));
    finish_sums(y, sums);
    for (size_t i = 0; i < NEST_ROWS; i++)
      y[i] += w->bias ? w->bias[block * NEST_ROWS + i] : 0.0f;
  }
}

#endif
