/* Runs a fuzz target without libFuzzer: replays the files of some folders, then mutates them for some seconds:
 * fuzz_x_drive SECONDS SEED DIR... It knows nothing of coverage; that is libFuzzer's part (-DPYCASS_FUZZ=ON). */
#include <dirent.h>
#include <time.h>

#include "fuzz.h"

enum { MOST = 1000 };
static struct {
  uint8_t *p;
  size_t n;
} seed[MOST];
static size_t n_seeds;

static void read_seed(const char *path) {
  FILE *f = fopen(path, "rb");
  CHECK(f, "cannot read %s", path);
  Bytes b = {0};
  uint8_t chunk[4096];
  for (size_t n; (n = fread(chunk, 1, sizeof chunk, f)) > 0;)
    bytes_put(&b, chunk, n);
  fclose(f);
  CHECK(n_seeds < MOST, "too many seeds");
  seed[n_seeds].p = b.p, seed[n_seeds++].n = b.n;
  LLVMFuzzerTestOneInput(b.p, b.n);
}

static void read_folder(const char *dir) {
  char path[1024];
  DIR *d = opendir(dir);
  CHECK(d, "cannot read %s", dir);
  for (struct dirent *e; (e = readdir(d)) != NULL;) {
    snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
    if (e->d_name[0] != '.')
      read_seed(path);
  }
  closedir(d);
}

/* Offset of a byte: often in the header's table, or in what comes after the weights. */
static size_t somewhere(size_t n) {
  if (n > 4096 && random_below(3) == 0)
    return random_below(192);
  if (n > 1024 && random_below(2))
    return n - 1 - random_below(1024);
  return random_below((uint32_t)n);
}

static void copy_within(uint8_t *p, size_t n, size_t to, size_t from) {
  memmove(p + to, p + from, min_size(1 + random_below(64), n - (to > from ? to : from)));
}

static size_t mutate(uint8_t *p, size_t n) {
  static const uint64_t odd[] = {0, 1, 15, 16, 17, 64, 255, 256, 1u << 16, 1u << 28, INT32_MAX, UINT32_MAX,
                                 (uint64_t)1 << 32, INT64_MAX, UINT64_MAX, UINT64_MAX - 63, (uint64_t)1 << 63};
  for (uint32_t k = 1 + random_below(4); k && n; k--) {
    size_t at = somewhere(n), width = (size_t)1 << random_below(4);
    uint64_t v = odd[random_below(sizeof odd / sizeof *odd)];
    switch (random_below(5)) {
    case 0: p[at] ^= (uint8_t)(1 << random_below(8)); break;
    case 1: p[at] = (uint8_t)random_u32(); break;
    case 2: at -= at % width, memcpy(p + at, &v, min_size(width, n - at)); break;
    case 3: copy_within(p, n, at, somewhere(n)); break;
    default: n = random_below(8) ? n : at;
    }
  }
  return n;
}

int main(int argc, char **argv) {
  CHECK(argc >= 4, "usage: %s SECONDS SEED DIR...", argv[0]);
  time_t end = time(NULL) + strtol(argv[1], NULL, 10);
  random_state = strtoul(argv[2], NULL, 10);
  for (int i = 3; i < argc; i++)
    read_folder(argv[i]);
  CHECK(n_seeds, "no seeds");
  size_t runs = 0;
  for (; time(NULL) < end; runs++) {
    size_t i = random_below((uint32_t)n_seeds);
    uint8_t *p = malloc(seed[i].n + 1);
    if (seed[i].n)
      memcpy(p, seed[i].p, seed[i].n);
    LLVMFuzzerTestOneInput(p, mutate(p, seed[i].n));
    free(p);
  }
  for (size_t i = 0; i < n_seeds; i++)
    free(seed[i].p);
  printf("%zu seeds, %zu mutations\n", n_seeds, runs);
  return 0;
}
