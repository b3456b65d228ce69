/* Matrices as the kernels see them, and the nest codec's scalar truth. Layout and terms: docs/format.md. */
#ifndef CASS_CODEC_H
#define CASS_CODEC_H

#include "base.h"

enum { NEST_ROWS = 16, NEST_COLS = 64, NEST_TILE = NEST_ROWS * NEST_COLS };
/* A damaged plane A moves the side position at most this far past a record and takes that many escapes before its
 * end; readers may touch those bytes, so they must be mapped. */
enum { NEST_SIDE_SLACK = 1024, NEST_MAX_ESCAPES = 1024 };

/* Draft magnitudes of the eight cells, times 70. */
extern const uint8_t nest_magnitude[8];

/* One weight matrix [rows, cols], borrowed from the file. */
typedef struct Matrix {
  pycass_codec codec;
  uint32_t rows, cols;        /* out-features, in-features */
  uint32_t n_block, n_group;  /* ceil(rows / 16), ceil(cols / 64): tiles down and across */
  const uint16_t *raw;        /* raw: [rows][cols] */
  const uint8_t *a, *x, *b, *c; /* nest planes */
  const uint8_t *side;        /* nest: offsets, then records */
} Matrix;

/* A decoded tile as kernels use it: pair p = 4 j + i holds columns 8 j + i and 8 j + i + 4 of all 16 rows. It is
 * the order in which two half lines of plane A leave the decoder, and a B operand of AMX. */
typedef uint16_t TilePairs[32][NEST_ROWS][2];

/* Decodes tile t (row block t / n_group) to exact bits. Never fails: see NEST_SIDE_SLACK. */
void nest_decode_tile(const Matrix *w, size_t t, TilePairs out);
/* The same for raw; rows and columns past the matrix are zero. */
void raw_decode_tile(const Matrix *w, size_t t, TilePairs out);
/* Checks a side part's offsets. */
pycass_status nest_check_side(const uint8_t *side, size_t size, size_t n_tiles);
/* The whole matrix's bits, row-major. out [rows][cols] */
void matrix_bits(const Matrix *w, uint16_t *out);
/* One row of a matrix: exact, or what the draft sees. out [cols] */
void matrix_row_exact(const Matrix *w, uint32_t row, float *out);
void matrix_row_draft(const Matrix *w, uint32_t row, float *out);

static inline size_t matrix_tiles(const Matrix *w) { return (size_t)w->n_block * w->n_group; }
static inline Matrix matrix_shape(pycass_codec codec, uint32_t rows, uint32_t cols) {
  Matrix w = {.codec = codec, .rows = rows, .cols = cols};
  w.n_block = (rows + NEST_ROWS - 1) / NEST_ROWS;
  w.n_group = (cols + NEST_COLS - 1) / NEST_COLS;
  return w;
}

#endif
