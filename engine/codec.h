/* Matrices as the kernels see them, and the nest codec's scalar truth. Layout and terms: docs/format.md. */
#ifndef CASS_CODEC_H
#define CASS_CODEC_H

#include "base.h"

enum { NEST_ROWS = 16, NEST_COLS = 64, NEST_TILE = NEST_ROWS * NEST_COLS };
enum { HOT_UNIT = 16, HOT_MOST = NEST_COLS }; /* hot columns: a multiple of the one, at most the other */
/* A damaged record makes readers touch at most this many bytes past its start, and take that many escapes before its
 * end; those bytes must be mapped. */
enum { NEST_SIDE_SLACK = 1024, NEST_MAX_ESCAPES = 1024 };

/* By cell: draft magnitude times 70; e - G + NEST_BIAS and mantissa bit 6, without what T and q add. */
extern const uint8_t nest_magnitude[8], nest_exponent[8], nest_bit6[8];
enum { CELL_TOP = 5, CELL_EIGHTH = 6, CELL_SMALL = 7, NEST_BIAS = 18 };
/* A record's header: its number of nibbles q, and whether 15 among them stands for an escape byte. */
enum { NEST_HEADER = 2, NEST_COUNT = 0x7ff, NEST_HAS_ESCAPE = 0x4000 };

/* One weight matrix [rows, cols], borrowed from the file. */
typedef struct Matrix {
  pycass_codec codec;
  uint32_t rows, cols;        /* out-features, in-features */
  uint32_t n_block, n_group;  /* ceil(rows / 16), ceil(cols / 64): tiles down and across */
  const uint16_t *raw;        /* raw: [rows][cols] */
  const uint8_t *a, *x, *b;   /* nest planes */
  const uint8_t *side;        /* nest: offsets, then records */
  uint32_t n_hot;             /* nest: columns that planes do not hold, 0 if none */
  const uint32_t *hot;        /* [n_hot], ascending */
  const uint16_t *hot_words;  /* [n_block][n_hot / 4][64]: half lines of four hot columns each, as in TileWords */
  const float *bias;          /* [16 n_block]: what the draft adds to each row's product; NULL if none */
  bool draft_full;            /* the draft reads it as the target does */
  const uint8_t *spec, *ver;  /* cass1, cass2: the parts; without ver the matrix is the draft's */
} Matrix;

/* A decoded tile as kernels use it. Half line hl = 2 j + h holds columns 8 j + h + {0, 2, 4, 6} of all 16 rows, as they
 * leave the decoder: of each four rows first two, then, 32 words on, the other two. */
typedef uint16_t TileWords[16][64];
/* Where half line hl has the word of row r and column 8 j + h + 2 c. */
static inline uint32_t tile_word(uint32_t r, uint32_t c) { return r / 2 % 2 * 32 + r / 4 * 8 + r % 2 * 4 + c; }

/* Decodes tile t (row block t / n_group) to exact bits. Never fails: see NEST_SIDE_SLACK. */
void nest_decode_tile(const Matrix *w, size_t t, TileWords out);
/* Target products take most tiles in *relative* form: a weight is w / 2^(G - NEST_BIAS), so its word is what the planes give
 * without adding the group's exponent, and those whose exponent is zero are denormal, that is zero, by themselves. A tile
 * with escapes, whose weights would not fit, or with very large ones, is taken as it is. */
enum { NEST_RELATIVE_MOST = 140 }; /* the largest G: 2^(G - NEST_BIAS) has to be a float */
static inline bool nest_is_relative(const Matrix *w, size_t t) {
  const uint8_t *record = w->side + load_u32(w->side + 4 * t);
  bool fits = !(record[1] & NEST_HAS_ESCAPE >> 8);
  for (int r = 0; r < NEST_ROWS; r++)
    fits &= w->x[16 * t + (size_t)r] <= NEST_RELATIVE_MOST;
  return fits;
}
/* Such a tile in relative form. */
void nest_decode_relative(const Matrix *w, size_t t, TileWords out);

