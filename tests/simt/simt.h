/* Runs CUDA kernels on the CPU, for tests: g++ -x c++ -include simt.h KERNELS.cu, and simt.cpp. A CUDA thread is a fiber, one
 * block of threads runs at a time on one OS thread, and kernels see what CUDA C++ gives them, as far as this project uses it.
 * Types come from NVIDIA's own headers.
 *
 * What it finds: wrong results under another order of threads (SIMT_ORDER=forward|reverse|random[:SEED]), cp.async that arrives
 * as late, or as early, as it may (SIMT_COPY=late|early), threads that meet at different barriers or never, lanes that miss a
 * warp's exchange, shared memory that nobody wrote (it begins as NaN); with sanitizers reads and writes out of range, and, since
 * only barriers order fibers' accesses for TSan, missing barriers. */
#ifndef SIMT_H
#define SIMT_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#define __global__ static
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("simt_shared"))) /* one block at a time; the section's name allows poisoning */
#define SIMT_LAUNCH(kernel, grid, block, ...)                                                                                  \
  ::simt::launch(#kernel, grid, block, ::simt::bind([](auto... a) { kernel(a...); }, __VA_ARGS__))

namespace simt {
struct Thread {
  uint3 index;
  unsigned lane, warp;
};
struct Grid {
  uint3 block;
  dim3 threads, blocks;
};
extern Thread *self; /* the one that runs */
extern Grid grid;

inline unsigned lane() { return self->lane; }
void sync_block(const char *file, int line);

enum { DEPOSIT = 64 };
/* What the lanes of a warp gave. */
struct Deposits {
  const unsigned char (*of)[DEPOSIT];
  uint32_t word(unsigned lane, unsigned i) const {
    uint32_t w;
    std::memcpy(&w, of[lane] + 4 * i, 4);
    return w;
  }
};
/* All lanes of mask meet here and see what each gave. memory: it also orders their accesses, as only __syncwarp does. */
Deposits exchange(uint32_t mask, const void *mine, size_t size, bool memory = false, const char *file = __builtin_FILE(),
                  int line = __builtin_LINE());

/* cp.async of the running thread. The copying itself is compiled with the kernels, for sanitizers to see. */
struct Copy {
  void *to;
  const void *from;
};
bool copy_later(Copy c);              /* false: now */
bool copy_due(unsigned most, Copy *c); /* the next one to do before at most that many groups are under way */
void copy_commit();
inline void copy_async(void *to, const void *from) {
  if (!copy_later({to, from}))
    std::memcpy(to, from, 16);
}
inline void copy_wait(unsigned most) {
  for (Copy c; copy_due(most, &c);)
    std::memcpy(c.to, c.from, 16);
}

void run(const char *kernel, dim3 blocks, dim3 threads, void (*entry)(void *), void *arg);
template <class F> void launch(const char *kernel, dim3 blocks, dim3 threads, F f) {
  run(kernel, blocks, threads, [](void *p) { (*static_cast<F *>(p))(); }, &f);
}
template <class K, class... A> auto bind(K kernel, A... a) {
  return [=] { kernel(a...); };
}

template <class T> T from_lane(uint32_t mask, T v, unsigned source, const char *file, int line) {
  static_assert(sizeof(T) <= DEPOSIT && std::is_trivially_copyable<T>::value, "");
  T r;
  std::memcpy(&r, exchange(mask, &v, sizeof v, false, file, line).of[source], sizeof r);
  return r;
}
} // namespace simt

#define threadIdx (::simt::self->index)
#define blockIdx (::simt::grid.block)
#define blockDim (::simt::grid.threads)
#define gridDim (::simt::grid.blocks)

#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(SIMT_HERE) { simt::sync_block(file, line); }
inline void __syncwarp(uint32_t mask = ~0u, SIMT_HERE) { simt::exchange(mask, nullptr, 0, true, file, line); }
template <class T> T __shfl_sync(uint32_t mask, T v, unsigned source, SIMT_HERE) {
  return simt::from_lane(mask, v, source % 32, file, line);
}
template <class T> T __shfl_xor_sync(uint32_t mask, T v, unsigned flip, SIMT_HERE) {
  return simt::from_lane(mask, v, simt::lane() ^ flip, file, line);
}
template <class T> T __shfl_up_sync(uint32_t mask, T v, unsigned by, SIMT_HERE) {
  unsigned lane = simt::lane();
  return simt::from_lane(mask, v, lane < by ? lane : lane - by, file, line);
}
template <class T> T __shfl_down_sync(uint32_t mask, T v, unsigned by, SIMT_HERE) {
  unsigned lane = simt::lane();
  return simt::from_lane(mask, v, lane + by > 31 ? lane : lane + by, file, line);
}
inline uint32_t __ballot_sync(uint32_t mask, int yes, SIMT_HERE) {
  unsigned char mine = yes != 0;
  simt::Deposits all = simt::exchange(mask, &mine, 1, false, file, line);
  uint32_t r = 0;
  for (unsigned i = 0; i < 32; i++)
    r |= (uint32_t)(mask >> i & 1 && all.of[i][0]) << i;
  return r;
}
inline int __all_sync(uint32_t mask, int yes, SIMT_HERE) { return __ballot_sync(mask, !yes, file, line) == 0; }
inline int __any_sync(uint32_t mask, int yes, SIMT_HERE) { return __ballot_sync(mask, yes, file, line) != 0; }

template <class T> T __ldg(const T *p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T))
    std::abort(); /* the hardware traps, too */
  return *p;
}
inline uint32_t atomicOr(uint32_t *p, uint32_t v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++)
    c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
  return c;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> (by & 31u));
}
inline float __uint_as_float(uint32_t v) {
  float f;
  std::memcpy(&f, &v, 4);
  return f;
}
inline uint32_t __float_as_uint(float f) {
  uint32_t v;
  std::memcpy(&v, &f, 4);
  return v;
}

