/* Writes seeds for the fuzz targets: make_corpus DIR makes DIR/{format,model,state}. */
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

static void write_seed(const char *dir, const char *sub, const char *name, const uint8_t *p, size_t n) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", dir, sub);
  CHECK((mkdir(dir, 0777) == 0 || errno == EEXIST) && (mkdir(path, 0777) == 0 || errno == EEXIST), "%s", path);
  snprintf(path, sizeof path, "%s/%s/%s", dir, sub, name);
  FILE *f = fopen(path, "wb");
  CHECK(f && fwrite(p, 1, n, f) == n && fclose(f) == 0, "cannot write %s", path);
}

/* Models that are as small as they can be, so that a mutation often hits the structure. */
static TinyModel smallest(int kind) {
  TinyModel m = tiny_model(kind);
  pycass_config *c = &m.config;
  c->n_vocab = 5, c->n_token = 4, c->n_embd = 6, c->n_ff = 7, c->n_layer = 1, c->n_head = 2, c->n_head_kv = 1, c->head_dim = 4;
  return m;
}

static void models(const char *dir) {
  static const char *const name[] = {"llama", "qwen2", "qwen3", "hot", "raw", "cass1", "cass2"};
  for (int kind = 0; kind < N_TINY; kind++) {
    size_t size;
    TinyModel m = smallest(kind);
    m.config.n_embd = m.calibrated ? 17 : m.config.n_embd; /* wide enough for hot columns */
    uint8_t *file = tiny_file(&m, &size);
    write_seed(dir, "format", name[kind], file, size), write_seed(dir, "model", name[kind], file, size);
    free(file);
  }
}

static void one_tensor(const char *dir, const char *name, pycass_codec codec, uint32_t rows, uint32_t cols) {
  CassBuilder b = {0};
  TinyModel m = smallest(0);
  size_t size, n = (size_t)rows * (cols ? cols : 1);
  uint16_t *w = malloc(2 * n);
  for (size_t i = 0; i < n; i++)
    w[i] = (uint16_t)random_u32();
  cass_config(&b, &m.config);
  cass_tensor(&b, "w", codec, rows, cols, w);
  bytes_put(&b.section[SECTION_JSON], "{}", 2);
  uint8_t *file = cass_finish(&b, &size);
  write_seed(dir, "format", name, file, size);
  free(file), free(w);
}

static void states(const char *dir) {
  char path[256], name[16];
  TinyModel tiny = tiny_model(TINY_QWEN3);
  pycass_model *m = NULL;
  pycass_session *s = NULL;
  tiny_write(&tiny, path);
  CHECK(pycass_model_load(path, NULL, &m) == PYCASS_OK, "%s", pycass_error_detail());
  CHECK(pycass_session_new(m, &(pycass_session_options){.n_ctx = 24, .n_threads = 1}, &s) == PYCASS_OK, "%s",
        pycass_error_detail());
  for (int n = 0; n <= 24; n = 2 * n + (n != 3) + 1) { /* 0, 2, 6, 14 */
    size_t size;
    for (int i = (int)pycass_session_tokens(s, NULL, 0); i < n; i++)
      CHECK(pycass_session_eval(s, &(int32_t){i}, 1, NULL) == PYCASS_OK, "%s", pycass_error_detail());
    uint8_t *state = malloc(size = pycass_session_state_size(s));
    CHECK(pycass_session_save_state(s, state, size) == PYCASS_OK, "%s", pycass_error_detail());
    snprintf(name, sizeof name, "%d", n);
    write_seed(dir, "state", name, state, size);
    free(state);
  }
  pycass_session_free(s);
  pycass_model_free(m);
  unlink(path);
}

int main(int argc, char **argv) {
  CHECK(argc == 2, "usage: make_corpus DIR");
  models(argv[1]);
  one_tensor(argv[1], "vector", PYCASS_CODEC_RAW, 9, 0);
  one_tensor(argv[1], "matrix", PYCASS_CODEC_RAW, 3, 5);
  one_tensor(argv[1], "nest", PYCASS_CODEC_NEST, 3, 5);
  one_tensor(argv[1], "nest4", PYCASS_CODEC_NEST, 17, 65);
  one_tensor(argv[1], "cass1", PYCASS_CODEC_CASS1, 17, 65);
  one_tensor(argv[1], "cass2", PYCASS_CODEC_CASS2, 17, 65);
  states(argv[1]);
  return 0;
}
