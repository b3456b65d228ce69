/* Look-ups against a plain definition, and what the policy chooses where the answer can be worked out by hand. */
#include "check.h"
#include "spec.h"

/* ---- look-ups --------------------------------------------------------------------------------------- */

static bool ends_alike(const int32_t *t, size_t n, size_t at, uint32_t length) {
  return length <= at && memcmp(t + at - length, t + n - length, length * sizeof *t) == 0;
}

static Match defined(const int32_t *t, size_t n) {
  for (uint32_t length = LOOKUP_LONGEST; length > 0; length--)
    for (size_t at = n ? n - 1 : 0; at > 0; at--)
      if (ends_alike(t, n, at, length))
        return (Match){length, at};
  return (Match){0};
}

static void test_look_up(void) {
  for (int i = 0; i < 4000; i++) {
    size_t n = i < 50 ? (size_t)i % 5 : random_below(120);
    uint32_t alphabet = 1 + random_below(i % 2 ? 4 : 60);
    int32_t t[120];
    for (size_t k = 0; k < n; k++) /* some of it copied from before */
      t[k] = k > 20 && k % 40 > 10 ? t[k - 20] : (int32_t)random_below(alphabet);
    int32_t *exact = (int32_t *)exact_copy(t, n * sizeof *t);
    Match want = defined(t, n), got = look_up(exact, n);
    free(exact);
    CHECK(want.length == got.length && (!want.length || want.at == got.at), "%zu tokens: %u at %zu, not %u at %zu", n,
          got.length, got.at, want.length, want.at);
  }
  static const int32_t text[] = {7, 1, 2, 3, 8, 4, 2, 3, 9, 2, 3};
  Match m = look_up(text, 11);
  CHECK(m.length == 2 && text[m.at] == 9, "the latest of equally long ones");
  static const int32_t longer[] = {1, 2, 3, 8, 4, 2, 3, 9, 1, 2, 3};
  m = look_up(longer, 11);
  CHECK(m.length == 3 && longer[m.at] == 8, "the longest");
}

/* ---- the policy -------------------------------------------------------------------------------------- */

/* 40 ms a token of late; 60 ms a pass, 5 for every further token, 19 a draft pass; the draft is right at .93, a match of
 * any length at `right`. */
static Policy measured(bool has_draft, double right) {
  Policy p;
  policy_init(&p, &(pycass_speculation){PYCASS_SPEC_ON, 8, 0, 1}, has_draft);
  p.steps = 100, p.tokens = 20, p.ms = 800, p.draft_ms = 19, p.acceptance = 0.93;
  for (int i = 1; i <= 6; i++)
    p.verify_ms[i] = 55 + 5 * i;
  for (int i = 0; i < SPEC_BINS; i++)
    p.accepted_at[i] = 0.93;
  for (int i = 1; i <= LOOKUP_LONGEST; i++)
    p.match_right[i] = right;
  return p;
}

/* A step in which every token has a match of this length. */
static Draft guesses(const Policy *p, uint32_t match) {
  Draft d = {0};
  for (Source from; d.n < SPEC_MAX_GUESS && (from = policy_next(p, &d, match)) != FROM_NOWHERE; d.n++)
    if (from == FROM_LOOKUP)
      d.match[d.n] = match, d.n_lookup++;
    else
      d.confidence[d.n] = 0.9f;
  return d;
}

static void check_guesses(const Policy *p, uint32_t match, uint32_t n, uint32_t n_lookup, const char *what) {
  Draft d = guesses(p, match);
  CHECK(d.n == n && d.n_lookup == n_lookup, "%s: %u guesses, %u looked up; not %u and %u", what, d.n, d.n_lookup, n,
        n_lookup);
}

