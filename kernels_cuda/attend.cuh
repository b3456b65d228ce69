/* Attention over the KV cache, in pieces of CHUNK positions whatever the number of tokens: each has its own largest score, sum
 * and mix, and a second kernel puts the pieces together in order. Rows are brought to shared memory 64 positions at a time, plain
 * ones as they are, blocks of the codec nest decoded (docs/format.md, "Blocks of the KV cache"). */
#ifndef CASS_ATTEND_CUH
#define CASS_ATTEND_CUH

#include "ops.cuh"

enum {
  CHUNK = CUDA_CHUNK,
  KV_ROWS = 64,
  ATTEND_THREADS = 128,
  ATTEND_HEADS = 8, /* of a KV head, together */
  MOST_DIM = CUDA_MOST_HEAD_DIM,
  LD_ROWS = MOST_DIM + 2, /* an odd number of words: lanes of different rows meet no bank twice */
};

/* What a piece leaves: the largest score, the sum of e^(score - largest), and the mix [head_dim]. */
DEVICE float *piece_of(const CudaKv &kv, float *work, uint32_t n_chunk, uint32_t token, uint32_t head, uint32_t chunk) {
  return work + (((size_t)token * kv.n_head + head) * n_chunk + chunk) * (kv.head_dim + 2);
}

/* A head's keys or values in an encoded block, a matrix of head_dim rows and 64 columns. */
DEVICE CudaMatrix encoded_rows(const CudaKv &kv, const uint8_t *block, uint32_t head, int values) {
  const uint8_t *entry = block + 8 * (2 * head + values);
  uint32_t tiles = (kv.head_dim + ROWS - 1) / ROWS;
  CudaMatrix w = {};
  w.x = block + load_word(entry), w.side = block + load_word(entry + 4);
  w.a = w.x + (16 * tiles + 63) / 64 * 64, w.b = w.a + 512 * tiles;
  return w;
}

/* What the draft takes keys and values for (docs/format.md, "Blocks of the KV cache"), as BF16: a key's integer has seven bits; a
 * value's magnitude, 70 times too large, is exact, too. */
DEVICE uint32_t draft_key(uint32_t nibble, uint32_t low6, uint32_t group) {
  uint32_t c = nibble & 7u, m = low6 >> 2;
  uint32_t x = c < 2 ? 16 + 8 * c + (m + 1) / 2 : c < 4 ? 16 * c + m : c < 6 ? 32 * c - 63 + 2 * m : c == 6 ? 10 + (m + 2) / 4 : 4;
  return (__float_as_uint((float)x) >> 16) + ((group - 127 - 6) << 7) + ((nibble & 8u) << 12);
}
DEVICE uint32_t draft_value(uint32_t nibble, uint32_t group) {
  uint32_t magnitude = prmt(MAGNITUDES_LOW, MAGNITUDES_HIGH, nibble & 7u) & 255u;
  return __float_as_uint((float)magnitude * __uint_as_float(group << 23)) >> 16 | (nibble & 8u) << 12;
}

/* Half line k of a tile as the draft has it, in the order of exact_words. */
DEVICE void draft_words(uint32_t (&a)[4], const Planes &p, int k, int values) {
  uint32_t nibbles = half_line(p, k);
#pragma unroll
  for (int row = 0; row < 2; row++) {
    uint32_t low = low6(p, k, row), group = p.x >> 8 * row & 255u, word[4];
#pragma unroll
    for (int i = 0; i < 4; i++, nibbles >>= 4)
      word[i] = (values ? draft_value(nibbles & 15u, group) : draft_key(nibbles & 15u, low >> 8 * i & 63u, group)) & 0xffffu;
    a[row] = word[0] | word[1] << 16, a[2 + row] = word[2] | word[3] << 16;
  }
}

