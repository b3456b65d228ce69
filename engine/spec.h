/* How many tokens to guess, and where from. Every choice here is about speed only: the output does not depend on it.
 *
 * A guess costs its share of verification and, if the draft makes it, a draft pass; a look-up (lookup.h) is free
 * otherwise. With r = milliseconds per token of late, one more guess gains
 *   P(it will be accepted) * r - its cost,
 * P being the chance that it and all tokens before it are right: judged by the draft's confidence in each or by the
 * length of its match, both calibrated by what turned out. The next guess is the one that the best way to go on begins
 * with: some looked up tokens and then some of the draft's. */
#ifndef CASS_SPEC_H
#define CASS_SPEC_H

#include "lookup.h"

enum { SPEC_MAX_DRAFT = 16, SPEC_MAX_GUESS = 31, SPEC_BINS = 8 }; /* of a step: draft passes; tokens guessed */

typedef struct Policy {
  pycass_speculation options;
  bool has_draft;
  double draft_ms;                      /* running mean of a draft step */
  double verify_ms[SPEC_MAX_GUESS + 2]; /* of a target pass over n tokens; 0: not seen yet */
  double acceptance;                    /* running share of accepted among judged draft tokens */
  double accepted_at[SPEC_BINS];        /* the same, by the draft's probability of the token */
  double match_right[LOOKUP_LONGEST + 1]; /* running share of right look-ups, by the length of the match */
  double tokens, ms;                    /* decaying sums over all steps: their ratio is r */
  double spec_tokens, spec_ms;          /* the same of steps that only the draft made guesses for: auto compares it with
                                           plain steps */
  uint64_t steps;                       /* all */
  uint64_t spec_steps;                  /* that only the draft made guesses for, since (re)enabled */
  uint64_t since_plain;                 /* steps since the last plain one */
  bool disabled;                        /* auto: the draft does not pay; look-ups go on, each must pay by itself */
} Policy;

/* What a step guessed: n tokens, for each the length of its match or, where that is 0, the draft's probability. */
typedef struct Draft {
  uint32_t n, n_lookup;
  uint32_t match[SPEC_MAX_GUESS];
  float confidence[SPEC_MAX_GUESS];
} Draft;

typedef enum Source { FROM_NOWHERE, FROM_LOOKUP, FROM_DRAFT } Source;

void policy_init(Policy *p, const pycass_speculation *options, bool has_draft);
/* Whether this step guesses at all. */
bool policy_guesses(Policy *p);
/* Where the next guess comes from, if there is to be one; match: the length of the match for it. */
Source policy_next(const Policy *p, const Draft *d, uint32_t match);
void policy_saw_draft(Policy *p, double ms);
/* What a match foretold at a token that is known now, guessed or not. */
void policy_saw_match(Policy *p, uint32_t match, bool right);
/* A step: the target pass took verify_ms, with the guessing it was ms; the first accepted of d's tokens were right. */
void policy_saw_step(Policy *p, const Draft *d, uint32_t accepted, double verify_ms, double ms);
/* r; with drafting turned off, what it was while it lasted. 0: not measured. */
double policy_spec_ms_per_token(const Policy *p);

#endif
