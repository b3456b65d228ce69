/* The sets that may be built in. */
#ifndef CASS_SETS_H
#define CASS_SETS_H

#include "kernels.h"

extern const Kernels kernels_scalar, kernels_avx2, kernels_avx512, kernels_avx512bf16, kernels_amx, kernels_neon;

#endif
