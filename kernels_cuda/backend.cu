/* The table of the CUDA library. */
#include "acts.cuh"
#include "attend.cuh"
#include "encode.cuh"
#include "matmul.cuh"
#include "ops.cuh"

#include <cstring>

#include <cuda_runtime_api.h>

static int last() { return (int)cudaGetLastError(); }

static int device_alloc(void **p, size_t size) { return (int)cudaMalloc(p, size ? size : 1); }
static int device_release(void *p) { return (int)cudaFree(p); }
static int device_upload(void *device, const void *host, size_t size, CudaStream s) {
  return (int)cudaMemcpyAsync(device, host, size, cudaMemcpyHostToDevice, s);
}
static int device_download(void *host, const void *device, size_t size, CudaStream s) {
  int error = (int)cudaMemcpyAsync(host, device, size, cudaMemcpyDeviceToHost, s);
  return error ? error : (int)cudaStreamSynchronize(s);
}
static int device_zero(void *device, size_t size, CudaStream s) { return (int)cudaMemsetAsync(device, 0, size, s); }
static int device_wait(CudaStream s) { return (int)cudaStreamSynchronize(s); }
static const char *error_text(int error) { return cudaGetErrorString((cudaError_t)error); }

static uint32_t pieces(uint32_t n, uint32_t of) { return (n + of - 1) / of; }

static int run_find_form(uint8_t *form, const CudaMatrix *w, CudaStream s) {
  LAUNCH(find_form, dim3(pieces(w->n_block * w->n_group, ACTS_WARPS)), dim3(ACTS_WARPS * WARP), s, form, *w);
  return last();
}

static int run_decode(uint16_t *out, const CudaMatrix *w, int relative, CudaStream s) {
  LAUNCH(decode_tiles, dim3(pieces(w->n_block * w->n_group, ACTS_WARPS)), dim3(ACTS_WARPS * WARP), s, out, *w, relative);
  return last();
}

static int run_ready(const CudaActs *acts, const float *x, uint32_t ldx, uint32_t m, const CudaMatrix *w, int panels, int q,
                     CudaStream s) {
  LAUNCH(ready_acts, dim3(pieces(w->n_group, ACTS_WARPS), m), dim3(ACTS_WARPS * WARP), s, *acts, x, ldx, *w, panels, q);
  return last();
}

/* Products [i, n) from i on that are of one codec, and their row blocks; i becomes the first one after them. */
static Products take_run(const CudaProduct *list, uint32_t n, uint32_t *i, uint32_t *blocks) {
  Products run = {};
  uint32_t count = 0;
  *blocks = 0;
  for (; *i < n && count < CUDA_PRODUCTS && list[*i].w.codec == list[*i - count].w.codec; ++*i)
    run.p[count++] = list[*i], *blocks += list[*i].w.n_block;
  return run;
}

static int run_matmul(const CudaProduct *list, uint32_t n, const CudaActs *acts, uint32_t m, CudaStream s) {
  dim3 threads(TARGET_WARPS * WARP);
  for (uint32_t i = 0, blocks; i < n;) {
    bool nest = list[i].w.codec == CUDA_NEST;
    Products run = take_run(list, n, &i, &blocks);
    uint32_t wide = m <= 8 ? 8 : m <= 16 ? 16 : 64;
    dim3 grid(blocks, pieces(m, wide));
    if (wide == 8 && nest)
      LAUNCH(matmul_nest<1>, grid, threads, s, run, *acts, m);
    else if (wide == 16 && nest)
      LAUNCH(matmul_nest<2>, grid, threads, s, run, *acts, m);
    else if (nest)
      LAUNCH(matmul_nest<8>, grid, threads, s, run, *acts, m);
    else if (wide == 8)
      LAUNCH(matmul_raw<1>, grid, threads, s, run, *acts, m);
    else if (wide == 16)
      LAUNCH(matmul_raw<2>, grid, threads, s, run, *acts, m);
    else
      LAUNCH(matmul_raw<8>, grid, threads, s, run, *acts, m);
  }
  return last();
}

static int run_draft(const CudaProduct *list, uint32_t n, const CudaActs *acts, uint32_t m, CudaStream s) {
  dim3 threads(DRAFT_WARPS * WARP);
  for (uint32_t i = 0, blocks; i < n;) {
    Products run = take_run(list, n, &i, &blocks);
    if (m == 1)
      LAUNCH(matmul_draft<1>, dim3(blocks), threads, s, run, *acts, m);
    else if (m == 2)
      LAUNCH(matmul_draft<2>, dim3(blocks), threads, s, run, *acts, m);
    else
      LAUNCH(matmul_draft<4>, dim3(blocks, pieces(m, 4)), threads, s, run, *acts, m);
  }
  return last();
}

