#include "spec.h"

enum { WARM_UP = 16, PLAIN_EVERY = 128, RETRY_AFTER = 256 };

pycass_speculation pycass_speculation_default(void) { return (pycass_speculation){PYCASS_SPEC_AUTO, 8, 0}; }

void policy_init(Policy *p, const pycass_speculation *options) {
  *p = (Policy){.options = *options, .acceptance = 0.8};
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
  /* plain steps at the start and now and then, to know what speculation has to beat */
  if (p->verify_ms[1] <= 0 || ++p->since_plain > PLAIN_EVERY) {
    p->since_plain = 0;
    return false;
  }
  return true;
}

/* What one more token adds to a verification of n tokens: the slope between the passes seen around n. */
static double verify_slope(const Policy *p, uint32_t n) {
  uint32_t low = 0, high = 0;
  for (uint32_t i = 1; i <= SPEC_MAX_DRAFT + 1; i++)
    if (p->verify_ms[i] > 0) {
      if (i <= n || !low)
        low = i;
      high = i;
      if (i > n && high > low)
        break;
    }
  if (high <= low) /* only one size seen */
    return low ? p->verify_ms[low] * 0.1 : 0;
  double slope = (p->verify_ms[high] - p->verify_ms[low]) / (high - low);
  return slope > 0 ? slope : 0;
}

bool policy_continues(const Policy *p, uint32_t n, double reach) {
  if (n >= (uint32_t)p->options.draft_max)
    return false;
  if (n == 0 || p->options.draft_fixed)
    return true;
  double cost = p->draft_ms + verify_slope(p, n + 1), ms_per_token = policy_spec_ms_per_token(p);
  if (p->steps < 2 || ms_per_token <= 0)
    return n < 4; /* nothing measured yet */
  return reach * p->acceptance * ms_per_token > cost;
}

void policy_saw_draft(Policy *p, double ms) { mean_in(&p->draft_ms, ms, 0.1); }

void policy_saw_step(Policy *p, uint32_t n, uint32_t accepted, double verify_ms, double ms) {
  mean_in(&p->verify_ms[n], verify_ms, 0.2);
  if (n == 1)
    return;
  uint32_t judged = accepted + (accepted < n - 1); /* the first rejected one ends it */
  for (uint32_t i = 0; i < judged; i++)
    p->acceptance += 0.02 * ((i < accepted) - p->acceptance);
  p->spec_tokens = 0.95 * p->spec_tokens + accepted + 1;
  p->spec_ms = 0.95 * p->spec_ms + ms;
  p->steps++;
  if (p->options.mode == PYCASS_SPEC_AUTO && p->steps >= WARM_UP && p->verify_ms[1] > 0 &&
      policy_spec_ms_per_token(p) > p->verify_ms[1])
    p->disabled = true, p->since_plain = 0;
}
