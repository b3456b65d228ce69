/* Any bytes as a saved state: as they are, then with magic, model and checksum made right. Whatever loads is used. */
#include <unistd.h>

#include "fuzz.h"

enum { AT_CRC = 20, HEAD = 32 };

static pycass_session *session;
static uint8_t right_head[HEAD]; /* of a state that belongs to the session */

static void start(void) {
  char path[256];
  TinyModel tiny = tiny_model(TINY_QWEN3);
  pycass_model *m = NULL;
  tiny_write(&tiny, path);
  CHECK(pycass_model_load(path, NULL, &m) == PYCASS_OK, "%s", pycass_error_detail());
  unlink(path);
  CHECK(pycass_session_new(m, &(pycass_session_options){.n_ctx = 24, .n_threads = 1}, &session) == PYCASS_OK, "%s",
        pycass_error_detail());
  CHECK(pycass_session_save_state(session, right_head, HEAD) == PYCASS_OK, "%s", pycass_error_detail());
}

static void load_and_use(const uint8_t *data, size_t size) {
  if (pycass_session_load_state(session, data, size) != PYCASS_OK)
    return;
  pycass_token t[4];
  size_t n, n_tokens = pycass_session_tokens(session, NULL, 0);
  CHECK(pycass_session_state_size(session) == size, "another size");
  pycass_status status = pycass_session_eval(session, (int32_t[]){1}, 1, NULL);
  CHECK(status == (n_tokens < 24 ? PYCASS_OK : PYCASS_ERR_CONTEXT_FULL), "%s", pycass_error_detail());
  if (status == PYCASS_OK)
    CHECK(pycass_session_next(session, t, 4, &n) == PYCASS_OK, "%s", pycass_error_detail());
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (!session)
    start();
  uint8_t *state = malloc(size + 1); /* at an odd address: callers may have any */
  CHECK(state, "no memory");
  if (size)
    memcpy(state + 1, data, size);
  load_and_use(state + 1, size);
  if (size >= HEAD) {
    memcpy(state + 1, right_head, 16);
    put_u32(state + 1 + AT_CRC, pycass_crc32c(0, state + 1 + HEAD, size - HEAD));
    load_and_use(state + 1, size);
  }
  free(state);
  return 0;
}