static int run_embed(float *x, uint32_t ld, const int *ids, uint32_t m, const CudaMatrix *w, int draft, CudaStream s) {
  LAUNCH(embed_rows, dim3(pieces(w->n_group, OPS_WARPS), m), dim3(OPS_THREADS), s, x, ld, ids, *w, draft);
  return last();
}

static int run_add_norm(float *h, float *x, uint32_t ld, uint32_t m, int add, const uint16_t *weight, uint32_t n, float eps,
                        CudaStream s) {
  LAUNCH(add_norm, dim3(m), dim3(OPS_THREADS), s, h, x, ld, add, weight, n, eps);
  return last();
}

static int run_angles(float *cos_sin, const float *inv_freq, float factor, const uint32_t *pos, uint32_t m, uint32_t head_dim,
                      CudaStream s) {
  LAUNCH(rope_angles, dim3(m), dim3(OPS_THREADS), s, cos_sin, inv_freq, factor, pos, head_dim);
  return last();
}

static int run_finish_qkv(const CudaHeads *h, uint32_t m, const float *cos_sin, const uint32_t *pos, CudaStream s) {
  uint32_t units = m * (h->n_head + 2 * h->n_head_kv);
  LAUNCH(finish_qkv, dim3(pieces(units, OPS_WARPS)), dim3(OPS_THREADS), s, *h, m, cos_sin, pos);
  return last();
}

static int run_attend(float *out, uint32_t ld, const float *q, uint32_t ld_q, uint32_t m, const CudaKv *kv, const uint32_t *pos,
                      uint32_t n_seen, int draft, float *work, CudaStream s) {
  uint32_t n_chunk = pieces(n_seen, CHUNK), parts = pieces(kv->n_head / kv->n_head_kv, ATTEND_HEADS);
  LAUNCH(attend_pieces, dim3(n_chunk, kv->n_head_kv * parts, m), dim3(ATTEND_THREADS), s, work, q, ld_q, *kv, pos, draft);
  LAUNCH(join_pieces, dim3(kv->n_head, m), dim3(ATTEND_THREADS), s, out, ld, work, *kv, n_chunk, pos);
  return last();
}

static int run_encode(uint8_t *units, uint32_t *sizes, const CudaKv *kv, uint32_t pos, CudaStream s) {
  LAUNCH(encode_units, dim3(2 * kv->n_head_kv), dim3(WARP), s, units, cuda_unit_room(kv->head_dim), sizes, *kv, pos);
  return last();
}

static int run_pack(uint8_t *block, const uint8_t *units, const uint32_t *sizes, uint32_t n_head_kv, uint32_t head_dim,
                    CudaStream s) {
  LAUNCH(pack_units, dim3(2 * n_head_kv), dim3(OPS_THREADS), s, block, units, cuda_unit_room(head_dim), sizes, n_head_kv,
         head_dim);
  return last();
}

static int run_swiglu(float *gate, const float *up, uint32_t ld, uint32_t m, uint32_t n, CudaStream s) {
  LAUNCH(swiglu, dim3(pieces(n, OPS_THREADS), m), dim3(OPS_THREADS), s, gate, up, ld, n);
  return last();
}

static int run_argmax(int *out, const float *logits, uint32_t ld, uint32_t m, uint32_t n, CudaStream s) {
  LAUNCH(argmax_rows, dim3(m), dim3(OPS_THREADS), s, out, logits, ld, n);
  return last();
}

static int describe(int device, CudaDevice *out) {
  cudaDeviceProp p;
  int current = 0, error = (int)cudaGetDeviceProperties(&p, device);
  if (error || (error = (int)cudaGetDevice(&current)) || (error = (int)cudaSetDevice(device))) {
    last(); /* forgets it: asking past the last one must not spoil what follows */
    return error;
  }
  memcpy(out->name, p.name, sizeof out->name);
  out->name[sizeof out->name - 1] = 0;
  out->major = p.major, out->minor = p.minor;
  error = (int)cudaMemGetInfo(&out->free_bytes, &out->total_bytes);
  cudaSetDevice(current);
  return error;
}

static const PycassCuda table = {sizeof(PycassCuda), device_alloc,    device_release, device_upload, device_download,
                                 device_zero,        device_wait,     error_text,     run_find_form, run_decode,
                                 run_ready,          run_matmul,      run_draft,      run_embed,     run_add_norm,
                                 run_angles,         run_finish_qkv,  run_attend,     run_encode,    run_pack,
                                 run_swiglu,         run_argmax,      describe};

extern "C" __attribute__((visibility("default"))) const PycassCuda *pycass_cuda(void) { return &table; }
