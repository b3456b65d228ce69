/* The float operations of a kernel set besides the products, in plain C. Each set's file includes this and compiles
 * it with its own flags. The 16 lanes are written out as arrays, so that the order of additions is the same
 * whatever the vector width; multiply-adds are fmaf, one rounding everywhere. */
#ifndef CASS_OPS_H
#define CASS_OPS_H

#include <math.h>

#include "kernels.h"

enum { LANES = 16 };

/* Sum of 16 lanes, pairwise. */
static inline float ops_sum_lanes(const float *lane) {
  float s[8];
  for (int i = 0; i < 8; i++)
    s[i] = lane[i] + lane[i + 8];
  for (int i = 0; i < 4; i++)
    s[i] = s[i] + s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

/* e^x to about 1 ulp: x = n ln 2 + r, |r| <= ln(2) / 2, a polynomial in r (coefficients: Taylor, degree 7). Below -87
 * it is 0; x <= 88. */
static inline float ops_exp(float x) {
  float clamped = x < -87.0f ? -87.0f : x;
  float n = fmaf(clamped, 1.44269504088896341f, 12582912.0f) - 12582912.0f; /* rint, by the magic number 1.5 * 2^23 */
  float r = fmaf(n, -0.693359375f, clamped);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = 1.98412698e-4f;
  p = fmaf(p, r, 1.38888889e-3f);
  p = fmaf(p, r, 8.33333333e-3f);
  p = fmaf(p, r, 4.16666667e-2f);
  p = fmaf(p, r, 1.66666667e-1f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  n = n > -127.0f ? n : -127.0f; /* only a NaN, whose conversion C leaves undefined; p is NaN then */
  float scaled = p * f32_from_bits((uint32_t)((int32_t)n + 127) << 23);
  return x < -87.0f ? 0.0f : scaled;
}

static void ops_rmsnorm(float *out, const float *x, const uint16_t *weight, uint32_t n, float eps) {
  float lane[LANES] = {0};
  uint32_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int l = 0; l < LANES; l++)
      lane[l] = fmaf(x[i + l], x[i + l], lane[l]);
  for (int l = 0; i + l < n; l++)
    lane[l] = fmaf(x[i + l], x[i + l], lane[l]);
  float scale = 1.0f / sqrtf(ops_sum_lanes(lane) / (float)n + eps);
  for (uint32_t j = 0; j < n; j++)
    out[j] = bf16_to_f32(weight[j]) * (x[j] * scale);
}

static void ops_rope(float *x, uint32_t n_head, uint32_t n, const float *cos_sin) {
  const float *cosine = cos_sin, *sine = cos_sin + n / 2;
  for (uint32_t h = 0; h < n_head; h++) {
    float *restrict a = x + (size_t)h * n, *restrict b = a + n / 2;
    for (uint32_t i = 0; i < n / 2; i++) {
      float u = a[i], v = b[i];
      a[i] = fmaf(u, cosine[i], -(v * sine[i]));
      b[i] = fmaf(v, cosine[i], u * sine[i]);
    }
  }
}

static inline void ops_swiglu(float *gate, const float *up, size_t n) {
  for (size_t i = 0; i < n; i++) {
    float x = gate[i] > 80.0f ? 80.0f : gate[i]; /* silu is x there; e^-x must stay finite */
    x = x < -80.0f ? -80.0f : x;
    gate[i] = gate[i] / (1.0f + ops_exp(-x)) * up[i];
  }
}

static void ops_add(float *x, const float *y, size_t n) {
  for (size_t i = 0; i < n; i++)
    x[i] += y[i];
}

static void ops_add_bf16(float *x, const uint16_t *b, size_t n) {
  for (size_t i = 0; i < n; i++)
    x[i] += bf16_to_f32(b[i]);
}

static void ops_to_bf16(uint16_t *out, const float *x, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint32_t u = f32_bits(x[i]);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    out[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40u : rounded);
  }
}

static inline void ops_round(uint16_t *panels, const float *x, uint32_t n_group) {
  for (size_t hl = 0; hl < 16 * (size_t)n_group; hl++)
    for (size_t c = 0; c < 4; c++)
      panels[hl * PANEL_TOKENS * 4 + c] = bf16_from_f32(x[hl / 2 * 8 + hl % 2 + 2 * c] * PANEL_SCALE);
}

static inline float ops_dot_bf16(const float *q, const uint16_t *k, uint32_t n) {
  float lane[LANES] = {0};
  uint32_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int l = 0; l < LANES; l++)
      lane[l] = fmaf(q[i + l], bf16_to_f32(k[i + l]), lane[l]);
  for (int l = 0; i + l < n; l++)
    lane[l] = fmaf(q[i + l], bf16_to_f32(k[i + l]), lane[l]);
  return ops_sum_lanes(lane);
}

/* Softmax over scores[0..n): 16 strided partial sums. */
static inline void ops_softmax(float *s, uint32_t n) {
  float top = s[0], lane[LANES] = {0};
  for (uint32_t i = 1; i < n; i++)
    top = s[i] > top ? s[i] : top;
  uint32_t padded = (n + LANES - 1) / LANES * LANES;
  for (uint32_t i = n; i < padded; i++)
    s[i] = -INFINITY;
  for (uint32_t i = 0; i < padded; i += LANES)
    for (int l = 0; l < LANES; l++) {
      s[i + l] = ops_exp(s[i + l] - top);
      lane[l] += s[i + l];
    }
  float inverse = 1.0f / ops_sum_lanes(lane);
  for (uint32_t i = 0; i < n; i++)
    s[i] *= inverse;
}

