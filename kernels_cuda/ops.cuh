/* What is not a product: embedding rows, norms, what happens to queries, keys and values, SwiGLU, the largest logit. Where one
 * element needs no other's, bits are those of kernels_cpu/ops.h; sums have an order of their own, which is the same for every
 * number of tokens. Rows are float, [m][ld]. */
#ifndef CASS_OPS_CUH
#define CASS_OPS_CUH

#include "nest.cuh"

enum { OPS_THREADS = 256, OPS_WARPS = OPS_THREADS / WARP };

/* e^x as ops_exp: to about 1 ulp, 0 below -87; x <= 88. */
DEVICE float exp_of(float x) {
  float clamped = x < -87.0f ? -87.0f : x;
  float n = fmaf(clamped, 1.44269504088896341f, 12582912.0f) - 12582912.0f;
  float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, clamped));
  float p = 1.98412698e-4f;
  p = fmaf(p, r, 1.38888889e-3f);
  p = fmaf(p, r, 8.33333333e-3f);
  p = fmaf(p, r, 4.16666667e-2f);
  p = fmaf(p, r, 1.66666667e-1f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  n = n > -127.0f ? n : -127.0f; /* a NaN */
  return x < -87.0f ? 0.0f : p * __uint_as_float((uint32_t)((int)n + 127) << 23);
}

DEVICE float warp_sum(float v) {
  for (int d = 1; d < WARP; d *= 2)
    v += __shfl_xor_sync(ALL_LANES, v, d);
  return v;
}

/* ---- embedding ---------------------------------------------------------------------------------- */

/* What the hot weights say of a row's column. */
DEVICE uint32_t hot_word(const CudaMatrix &w, uint32_t row, uint32_t column) {
  uint32_t i = 0, r = row % ROWS;
  while (i + 1 < w.n_hot && w.hot[i] != column)
    i++;
  const uint16_t *half_line = w.hot_words + ((size_t)(row / ROWS) * (w.n_hot / 4) + i / 4) * 64;
  return half_line[r / 2 % 2 * 32 + r / 4 * 8 + r % 2 * 4 + i % 4];
}

/* The draft's weight of a row's column. */
DEVICE float draft_weight(const CudaMatrix &w, size_t tile, uint32_t row, uint32_t k) {
  uint32_t nibble = w.a[512 * tile + 64 * (k / 8) + 4 * row + k % 8 / 2] >> 4 * (k % 2) & 15u;
  uint32_t magnitude = prmt(MAGNITUDES_LOW, MAGNITUDES_HIGH, nibble & 7u) & 255u;
  float v = (float)magnitude * (1.0f / 70.0f) * __uint_as_float((uint32_t)w.x[16 * tile + row] << 23);
  return nibble & 8u ? -v : v;
}

/* x[token] = row ids[token] of w, exact or as the draft has it; a warp has a group. */
__global__ void __launch_bounds__(OPS_THREADS) embed_rows(float *x, uint32_t ld, const int *ids, CudaMatrix w, int draft) {
  uint32_t group = blockIdx.x * OPS_WARPS + threadIdx.x / WARP, token = blockIdx.y, row = (uint32_t)ids[token];
  if (group >= w.n_group)
    return;
  float *out = x + (size_t)token * ld + group * COLS;
  size_t tile = (size_t)(row / ROWS) * w.n_group + group;
  uint64_t hot = w.n_hot ? w.hot_mask[group] : 0;
  if (w.codec == CUDA_RAW || draft) {
    for (uint32_t k = lane_of(); k < COLS && group * COLS + k < w.cols; k += WARP)
      out[k] = w.codec == CUDA_RAW ? bf16_float(w.raw[(size_t)row * w.cols + group * COLS + k])
               : hot >> k & 1u     ? bf16_float(hot_word(w, row, group * COLS + k))
                                   : draft_weight(w, tile, row % ROWS, k);
    return;
  }
  Planes planes = load_planes(stream_at(w, tile));
  ExactTile exact = exact_tile(w.side, tile, planes);
  uint32_t t = lane_of() % 4, odd = row % 2, a[4];
#pragma unroll
  for (uint32_t half = 0; half < 4; half++) {
    exact_words(a, exact, planes, half, planes.x);
    for (uint32_t c = 0; c < 4 && lane_of() / 4 == row % ROWS / 2; c++) {
      uint32_t k = 16 * t + half / 2 * 8 + half % 2 + 2 * c, pair = c < 2 ? (odd ? a[1] : a[0]) : (odd ? a[3] : a[2]);
      uint32_t word = hot >> k & 1u ? hot_word(w, row, group * COLS + k) : c % 2 ? pair >> 16 : pair & 0xffffu;
      if (group * COLS + k < w.cols)
        out[k] = bf16_float(word);
    }
  }
}

/* ---- norms -------------------------------------------------------------------------------------- */

/* x += h if add; then h = x / rms(x) * weight. A block has a token. */
__global__ void __launch_bounds__(OPS_THREADS)
    add_norm(float *h, float *x, uint32_t ld, int add, const uint16_t *weight, uint32_t n, float eps) {
  __shared__ float part[OPS_WARPS];
  x += (size_t)blockIdx.x * ld, h += (size_t)blockIdx.x * ld;
  float sum = 0;
  for (uint32_t i = threadIdx.x; i < n; i += OPS_THREADS) {
    float v = add ? x[i] + h[i] : x[i];
    x[i] = v;
    sum = fmaf(v, v, sum);
  }
  sum = warp_sum(sum);
  if (lane_of() == 0)
    part[threadIdx.x / WARP] = sum;
  __syncthreads();
  sum = part[0];
  for (int i = 1; i < OPS_WARPS; i++)
    sum += part[i];
  float scale = 1.0f / sqrtf(sum / (float)n + eps);
  for (uint32_t i = threadIdx.x; i < n; i += OPS_THREADS)
    h[i] = bf16_float(weight[i]) * (x[i] * scale);
}

