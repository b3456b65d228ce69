/* How many tokens to draft. Every choice here is about speed only: the output does not depend on it.
 *
 * With r = tokens per millisecond of late, one more draft token pays while
 *   P(it will be accepted) / (its draft time + what it adds to verification) > r,
 * P being the chance that all tokens before it are accepted, judged by the draft's confidence in each, times the
 * running acceptance. */
#ifndef CASS_SPEC_H
#define CASS_SPEC_H

#include "base.h"

enum { SPEC_MAX_DRAFT = 16, SPEC_BINS = 8 };

typedef struct Policy {
  pycass_speculation options;
  double draft_ms;                      /* running mean of a draft step */
  double verify_ms[SPEC_MAX_DRAFT + 2]; /* of a target pass over n tokens; 0: not seen yet */
  double acceptance;                    /* running share of accepted among judged draft tokens */
  double accepted_at[SPEC_BINS];        /* the same, by the draft's probability of the token */
  double spec_tokens, spec_ms;          /* decaying sums: their ratio is r */
  uint64_t steps;                       /* speculative steps since (re)enabled */
  uint64_t since_plain;                 /* steps since the last plain one */
  bool disabled;                        /* auto: does not pay */
} Policy;

/* What a step drafted: n tokens and the draft's probability of each. */
typedef struct Draft {
  uint32_t n;
  float confidence[SPEC_MAX_DRAFT];
} Draft;

void policy_init(Policy *p, const pycass_speculation *options);
/* Whether this step drafts at all. */
bool policy_drafts(Policy *p);
/* Whether to draft one more token. */
bool policy_continues(const Policy *p, const Draft *d);
void policy_saw_draft(Policy *p, double ms);
/* A step: the target pass took verify_ms, with the drafting it was ms; the first accepted of d's tokens were right. */
void policy_saw_step(Policy *p, const Draft *d, uint32_t accepted, double verify_ms, double ms);
double policy_spec_ms_per_token(const Policy *p);

#endif
