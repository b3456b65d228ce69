#include "sampler.h"

#include <math.h>
#include <stdlib.h>

/* ---- options ------------------------------------------------------------------------------------ */

pycass_sampling pycass_sampling_default(void) {
  return (pycass_sampling){.top_p = 1, .repeat_penalty = 1, .repeat_last_n = 64};
}

static pycass_status check_options(const pycass_sampling *o, uint32_t n_token) {
  if (!(o->temperature >= 0) || !(o->temperature <= 1e6f))
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "temperature = %g; it must be 0 or more", (double)o->temperature);
  if (o->top_k < 0)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "top_k = %d; it must be 0 (off) or more", o->top_k);
  if (!(o->top_p >= 0) || !(o->top_p <= 1))
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "top_p = %g; it must be in 0..1", (double)o->top_p);
  if (!(o->min_p >= 0) || !(o->min_p <= 1))
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "min_p = %g; it must be in 0..1", (double)o->min_p);
  if (!(o->repeat_penalty > 0) || !(o->repeat_penalty <= 1e6f))
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "repeat_penalty = %g; it must be above 0", (double)o->repeat_penalty);
  if (!isfinite(o->presence_penalty) || !isfinite(o->frequency_penalty))
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "presence_penalty or frequency_penalty is not a finite number");
  if (o->repeat_last_n < -1)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "repeat_last_n = %d; it must be -1 (all) or more", o->repeat_last_n);
  for (size_t i = 0; i < o->n_bias; i++)
    if (o->bias_ids[i] < 0 || (uint32_t)o->bias_ids[i] >= n_token || isnan(o->bias[i]))
      return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "logit bias of token %d: tokens are 0..%u, a bias is a number",
                       o->bias_ids[i], n_token - 1);
  return PYCASS_OK;
}

static void free_bias(Sampler *s) {
  free((void *)(uintptr_t)s->options.bias_ids);
  free((void *)(uintptr_t)s->options.bias);
  s->options.bias_ids = NULL, s->options.bias = NULL, s->options.n_bias = 0;
}

pycass_status sampler_configure(Sampler *s, const pycass_sampling *o) {
  RETURN_IF(check_options(o, s->n_token));
  int32_t *ids = malloc(o->n_bias * sizeof *ids + 1);
  float *bias = malloc(o->n_bias * sizeof *bias + 1);
  if (!ids || !bias) {
    free(ids), free(bias);
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for logit biases");
  }
  if (o->n_bias) {
    memcpy(ids, o->bias_ids, o->n_bias * sizeof *ids);
    memcpy(bias, o->bias, o->n_bias * sizeof *bias);
  }
  free_bias(s);
  s->options = *o;
  s->options.bias_ids = ids, s->options.bias = bias;
  return PYCASS_OK;
}

pycass_status sampler_init(Sampler *s, const Kernels *kernels, uint32_t n_token) {
  *s = (Sampler){.options = pycass_sampling_default(), .kernels = kernels, .n_token = n_token};
  s->logits = cass_alloc(n_token * sizeof *s->logits);
  s->candidates = cass_alloc(n_token * sizeof *s->candidates);
  s->count = cass_alloc(n_token * sizeof *s->count);
  if (s->logits && s->candidates && s->count)
    return PYCASS_OK;
  sampler_free(s);
  return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for a sampler");
}

void sampler_free(Sampler *s) {
  free_bias(s);
  cass_free(s->logits), cass_free(s->candidates), cass_free(s->count);
  *s = (Sampler){0};
}

/* ---- changes to logits -------------------------------------------------------------------------- */

static bool has_penalties(const pycass_sampling *o) {
  return o->repeat_last_n != 0 &&
         (o->repeat_penalty != 1 || o->presence_penalty != 0 || o->frequency_penalty != 0);
}