/* Keys of a KV cache as its draft takes them, by planes A, X and B: row r of a matrix of one group is its sign and magnitude, by
 * cell and mantissa bits 5..2, times 2^(G - 127 - 6). */
extern const uint8_t nest_key_magnitude[8][16];
void nest_key_row(const Matrix *w, uint32_t row, int8_t out[NEST_COLS]);
/* Tiles [t0, t1) of a matrix of one group, transposed: out [64][ld], row r of tile t in column 16 (t - t0) + r. */
void nest_columns(const Matrix *w, size_t t0, size_t t1, uint16_t *out, size_t ld);
/* The other way round: channels [16 n_tile] of 64 positions v [64][stride], those past n_channel zero, as n_tile tiles with one
 * side part (offsets and records, no zeros at the end). top: group exponents are always the largest. Returns the side part's
 * size, at most nest_columns_bound(n_tile). */
size_t nest_encode_columns(const uint16_t *v, size_t stride, uint32_t n_channel, bool top, uint8_t *a, uint8_t *x, uint8_t *b,
                           uint8_t *side);
static inline size_t nest_columns_bound(size_t n_tile) {
  return 4 * (n_tile + 1) + n_tile * (NEST_HEADER + NEST_TILE * 5 / 8 + NEST_TILE);
}

/* Decodes a tile of a raw matrix; rows and columns past the matrix are zero. */
void raw_decode_tile(const Matrix *w, size_t t, TileWords out);
/* Row block's half line i of hot columns. */
static inline const uint16_t *hot_half_line(const Matrix *w, size_t block, size_t i) {
  return w->hot_words + (block * (w->n_hot / 4) + i) * 64;
}
/* Whether hot columns are what they must be. */
pycass_status nest_check_hot(const uint32_t *hot, size_t n_hot, uint64_t cols);
/* Checks a side part's offsets. */
pycass_status nest_check_side(const uint8_t *side, size_t size, size_t n_tiles);
/* The bits of rows [r0, r1), row-major. out [r1 - r0][cols] */
void matrix_bits(const Matrix *w, uint32_t r0, uint32_t r1, uint16_t *out);
/* One row of a matrix: exact, or what the draft sees. out [cols] */
void matrix_row_exact(const Matrix *w, uint32_t row, float *out);
/* The same with another decoder of nest tiles. */
void matrix_row_decode(const Matrix *w, uint32_t row, void (*decode)(const Matrix *, size_t, TileWords), float *out);
void matrix_row_draft(const Matrix *w, uint32_t row, float *out);

/* For a decoder that is at the tile with these planes and this record: fetches a later one into L2, since hardware sees too
 * late that three streams are read by turns. Past the matrix that does nothing. */
static inline void nest_prefetch(const uint8_t *a, const uint8_t *b, const uint8_t *record) {
  enum { AHEAD = 8, L2 = 2, RECORD = 180 }; /* tiles; bytes of a record, about */
  for (int i = 0; i < 8; i++)
    __builtin_prefetch((const void *)((uintptr_t)a + AHEAD * 512 + 64 * (uintptr_t)i), 0, L2);
  for (int i = 0; i < 12; i++)
    __builtin_prefetch((const void *)((uintptr_t)b + AHEAD * 768 + 64 * (uintptr_t)i), 0, L2);
  for (int i = 0; i < 3; i++)
    __builtin_prefetch((const void *)((uintptr_t)record + AHEAD * RECORD + 64 * (uintptr_t)i), 0, L2);
}

static inline bool matrix_is_cass(const Matrix *w) { return w->codec == PYCASS_CODEC_CASS1 || w->codec == PYCASS_CODEC_CASS2; }
static inline size_t matrix_tiles(const Matrix *w) { return (size_t)w->n_block * w->n_group; }
static inline Matrix matrix_shape(pycass_codec codec, uint32_t rows, uint32_t cols) {
  Matrix w = {.codec = codec, .rows = rows, .cols = cols};
  w.n_block = (rows + NEST_ROWS - 1) / NEST_ROWS;
  w.n_group = (cols + NEST_COLS - 1) / NEST_COLS;
  return w;
}

#endif
