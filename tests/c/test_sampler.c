/* Sampling against brute force: which tokens can come, how often, and that odd logits and options do no harm. */
#include "check.h"
#include "sampler.h"

enum { MOST = 40 };

static Sampler make(const Kernels *k, uint32_t n_token, const pycass_sampling *o) {
  Sampler s;
  CHECK(sampler_init(&s, k, n_token) == PYCASS_OK, "%s", pycass_error_detail());
  CHECK(sampler_configure(&s, o) == PYCASS_OK, "%s", pycass_error_detail());
  return s;
}

static int32_t pick_at(Sampler *s, const float *logits, size_t position) {
  static int32_t zeros[100000];
  return sampler_pick(s, logits, zeros, position);
}

/* ---- options ---------------------------------------------------------------------------------------- */

static void test_options(const Kernels *k) {
  pycass_sampling good = pycass_sampling_default();
  Sampler s = make(k, 10, &good);
#define REFUSED(field, value)                                                                                          \
  do {                                                                                                                 \
    pycass_sampling o = good;                                                                                          \
    o.field = value;                                                                                                   \
    CHECK(sampler_configure(&s, &o) == PYCASS_ERR_INVALID_ARGUMENT, #field " = " #value " was taken");                 \
    CHECK(strstr(pycass_error_detail(), #field), "the detail does not name " #field ": %s", pycass_error_detail());    \
  } while (0)
  REFUSED(temperature, -1); REFUSED(temperature, NAN); REFUSED(temperature, INFINITY);
  REFUSED(top_k, -1); REFUSED(top_k, INT32_MIN);
  REFUSED(top_p, -0.1f); REFUSED(top_p, 1.1f); REFUSED(top_p, NAN);
  REFUSED(min_p, -0.1f); REFUSED(min_p, 1.1f); REFUSED(min_p, NAN);
  REFUSED(repeat_penalty, 0); REFUSED(repeat_penalty, -1); REFUSED(repeat_penalty, NAN); REFUSED(repeat_penalty, INFINITY);
  REFUSED(presence_penalty, NAN); REFUSED(presence_penalty, INFINITY);
  REFUSED(frequency_penalty, NAN); REFUSED(frequency_penalty, -INFINITY);
  REFUSED(repeat_last_n, -2); REFUSED(repeat_last_n, INT32_MIN);
#undef REFUSED
  int32_t ids[] = {-1, 10, INT32_MAX, 3};
  float bias[] = {1, 1, 1, NAN};
  for (int i = 0; i < 4; i++) {
    pycass_sampling o = good;
    o.bias_ids = ids + i, o.bias = bias + i, o.n_bias = 1;
    CHECK(sampler_configure(&s, &o) == PYCASS_ERR_INVALID_ARGUMENT, "bias %d was taken", i);
  }
  float logits[10] = {0, 1};
  CHECK(pick_at(&s, logits, 0) == 1, "a refused option changed the sampler");
  sampler_free(&s);
}

/* ---- survivors -------------------------------------------------------------------------------------- */

typedef struct Ranked {
  double logit;
  int id;
} Ranked;

static int by_rank(const void *a, const void *b) {
  const Ranked *p = a, *q = b;
  return p->logit != q->logit ? (p->logit < q->logit) - (p->logit > q->logit) : p->id - q->id;
}

/* What top-k, then top-p, then min-p leave; NaN is never chosen. */
static size_t brute_survivors(const float *logits, uint32_t n_token, const pycass_sampling *o, Ranked *out) {
  size_t n = 0, kept = 0;
  for (uint32_t i = 0; i < n_token; i++)
    if (!isnan(logits[i]))
      out[n++] = (Ranked){logits[i], (int)i};
  qsort(out, n, sizeof *out, by_rank);
  if (o->top_k && (size_t)o->top_k < n)
    n = (size_t)o->top_k;
  double total = 0, mass = 0;
  for (size_t i = 0; i < n; i++)
    total += exp(out[i].logit - out[0].logit);
  for (; kept < n; kept++) {
    double p = exp(out[kept].logit - out[0].logit);
    if (kept && ((o->top_p < 1 && mass / total >= o->top_p) || p < o->min_p))
      break;
    mass += p;
  }
  return kept;
}

/* At an enormous temperature every survivor comes about equally often, and nothing else ever. */
static void check_survivors(const Kernels *k, const float *logits, uint32_t n_token, pycass_sampling o) {
  Ranked want[MOST];
  uint32_t seen[MOST] = {0};
  size_t n = brute_survivors(logits, n_token, &o, want), draws = 30 * n + 30;
  o.temperature = 1e6f, o.seed = random_u32();
  Sampler s = make(k, n_token, &o);
  for (size_t i = 0; i < draws; i++)
    seen[pick_at(&s, logits, i)]++;
  for (size_t i = 0; i < n; i++) {
    CHECK(seen[want[i].id] || o.top_k == 1, "%s: token %d of %zu survivors never came: k %d, p %g, min %g", k->name,
          want[i].id, n, o.top_k, (double)o.top_p, (double)o.min_p);
    seen[want[i].id] = 0;
  }
  for (uint32_t i = 0; i < n_token; i++)
    CHECK(!seen[i], "%s: token %u came but does not survive: k %d, p %g, min %g", k->name, i, o.top_k, (double)o.top_p,
          (double)o.min_p);
  sampler_free(&s);
}

static void test_survivors(const Kernels *k) {
  static const int32_t top_k[] = {0, 1, 2, 7, 39, 1000, INT32_MAX};
  static const float top_p[] = {1, 0, 0.1f, 0.5f, 0.9f, 0.999f}, min_p[] = {0, 1, 0.5f, 0.1f, 0.01f};
  for (int i = 0; i < 300; i++) {
    float logits[MOST];
    uint32_t n = 1 + random_below(MOST);
    for (uint32_t j = 0; j < n; j++)
      logits[j] = i % 5 == 0 ? (float)random_below(3) : 3 * random_gauss(); /* ties, too */
    pycass_sampling o = pycass_sampling_default();
    o.top_k = top_k[random_below(7)];
    o.top_p = i % 5 == 0 ? 1 : top_p[random_below(6)]; /* sums of equal terms would sit on the limit */
    o.min_p = min_p[random_below(5)];
    if (i % 7 == 0 && o.top_p == 1)
      logits[random_below(n)] = n > 1 ? NAN : 0;
    check_survivors(k, logits, n, o);
  }
}

/* ---- the distribution -------------------------------------------------------------------------------- */

static void check_frequencies(const Kernels *k, float temperature, pycass_sampling o) {
  enum { N = 12, DRAWS = 20000 };
  float logits[N];
  Ranked kept[N];
  double want[N] = {0}, total = 0, chi = 0;
  uint32_t seen[N] = {0};
  for (int i = 0; i < N; i++)
    logits[i] = 1.5f * random_gauss();
  size_t n = brute_survivors(logits, N, &o, kept);
  for (size_t i = 0; i < n; i++)
    total += want[kept[i].id] = exp((kept[i].logit - kept[0].logit) / temperature);
  o.temperature = temperature, o.seed = random_u32();
  Sampler s = make(k, N, &o);
  for (size_t i = 0; i < DRAWS; i++)
    seen[pick_at(&s, logits, i)]++;
  for (int i = 0; i < N; i++) {
    double expected = want[i] / total * DRAWS;
    chi += expected > 0 ? (seen[i] - expected) * (seen[i] - expected) / expected : 1e9 * seen[i];
  }
  CHECK(chi < 45, "chi squared of %g for %zu tokens at temperature %g", chi, n, (double)temperature); /* p < 1e-5 */
  sampler_free(&s);
}

static void test_distribution(const Kernels *k) {
  pycass_sampling o = pycass_sampling_default();
  check_frequencies(k, 1, o), check_frequencies(k, 0.7f, o), check_frequencies(k, 2, o);
  o.top_k = 5, check_frequencies(k, 1, o);
  o.top_p = 0.8f, check_frequencies(k, 1.3f, o);
  o.top_k = 0, o.min_p = 0.05f, check_frequencies(k, 1, o);
}

/* The same seed and position give the same token; other ones independent tokens. */
static void test_seed(const Kernels *k) {
  float logits[MOST] = {0};
  uint32_t same_position = 0, same_seed = 0;
  pycass_sampling o = pycass_sampling_default();
  o.temperature = 1;
  for (uint64_t seed = 0; seed < 400; seed++) {
    o.seed = seed;
    Sampler a = make(k, MOST, &o), b = make(k, MOST, &o);
    o.seed = seed + 1;
    Sampler c = make(k, MOST, &o);
    CHECK(pick_at(&a, logits, 7) == pick_at(&b, logits, 7), "seed %llu is not repeatable", (unsigned long long)seed);
    same_position += pick_at(&a, logits, 7) == pick_at(&c, logits, 7);
    same_seed += pick_at(&a, logits, 7) == pick_at(&a, logits, 8);
    sampler_free(&a), sampler_free(&b), sampler_free(&c);
  }
  CHECK(same_position < 40 && same_seed < 40, "%u and %u of 400 equal; 10 are expected", same_position, same_seed);
}

/* ---- greedy, penalties, bias -------------------------------------------------------------------------- */

static int brute_greedy(const float *logits, uint32_t n, const pycass_sampling *o, const int32_t *history, size_t n_past) {
  float l[MOST];
  int best = 0;
  memcpy(l, logits, n * sizeof *l);
  for (size_t i = 0; i < o->n_bias; i++)
    l[o->bias_ids[i]] += o->bias[i];
  size_t last = o->repeat_last_n < 0 || (size_t)o->repeat_last_n > n_past ? n_past : (size_t)o->repeat_last_n;
  for (uint32_t t = 0; t < n; t++) {
    uint32_t count = 0;
    for (size_t i = n_past - last; i < n_past; i++)
      count += history[i] == (int32_t)t;
    if (!count)
      continue;
    l[t] = l[t] > 0 ? l[t] / o->repeat_penalty : l[t] * o->repeat_penalty;
    l[t] -= (float)count * o->frequency_penalty + o->presence_penalty;
  }
  for (uint32_t t = 1; t < n; t++)
    if (l[t] > l[best])
      best = (int)t;
  return best;
}

static void test_penalties(const Kernels *k) {
  for (int i = 0; i < 2000; i++) {
    float logits[MOST], bias[3];
    int32_t history[64], bias_ids[3];
    uint32_t n = 1 + random_below(MOST), n_past = random_below(64);
    for (uint32_t j = 0; j < n; j++)
      logits[j] = random_gauss();
    for (uint32_t j = 0; j < n_past; j++) /* padding rows, too: ids from n_token on */
      history[j] = (int32_t)random_below(n + 3);
    for (int j = 0; j < 3; j++)
      bias_ids[j] = (int32_t)random_below(n), bias[j] = random_gauss();
    pycass_sampling o = pycass_sampling_default();
    o.repeat_penalty = random_below(2) ? 1 : 0.5f + random_unit();
    o.presence_penalty = random_below(2) ? 0 : random_gauss();
    o.frequency_penalty = random_below(2) ? 0 : 0.2f * random_gauss();
    o.repeat_last_n = (int32_t)random_below(80) - 1;
    o.n_bias = random_below(4), o.bias_ids = bias_ids, o.bias = bias;
    Sampler s = make(k, n, &o);
    int want = brute_greedy(logits, n, &o, history, n_past);
    for (int twice = 0; twice < 2; twice++) { /* the scratch counts are zero again */
      int got = sampler_pick(&s, logits, history, n_past);
      CHECK(got == want, "%s: token %d, not %d", k->name, got, want);
    }
    sampler_free(&s);
  }
}

static void test_logprob(const Kernels *k) {
  pycass_sampling o = pycass_sampling_default();
  float logits[MOST];
  double total = 0;
  for (int i = 0; i < MOST; i++)
    logits[i] = 4 * random_gauss(), total += exp(logits[i]);
  Sampler s = make(k, MOST, &o);
  for (int i = 0; i < MOST; i++) {
    double want = logits[i] - log(total), got = sampler_logprob(&s, logits, i);
    CHECK(fabs(want - got) < 1e-5, "log probability %g, not %g", got, want);
  }
  sampler_free(&s);
}

/* ---- odd logits -------------------------------------------------------------------------------------- */

static void check_odd(const Kernels *k, const float *logits, uint32_t n) {
  for (int i = 0; i < 40; i++) {
    pycass_sampling o = pycass_sampling_default();
    o.temperature = i % 4 == 0 ? 0 : i % 4 == 1 ? 1e-45f : i % 4 == 2 ? 1 : 1e6f;
    o.top_k = i % 3 ? 0 : 2, o.top_p = i % 5 ? 1 : 0.5f, o.min_p = i % 7 ? 0 : 0.1f;
    o.repeat_penalty = i % 2 ? 1 : 1.5f;
    Sampler s = make(k, n, &o);
    int32_t id = pick_at(&s, logits, (size_t)i);
    CHECK(id >= 0 && (uint32_t)id < n, "token %d of %u", id, n);
    sampler_logprob(&s, logits, id);
    sampler_free(&s);
  }
}

static void test_odd_logits(const Kernels *k) {
  static const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 0, -0.0f, 1e-45f};
  enum { N_ODD = sizeof odd / sizeof *odd };
  float logits[MOST];
  for (int i = 0; i < N_ODD; i++) {
    for (int j = 0; j < MOST; j++)
      logits[j] = odd[i];
    check_odd(k, logits, 1), check_odd(k, logits, 5), check_odd(k, logits, MOST);
  }
  for (int i = 0; i < 200; i++) {
    for (int j = 0; j < MOST; j++)
      logits[j] = random_below(3) ? random_gauss() : odd[random_below(N_ODD)];
    check_odd(k, logits, 1 + random_below(MOST));
  }
  pycass_sampling greedy = pycass_sampling_default();
  Sampler s = make(k, 5, &greedy);
  CHECK(pick_at(&s, (float[]){NAN, -1, NAN, 2, 1}, 0) == 3, "argmax among NaN");
  CHECK(pick_at(&s, (float[]){NAN, NAN, NAN, NAN, NAN}, 0) == 0, "argmax of NaN only");
  CHECK(pick_at(&s, (float[]){1, 2, 2, 2, 1}, 0) == 1, "the first of equals");
  CHECK(pick_at(&s, (float[]){NAN, -INFINITY, -INFINITY, NAN, NAN}, 0) == 1, "argmax of -inf");
  sampler_free(&s);
  for (int i = 0; i < 32; i++) { /* an infinite logit, a bias makes one, is chosen whatever the filters */
    pycass_sampling o = pycass_sampling_default();
    o.temperature = i & 1 ? 0.8f : 100.0f;
    o.top_p = i & 2 ? 0.95f : 1, o.top_k = i & 4 ? 3 : 0, o.min_p = i & 8 ? 0.05f : 0, o.seed = (uint64_t)i;
    s = make(k, 5, &o);
    int32_t id = pick_at(&s, (float[]){1, 2, -INFINITY, INFINITY, 1}, (size_t)i);
    CHECK(id == 3, "top-p %g, top-k %d, min-p %g chose %d", (double)o.top_p, o.top_k, (double)o.min_p, id);
    sampler_free(&s);
  }
}

int main(void) {
  const char *name;
  int runs;
  for (size_t i = 0; (name = pycass_kernel_name(i, &runs)) != NULL; i++) {
    const Kernels *k;
    if (!runs)
      continue;
    CHECK(kernels_select(name, &k) == PYCASS_OK, "%s", pycass_error_detail());
    random_state = 1;
    test_options(k);
    test_survivors(k);
    test_distribution(k);
    test_seed(k);
    test_penalties(k);
    test_logprob(k);
    test_odd_logits(k);
  }
  printf("ok\n");
  return 0;
}
