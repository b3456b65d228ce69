/* One pass of the transformer over n tokens, as draft or as target. */
#ifndef CASS_FORWARD_H
#define CASS_FORWARD_H

#include "kv.h"
#include "model.h"
#include "threads.h"

/* What a thread has of n pieces of work. */
typedef struct Range {
  uint32_t from, to;
} Range;

static inline Range share(uint32_t n, uint32_t thread, uint32_t n_threads) {
  return (Range){(uint32_t)((uint64_t)n * thread / n_threads), (uint32_t)((uint64_t)n * (thread + 1) / n_threads)};
}

/* Working memory of a pass. A leading dimension is the width rounded up to 64; what lies in the padding does not matter. */
typedef struct State {
  uint32_t n_batch;       /* most tokens of a pass */
  uint32_t n_logits;      /* most rows of logits of a pass */
  uint32_t ld_embd, ld_q, ld_kv, ld_ff, ld_vocab;
  float *x;               /* [n_batch][ld_embd] the residual stream */
  float *h;               /* [n_batch][ld_embd] its norm; then what a block adds to it */
  float *q, *k, *v;       /* [n_batch][ld_q], [n_batch][ld_kv] x 2 */
  float *att;             /* [n_batch][ld_q] */
  float *gate, *up;       /* [n_batch][ld_ff] */
  float *cos_sin;         /* [n_batch][head_dim] */
  float *logits;          /* [n_logits][ld_vocab] */
  float *scores;          /* see attend.c */
  size_t ld_scores;
  uint16_t *kv_rows;      /* [n_threads][KV_BLOCK][ld_head]: decoded keys or values */
  uint32_t ld_head;
  Acts acts;              /* activations of a product, [n_batch][the widest input] */
} State;

/* Sizes and logits, which every backend has. */
pycass_status state_shape(State *s, const pycass_model *m, uint32_t n_batch, uint32_t n_logits);
/* The columns of the widest input of a product. */
size_t state_widest(const pycass_config *c);
void state_free(State *s);

typedef struct Pass {
  const pycass_model *model;
  State *state;
  KvCache *kv;
  Pool *pool;
  uint32_t n_threads;
  bool draft;             /* read speculation data only */
  bool apart;             /* a token's own keys and values are its pass's, all before it the cache's, which stays as it is */
  const int32_t *ids;     /* [n], each below n_vocab */
  uint32_t n;             /* 1 .. state.n_batch */
  uint32_t pos;           /* of ids[0]; the cache holds everything before it */
  uint32_t n_logits;      /* the last n_logits tokens get logits, in state.logits; may be 0 */
  double *sum, *square;   /* [pycass_model_n_channel]: every token's activations are added; NULL. Then n_logits = 0 */
} Pass;

#endif
