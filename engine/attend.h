/* Attention of a pass over the KV cache. */
#ifndef CASS_ATTEND_H
#define CASS_ATTEND_H

#include "forward.h"

/* Floats of State.scores. */
size_t attend_scores_size(const pycass_config *c, uint32_t n_ctx, uint32_t n_threads);
/* q, k, v of all tokens of the pass are there, keys and values in the cache too unless the pass is apart; fills att. All threads call it; they leave it
 * together. */
void attend(const Pass *p, uint32_t layer, uint32_t thread, uint32_t n_threads);

#endif