/* ---- queries, keys, values ---------------------------------------------------------------------- */

/* cos_sin [m][head_dim] of positions *pos on: the angle is a float product, as in the implementations that models are trained
 * with. */
__global__ void __launch_bounds__(OPS_THREADS)
    rope_angles(float *cos_sin, const float *inv_freq, float factor, const uint32_t *pos, uint32_t head_dim) {
  for (uint32_t i = threadIdx.x; i < head_dim / 2; i += blockDim.x) {
    float angle = (float)(*pos + blockIdx.x) * inv_freq[i];
    cos_sin[(size_t)blockIdx.x * head_dim + i] = (float)cos((double)angle) * factor;
    cos_sin[(size_t)blockIdx.x * head_dim + head_dim / 2 + i] = (float)sin((double)angle) * factor;
  }
}

/* A head's vector by a warp: the bias, the norm (either may be NULL), rope. */
DEVICE void finish_head(float *v, const uint16_t *bias, const uint16_t *norm, const float *cos_sin, uint32_t n, float eps) {
  float sum = 0;
  for (uint32_t i = lane_of(); i < n; i += WARP) {
    v[i] = bias ? v[i] + bf16_float(bias[i]) : v[i];
    sum = fmaf(v[i], v[i], sum);
  }
  float scale = 1.0f / sqrtf(warp_sum(sum) / (float)n + eps);
  __syncwarp();
  for (uint32_t i = lane_of(); i < n / 2 && (norm || cos_sin); i += WARP) {
    uint32_t j = i + n / 2;
    float a = norm ? bf16_float(norm[i]) * (v[i] * scale) : v[i], b = norm ? bf16_float(norm[j]) * (v[j] * scale) : v[j];
    v[i] = cos_sin ? fmaf(a, cos_sin[i], -(b * cos_sin[j])) : a;
    v[j] = cos_sin ? fmaf(b, cos_sin[i], a * cos_sin[j]) : b;
  }
  __syncwarp();
}

/* All heads of all tokens, a warp each; keys and values go to the cache of this layer, too, at positions *pos on. */
__global__ void __launch_bounds__(OPS_THREADS) finish_qkv(CudaHeads h, uint32_t m, const float *cos_sin, const uint32_t *pos) {
  uint32_t unit = blockIdx.x * OPS_WARPS + threadIdx.x / WARP, per_token = h.n_head + 2 * h.n_head_kv, n = h.head_dim;
  uint32_t token = unit / per_token, head = unit % per_token;
  if (token >= m)
    return;
  const float *angles = cos_sin + (size_t)token * n;
  if (head < h.n_head) {
    finish_head(h.q + (size_t)token * h.ld_q + head * n, h.q_bias ? h.q_bias + head * n : NULL, h.q_norm, angles, n, h.eps);
    return;
  }
  head -= h.n_head;
  bool values = head >= h.n_head_kv;
  head -= values ? h.n_head_kv : 0;
  float *v = (values ? h.v : h.k) + (size_t)token * h.ld_kv + head * n;
  const uint16_t *bias = values ? h.v_bias : h.k_bias;
  finish_head(v, bias ? bias + head * n : NULL, values ? NULL : h.k_norm, values ? NULL : angles, n, h.eps);
  uint16_t *cache = (values ? h.v_cache : h.k_cache) + ((size_t)head * h.n_ctx + *pos + token) * n;
  for (uint32_t i = lane_of(); i < n; i += WARP)
    cache[i] = (uint16_t)float_bf16(v[i]);
}

/* ---- the rest ----------------------------------------------------------------------------------- */

/* gate = silu(gate) * up, [m][ld], n of each row. */
__global__ void __launch_bounds__(OPS_THREADS) swiglu(float *gate, const float *up, uint32_t ld, uint32_t n) {
  uint32_t i = blockIdx.x * OPS_THREADS + threadIdx.x;
  if (i >= n)
    return;
  size_t at = (size_t)blockIdx.y * ld + i;
  float g = gate[at], x = g > 80.0f ? 80.0f : g; /* silu is x there; e^-x must stay finite */
  x = x < -80.0f ? -80.0f : x;
  gate[at] = g / (1.0f + exp_of(-x)) * up[at];
}

/* The first of the largest of a row's n logits, NaN ignored; a block has a row. */
__global__ void __launch_bounds__(OPS_THREADS) argmax_rows(int *out, const float *logits, uint32_t ld, uint32_t n) {
  __shared__ float value[OPS_THREADS];
  __shared__ uint32_t index[OPS_THREADS];
  const float *row = logits + (size_t)blockIdx.x * ld;
  float top = -INFINITY;
  uint32_t at = 0xffffffffu;
  for (uint32_t i = threadIdx.x; i < n; i += OPS_THREADS)
    if (row[i] > top || (at == 0xffffffffu && row[i] == top))
      top = row[i], at = i;
  value[threadIdx.x] = top, index[threadIdx.x] = at;
  for (uint32_t half = OPS_THREADS / 2; half; half /= 2) {
    __syncthreads();
    uint32_t i = threadIdx.x, j = i + half;
    if (i < half && (value[j] > value[i] || (value[j] == value[i] && index[j] < index[i])))
      value[i] = value[j], index[i] = index[j];
  }
  if (threadIdx.x == 0)
    out[blockIdx.x] = index[0] == 0xffffffffu ? 0 : (int)index[0];
}

#endif