/* A tile's 16 channels of 64 positions; the lane's two channels are neighbours. */
DEVICE void store_tile(uint16_t (*rows)[LD_ROWS], const CudaMatrix &w, uint32_t tile, int values, int draft) {
  Planes planes = load_planes(stream_at(w, tile));
  ExactTile exact;
  if (!draft)
    exact = exact_tile(w.side, tile, planes);
  uint32_t channel = ROWS * tile + lane_of() / 4 * 2, a[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if (draft)
      draft_words(a, planes, k, values);
    else
      exact_words(a, exact, planes, k, planes.x);
    uint16_t *out = &rows[lane_of() % 4 * 16 + k / 2 * 8 + k % 2][channel];
    *(uint32_t *)out = prmt(a[0], a[1], 0x5410), *(uint32_t *)(out + 2 * LD_ROWS) = prmt(a[0], a[1], 0x7632);
    *(uint32_t *)(out + 4 * LD_ROWS) = prmt(a[2], a[3], 0x5410), *(uint32_t *)(out + 6 * LD_ROWS) = prmt(a[2], a[3], 0x7632);
  }
}

DEVICE const uint8_t *block_of(const CudaKv &kv, uint32_t pos) { return kv.block ? kv.block[pos / KV_ROWS] : NULL; }

/* The first n positions from pos on, a multiple of 64. */
DEVICE void store_rows(uint16_t (*rows)[LD_ROWS], const CudaKv &kv, uint32_t head, uint32_t pos, uint32_t n, int values,
                       int draft) {
  const uint8_t *block = block_of(kv, pos);
  if (block) {
    CudaMatrix w = encoded_rows(kv, block, head, values);
    for (uint32_t tile = threadIdx.x / WARP; tile < (kv.head_dim + ROWS - 1) / ROWS; tile += ATTEND_THREADS / WARP)
      store_tile(rows, w, tile, values, draft);
    return;
  }
  const uint16_t *plain = (values ? kv.v : kv.k) + ((size_t)head * kv.n_ctx + pos) * kv.head_dim;
  uint32_t words = kv.head_dim / 2;
  for (uint32_t i = threadIdx.x; i < n * words; i += ATTEND_THREADS)
    *(uint32_t *)&rows[i / words][i % words * 2] = __ldg((const uint32_t *)plain + i);
}

DEVICE float dot_row(const float *q, const uint16_t *row, uint32_t n) {
  float s = 0;
  for (uint32_t i = 0; i < n; i += 2) {
    uint32_t pair = *(const uint32_t *)(row + i);
    s = fmaf(q[i], bf16_float(pair & 0xffffu), s);
    s = fmaf(q[i + 1], bf16_float(pair >> 16), s);
  }
  return s;
}

/* A head's scores of a piece to e^(score - largest), by a warp. */
DEVICE void soften(float *scores, uint32_t n, float *piece) {
  float top = -INFINITY, sum = 0;
  for (uint32_t i = lane_of(); i < n; i += WARP)
    top = fmaxf(top, scores[i]);
  for (int d = 1; d < WARP; d *= 2)
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, d));
  for (uint32_t i = lane_of(); i < n; i += WARP) {
    scores[i] = exp_of(scores[i] - top);
    sum += scores[i];
  }
  sum = warp_sum(sum);
  if (lane_of() == 0)
    piece[0] = top, piece[1] = sum;
}

