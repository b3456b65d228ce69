/* What CUDA C++ has no words for: the only inline PTX, each wrapper with a twin for the host compiler, which tests/simt runs
 * the kernels with. Also what both compilers need before any kernel. */
#ifndef CASS_PTX_CUH
#define CASS_PTX_CUH

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned long size_t;
#define INFINITY __int_as_float(0x7f800000)
#else
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#endif

/* Tests are built with one of these, and have to fail then: 1 a wrong lane map, 2 no barrier before the warps' sums are added,
 * 3 no wait for cp.async, 4 a read past the last tile, 5 no __syncwarp after the wait. */
#ifndef SEED_BUG
#define SEED_BUG 0
#endif

enum { WARP = 32 };
#define ALL_LANES 0xffffffffu

#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block, stream, ...) kernel<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__)
#define DEVICE static __device__ __forceinline__

/* Bytes of {b, a} by the low four nibbles of s; a nibble's bit 3 asks for the byte's sign, eight times. */
DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s));
  return r;
}

/* Bits of a where mask has ones, else of b. Written out, since compilers fold the mask into what they know of b first. */
DEVICE uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}

/* As choose(mask, ~a, b). */
DEVICE uint32_t choose_not(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0x3a;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}

/* v and, where the lane's segment of width lanes has a lane that many below, what that one has: a step of a prefix sum. */
template <int by, int width> DEVICE uint32_t add_below(uint32_t v) {
  uint32_t sum = v;
  asm volatile("{ .reg .pred p; .reg .u32 r; shfl.sync.up.b32 r|p, %1, %2, %3, 0xffffffff; @p add.u32 %0, r, %0; }"
               : "+r"(sum) : "r"(v), "n"(by), "n"((32 - width) << 8));
  return sum;
}

/* c + the products of the bytes, unsigned. */
DEVICE uint32_t dot_bytes(uint32_t a, uint32_t b, uint32_t c) { return __dp4a(a, b, c); }

/* bit / 32; written out, so that it becomes part of an address. */
DEVICE uint32_t word_of(uint32_t bit) {
  uint32_t r;
  asm("shr.u32 %0, %1, 5;" : "=r"(r) : "r"(bit));
  return r;
}

/* 16 bytes from global to shared memory, both aligned, some time before the wait. */
DEVICE void cp_async16(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :: "r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Until at most n of the thread's groups are under way. */
template <int n> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory"); }

/* d += a b: a [16][16] BF16, b [16][8] BF16, d [16][8] float, in the fragments of mma.m16n8k16 (PTX ISA). */
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#else /* the twins: simt.h is included before this file */
#define LAUNCH(kernel, grid, block, stream, ...) ((void)(stream), SIMT_LAUNCH(kernel, grid, block, __VA_ARGS__))
#define DEVICE static inline

DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++, s >>= 4) {
    uint32_t byte = (uint32_t)(bytes >> 8 * (s & 7)) & 255u;
    r |= (s & 8 ? (byte & 128u ? 255u : 0u) : byte) << 8 * i;
  }
  return r;
}

DEVICE uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

DEVICE uint32_t choose_not(uint32_t mask, uint32_t a, uint32_t b) { return (~a & mask) | (b & ~mask); }
template <int by, int width> DEVICE uint32_t add_below(uint32_t v) {
  uint32_t below = __shfl_up_sync(ALL_LANES, v, by);
  return v + (simt::lane() % width >= by ? below : 0);
}
DEVICE uint32_t dot_bytes(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8)
    c += (a >> i & 255u) * (b >> i & 255u);
  return c;
}
DEVICE uint32_t word_of(uint32_t bit) { return bit / 32; }

DEVICE void cp_async16(void *shared, const void *global) { simt::copy_async(shared, global); }
DEVICE void cp_async_commit() { simt::copy_commit(); }
template <int n> DEVICE void cp_async_wait() { simt::copy_wait(n); }

/* Adds in the order of k with one rounding each; the hardware's order is its own. */
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  simt::Deposits all = simt::exchange(ALL_LANES, mine, sizeof mine);
  auto element = [&](unsigned lane, unsigned reg, unsigned high) {
    uint32_t w = all.word(lane, reg);
    return __uint_as_float(high ? w & 0xffff0000u : w << 16);
  };
  unsigned lane = simt::lane();
  for (unsigned i = 0; i < 4; i++) {
    unsigned row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; k++)
      d[i] = fmaf(element(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2),
                  element(col * 4 + k % 8 / 2, 4 + k / 8, k % 2), d[i]);
  }
}
#endif

DEVICE unsigned lane_of() { return threadIdx.x % WARP; }
DEVICE float bf16_float(uint32_t v) { return __uint_as_float(v << 16); }
/* To nearest even; a NaN stays one. */
DEVICE uint32_t float_bf16(float f) {
  uint32_t u = __float_as_uint(f);
  return (u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}

#endif
