/* The CPU function table. kernels_cpu/scalar.c is its specification: every set computes the same bits, but for amx,
 * whose target matmul splits activations into BF16 pieces (see kernels_cpu/amx.c).
 *
 * One order. Every result depends on its own row and token only: never on m, on the range of row blocks or on the
 * number of threads. */
#ifndef CASS_KERNELS_H
#define CASS_KERNELS_H

#include "codec.h"

/* Activations for the draft: int8 per group of 64 columns.
 *   scale = max|x| / 8890 (127 for int8, 70 for the cells), q = rint(x * (127 / max|x|)), 0 where max|x| = 0. */
typedef struct QuantActs {
  int8_t *q;      /* [m][n_group * 64] */
  float *scale;   /* [m][n_group] */
  int32_t *sum;   /* [m][n_group]: of the q of a group */
} QuantActs;

/* Attention of one query head: keys and values of one KV head, [position][stride] BF16. */
typedef struct AttentionArgs {
  const float *q;      /* [head_dim] */
  const uint16_t *k, *v;
  size_t stride;       /* in elements, between positions */
  uint32_t n_pos;      /* positions seen: 0 .. n_pos - 1 */
  uint32_t head_dim;
  float scale;         /* 1 / sqrt(head_dim) */
  float *scores;       /* scratch [n_pos + 16] */
  float *out;          /* [head_dim] */
} AttentionArgs;

typedef struct Kernels {
  const char *name;
  /* Tile t of a nest matrix to exact bits, as nest_decode_tile. */
  void (*nest_decode_tile)(const Matrix *w, size_t t, TilePairs out);

  /* y[i][r] = sum over k of W[r][k] x[i][k] for i < m and the row blocks [block0, block1): target arithmetic.
   * x [m][ldx], ldx >= 64 n_group, zero from cols on; y [m][ldy], ldy >= 16 n_block.
   * Order: two accumulators a row and token; s0 takes columns with k % 8 < 4, s1 the others, each in ascending
   * order with fused multiply-adds from zero; y = s0 + s1. */
  void (*matmul)(float *y, size_t ldy, const Matrix *w, const float *x, size_t ldx, uint32_t m, uint32_t block0,
                 uint32_t block1);

  /* x [m][ldx] -> q, padded with zeros to whole groups. */
  void (*quantize)(QuantActs *q, const float *x, size_t ldx, uint32_t m, uint32_t n_group);
  /* The draft's product, nest only, planes A and X only. Order: s = 0; for each group g ascending
   *   s = fma((float)I, scale[g] * 2^(G - 127), s), I = the integer dot product of q and signed magnitudes. */
  void (*matmul_draft)(float *y, size_t ldy, const Matrix *w, const QuantActs *q, uint32_t m, uint32_t block0,
                       uint32_t block1);

  /* The rest is kernels_cpu/ops.h compiled for each set. */
  void (*rmsnorm)(float *out, const float *x, const uint16_t *weight, uint32_t n, float eps);
  /* Rotates pairs (i, i + n / 2) of each head of n: x [n_head][n], cos_sin [n]: n / 2 cosines, then sines. */
  void (*rope)(float *x, uint32_t n_head, uint32_t n, const float *cos_sin);
  void (*swiglu)(float *gate, const float *up, size_t n);     /* gate = silu(gate) * up */
  void (*add)(float *x, const float *y, size_t n);            /* x += y */
  void (*add_bf16)(float *x, const uint16_t *b, size_t n);    /* x += b */
  void (*to_bf16)(uint16_t *out, const float *x, size_t n);
  void (*attention)(const AttentionArgs *a);
  float (*max)(const float *x, size_t n);                     /* n >= 1; NaN is ignored, -inf if all are */
  float (*sum_exp)(const float *x, size_t n, float shift);    /* sum of e^(x - shift), shift >= max(x) */
} Kernels;

/* The set of that name, $PYCASS_KERNEL if NULL, else the best that this machine runs. */
pycass_status kernels_select(const char *name, const Kernels **out);

#endif
