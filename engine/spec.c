#include "spec.h"

enum { WARM_UP = 16, PLAIN_EVERY = 128, RETRY_AFTER = 256 };

pycass_speculation pycass_speculation_default(void) { return (pycass_speculation){PYCASS_SPEC_AUTO, 8, 0, 1}; }

void policy_init(Policy *p, const pycass_speculation *options, bool has_draft) {
  *p = (Policy){.options = *options, .has_draft = has_draft, .acceptance = 0.8};
  for (int i = 0; i < SPEC_BINS; i++)
    p->accepted_at[i] = 0.5 + 0.5 * i / SPEC_BINS;
  for (int i = 1; i <= LOOKUP_LONGEST; i++)
    p->match_right[i] = i / (i + 3.0);
}

static void mean_in(double *mean, double v, double weight) { *mean = *mean > 0 ? *mean + weight * (v - *mean) : v; }

static double drafting_ms_per_token(const Policy *p) { return p->spec_tokens > 0 ? p->spec_ms / p->spec_tokens : 0; }

double policy_spec_ms_per_token(const Policy *p) {
  if (p->options.mode == PYCASS_SPEC_OFF || p->disabled || !p->steps)
    return drafting_ms_per_token(p);
  return p->ms / p->tokens;
}

bool policy_guesses(Policy *p) {
  if (p->options.mode == PYCASS_SPEC_OFF)
    return false;
  if (p->options.mode == PYCASS_SPEC_ON)
    return true;
  if (p->disabled && ++p->since_plain > RETRY_AFTER) /* the text may have become easier */
    p->disabled = false, p->spec_steps = 0, p->since_plain = 0, p->spec_tokens = p->spec_ms = 0;
  if (p->disabled)
    return true; /* look-ups; without one it is a plain step */
  /* a plain step after warming up and now and then, to know what speculation has to beat */
  if ((p->verify_ms[1] <= 0 && p->spec_steps >= WARM_UP) || ++p->since_plain > PLAIN_EVERY) {
    p->since_plain = 0;
    return false;
  }
  return true;
}

/* What one more token adds to a verification: the slope of the line through the passes seen, by least squares. */
static double verify_slope(const Policy *p) {
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (int i = 1; i <= SPEC_MAX_GUESS + 1; i++)
    if (p->verify_ms[i] > 0)
      n++, x += i, y += p->verify_ms[i], xx += i * i, xy += i * p->verify_ms[i];
  if (n < 2) /* only one size seen */
    return n > 0 ? 0.1 * y : 0;
  double slope = (n * xy - x * y) / (n * xx - x * x);
  return slope > 0 ? slope : 0;
}

static int bin_of(float confidence) {
  int bin = (int)(confidence * SPEC_BINS);
  return bin < 0 ? 0 : bin >= SPEC_BINS ? SPEC_BINS - 1 : bin;
}

/* Milliseconds, as measured so far. Before that, in units of a plain pass, what is usual. */
typedef struct Prices {
  double token, verify, draft; /* worth of a token; cost of one more to verify, of a draft pass */
} Prices;

static Prices prices(const Policy *p) {
  if (p->steps < 2)
    return (Prices){1, 0.1, 0.25};
  return (Prices){p->ms / p->tokens, verify_slope(p), p->draft_ms};
}

/* The chance that all tokens guessed so far are right. */
static double reach_of(const Policy *p, const Draft *d) {
  double reach = 1;
  for (uint32_t i = 0; i < d->n; i++)
    reach *= d->match[i] ? p->match_right[d->match[i]] : p->accepted_at[bin_of(d->confidence[i])];
  return reach;
}

/* What up to `most` tokens of the draft gain. */
static double draft_gain(const Policy *p, const Prices *price, double reach, uint32_t most) {
  double total = 0;
  while (most--) {
    reach *= p->acceptance;
    double gain = reach * price->token - price->verify - price->draft;
    if (gain <= 0)
      break;
    total += gain;
  }
  return total;
}

Source policy_next(const Policy *p, const Draft *d, uint32_t match) {
  uint32_t n_drafted = d->n - d->n_lookup, max = (uint32_t)p->options.draft_max;
  uint32_t drafts = p->has_draft && !p->disabled && n_drafted < max ? max - n_drafted : 0;
  if (p->options.draft_fixed)
    return match && d->n % 4 < 3 ? FROM_LOOKUP : drafts ? FROM_DRAFT : FROM_NOWHERE;
  Prices price = prices(p);
  double reach = reach_of(p, d), best = draft_gain(p, &price, reach, drafts), looked_up = 0;
  Source next = drafts && (best > 0 || d->n == 0) ? FROM_DRAFT : FROM_NOWHERE;
  for (uint32_t n = d->n; match && n < SPEC_MAX_GUESS; n++) { /* the match grows with every token that is taken */
    reach *= p->match_right[match];
    match += match < LOOKUP_LONGEST;
    looked_up += reach * price.token - price.verify;
    double gain = looked_up + draft_gain(p, &price, reach, drafts);
    if (gain > best)
      best = gain, next = FROM_LOOKUP;
  }
  return next;
}

void policy_saw_draft(Policy *p, double ms) { mean_in(&p->draft_ms, ms, 0.1); }

void policy_saw_match(Policy *p, uint32_t match, bool right) {
  double *at = &p->match_right[match];
  *at += 0.05 * (right - *at);
}

static void judge(Policy *p, float confidence, bool accepted) {
  p->acceptance += 0.02 * (accepted - p->acceptance);
  double *at = &p->accepted_at[bin_of(confidence)];
  *at += 0.05 * (accepted - *at);
}

void policy_saw_step(Policy *p, const Draft *d, uint32_t accepted, double verify_ms, double ms) {
  mean_in(&p->verify_ms[d->n + 1], verify_ms, 0.2);
  p->tokens = 0.95 * p->tokens + accepted + 1;
  p->ms = 0.95 * p->ms + ms;
  p->steps++;
  for (uint32_t i = 0; i <= accepted && i < d->n; i++) /* the first rejected one ends it */
    if (!d->match[i])
      judge(p, d->confidence[i], i < accepted);
  if (d->n == 0 || d->n_lookup > 0)
    return;
  p->spec_tokens = 0.95 * p->spec_tokens + accepted + 1;
  p->spec_ms = 0.95 * p->spec_ms + ms;
  p->spec_steps++;
  if (p->options.mode == PYCASS_SPEC_AUTO && p->spec_steps >= WARM_UP && p->verify_ms[1] > 0 &&
      drafting_ms_per_token(p) > p->verify_ms[1])
    p->disabled = true, p->since_plain = 0;
}
