/* A writer of tiny .cass files in memory, for tests: whole models, or any list of tensors. */
#ifndef CASS_TINY_H
#define CASS_TINY_H

#include "format.h"

typedef struct Bytes {
  uint8_t *p;
  size_t n, capacity;
} Bytes;
void bytes_put(Bytes *b, const void *data, size_t n);
void bytes_pad(Bytes *b, size_t to); /* zeros to a multiple */

/* The sections of a file under construction; tests may change them before cass_finish. */
typedef struct CassBuilder {
  Bytes section[N_SECTION];
  uint32_t n_tensor;
  bool calibrated; /* nest matrices get a draft bias and, from 16 columns on, hot columns */
} CassBuilder;

/* config: n_embd .. of pycass_config; rope_inv_freq as Llama's with base 10000. */
void cass_config(CassBuilder *b, const pycass_config *c);
/* cols = 0: a vector of rows values. */
void cass_tensor(CassBuilder *b, const char *name, pycass_codec codec, uint32_t rows, uint32_t cols, const uint16_t *w);
/* The file in an exact-size buffer (free it); frees the builder's sections. */
uint8_t *cass_finish(CassBuilder *b, size_t *size);

/* Makes the checksums right again after changes, as far as the section table allows. */
void cass_reseal(uint8_t *file, size_t size);

/* A random model. The weights are so scaled that greedy text varies and that the draft is often right. */
typedef struct TinyModel {
  pycass_config config;
  pycass_codec codec;
  bool qkv_bias, head_norm, calibrated;
  uint16_t odd_weight;  /* nonzero: this BF16 value is strewn over the matrices */
  uint32_t seed;
} TinyModel;
enum { TINY_LLAMA, TINY_QWEN2, TINY_QWEN3, TINY_HOT, TINY_RAW, TINY_CASS1, TINY_CASS2, N_TINY };
TinyModel tiny_model(int kind);
uint8_t *tiny_file(const TinyModel *m, size_t *size);
/* Writes it to a new temporary file; path [256]. */
void tiny_write(const TinyModel *m, char *path);

#endif