static void penalize(Sampler *s, const int32_t *history, size_t n) {
  const pycass_sampling *o = &s->options;
  size_t last = o->repeat_last_n < 0 ? n : min_size(n, (size_t)o->repeat_last_n);
  const int32_t *seen = history + n - last;
  for (size_t i = 0; i < last; i++)
    if ((uint32_t)seen[i] < s->n_token && s->count[seen[i]] < UINT16_MAX)
      s->count[seen[i]]++;
  for (size_t i = 0; i < last; i++) {
    if ((uint32_t)seen[i] >= s->n_token || !s->count[seen[i]])
      continue;
    float *l = &s->logits[seen[i]];
    *l = *l > 0 ? *l / o->repeat_penalty : *l * o->repeat_penalty;
    *l -= (float)s->count[seen[i]] * o->frequency_penalty + o->presence_penalty;
    s->count[seen[i]] = 0;
  }
}

/* The logits to choose from: the argument itself, or the changed copy. */
static const float *changed_logits(Sampler *s, const float *logits, const int32_t *history, size_t n) {
  const pycass_sampling *o = &s->options;
  if (!o->n_bias && !has_penalties(o))
    return logits;
  memcpy(s->logits, logits, s->n_token * sizeof *logits);
  for (size_t i = 0; i < o->n_bias; i++)
    s->logits[o->bias_ids[i]] += o->bias[i];
  if (has_penalties(o))
    penalize(s, history, n);
  return s->logits;
}

/* ---- candidates: a max-heap by logit, the smaller id first among equals ------------------------------ */