/* A block of threads has a piece, a token and up to ATTEND_HEADS heads that share a KV head. */
__global__ void __launch_bounds__(ATTEND_THREADS)
    attend_pieces(float *work, const float *q, uint32_t ld_q, CudaKv kv, const uint32_t *pos, int draft) {
  __shared__ __align__(16) uint16_t rows[KV_ROWS][LD_ROWS];
  __shared__ float scores[ATTEND_HEADS][CHUNK], query[ATTEND_HEADS][MOST_DIM];
  uint32_t token = blockIdx.z, first = blockIdx.x * CHUNK, seen = *pos + token + 1, dim = kv.head_dim;
  if (first >= seen)
    return;
  uint32_t group = kv.n_head / kv.n_head_kv, parts = (group + ATTEND_HEADS - 1) / ATTEND_HEADS;
  uint32_t kv_head = blockIdx.y / parts, head0 = blockIdx.y % parts * ATTEND_HEADS;
  uint32_t heads = group - head0 < (uint32_t)ATTEND_HEADS ? group - head0 : (uint32_t)ATTEND_HEADS;
  uint32_t n = seen - first < (uint32_t)CHUNK ? seen - first : (uint32_t)CHUNK;
  head0 += kv_head * group;
  for (uint32_t i = threadIdx.x; i < heads * dim; i += ATTEND_THREADS)
    query[i / dim][i % dim] = q[(size_t)token * ld_q + (size_t)head0 * dim + i];

  float scale = 1.0f / sqrtf((float)dim);
  for (uint32_t p = 0; p < n; p += KV_ROWS) {
    uint32_t count = n - p < (uint32_t)KV_ROWS ? n - p : (uint32_t)KV_ROWS;
    __syncthreads();
    store_rows(rows, kv, kv_head, first + p, count, 0, draft);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < heads * KV_ROWS; i += ATTEND_THREADS)
      if (i % KV_ROWS < count)
        scores[i / KV_ROWS][p + i % KV_ROWS] = dot_row(query[i / KV_ROWS], rows[i % KV_ROWS], dim) * scale;
  }
  __syncthreads();
  for (uint32_t h = threadIdx.x / WARP; h < heads; h += ATTEND_THREADS / WARP)
    soften(scores[h], n, piece_of(kv, work, gridDim.x, token, head0 + h, blockIdx.x));

  float mix[ATTEND_HEADS][MOST_DIM / ATTEND_THREADS] = {};
  for (uint32_t p = 0; p < n; p += KV_ROWS) {
    uint32_t count = n - p < (uint32_t)KV_ROWS ? n - p : (uint32_t)KV_ROWS;
    float unit = draft && block_of(kv, first + p) ? 1.0f / 70.0f : 1.0f;
    __syncthreads();
    store_rows(rows, kv, kv_head, first + p, count, 1, draft);
    __syncthreads();
    for (uint32_t k = 0; k < count; k++)
#pragma unroll
      for (int j = 0; j < MOST_DIM / ATTEND_THREADS; j++) {
        uint32_t c = threadIdx.x + ATTEND_THREADS * j;
        float v = c < dim ? bf16_float(rows[k][c]) * unit : 0;
#pragma unroll
        for (int h = 0; h < ATTEND_HEADS; h++)
          mix[h][j] = fmaf((uint32_t)h < heads ? scores[h][p + k] : 0, v, mix[h][j]);
      }
  }
#pragma unroll
  for (int h = 0; h < ATTEND_HEADS; h++)
#pragma unroll
    for (int j = 0; j < MOST_DIM / ATTEND_THREADS; j++) {
      uint32_t c = threadIdx.x + ATTEND_THREADS * j;
      if ((uint32_t)h < heads && c < dim)
        piece_of(kv, work, gridDim.x, token, head0 + h, blockIdx.x)[2 + c] = mix[h][j];
    }
}

/* A block of threads has a head of a token. */
__global__ void __launch_bounds__(ATTEND_THREADS)
    join_pieces(float *out, uint32_t ld, float *work, CudaKv kv, uint32_t n_chunk, const uint32_t *pos) {
  uint32_t head = blockIdx.x, token = blockIdx.y, n = (*pos + token + CHUNK) / CHUNK, dim = kv.head_dim;
  const float *piece = piece_of(kv, work, n_chunk, token, head, 0);
  float top = piece[0], sum = 0;
  for (uint32_t i = 1; i < n; i++)
    top = fmaxf(top, piece[(size_t)i * (dim + 2)]);
  for (uint32_t i = 0; i < n; i++)
    sum = fmaf(piece[(size_t)i * (dim + 2) + 1], exp_of(piece[(size_t)i * (dim + 2)] - top), sum);
  for (uint32_t c = threadIdx.x; c < dim; c += ATTEND_THREADS) {
    float s = 0;
    for (uint32_t i = 0; i < n; i++)
      s = fmaf(piece[(size_t)i * (dim + 2) + 2 + c], exp_of(piece[(size_t)i * (dim + 2)] - top), s);
    out[(size_t)token * ld + (size_t)head * dim + c] = s / sum;
  }
}

#endif
