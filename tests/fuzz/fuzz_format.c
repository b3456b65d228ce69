/* Any bytes as a file: as they are, then with the sizes and checksums made right, which would stop a fuzzer at the
 * door. Whatever opens is walked and decoded. */
#include "fuzz.h"

volatile uint32_t fuzz_sink; /* so that no read is left out */

static uint32_t touch(const void *p, size_t n) { return pycass_crc32c(0, p, n); }

static void walk(const pycass_file *f) {
  size_t len;
  const char *json = pycass_file_json(f, &len);
  uint32_t seen = touch(json, len) + touch(pycass_file_config(f), sizeof(pycass_config)) +
                  touch(pycass_file_rope_inv_freq(f), pycass_file_config(f)->head_dim / 2 * sizeof(float));
  for (size_t i = 0; i < pycass_file_tensor_count(f); i++) {
    pycass_tensor_info t;
    CHECK(pycass_file_tensor(f, i, &t) == PYCASS_OK, "%s", pycass_error_detail());
    seen += touch(t.name, strlen(t.name));
    uint64_t n = t.shape[0] * (t.n_dims == 2 ? t.shape[1] : 1);
    if (n > FUZZ_MAX_VALUES)
      continue;
    uint16_t *out = malloc(2 * n);
    CHECK(out && pycass_file_tensor_bf16(f, i, 0, t.n_dims == 2 ? t.shape[0] : 1, out, n) == PYCASS_OK, "%s", pycass_error_detail());
    seen += touch(out, 2 * n);
    free(out);
  }
  seen += pycass_file_verify(f);
  fuzz_sink = seen;
}

static void open_and_walk(const uint8_t *data, size_t size) {
  pycass_file *f = NULL;
  if (pycass_file_open_buffer(data, size, &f) != PYCASS_OK)
    return;
  walk(f);
  pycass_file_close(f);
}

static void make_right(uint8_t *file, size_t size) {
  static const uint8_t start[12] = {0x89, 'C', 'A', 'S', 'S', '\r', '\n', 0x1a, 2};
  memcpy(file, start, sizeof start);
  put_u64(file + 16, size);
  uint8_t *last = file + 32 + 32 * SECTION_JSON;
  if (load_u64(last + 8) <= size)
    put_u64(last + 16, size - load_u64(last + 8));
  cass_reseal(file, size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  uint8_t *file = exact_copy(data, size);
  open_and_walk(file, size);
  if (size >= 4096) {
    make_right(file, size);
    open_and_walk(file, size);
  }
  free(file);
  return 0;
}
