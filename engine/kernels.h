/* The CPU function table. kernels_cpu/scalar.c is its specification: every set computes the same bits, but for amx,
 * whose instruction adds in an order of its own (see kernels_cpu/amx.c).
 *
 * One order. Every result depends on its own row and token only: never on m, on the range of row blocks or on the
 * number of threads.
 *
 * Denormals count as zero, as BF16 instructions have it: callers hold flush_denormals() around all of these. */
#ifndef CASS_KERNELS_H
#define CASS_KERNELS_H

#include "codec_cass.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* From here on, float operations of this thread take denormals for zero and give zero for them. Returns what
 * restore_denormals() wants. Architectures differ in one thing: a result just below 2^-126 that rounds up to it is zero on Arm,
 * which looks before rounding, and 2^-126 on x86. */
static inline uint64_t flush_denormals(void) {
#if defined(__x86_64__)
  uint32_t before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);
  return before;
#elif defined(__aarch64__)
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | 1u << 24));
  return before;
#else
  return 0;
#endif
}
static inline void restore_denormals(uint64_t before) {
#if defined(__x86_64__)
  _mm_setcsr((uint32_t)before);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
  (void)before;
#endif
}

/* Activations of a product, as matrices want them.
 * panels: BF16 times 2^48, in panels of 16 tokens, [ceil(m / 16)][n_group][half line][16][4]. The four are the
 * columns of the half line, as in TileWords. Those of hot columns are zero.
 * hot: the activations of hot columns in the same form, [ceil(m / 16)][half line of hot columns][16][4], n_hot / 4 of 16 half
 * lines in use.
 * q, scale, sum: int8 per group of 64 columns, for the draft:
 *   scale = max|x| / 8890 (127 for int8, 70 for the cells), q = rint(x * (127 / max|x|)), 0 where max|x| = 0. */
#define PANEL_SCALE 0x1p48f /* so that products with relative weights do not become denormal */
enum { PANEL_TOKENS = 16, PANEL_WORDS = PANEL_TOKENS * NEST_COLS };
static inline size_t panel_at(size_t token, size_t n_group, size_t group) {
  return (token / PANEL_TOKENS * n_group + group) * PANEL_WORDS + token % PANEL_TOKENS * 4;
}

typedef struct Acts {
  uint16_t *panels, *hot;
  int8_t *q;      /* [m][n_group * 64] */
  float *scale;   /* [m][n_group] */
  int32_t *sum;   /* [m][n_group]: of the q of a group */
} Acts;

/* Attention of the query heads that share a KV head, for one token. A head's result does not depend on the others'. */
typedef struct AttentionArgs {
  const float *q;      /* [n_head][head_dim] */
  uint32_t n_head;     /* 1 .. */
  uint32_t head_dim;
  float scale;         /* 1 / sqrt(head_dim) */
  float *scores;       /* [n_head][ld_scores], ld_scores >= positions + 16 */
  size_t ld_scores;
  float *out;          /* [n_head][head_dim] */
} AttentionArgs;

enum { KEY_MOST_G = 191, KEY_DIM_MOST = 256, QUERY_MOST = 32512 };

