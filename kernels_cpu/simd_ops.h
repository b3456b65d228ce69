/* Those operations of ops.h that compilers vectorise badly (lanes in memory, a maximum, a conditional), with the same
 * arithmetic in the same order, so with the same bits. The including set defines for its vectors of V_WIDTH floats:
 *   V, V_LOAD, V_STORE, V_SET1, V_ADD, V_SUB, V_MUL, V_DIV, V_FMA (a b + c), V_MAX, V_MIN (x86's: the second operand if
 *   either is NaN), V_BF16 (V_WIDTH BF16 as floats), V_POW2 (2^n of integral floats n), V_ZERO_BELOW (x, limit, v: v,
 *   but 0 where x < limit)
 * and has a simd_round, a quantize_group and a simd_sums of its own. */
#ifndef CASS_SIMD_OPS_H
#define CASS_SIMD_OPS_H

#include "ops.h"

enum { VECTORS = LANES / V_WIDTH, SCORES = 4 };
/* Heads that read a key or a value together, and columns of a mix, as registers allow. */
enum { SCORE_HEADS = V_WIDTH == 16 ? 4 : 1, MIX_HEADS = V_WIDTH == 16 ? 6 : 4, MIX_VECTORS = V_WIDTH == 4 ? 4 : 2 };

/* Four times the sum of 16 lanes, as ops_sum_lanes, times scale. */
ALWAYS_INLINE void simd_sums(float out[SCORES], V lane[SCORES][VECTORS], float scale);

/* As ops_quantize_group. */
ALWAYS_INLINE void quantize_group(int8_t *q, float *scale, int32_t *sum, const float *x);

static void simd_quantize(Acts *q, const float *x, size_t ldx, uint32_t m, uint32_t n_group) {
  for (uint32_t i = 0; i < m; i++)
    for (uint32_t g = 0; g < n_group; g++) {
      size_t at = (size_t)i * n_group + g;
      quantize_group(q->q + at * NEST_COLS, q->scale + at, q->sum + at, x + i * ldx + (size_t)g * NEST_COLS);
    }
}

ALWAYS_INLINE V simd_exp(V x) { /* ops_exp */
  V clamped = V_MAX(V_SET1(-87.0f), x), magic = V_SET1(12582912.0f);
  V n = V_SUB(V_FMA(clamped, V_SET1(1.44269504088896341f), magic), magic);
  V r = V_FMA(n, V_SET1(-0.693359375f), clamped);
  r = V_FMA(n, V_SET1(2.12194440e-4f), r);
  V p = V_FMA(V_SET1(1.98412698e-4f), r, V_SET1(1.38888889e-3f));
  p = V_FMA(p, r, V_SET1(8.33333333e-3f));
  p = V_FMA(p, r, V_SET1(4.16666667e-2f));
  p = V_FMA(p, r, V_SET1(1.66666667e-1f));
  p = V_FMA(p, r, V_SET1(0.5f));
  p = V_FMA(p, r, V_SET1(1.0f));
  p = V_FMA(p, r, V_SET1(1.0f));
  return V_ZERO_BELOW(x, -87.0f, V_MUL(p, V_POW2(n)));
}

static void simd_swiglu(float *gate, const float *up, size_t n) {
  size_t i = 0;
  for (; i + V_WIDTH <= n; i += V_WIDTH) {
    V g = V_LOAD(gate + i), x = V_MAX(V_SET1(-80.0f), V_MIN(V_SET1(80.0f), g));
    V e = simd_exp(V_SUB(V_SET1(-0.0f), x)); /* -x */
    V_STORE(gate + i, V_MUL(V_DIV(g, V_ADD(V_SET1(1.0f), e)), V_LOAD(up + i)));
  }
  ops_swiglu(gate + i, up + i, n - i);
}