/* The runtime, on the heap: buffers of exactly the size asked for. SIMT_ROOM=N: none of more bytes. */
inline cudaError_t simt_alloc(void **p, size_t size) {
  const char *room = getenv("SIMT_ROOM");
  return (room && size > strtoul(room, nullptr, 10)) || posix_memalign(p, 256, size) ? cudaErrorMemoryAllocation : cudaSuccess;
}
#define cudaMalloc(p, size) simt_alloc(p, size)
#define cudaFree(p) (std::free(p), cudaSuccess)
#define cudaMemcpyAsync(to, from, size, kind, stream) ((void)(stream), std::memcpy(to, from, size), cudaSuccess)
#define cudaMemsetAsync(to, value, size, stream) ((void)(stream), std::memset(to, value, size), cudaSuccess)
#define cudaStreamSynchronize(stream) ((void)(stream), cudaSuccess)
#define cudaGetErrorString(error) ((error) == cudaSuccess ? "no error" : "an error of the shim")
/* SIMT_FAIL=N: launches fail from the N-th on. */
inline cudaError_t simt_last_error() {
  static long launches;
  const char *fail = getenv("SIMT_FAIL");
  launches = fail ? launches + 1 : 0;
  return fail && launches >= atol(fail) ? cudaErrorLaunchFailure : cudaSuccess;
}
#define cudaGetLastError() simt_last_error()
/* One GPU. */
inline cudaError_t simt_properties(cudaDeviceProp *p, int device) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "SIMT shim");
  return device ? cudaErrorInvalidDevice : cudaSuccess;
}
#define cudaGetDeviceProperties(p, device) simt_properties(p, device)
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaSetDevice(device) ((void)(device), cudaSuccess)
#define cudaMemGetInfo(available, total) (*(available) = *(total) = (size_t)1 << 30, cudaSuccess)

#endif