typedef struct Kernels {
  const char *name;
  /* Tile t of a nest matrix to exact bits, as nest_decode_tile. */
  void (*nest_decode_tile)(const Matrix *w, size_t t, TileWords out);
  /* The next tile of a row block of a cass matrix, as cass_next_tile. */
  void (*cass_next_tile)(CassReader *r, TileWords out);

  /* Groups [0, n_group) of a token's activations x, times PANEL_SCALE, to BF16, to nearest even; NaN stays NaN. panels points
   * at the token's place in the first of them. */
  void (*round)(uint16_t *panels, const float *x, uint32_t n_group);
  /* y[i][r] = sum over k of W[r][k] x[i][k] for i < m and the row blocks [block0, block1): target arithmetic, BF16 times
   * BF16 into float; of a cass matrix without verification data, the draft's. Panels are zero from cols on; y [m][ldy], ldy >= 16 n_block.
   * Order: hot columns first, as one group with u = 1. For each group, two accumulators a row and token from zero, with fused multiply-adds: half lines in turn, a0 takes
   * of each the columns +2, +0, a1 the columns +6, +4. Then s0 = fma(a0, u, s0) and s1 = fma(a1, u, s1), with u =
   * 2^(G - NEST_BIAS) for tiles in relative form (codec.h), else 1. y = (s0 + s1) / PANEL_SCALE. */
  void (*matmul)(float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, uint32_t block0, uint32_t block1);

  /* x [m][ldx] -> q, padded with zeros to whole groups. */
  void (*quantize)(Acts *acts, const float *x, size_t ldx, uint32_t m, uint32_t n_group);
  /* The draft's product, nest only, speculation data only. Order: s = the product with the hot columns as the target has it +
   * the bias, each 0 if there is none; for each group g ascending
   *   s = fma((float)I, scale[g] * 2^(G - 127), s), I = the integer dot product of q and signed magnitudes. */
  void (*matmul_draft)(float *y, size_t ldy, const Matrix *w, const Acts *acts, uint32_t m, uint32_t block0,
                       uint32_t block1);

  /* The rest is kernels_cpu/ops.h compiled for each set. */
  void (*rmsnorm)(float *out, const float *x, const uint16_t *weight, uint32_t n, float eps);
  /* Rotates pairs (i, i + n / 2) of each head of n: x [n_head][n], cos_sin [n]: n / 2 cosines, then sines. */
  void (*rope)(float *x, uint32_t n_head, uint32_t n, const float *cos_sin);
  void (*swiglu)(float *gate, const float *up, size_t n);     /* gate = silu(gate) * up */
  void (*add)(float *x, const float *y, size_t n);            /* x += y */
  void (*add_bf16)(float *x, const uint16_t *b, size_t n);    /* x += b */
  void (*to_bf16)(uint16_t *out, const float *x, size_t n);
  /* Attention's three steps. Scores of positions [pos, pos + n), whose keys are k [n][stride]: 16 lanes of fused
   * multiply-adds, added pairwise, times the scale. Softmax of n scores of a head. Then columns [c0, c1) of the output, c0 a
   * multiple of 16 and c1, too, unless it is head_dim: values v [n][stride] begin at column c0, fused multiply-adds in the
   * order of positions, on top of out unless pos = 0. */
  void (*scores)(const AttentionArgs *a, const uint16_t *k, size_t stride, uint32_t pos, uint32_t n);
  void (*softmax)(float *scores, uint32_t n);
  void (*mix)(const AttentionArgs *a, const uint16_t *v, size_t stride, uint32_t pos, uint32_t n, uint32_t c0, uint32_t c1);
  /* Blocks of a KV cache, as in codec.h. */
  void (*nest_columns)(const Matrix *w, size_t t0, size_t t1, uint16_t *out, size_t ld);
  /* Scores of the 64 positions from pos on for the draft, by the speculation data of their keys w, [head_dim][64] with all
   * G <= KEY_MOST_G, head_dim <= KEY_DIM_MOST (codec.h, nest_key_row). Of a head let u[c] = q[c] 2^(G[c] - 127),
   * n[c] = rint(u[c] * (32512 / max|u|)), 0 where max|u| = 0; then s = (float)(sum over c of n[c] key[c])
   * * (max|u| / (32512 * 64)) * scale. */
  void (*scores_draft)(const AttentionArgs *a, const Matrix *w, uint32_t pos);
  float (*max)(const float *x, size_t n);                     /* n >= 1; NaN is ignored, -inf if all are */
  float (*sum_exp)(const float *x, size_t n, float shift);    /* sum of e^(x - shift), shift >= max(x) */
} Kernels;

/* The set of that name, $PYCASS_KERNEL if NULL, else the best that this machine runs. */
pycass_status kernels_select(const char *name, const Kernels **out);

#endif