static inline bool before(Candidate a, Candidate b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

static void sift(Candidate *heap, size_t n, size_t i) {
  Candidate c = heap[i];
  for (size_t child = 2 * i + 1; child < n; i = child, child = 2 * i + 1) {
    child += child + 1 < n && before(heap[child + 1], heap[child]);
    if (!before(heap[child], c))
      break;
    heap[i] = heap[child];
  }
  heap[i] = c;
}

/* Moves the best of the heap to the place behind it. */
static void pop(Candidate *heap, size_t *n) {
  Candidate best = heap[0];
  heap[0] = heap[--*n];
  sift(heap, *n, 0);
  heap[*n] = best;
}

static size_t collect(Sampler *s, const float *logits, float lowest) {
  size_t n = 0;
  for (uint32_t i = 0; i < s->n_token; i++)
    if (logits[i] >= lowest) /* drops NaN too */
      s->candidates[n++] = (Candidate){logits[i], (int32_t)i};
  if (!n)
    s->candidates[n++] = (Candidate){0, 0};
  return n;
}

/* The k-th largest logit: a heap of the k largest so far, negated, so that the least of them is on top. */
static float kth_largest(Sampler *s, const float *logits, size_t k) {
  Candidate *heap = s->candidates;
  for (size_t i = 0; i < k; i++)
    heap[i] = (Candidate){INFINITY, 0};
  for (uint32_t i = 0; i < s->n_token; i++)
    if (logits[i] > -heap[0].logit) {
      heap[0].logit = -logits[i];
      sift(heap, k, 0);
    }
  return -heap[0].logit;
}

/* The survivors of top-k, top-p and min-p: each looks at the probabilities at temperature 1 of what the one before
 * it left, as in llama.cpp. They lie at the end of s->candidates. Only those that can survive are sorted at all. */
static const Candidate *survivors(Sampler *s, const float *logits, size_t *n_out) {
  const pycass_sampling *o = &s->options;
  float top = s->kernels->max(logits, s->n_token), lowest = -INFINITY;
  double total = 0, mass = 0;
  bool only_min_p = !o->top_k && o->top_p >= 1; /* then no sorting is needed */
  if (o->top_k) {
    lowest = kth_largest(s, logits, min_size((size_t)o->top_k, s->n_token));
  } else if (only_min_p) {
    lowest = top + logf(o->min_p);
  } else if (top == INFINITY) { /* by a bias: only these have any mass, and differences are no numbers */
    lowest = top;
  } else {
    /* all that are further below the best have less than 1 - top_p of the mass together */
    total = (double)s->kernels->sum_exp(logits, s->n_token, top);
    lowest = top - logf((float)s->n_token / ((1 - o->top_p) * (float)total)) - 0.01f;
  }
  size_t all = collect(s, logits, lowest), n = all;
  *n_out = all;
  if (only_min_p)
    return s->candidates;
  Candidate *heap = s->candidates;
  for (size_t i = n / 2; i-- > 0;)
    sift(heap, n, i);
  size_t k = o->top_k ? min_size((size_t)o->top_k, all) : all, kept = 0;
  while (o->top_k && all - n < k) {
    pop(heap, &n);
    total += exp((double)(heap[n].logit - top));
  }
  for (; kept < k; kept++) {
    if (all - n == kept)
      pop(heap, &n);
    double p = exp((double)(heap[all - 1 - kept].logit - top));
    if (kept && (p < (double)o->min_p || (o->top_p < 1 && mass >= (double)o->top_p * total)))
      break;
    mass += p;
  }
  *n_out = kept;
  return heap + all - kept;
}

/* ---- the choice --------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t z) { /* the finalizer of splitmix64 */
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/* The choice so far: the token of largest logit / T + standard Gumbel noise of (seed, position, token) is a sample of
 * softmax(logits / T). */
typedef struct Choice {
  uint64_t key; /* of seed and position */
  double temperature, score;
  int32_t id;
} Choice;

/* Noise is -ln(-ln u), u from 53 bits. It is below (n + 1) ln 2 if n bits of u lead with ones, and below 38 always; so
 * hardly any token needs a logarithm. */
static inline void consider(Choice *best, float logit, int32_t id) {
  double base = (double)logit / best->temperature;
  if (!(base + 38 >= best->score))
    return;
  uint64_t bits = mix(best->key + (uint64_t)(uint32_t)id * 0x9e3779b97f4a7c15u) >> 11;
  int ones = __builtin_clzll(~(bits << 11));
  if (base + (ones + 1) * 0.6931471805599454 < best->score)
    return;
  double score = base - log(-log(((double)bits + 0.5) * 0x1p-53));
  if (score > best->score || (score == best->score && id < best->id))
    best->score = score, best->id = id;
}

static int32_t argmax(const Sampler *s, const float *logits) {
  float top = s->kernels->max(logits, s->n_token);
  for (uint32_t i = 0; i < s->n_token; i++)
    if (logits[i] == top)
      return (int32_t)i;
  return 0; /* all NaN */
}

int32_t sampler_pick(Sampler *s, const float *bare, const int32_t *history, size_t n) {
  const pycass_sampling *o = &s->options;
  const float *logits = changed_logits(s, bare, history, n);
  if (o->temperature == 0 || o->top_k == 1)
    return argmax(s, logits);
  uint64_t key = mix(mix(o->seed + 0x9e3779b97f4a7c15u) ^ (n * 0xd1342543de82ef95u));
  Choice best = {key, (double)o->temperature, -INFINITY, argmax(s, logits)};
  if (!o->top_k && o->top_p >= 1 && o->min_p <= 0) {
    consider(&best, logits[best.id], best.id); /* first: most others are then too far below to be considered */
    float far = (float)((best.score - 39) * best.temperature);
    for (uint32_t i = 0; i < s->n_token; i++)
      if (logits[i] > far)
        consider(&best, logits[i], (int32_t)i);
    return best.id;
  }
  size_t count;
  const Candidate *c = survivors(s, logits, &count);
  for (size_t i = count; i-- > 0;)
    consider(&best, c[i].logit, c[i].id);
  return best.id;
}

float sampler_logprob(const Sampler *s, const float *logits, int32_t id) {
  float top = s->kernels->max(logits, s->n_token);
  return logits[id] - top - logf(s->kernels->sum_exp(logits, s->n_token, top));
}
