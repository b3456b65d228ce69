/* Logits -> token. A pure function of logits, earlier tokens, options and position: plain and speculative decoding
 * call the same one, so they choose the same tokens. */
#ifndef CASS_SAMPLER_H
#define CASS_SAMPLER_H

#include "kernels.h"

typedef struct Candidate {
  float logit;
  int32_t id;
} Candidate;

typedef struct Sampler {
  pycass_sampling options; /* bias_ids and bias are owned copies */
  const Kernels *kernels;
  uint32_t n_token;        /* ids that may be chosen */
  float *logits;           /* [n_token] scratch */
  Candidate *candidates;   /* [n_token] scratch */
  uint16_t *count;         /* [n_token] scratch for penalties, zero between calls */
} Sampler;

pycass_status sampler_init(Sampler *s, const Kernels *kernels, uint32_t n_token);
void sampler_free(Sampler *s);
pycass_status sampler_configure(Sampler *s, const pycass_sampling *options);
/* logits [n_token]; history [n]: the tokens before; n is also the position of the token to choose. */
int32_t sampler_pick(Sampler *s, const float *logits, const int32_t *history, size_t n);
/* Log of the softmax probability of id under the bare logits. */
float sampler_logprob(const Sampler *s, const float *logits, int32_t id);

#endif
