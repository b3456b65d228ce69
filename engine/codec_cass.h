/* The codecs cass1 and cass2: the reader of a row block. Layout and terms: docs/format.md, "Codecs cass1 and cass2". */
#ifndef CASS_CODEC_CASS_H
#define CASS_CODEC_CASS_H

#include "codec.h"

enum { CASS_HEADER = 64, CASS_ENTRY = 20, CASS_CODES = 12, CASS_BLOCK = 128 }; /* bytes; CASS_CODES is the escape's rank */
enum { CASS_MX_GROUP = 32 };
enum { CASS_HALF = 1, CASS_RAW = 2 }; /* flags of a header */

/* Bits of one kind between the file and the decoder, at most 2 blocks and what is left of a byte. Vector decoders load 64
 * bytes from any bit that is there. */
typedef struct CassQueue {
  uint32_t at, end; /* bits: the next one, past the last one */
  uint64_t blocks;  /* of this kind that are still to come */
  uint8_t bits[2 * CASS_BLOCK + 128];
} CassQueue;

/* A row block's segment of one part. */
enum { CASS_BITMAP, CASS_EXPONENT, CASS_MANTISSA, CASS_KINDS };
typedef struct CassStream {
  const uint8_t *next, *end; /* of the segment */
  const uint8_t *codebook;   /* [CASS_CODES] */
  CassQueue queue[CASS_KINDS];
} CassStream;

/* Decodes the tiles of a row block in turn; as the draft sees them if the matrix has no verification data. */
typedef struct CassReader {
  bool draft, mx, raw, half;
  uint32_t mantissa_bits;
  uint32_t rows;           /* of the row block that the matrix has */
  uint32_t cols;           /* that are still to come */
  CassStream s, v;         /* speculation, verification */
} CassReader;

void cass_reader_init(CassReader *r, const Matrix *w, uint32_t block);
/* The next tile, by rows. Never fails and reads nothing outside of the parts, whatever they hold. */
void cass_next_rows(CassReader *r, uint16_t out[NEST_ROWS][NEST_COLS]);
void cass_next_tile(CassReader *r, TileWords out);

/* For other decoders. One superblock: what the queues must have before a row of a tile is decoded; cass_due: whether it is
 * more than nothing. */
void cass_fill(CassStream *s);
static inline bool cass_due(const CassStream *s) {
  bool due = false;
  for (int k = 0; k < CASS_KINDS; k++)
    due |= s->queue[k].end - s->queue[k].at <= 8 * CASS_BLOCK;
  return due;
}
/* The next bits, without taking them: at least 57. */
static inline uint64_t cass_peek(const CassQueue *q) { return load_u64(q->bits + q->at / 8) >> q->at % 8; }
static inline uint32_t cass_take(CassQueue *q, uint32_t n) {
  uint32_t v = (uint32_t)(cass_peek(q) & (((uint64_t)1 << n) - 1));
  q->at += n;
  return v;
}
static inline void cass_skip_tile(CassReader *r) { r->cols -= r->cols < NEST_COLS ? r->cols : NEST_COLS; }
/* The columns of the next tile's row r that the matrix has. */
static inline uint64_t cass_columns(const CassReader *r, uint32_t row) {
  return row >= r->rows ? 0 : r->cols >= NEST_COLS ? ~(uint64_t)0 : ((uint64_t)1 << r->cols) - 1;
}
/* BF16 of a sign (bit 15) and 8 magnitude bits relative to the exponent of their group. */
uint16_t cass_normalise(uint32_t v, uint32_t group);

/* Rows [r0, r1), row-major. out [r1 - r0][cols] */
void cass_bits(const Matrix *w, uint32_t r0, uint32_t r1, uint16_t *out);
/* The same of one row, as float. */
void cass_row(const Matrix *w, uint32_t row, float *out);
/* What the draft reads. */
static inline Matrix cass_draft_view(const Matrix *w) {
  Matrix view = *w;
  view.ver = NULL;
  return view;
}
/* Checks the parts of a matrix: everything but the segments' content. ver NULL: it has none. */
pycass_status cass_check_parts(const Matrix *w, size_t spec_size, size_t ver_size);

#endif
