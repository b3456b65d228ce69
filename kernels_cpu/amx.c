/* AMX: for now as avx512. */
#include "avx512_common.h"
#include "sets.h"

const Kernels kernels_amx = {.name = "amx",
                                .nest_decode_tile = set_nest_decode_tile,
                                .matmul = set_matmul,
                                .matmul_draft = set_matmul_draft,
                                OPS_TABLE};
