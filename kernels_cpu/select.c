/* Which sets this machine runs, best first. On x86 a set needs the CPU's bits and the operating system's permission to use
 * the registers (xgetbv; for AMX also a request to the kernel); on Arm Linux tells both. */
#include <stdio.h>
#include <stdlib.h>

#include "sets.h"

#if defined(PYCASS_HAVE_AVX512)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { XCR0_AVX = 0x6, XCR0_AVX512 = 0xe6, XCR0_AMX = 0x60000 };

static uint64_t enabled_state(void) {
  uint32_t eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & 1u << 27))
    return 0;
  __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (uint64_t)edx << 32 | eax;
}

typedef struct Features {
  uint32_t c1, b7, c7, d7, a71; /* leaf 1 ecx; leaf 7 ebx, ecx, edx; leaf 7.1 eax */
  uint64_t state;
} Features;

static Features features(void) {
  Features f = {0};
  uint32_t a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d))
    f.c1 = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
    f.b7 = b, f.c7 = c, f.d7 = d;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d))
    f.a71 = a;
  f.state = enabled_state();
  return f;
}

static bool has(uint32_t word, uint32_t bits) { return (word & bits) == bits; }

static bool runs_avx2(void) {
  Features f = features();
  /* fma, popcnt; bmi1, avx2, bmi2 */
  return has(f.c1, 1u << 12 | 1u << 23 | 1u << 28) && has(f.b7, 1u << 3 | 1u << 5 | 1u << 8) &&
         (f.state & XCR0_AVX) == XCR0_AVX;
}

static bool runs_avx512(void) {
  Features f = features();
  /* f, dq, bw, vl; vbmi, vbmi2, gfni, vnni */
  return runs_avx2() && has(f.b7, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) && has(f.c7, 1u << 1 | 1u << 6 | 1u << 8 | 1u << 11) &&
         (f.state & XCR0_AVX512) == XCR0_AVX512;
}

static bool runs_avx512bf16(void) { return runs_avx512() && has(features().a71, 1u << 5); }

static bool runs_amx(void) {
#if defined(__linux__)
  Features f = features();
  /* amx-bf16, amx-tile; then Linux's permission for the tile data (arch_prctl, ARCH_REQ_XCOMP_PERM) */
  return runs_avx512bf16() && has(f.d7, 1u << 22 | 1u << 24) &&
         (f.state & XCR0_AMX) == XCR0_AMX && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#endif

#if defined(PYCASS_HAVE_NEON)
#include <sys/auxv.h>

static bool runs_neon(void) {
  /* half-precision arithmetic, scalar and vector, and dot products: linux/arch/arm64/include/uapi/asm/hwcap.h */
  const unsigned long wanted = 1ul << 9 | 1ul << 10 | 1ul << 20;
  return (getauxval(AT_HWCAP) & wanted) == wanted;
}
#endif

static bool runs_always(void) { return true; }

static const struct {
  const Kernels *kernels;
  bool (*runs)(void);
} sets[] = {
#if defined(PYCASS_HAVE_AMX)
    {&kernels_amx, runs_amx},
#endif
#if defined(PYCASS_HAVE_AVX512)
    {&kernels_avx512bf16, runs_avx512bf16},
    {&kernels_avx512, runs_avx512},
#endif
#if defined(PYCASS_HAVE_AVX2)
    {&kernels_avx2, runs_avx2},
#endif
#if defined(PYCASS_HAVE_NEON)
    {&kernels_neon, runs_neon},
#endif
    {&kernels_scalar, runs_always},
};
enum { N_SET = sizeof sets / sizeof *sets };

const char *pycass_kernel_name(size_t index, int *runs) {
  if (index >= N_SET)
    return NULL;
  if (runs)
    *runs = sets[index].runs();
  return sets[index].kernels->name;
}

pycass_status kernels_select(const char *name, const Kernels **out) {
  const char *forced = name ? name : getenv("PYCASS_KERNEL");
  char known[128] = "";
  for (int i = 0; i < N_SET; i++) {
    bool wanted = !forced || !*forced || strcmp(forced, sets[i].kernels->name) == 0;
    if (wanted && sets[i].runs()) {
      *out = sets[i].kernels;
      return PYCASS_OK;
    }
    if (wanted && forced && *forced)
      return cass_fail(PYCASS_ERR_KERNEL, "this machine cannot run the kernel set %s", forced);
    size_t n = strlen(known);
    snprintf(known + n, sizeof known - n, " %s", sets[i].kernels->name);
  }
  return cass_fail(PYCASS_ERR_KERNEL, "no kernel set %s; there are:%s", forced, known);
}
