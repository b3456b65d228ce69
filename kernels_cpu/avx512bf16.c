/* AVX-512 with BF16 products: Zen 4, Sapphire Rapids and later. VDPBF16PS takes the odd words first, with a rounding after
 * each product, as two fused multiply-adds that flush denormals: the same bits as the other sets. */
#include "avx512_common.h"
#include "sets.h"

const Kernels kernels_avx512bf16 = {.name = "avx512bf16",
                                .nest_decode_tile = set_nest_decode_tile,
                                .nest_columns = set_nest_columns,
                                .cass_next_tile = set_cass_next_tile,
                                .matmul = set_matmul,
                                .matmul_draft = set_matmul_draft,
                                .scores_draft = set_scores_draft,
                                SIMD_OPS_TABLE};
