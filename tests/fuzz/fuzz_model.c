/* Any bytes as a model: with sizes and checksums made right, loaded and run for a few tokens, drafting too. */
#include <sys/mman.h>
#include <unistd.h>

#include "fuzz.h"

static bool small(const pycass_file *f) {
  const pycass_config *c = pycass_file_config(f);
  return (uint64_t)c->n_layer * c->n_head * c->head_dim < FUZZ_MAX_VALUES && c->n_vocab < FUZZ_MAX_VALUES &&
         c->n_ff < FUZZ_MAX_VALUES;
}

static void run(pycass_model *m) {
  pycass_session *s = NULL;
  pycass_session_options o = {.n_ctx = 12, .n_threads = 1};
  if (pycass_session_new(m, &o, &s) != PYCASS_OK)
    return;
  pycass_sampling sampling = pycass_sampling_default();
  pycass_speculation speculation = {PYCASS_SPEC_ON, 3, 1, 0};
  pycass_token t[4];
  size_t n;
  sampling.temperature = 1;
  CHECK(pycass_session_configure(s, &sampling, &speculation) == PYCASS_OK, "%s", pycass_error_detail());
  CHECK(pycass_session_prompt(s, (int32_t[]){0, 0, 0}, 3, 0, NULL, NULL) == PYCASS_OK, "%s", pycass_error_detail());
  for (int i = 0; i < 3; i++)
    CHECK(pycass_session_next(s, t, 4, &n) == PYCASS_OK, "%s", pycass_error_detail());
  pycass_session_free(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static int fd = -1;
  char path[64];
  if (size < 4096)
    return 0;
  if (fd < 0)
    fd = memfd_create("fuzz_model", 0);
  uint8_t *file = exact_copy(data, size);
  cass_reseal(file, size);
  CHECK(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, file, size, 0) == (ssize_t)size, "memfd");
  free(file);
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  pycass_model *m = NULL;
  if (pycass_model_load(path, NULL, &m) != PYCASS_OK)
    return 0;
  if (small(pycass_model_file(m)))
    run(m);
  pycass_model_free(m);
  return 0;
}