/* Scores of n_head heads at the four positions from pos on, whose keys begin at k. head_dim a multiple of 16 */
ALWAYS_INLINE void simd_scores_n(const AttentionArgs *a, const uint16_t *k, size_t stride, uint32_t head, uint32_t pos,
                                 const int n_head) {
  const float *q = a->q + (size_t)head * a->head_dim;
  V lane[SCORE_HEADS][SCORES][VECTORS];
  for (int h = 0; h < n_head; h++)
    for (int i = 0; i < SCORES; i++)
      for (int v = 0; v < VECTORS; v++)
        lane[h][i][v] = V_SET1(0.0f);
  for (uint32_t d = 0; d < a->head_dim; d += LANES)
    for (uint32_t v = 0; v < VECTORS; v++)
      for (size_t i = 0; i < SCORES; i++) {
        V key = V_BF16(k + i * stride + d + v * V_WIDTH);
        for (int h = 0; h < n_head; h++)
          lane[h][i][v] = V_FMA(V_LOAD(q + (size_t)h * a->head_dim + d + v * V_WIDTH), key, lane[h][i][v]);
      }
  for (int h = 0; h < n_head; h++)
    simd_sums(a->scores + ((size_t)head + (size_t)h) * a->ld_scores + pos, lane[h], a->scale);
}

static float simd_max(const float *x, size_t n) { /* ops_max */
  V tops[VECTORS];
  for (int v = 0; v < VECTORS; v++)
    tops[v] = V_SET1(-INFINITY);
  size_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int v = 0; v < VECTORS; v++)
      tops[v] = V_MAX(V_LOAD(x + i + v * V_WIDTH), tops[v]);
  float lane[LANES];
  for (int v = 0; v < VECTORS; v++)
    V_STORE(lane + v * V_WIDTH, tops[v]);
  for (size_t l = 0; i + l < n; l++)
    lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  for (int l = 1; l < LANES; l++)
    lane[0] = lane[l] > lane[0] ? lane[l] : lane[0];
  return lane[0];
}

static float simd_sum_exp(const float *x, size_t n, float shift) { /* ops_sum_exp */
  V sum[VECTORS];
  for (int v = 0; v < VECTORS; v++)
    sum[v] = V_SET1(0.0f);
  size_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int v = 0; v < VECTORS; v++)
      sum[v] = V_ADD(sum[v], simd_exp(V_SUB(V_LOAD(x + i + v * V_WIDTH), V_SET1(shift))));
  float lane[LANES];
  for (int v = 0; v < VECTORS; v++)
    V_STORE(lane + v * V_WIDTH, sum[v]);
  for (size_t l = 0; i + l < n; l++)
    lane[l] += ops_exp(x[i + l] - shift);
  return ops_sum_lanes(lane);
}

static void simd_softmax(float *s, uint32_t n) { /* ops_softmax */
  V sum[VECTORS];
  for (int v = 0; v < VECTORS; v++)
    sum[v] = V_SET1(0.0f);
  float top = simd_max(s, n), lane[LANES];
  uint32_t padded = (n + LANES - 1) / LANES * LANES;
  for (uint32_t i = n; i < padded; i++)
    s[i] = -INFINITY;
  for (uint32_t i = 0; i < padded; i += LANES)
    for (uint32_t v = 0; v < VECTORS; v++) {
      V e = simd_exp(V_SUB(V_LOAD(s + i + v * V_WIDTH), V_SET1(top)));
      V_STORE(s + i + v * V_WIDTH, e);
      sum[v] = V_ADD(sum[v], e);
    }
  for (uint32_t v = 0; v < VECTORS; v++)
    V_STORE(lane + v * V_WIDTH, sum[v]);
  float inverse = 1.0f / ops_sum_lanes(lane);
  for (uint32_t i = 0; i < n; i++)
    s[i] *= inverse;
}

