/* The CUDA library's C interface: libpycass_cuda.so exports pycass_cuda(), a table of functions. Pointers in these structs are
 * the device's; matrices' planes lie there as in the file, at multiples of 16 bytes. Nothing here waits for the device but
 * where it says so, and nothing allocates but alloc. Functions return 0 or the number of a cudaError_t.
 *
 * One order: a token's results are the same bits for every m and for every place in a batch, because a sum is divided by the
 * matrix's shape alone. They are not the CPU's bits: tests/simt states the bounds. */
#ifndef CASS_CUDA_BACKEND_H
#define CASS_CUDA_BACKEND_H

#ifndef __CUDACC_RTC__ /* ptx.cuh has the types */
#include <stddef.h>
#include <stdint.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *CudaStream; /* as cudaStream_t */

typedef struct CudaDevice {
  char name[256];
  int major, minor; /* compute capability */
  size_t free_bytes, total_bytes;
} CudaDevice;

enum { CUDA_RAW, CUDA_NEST }; /* as pycass_codec; others are the host's to refuse */

/* A weight matrix, as engine/codec.h's Matrix. */
typedef struct CudaMatrix {
  uint32_t codec;
  uint32_t rows, cols, n_block, n_group;
  uint32_t n_hot;
  const uint16_t *raw;             /* raw: [rows][cols] */
  const uint8_t *a, *x, *b, *side; /* nest */
  const uint8_t *form;             /* nest: [n_block][n_group], what find_form wrote */
  const uint16_t *hot_words;       /* [n_block][n_hot / 4][64] */
  const uint32_t *hot;             /* [n_hot] */
  const uint64_t *hot_mask;        /* [n_group]: bit k says that column k of the group is hot; NULL without hot columns */
  const float *bias;               /* [16 n_block] or NULL */
} CudaMatrix;

/* Activations of a product, made by ready.
 * panels: BF16 times 2^48, [m][n_group][half line][4], hot columns zero; hot: those, [m][64].
 * q: int8 for the draft: of each 8 columns their q, then -q, [m][n_group][8][16]; scale [m][n_group]. */
typedef struct CudaActs {
  uint16_t *panels, *hot;
  int8_t *q;
  float *scale;
} CudaActs;

/* y [m][ldy] = W x; rows from w.rows to 16 n_block are written, too. */
typedef struct CudaProduct {
  CudaMatrix w;
  float *y;
  uint32_t ldy;
} CudaProduct;
enum { CUDA_PRODUCTS = 3 }; /* at most, in one launch: of the same activations */

/* A layer's queries [m][ld_q], keys and values [m][ld_kv] as products give them, what they want, and where keys and values of
 * this layer lie in the cache, [n_head_kv][n_ctx][head_dim] BF16. Biases and norms NULL if there are none. */
typedef struct CudaHeads {
  float *q, *k, *v;
  uint32_t ld_q, ld_kv, n_head, n_head_kv, head_dim, n_ctx;
  float eps;
  const uint16_t *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;
  uint16_t *k_cache, *v_cache;
} CudaHeads;

/* A layer's keys and values: plain rows [n_head_kv][n_ctx][head_dim], and where a block of 64 positions is encoded (codec nest,
 * docs/format.md), where its data lie, at a multiple of 64. */
typedef struct CudaKv {
  const uint16_t *k, *v;
  const uint8_t *const *block; /* [n_ctx / 64], NULL for a plain one; or NULL */
  uint32_t n_head, n_head_kv, head_dim, n_ctx;
} CudaKv;
enum { CUDA_MOST_HEAD_DIM = 256, CUDA_CHUNK = 128 }; /* larger heads are the host's to refuse; positions of a piece */
enum { CUDA_BLOCK_SLACK = 128 };                         /* zeros behind an encoded block, which decoders may read */

#ifndef __CUDACC_RTC__
/* Floats of attend's work for m tokens of which none sees more than n_seen positions. */
static inline size_t cuda_attend_work(const CudaKv *kv, uint32_t m, uint32_t n_seen) {
  return (size_t)m * kv->n_head * ((n_seen + CUDA_CHUNK - 1) / CUDA_CHUNK) * (kv->head_dim + 2);
}

/* Encoding a block: room for each of 2 n_head_kv units, and what they take together once their sizes are known. A unit's first
 * part and, in the block, its rest are multiples of 64. */