static void test_choice(void) {
  Policy p = measured(true, 0.99);
  check_guesses(&p, 9, 31, 31, "a long copy"); /* .99^31 * 40 > 5 */
  p = measured(false, 0.8);
  check_guesses(&p, 2, 9, 9, "where it stops to pay"); /* .8^9 * 40 > 5 > .8^10 * 40 */
  p = measured(false, 0.1);
  check_guesses(&p, 1, 0, 0, "not worth its verification");
  check_guesses(&p, 0, 0, 0, "neither match nor draft");
  p = measured(true, 0.3);
  check_guesses(&p, 0, 7, 0, "the draft alone"); /* .93^7 * 40 > 24 > .93^8 * 40 */
  Draft none = {0};
  CHECK(policy_next(&p, &none, 1) == FROM_DRAFT, "a poor match instead of a good draft");
  p = measured(true, 0.9); /* a little less likely, and 19 ms cheaper */
  CHECK(policy_next(&p, &none, 1) == FROM_LOOKUP, "a good match is cheaper than the draft");
  /* .6 gains 19 ms at once, more than the draft's 13, but ends it all: the draft's tokens gain more together */
  p = measured(true, 0.6);
  CHECK(policy_next(&p, &none, 1) == FROM_DRAFT, "the best single token instead of the best way to go on");
  p.draft_ms = 200;
  check_guesses(&p, 0, 1, 0, "a draft that does not pay is tried once a step");
  p.disabled = true;
  check_guesses(&p, 0, 0, 0, "turned off");
  CHECK(policy_next(&p, &none, 1) == FROM_LOOKUP, "look-ups go on");
}

static void test_fixed(void) {
  for (int32_t max = 1; max <= SPEC_MAX_DRAFT; max++) {
    Policy p;
    policy_init(&p, &(pycass_speculation){PYCASS_SPEC_ON, max, 1, 1}, true);
    check_guesses(&p, 0, (uint32_t)max, 0, "drafts of a fixed length");
    uint32_t n = max < 7 ? 4 * (uint32_t)max + 3 : SPEC_MAX_GUESS; /* three and one in turns */
    check_guesses(&p, 1, n, n - n / 4, "with look-ups");
  }
}

static void test_learning(void) {
  Policy p = measured(true, 0.5);
  for (int i = 0; i < 100; i++)
    policy_saw_match(&p, 3, true), policy_saw_match(&p, 2, false);
  CHECK(p.match_right[3] > 0.95 && p.match_right[2] < 0.05 && p.match_right[4] == 0.5, "%g, %g, %g", p.match_right[3],
        p.match_right[2], p.match_right[4]);
  policy_init(&p, &(pycass_speculation){PYCASS_SPEC_ON, 8, 0, 1}, true);
  check_guesses(&p, 0, 8, 0, "before anything is measured");
  CHECK(guesses(&p, LOOKUP_LONGEST).n_lookup > 4, "a long match before anything is measured");
}

/* Steps of a machine where drafting doubles the time: auto turns it off, keeps look-ups, and tries again later. */
static void test_auto(void) {
  Policy p;
  int n_steps = 0, off_at = 0, plain = 0;
  policy_init(&p, &(pycass_speculation){PYCASS_SPEC_AUTO, 4, 0, 1}, true);
  for (; n_steps < 1000 && !(off_at && !p.disabled); n_steps++) {
    Draft d = policy_guesses(&p) ? guesses(&p, 0) : (Draft){0};
    CHECK(!p.disabled || d.n == 0, "drafted while turned off");
    plain += d.n == 0;
    for (uint32_t i = 0; i < d.n; i++)
      policy_saw_draft(&p, 60);
    policy_saw_step(&p, &d, 0, 60 + 5.0 * d.n, 60 + 65.0 * d.n);
    if (p.disabled && !off_at)
      off_at = n_steps;
  }
  CHECK(off_at > 8 && off_at < 40, "turned off at step %d", off_at);
  CHECK(n_steps - off_at > 200 && n_steps < 400, "tried again at step %d", n_steps);
  CHECK(policy_spec_ms_per_token(&p) > 0, "nothing measured");
  /* steps of look-ups alone do not judge the draft */
  policy_init(&p, &(pycass_speculation){PYCASS_SPEC_AUTO, 4, 0, 1}, true);
  for (int i = 0; i < 300; i++) {
    Draft d = {.n = 1, .n_lookup = 1, .match = {1}};
    if (!policy_guesses(&p))
      d = (Draft){0};
    policy_saw_step(&p, &d, 0, 60 + 5.0 * d.n, 1000);
  }
  CHECK(!p.disabled, "look-ups turned the draft off");
}

int main(void) {
  test_look_up();
  test_choice();
  test_fixed();
  test_learning();
  test_auto();
  printf("ok\n");
  return 0;
}