static inline void ops_scores(const AttentionArgs *a, const uint16_t *k, size_t stride, uint32_t pos, uint32_t n) {
  for (uint32_t h = 0; h < a->n_head; h++)
    for (uint32_t p = 0; p < n; p++)
      a->scores[h * a->ld_scores + pos + p] =
          ops_dot_bf16(a->q + (size_t)h * a->head_dim, k + p * stride, a->head_dim) * a->scale;
}

/* A head's query for one block: n of kernels.h, [head_dim]. Returns what the integers are multiplied by. */
static inline float ops_query(const AttentionArgs *a, uint32_t h, const Matrix *w, int32_t *n) {
  float u[KEY_DIM_MOST], top = 0;
  for (uint32_t c = 0; c < a->head_dim; c++) {
    u[c] = a->q[(size_t)h * a->head_dim + c] * f32_from_bits((uint32_t)w->x[c] << 23);
    float v = fabsf(u[c]);
    top = v > top ? v : top;
  }
  float inverse = top > 0 ? (float)QUERY_MOST / top : 0.0f;
  inverse = inverse > 3e38f ? 0.0f : inverse;
  for (uint32_t c = 0; c < a->head_dim; c++) {
    float r = (u[c] * inverse + 12582912.0f) - 12582912.0f;
    n[c] = (int32_t)(r > -(float)QUERY_MOST ? r : -(float)QUERY_MOST); /* a NaN, too */
  }
  return top * (1.0f / (QUERY_MOST * 64));
}

static inline void ops_scores_draft(const AttentionArgs *a, const Matrix *w, uint32_t pos) {
  int8_t key[KEY_DIM_MOST][NEST_COLS];
  for (uint32_t c = 0; c < a->head_dim; c++)
    nest_key_row(w, c, key[c]);
  for (uint32_t h = 0; h < a->n_head; h++) {
    int32_t n[KEY_DIM_MOST], sum[NEST_COLS] = {0};
    float scale = ops_query(a, h, w, n);
    for (uint32_t c = 0; c < a->head_dim; c++)
      for (uint32_t p = 0; p < NEST_COLS; p++)
        sum[p] += n[c] * key[c][p];
    for (uint32_t p = 0; p < NEST_COLS; p++)
      a->scores[h * a->ld_scores + pos + p] = (float)sum[p] * scale * a->scale;
  }
}

static inline void ops_mix(const AttentionArgs *a, const uint16_t *v, size_t stride, uint32_t pos, uint32_t n, uint32_t c0,
                           uint32_t c1) {
  for (uint32_t h = 0; h < a->n_head; h++) {
    const float *scores = a->scores + h * a->ld_scores + pos;
    float *restrict out = a->out + (size_t)h * a->head_dim;
    for (uint32_t c = c0; c < c1 && pos == 0; c++)
      out[c] = 0;
    for (uint32_t p = 0; p < n; p++)
      for (uint32_t c = c0; c < c1; c++)
        out[c] = fmaf(scores[p], bf16_to_f32(v[p * stride + c - c0]), out[c]);
  }
}

static inline float ops_max(const float *x, size_t n) {
  float lane[LANES];
  for (int l = 0; l < LANES; l++)
    lane[l] = -INFINITY;
  size_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int l = 0; l < LANES; l++)
      lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  for (int l = 0; i + l < n; l++)
    lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  for (int l = 1; l < LANES; l++)
    lane[0] = lane[l] > lane[0] ? lane[l] : lane[0];
  return lane[0];
}

static inline float ops_sum_exp(const float *x, size_t n, float shift) {
  float lane[LANES] = {0};
  size_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int l = 0; l < LANES; l++)
      lane[l] += ops_exp(x[i + l] - shift);
  for (int l = 0; i + l < n; l++)
    lane[l] += ops_exp(x[i + l] - shift);
  return ops_sum_lanes(lane);
}

static inline void ops_quantize_group(int8_t *q, float *scale, int32_t *sum, const float *x) {
  float top = 0;
  for (int k = 0; k < NEST_COLS; k++) {
    float v = fabsf(x[k]);
    top = v > top ? v : top;
  }
  float inverse = top > 0 ? 127.0f / top : 0.0f;
  inverse = inverse > 3e38f ? 0.0f : inverse; /* denormal activations */
  int32_t total = 0;
  for (int k = 0; k < NEST_COLS; k++) {
    float r = (x[k] * inverse + 12582912.0f) - 12582912.0f;
    int32_t v = (int32_t)(r > -127.0f ? r : -127.0f); /* a NaN is -127, too */
    q[k] = (int8_t)v;
    total += v;
  }
  *sum = total;
  *scale = top * (1.0f / 8890.0f);
}

static inline void ops_quantize(Acts *q, const float *x, size_t ldx, uint32_t m, uint32_t n_group) {
  for (uint32_t i = 0; i < m; i++)
    for (uint32_t g = 0; g < n_group; g++) {
      size_t at = (size_t)i * n_group + g;
      ops_quantize_group(q->q + at * NEST_COLS, q->scale + at, q->sum + at, x + i * ldx + (size_t)g * NEST_COLS);
    }
}

/* Those that every set takes from here, and those that a set may have its own code for (simd_ops.h). */
#define OPS_COMMON                                                                                                     \
  .rmsnorm = ops_rmsnorm, .rope = ops_rope, .add = ops_add, .add_bf16 = ops_add_bf16, .to_bf16 = ops_to_bf16
#define OPS_TABLE                                                                                                      \
  OPS_COMMON, .round = ops_round, .quantize = ops_quantize, .swiglu = ops_swiglu, .scores = ops_scores,     \
              .scores_draft = ops_scores_draft, .softmax = ops_softmax, .mix = ops_mix, .max = ops_max, .sum_exp = ops_sum_exp

#endif