static inline uint32_t cuda_unit_first(uint32_t head_dim) {
  uint32_t tiles = (head_dim + 15) / 16;
  return (16 * tiles + 63) / 64 * 64 + 1280 * tiles;
}
static inline uint32_t cuda_unit_room(uint32_t head_dim) {
  uint32_t tiles = (head_dim + 15) / 16, rest = 4 * (tiles + 1) + tiles * (2 + 640 + 1024);
  return cuda_unit_first(head_dim) + (rest + 63) / 64 * 64;
}
static inline size_t cuda_block_bytes(const uint32_t *sizes, uint32_t n_head_kv, uint32_t head_dim) {
  size_t n = (16 * (size_t)n_head_kv + 63) / 64 * 64 + CUDA_BLOCK_SLACK;
  for (uint32_t i = 0; i < 2 * n_head_kv; i++)
    n += cuda_unit_first(head_dim) + (sizes[i] + 63) / 64 * 64;
  return n;
}

typedef struct PycassCuda {
  uint32_t size; /* of this struct, for a host of another version */

  int (*alloc)(void **p, size_t size);
  int (*release)(void *p);
  int (*upload)(void *device, const void *host, size_t size, CudaStream s);
  int (*download)(void *host, const void *device, size_t size, CudaStream s);
  int (*zero)(void *device, size_t size, CudaStream s);
  int (*wait)(CudaStream s);
  const char *(*error_text)(int error);

  /* Which tiles' products take the relative form; once for a matrix. form [n_block][n_group] */
  int (*find_form)(uint8_t *form, const CudaMatrix *w, CudaStream s);
  /* Tiles' words as nest_decode_tile (relative false) or nest_decode_relative gives them: out [tiles][16][64]. For tests. */
  int (*decode)(uint16_t *out, const CudaMatrix *w, int relative, CudaStream s);
  /* x [m][ldx] -> acts: panels for the target, q for the draft, or both. Columns from w->cols on count as zero. */
  int (*ready)(const CudaActs *acts, const float *x, uint32_t ldx, uint32_t m, const CudaMatrix *w, int panels, int q,
               CudaStream s);
  int (*matmul)(const CudaProduct *list, uint32_t n, const CudaActs *acts, uint32_t m, CudaStream s);
  /* nest only */
  int (*matmul_draft)(const CudaProduct *list, uint32_t n, const CudaActs *acts, uint32_t m, CudaStream s);

  /* The transformer's other steps. ids and pos (the first token's position) are the device's, so that steps can be recorded in
   * a graph and a draft can go on without the host. */
  int (*embed)(float *x, uint32_t ld, const int *ids, uint32_t m, const CudaMatrix *w, int draft, CudaStream s);
  /* x += h if add, then h = norm(x): both [m][ld] */
  int (*add_norm)(float *h, float *x, uint32_t ld, uint32_t m, int add, const uint16_t *weight, uint32_t n, float eps,
                  CudaStream s);
  int (*angles)(float *cos_sin, const float *inv_freq, float factor, const uint32_t *pos, uint32_t m, uint32_t head_dim,
                CudaStream s);
  int (*finish_qkv)(const CudaHeads *h, uint32_t m, const float *cos_sin, const uint32_t *pos, CudaStream s);
  /* out [m][ld] of q [m][ld_q]; token i sees positions up to *pos + i, at most n_seen of them. */
  int (*attend)(float *out, uint32_t ld, const float *q, uint32_t ld_q, uint32_t m, const CudaKv *kv, const uint32_t *pos,
                uint32_t n_seen, int draft, float *work, CudaStream s);
  /* 64 plain positions of a layer from pos on: units [2 n_head_kv][cuda_unit_room], sizes [2 n_head_kv]. Then, with
   * cuda_block_bytes of those, the block as attend reads it. */
  int (*encode)(uint8_t *units, uint32_t *sizes, const CudaKv *kv, uint32_t pos, CudaStream s);
  int (*pack)(uint8_t *block, const uint8_t *units, const uint32_t *sizes, uint32_t n_head_kv, uint32_t head_dim, CudaStream s);
  /* gate = silu(gate) * up, [m][ld], n of each row */
  int (*swiglu)(float *gate, const float *up, uint32_t ld, uint32_t m, uint32_t n, CudaStream s);
  /* out [m]: the first of the largest of n logits */
  int (*argmax)(int *out, const float *logits, uint32_t ld, uint32_t m, uint32_t n, CudaStream s);

  /* Number `device` of the GPUs, of which all else uses the first; an error past the last one or without a driver. */
  int (*describe)(int device, CudaDevice *out);
} PycassCuda;

const PycassCuda *pycass_cuda(void);
#endif

#ifdef __cplusplus
}
#endif
#endif