/* n vectors of columns, from `at` on, of the output of n_head heads, in registers over all positions. */
ALWAYS_INLINE void simd_mix_n(const AttentionArgs *a, const uint16_t *v, size_t stride, uint32_t pos, uint32_t n_pos,
                              uint32_t head, uint32_t at, const int n, const int n_head) {
  V sum[MIX_HEADS][MIX_VECTORS];
  float *out = a->out + (size_t)head * a->head_dim + at;
  for (int h = 0; h < n_head; h++)
    for (int i = 0; i < n; i++)
      sum[h][i] = pos ? V_LOAD(out + (size_t)h * a->head_dim + i * V_WIDTH) : V_SET1(0.0f);
  const float *scores = a->scores + head * a->ld_scores + pos;
  for (uint32_t p = 0; p < n_pos; p++, v += stride) {
    V x[MIX_VECTORS];
    for (int i = 0; i < n; i++)
      x[i] = V_BF16(v + i * V_WIDTH);
    for (int h = 0; h < n_head; h++) {
      V score = V_SET1(scores[(size_t)h * a->ld_scores + p]);
      for (int i = 0; i < n; i++)
        sum[h][i] = V_FMA(score, x[i], sum[h][i]);
    }
  }
  for (int h = 0; h < n_head; h++)
    for (int i = 0; i < n; i++)
      V_STORE(out + (size_t)h * a->head_dim + i * V_WIDTH, sum[h][i]);
}

ALWAYS_INLINE void simd_mix_vectors(const AttentionArgs *a, const uint16_t *v, size_t stride, uint32_t pos, uint32_t n_pos,
                                    uint32_t at, const int n) {
  for (uint32_t h = 0, left; (left = a->n_head - h) > 0; h += left < MIX_HEADS ? left : MIX_HEADS)
    switch (left) {
    case 1: simd_mix_n(a, v, stride, pos, n_pos, h, at, n, 1); break;
    case 2: simd_mix_n(a, v, stride, pos, n_pos, h, at, n, 2); break;
    case 3: simd_mix_n(a, v, stride, pos, n_pos, h, at, n, 3); break;
    case 4: simd_mix_n(a, v, stride, pos, n_pos, h, at, n, 4); break;
    case 5:
      simd_mix_n(a, v, stride, pos, n_pos, h, at, n, MIX_HEADS < 5 ? MIX_HEADS : 5);
      break;
    default: simd_mix_n(a, v, stride, pos, n_pos, h, at, n, MIX_HEADS);
    }
}

static void simd_mix(const AttentionArgs *a, const uint16_t *v, size_t stride, uint32_t pos, uint32_t n, uint32_t c0,
                     uint32_t c1) {
  if (a->head_dim % LANES) {
    ops_mix(a, v, stride, pos, n, c0, c1);
    return;
  }
  uint32_t c = c0;
  for (; c + MIX_VECTORS * V_WIDTH <= c1; c += MIX_VECTORS * V_WIDTH)
    simd_mix_vectors(a, v + (c - c0), stride, pos, n, c, MIX_VECTORS);
  for (; c < c1; c += V_WIDTH)
    simd_mix_vectors(a, v + (c - c0), stride, pos, n, c, 1);
}

static void simd_scores(const AttentionArgs *a, const uint16_t *k, size_t stride, uint32_t pos, uint32_t n) {
  uint32_t p = 0, h;
  if (a->head_dim % LANES) {
    ops_scores(a, k, stride, pos, n);
    return;
  }
  for (; p + SCORES <= n; p += SCORES) {
    for (h = 0; h < a->n_head;) {
      uint32_t left = a->n_head - h, n_head = left == 5 || left == 6 ? 3 : left < SCORE_HEADS ? left : SCORE_HEADS;
      n_head = n_head < SCORE_HEADS ? n_head : SCORE_HEADS;
      switch (n_head) {
      case 1: simd_scores_n(a, k + p * stride, stride, h, pos + p, 1); break;
#if V_WIDTH == 16
      case 2: simd_scores_n(a, k + p * stride, stride, h, pos + p, 2); break;
      case 3: simd_scores_n(a, k + p * stride, stride, h, pos + p, 3); break;
      default: simd_scores_n(a, k + p * stride, stride, h, pos + p, SCORE_HEADS);
#endif
      }
      h += n_head;
    }
  }
  ops_scores(a, k + p * stride, stride, pos + p, n - p);
}

#define SIMD_OPS_TABLE                                                                                                 \
  OPS_COMMON, .round = simd_round, .quantize = simd_quantize, .swiglu = simd_swiglu, .scores = simd_scores,     \
              .softmax = simd_softmax, .mix = simd_mix, .max = simd_max, .sum_exp = simd_sum_exp

#endif
