/* Embedding pycass in C: greedy continuation of token ids.
 *   cc generate.c -lpycass -o generate
 *   ./generate MODEL.cass N_TOKENS ID ID ...
 * Prints the new ids on stdout and what speculation did on stderr. Texts need a tokenizer; the file's JSON section has
 * it in the Hugging Face format (pycass_file_json). */
#include <stdio.h>
#include <stdlib.h>

#include "pycass.h"

static int failed(const char *what, pycass_status status) {
  if (status != PYCASS_OK)
    fprintf(stderr, "%s: %s: %s\n", what, pycass_status_string(status), pycass_error_detail());
  return status != PYCASS_OK;
}

static pycass_status generate(pycass_session *s, const int32_t *prompt, size_t n_prompt, size_t n_new) {
  pycass_status status = pycass_session_prompt(s, prompt, n_prompt, 0, NULL, NULL);
  for (size_t done = 0, n; status == PYCASS_OK && done < n_new; done += n) {
    pycass_token tokens[32];
    size_t room = n_new - done < 32 ? n_new - done : 32;
    n = 0;
    status = pycass_session_next(s, tokens, room, &n); /* one step: as many tokens as the target accepted, plus one */
    for (size_t i = 0; i < n; i++)
      printf("%s%d", done + i ? " " : "", (int)tokens[i].id);
    fflush(stdout);
  }
  printf("\n");
  return status;
}

static void print_stats(const pycass_session *s) {
  pycass_stats t;
  pycass_session_stats(s, &t);
  fprintf(stderr, "%llu tokens in %llu steps, %.1f ms; %llu of %llu guessed tokens accepted\n",
          (unsigned long long)t.tokens, (unsigned long long)t.steps, t.decode_ms, (unsigned long long)t.accepted,
          (unsigned long long)t.drafted);
}

static int run(pycass_model *model, const int32_t *prompt, size_t n_prompt, size_t n_new) {
  pycass_session *session = NULL;
  pycass_session_options options = {.n_ctx = (uint32_t)(n_prompt + n_new)};
  pycass_sampling greedy = pycass_sampling_default();
  pycass_speculation speculation = pycass_speculation_default();
  int bad = failed("session", pycass_session_new(model, &options, &session)) ||
            failed("options", pycass_session_configure(session, &greedy, &speculation)) ||
            failed("generate", generate(session, prompt, n_prompt, n_new));
  if (!bad)
    print_stats(session);
  pycass_session_free(session);
  return bad;
}

int main(int argc, char **argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: %s MODEL.cass N_TOKENS ID...\n", argv[0]);
    return 2;
  }
  pycass_model *model = NULL;
  if (failed(argv[1], pycass_model_load(argv[1], NULL, &model)))
    return 1;
  size_t n_prompt = (size_t)argc - 3, n_new = strtoul(argv[2], NULL, 10);
  int32_t *prompt = calloc(n_prompt, sizeof *prompt);
  if (!prompt)
    return 1;
  for (size_t i = 0; i < n_prompt; i++)
    prompt[i] = (int32_t)strtol(argv[3 + i], NULL, 10);
  int bad = run(model, prompt, n_prompt, n_new);
  free(prompt);
  pycass_model_free(model);
  return bad;
}
