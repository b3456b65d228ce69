#include "spec.h"

enum { WARM_UP = 16, PLAIN_EVERY = 128, RETRY_AFTER = 256 };

pycass_speculation pycass_speculation_default(void) { return (pycass_speculation){PYCASS_SPEC_AUTO, 8, 0}; }

void policy_init(Policy *p, const pycass_speculation *options) {
  *p = (Policy){.options = *options, .acceptance = 0.8};
  for (int i = 0; i < SPEC_BINS; i++)
    p->accepted_at[i] = 0.5 + 0.5 * i / SPEC_BINS;
}

static void mean_in(double *mean, double v, double weight) { *mean = *mean > 0 ? *mean + weight * (v - *mean) : v; }

double policy_spec_ms_per_token(const Policy *p) { return p->spec_tokens > 0 ? p->spec_ms / p->spec_tokens : 0; }

bool policy_drafts(Policy *p) {
  if (p->options.mode == PYCASS_SPEC_OFF)
    return false;
  if (p->options.mode == PYCASS_SPEC_ON)
    return true;
  if (p->disabled && ++p->since_plain > RETRY_AFTER) /* the text may have become easier */
    p->disabled = false, p->steps = 0, p->since_plain = 0, p->spec_tokens = p->spec_ms = 0;
  if (p->disabled)
    return false;
  /* a plain step after warming up and now and then, to know what speculation has to beat */
  if ((p->verify_ms[1] <= 0 && p->steps >= WARM_UP) || ++p->since_plain > PLAIN_EVERY) {
    p->since_plain = 0;
    return false;
  }
  return true;
}

/* What one more token adds to a verification: the slope of the line through the passes seen, by least squares. */
static double verify_slope(const Policy *p) {
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (int i = 1; i <= SPEC_MAX_DRAFT + 1; i++)
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

bool policy_continues(const Policy *p, const Draft *d) {
  if (d->n >= (uint32_t)p->options.draft_max)
    return false;
  if (d->n == 0 || p->options.draft_fixed)
    return true;
  double cost = p->draft_ms + verify_slope(p), ms_per_token = policy_spec_ms_per_token(p);
  if (p->steps < 2 || ms_per_token <= 0)
    return d->n < 4; /* nothing measured yet */
  double reach = p->acceptance;
  for (uint32_t i = 0; i < d->n; i++)
    reach *= p->accepted_at[bin_of(d->confidence[i])];
  return reach * ms_per_token > cost;
}

void policy_saw_draft(Policy *p, double ms) { mean_in(&p->draft_ms, ms, 0.1); }

static void judge(Policy *p, float confidence, bool accepted) {
  p->acceptance += 0.02 * (accepted - p->acceptance);
  double *at = &p->accepted_at[bin_of(confidence)];
  *at += 0.05 * (accepted - *at);
}

void policy_saw_step(Policy *p, const Draft *d, uint32_t accepted, double verify_ms, double ms) {
  mean_in(&p->verify_ms[d->n + 1], verify_ms, 0.2);
  if (d->n == 0)
    return;
  for (uint32_t i = 0; i <= accepted && i < d->n; i++) /* the first rejected one ends it */
    judge(p, d->confidence[i], i < accepted);
  p->spec_tokens = 0.95 * p->spec_tokens + accepted + 1;
  p->spec_ms = 0.95 * p->spec_ms + ms;
  p->steps++;
  if (p->options.mode == PYCASS_SPEC_AUTO && p->steps >= WARM_UP && p->verify_ms[1] > 0 &&
      policy_spec_ms_per_token(p) > p->verify_ms[1])
    p->disabled = true, p->since_plain = 0;
}
