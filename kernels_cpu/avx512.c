/* AVX-512 without BF16 products: Ice Lake and the like. */
#include "avx512_common.h"
#include "sets.h"

const Kernels kernels_avx512 = {.name = "avx512",
                                .nest_decode_tile = set_nest_decode_tile,
                                .nest_columns = set_nest_columns,
                                .cass_next_tile = set_cass_next_tile,
                                .matmul = set_matmul,
                                .matmul_draft = set_matmul_draft,
                                .scores_draft = set_scores_draft,
                                SIMD_OPS_TABLE};
