/* Runs examples/generate on a tiny model, and compares what it prints with the session's own tokens:
 * test_example COMMAND..., the command being generate or an emulator and generate. */
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "tiny_cass.h"

enum { N_NEW = 30 };

static int run(const char *command, char *out, size_t capacity) {
  FILE *f = popen(command, "r");
  CHECK(f, "cannot run %s", command);
  size_t n = fread(out, 1, capacity - 1, f);
  out[n] = 0;
  int status = pclose(f);
  CHECK(WIFEXITED(status), "%s was killed", command);
  return WEXITSTATUS(status);
}

static void check_ids(const char *path, const char *printed) {
  pycass_model *m = NULL;
  pycass_session *s = NULL;
  CHECK(pycass_model_load(path, NULL, &m) == PYCASS_OK, "%s", pycass_error_detail());
  CHECK(pycass_session_new(m, NULL, &s) == PYCASS_OK, "%s", pycass_error_detail());
  pycass_sampling o = pycass_sampling_default();
  pycass_speculation off = {PYCASS_SPEC_OFF, 1, 0, 0};
  CHECK(pycass_session_configure(s, &o, &off) == PYCASS_OK, "%s", pycass_error_detail());
  CHECK(pycass_session_prompt(s, (int32_t[]){3, 1, 4}, 3, 0, NULL, NULL) == PYCASS_OK, "%s", pycass_error_detail());
  char *at = (char *)(uintptr_t)printed;
  for (int i = 0; i < N_NEW; i++) {
    pycass_token t;
    size_t n;
    CHECK(pycass_session_next(s, &t, 1, &n) == PYCASS_OK, "%s", pycass_error_detail());
    CHECK(strtol(at, &at, 10) == t.id, "token %d is not %d in: %s", i, t.id, printed);
  }
  CHECK(strcmp(at, "\n") == 0, "more was printed: %s", printed);
  pycass_session_free(s);
  pycass_model_free(m);
}

int main(int argc, char **argv) {
  CHECK(argc >= 2, "usage: test_example COMMAND...");
  char path[256], program[1024] = "", command[2048], out[4096];
  for (int i = 1; i < argc; i++) {
    size_t n = strlen(program);
    snprintf(program + n, sizeof program - n, "'%s' ", argv[i]);
  }
  for (int kind = 0; kind < N_TINY; kind++) {
    TinyModel tiny = tiny_model(kind);
    tiny_write(&tiny, path);
    snprintf(command, sizeof command, "%s'%s' %d 3 1 4", program, path, N_NEW);
    CHECK(run(command, out, sizeof out) == 0, "it failed: %s", out);
    check_ids(path, out);
    unlink(path);
  }
  snprintf(command, sizeof command, "%s'%s' %d 3 1 4 2>&1", program, path, N_NEW);
  CHECK(run(command, out, sizeof out) == 1 && strstr(out, path), "a missing model: %s", out);
  printf("ok\n");
  return 0;
}
