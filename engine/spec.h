/* How many tokens to draft. Every choice here is about speed only: the output does not depend on it.
 *
 * With r = tokens per millisecond of late, one more draft token pays while
 *   P(it will be accepted) / (its draft time + what it adds to verification) > r,
 * P being the product of the draft's own probabilities of the tokens before it, times the running acceptance. */
#ifndef CASS_SPEC_H
#define CASS_SPEC_H

#include "base.h"

enum { SPEC_MAX_DRAFT = 16 };

typedef struct Policy {
  pycass_speculation options;
  double draft_ms;                      /* running mean of a draft step */
  double verify_ms[SPEC_MAX_DRAFT + 2]; /* of a target pass over n tokens; 0: not seen yet */
  double acceptance;                    /* running share of accepted among judged draft tokens */
  double spec_tokens, spec_ms;          /* decaying sums: their ratio is r */
  uint64_t steps;                       /* speculative steps since (re)enabled */
  uint64_t since_plain;                 /* steps since the last plain one */
  bool disabled;                        /* auto: does not pay */
} Policy;

void policy_init(Policy *p, const pycass_speculation *options);
/* Whether this step drafts at all. */
bool policy_drafts(Policy *p);
/* Whether to draft token number n + 1, after n tokens whose probabilities multiply to reach. */
bool policy_continues(const Policy *p, uint32_t n, double reach);
void policy_saw_draft(Policy *p, double ms);
/* A target pass over n tokens, the n - 1 drafted of which accepted were accepted; ms includes the drafting. */
void policy_saw_step(Policy *p, uint32_t n, uint32_t accepted, double verify_ms, double ms);
double policy_spec_ms_per_token(const Policy *p);

#endif
