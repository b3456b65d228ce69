/* Those operations of ops.h that compilers vectorise badly (lanes in memory, a maximum, a conditional), with the same
 * arithmetic in the same order, so with the same bits. The including set defines for its vectors of V_WIDTH floats:
 *   V, V_LOAD, V_STORE, V_SET1, V_ADD, V_SUB, V_MUL, V_DIV, V_FMA (a b + c), V_MAX, V_MIN (x86's: the second operand if
 *   either is NaN), V_BF16 (V_WIDTH BF16 as floats), V_POW2 (2^n of integral floats n), V_ZERO_BELOW (x, limit, v: v,
 *   but 0 where x < limit), V_HALVES (of 16 / V_WIDTH vectors, the sums of lanes i and i + 8 as __m256)
 * and has a simd_quantize of its own. */
#ifndef CASS_SIMD_OPS_H
#define CASS_SIMD_OPS_H

#include "ops.h"
#include "side_bits.h"

enum { VECTORS = LANES / V_WIDTH, SCORES = 4 };

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

/* Scores of four positions. n a multiple of 16 */
ALWAYS_INLINE void simd_scores(float *scores, const float *q, const uint16_t *k, size_t stride, uint32_t n,
                               float scale) {
  V lane[SCORES][VECTORS];
  for (int p = 0; p < SCORES; p++)
    for (int v = 0; v < VECTORS; v++)
      lane[p][v] = V_SET1(0.0f);
  for (uint32_t i = 0; i < n; i += LANES)
    for (uint32_t v = 0; v < VECTORS; v++) {
      V qv = V_LOAD(q + i + v * V_WIDTH);
      for (size_t p = 0; p < SCORES; p++)
        lane[p][v] = V_FMA(qv, V_BF16(k + p * stride + i + v * V_WIDTH), lane[p][v]);
    }
  __m128 s[SCORES]; /* as ops_sum_lanes */
  for (int p = 0; p < SCORES; p++) {
    __m256 halves = V_HALVES(lane[p]);
    s[p] = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  }
  _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
  __m128 sum = _mm_add_ps(_mm_add_ps(s[0], s[2]), _mm_add_ps(s[1], s[3]));
  _mm_storeu_ps(scores, _mm_mul_ps(sum, _mm_set1_ps(scale)));
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

ALWAYS_INLINE void simd_softmax(float *s, uint32_t n) { /* ops_softmax */
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

/* n vectors of the output, in registers over all positions. */
ALWAYS_INLINE void simd_mix(const AttentionArgs *a, uint32_t at, const int n) {
  V out[8];
  for (int v = 0; v < n; v++)
    out[v] = V_SET1(0.0f);
  const uint16_t *value = a->v + at;
  for (uint32_t p = 0; p < a->n_pos; p++, value += a->stride)
    for (int v = 0; v < n; v++)
      out[v] = V_FMA(V_SET1(a->scores[p]), V_BF16(value + v * V_WIDTH), out[v]);
  for (int v = 0; v < n; v++)
    V_STORE(a->out + at + v * V_WIDTH, out[v]);
}

static void simd_attention(const AttentionArgs *a) {
  if (a->head_dim % LANES) {
    ops_attention(a);
    return;
  }
  uint32_t p = 0;
  for (; p + SCORES <= a->n_pos; p += SCORES)
    simd_scores(a->scores + p, a->q, a->k + p * a->stride, a->stride, a->head_dim, a->scale);
  for (; p < a->n_pos; p++)
    a->scores[p] = ops_dot_bf16(a->q, a->k + p * a->stride, a->head_dim) * a->scale;
  simd_softmax(a->scores, a->n_pos);
  uint32_t i = 0;
  for (; i + 8 * V_WIDTH <= a->head_dim; i += 8 * V_WIDTH)
    simd_mix(a, i, 8);
  for (; i + 4 * V_WIDTH <= a->head_dim; i += 4 * V_WIDTH)
    simd_mix(a, i, 4);
  for (; i < a->head_dim; i += V_WIDTH)
    simd_mix(a, i, 1);
}

#define SIMD_OPS_TABLE                                                                                                 \
  OPS_COMMON, .quantize = simd_quantize, .swiglu = simd_swiglu, .attention = simd_attention, .max = simd_max,          \
              .sum_exp = simd_sum_exp

#endif
