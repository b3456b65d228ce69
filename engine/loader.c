#include "loader.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static pycass_status io_error(const char *what, const char *path) {
  return cass_fail(PYCASS_ERR_IO, "cannot %s %s: %s", what, path, strerror(errno));
}

static pycass_status map_file(int fd, const char *path, pycass_file *f) {
  void *p = mmap(NULL, f->size, PROT_READ, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED)
    return io_error("map", path);
  f->data = p, f->own = OWN_MAP;
  return PYCASS_OK;
}

/* ---- reading into huge pages: 4 KB pages cost a fifth of the speed at which weights stream by ---------------- */

enum { HUGE_PAGE = 2 << 20, READERS = 4, SMALL_FILE = 32 << 20, SPARE = 512 << 20 };

/* Number after the key in a text file of the system, times unit; otherwise fallback. */
static uint64_t system_number(const char *path, const char *key, uint64_t unit, uint64_t fallback) {
  char line[256];
  FILE *f = fopen(path, "r");
  while (f && fgets(line, sizeof line, f)) {
    unsigned long long v;
    if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%llu", &v) == 1) {
      fclose(f);
      return v * unit;
    }
  }
  if (f)
    fclose(f);
  return fallback;
}

/* Whether a copy of the file fits well, by what the system and the process's control group have left. */
static bool has_room(uint64_t size) {
  uint64_t most = system_number("/sys/fs/cgroup/memory.max", "", 1, UINT64_MAX);
  uint64_t used = system_number("/sys/fs/cgroup/memory.current", "", 1, 0);
  return system_number("/proc/meminfo", "MemAvailable:", 1024, 0) > size + SPARE && most > used &&
         most - used > size + SPARE;
}

typedef struct Reader {
  pthread_t thread;
  int fd, error; /* error: an errno, or -1 if the file ended */
  uint8_t *to;
  uint64_t from, size;
} Reader;

static void *read_part(void *arg) {
  Reader *r = arg;
  while (r->size) {
    ssize_t n = pread(r->fd, r->to, min_size(r->size, (size_t)1 << 30), (off_t)r->from);
    if (n < 0 && errno == EINTR)
      continue;
    if (n <= 0) {
      r->error = n < 0 ? errno : -1;
      return NULL;
    }
    r->to += n, r->from += (uint64_t)n, r->size -= (uint64_t)n;
  }
  return NULL;
}

/* An anonymous map of whole huge pages. */
static uint8_t *map_memory(size_t size) {
  size_t whole = round_up(size, HUGE_PAGE);
  uint8_t *p = mmap(NULL, whole + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    return NULL;
  uint8_t *start = (uint8_t *)round_up((uintptr_t)p, HUGE_PAGE);
  if (start > p)
    munmap(p, (size_t)(start - p));
  if (start + whole < p + whole + HUGE_PAGE)
    munmap(start + whole, (size_t)(p + HUGE_PAGE - start));
#if defined(MADV_HUGEPAGE)
  madvise(start, whole, MADV_HUGEPAGE);
#endif
  return start;
}

static pycass_status read_file(int fd, const char *path, pycass_file *f) {
  uint8_t *p = map_memory(f->size);
  if (!p)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for the %zu bytes of %s", f->size, path);
  f->data = p, f->own = OWN_MEMORY;
  Reader part[READERS];
  size_t share = round_up(f->size / READERS + 1, HUGE_PAGE);
  int error = 0;
  for (size_t i = 0; i < READERS; i++) { /* several, since one is busy clearing and copying pages */
    size_t from = min_size(i * share, f->size);
    part[i] = (Reader){.fd = fd, .to = p + from, .from = from, .size = min_size(share, f->size - from)};
    if (!i || pthread_create(&part[i].thread, NULL, read_part, &part[i]) != 0)
      part[i].thread = pthread_self();
  }
  for (size_t i = 0; i < READERS; i++) {
    if (pthread_equal(part[i].thread, pthread_self()))
      read_part(&part[i]);
    else
      pthread_join(part[i].thread, NULL);
    error = part[i].error ? part[i].error : error;
  }
  if (error == -1)
    return cass_fail(PYCASS_ERR_TRUNCATED, "%s became shorter while it was read", path);
  errno = error;
  mprotect(p, round_up(f->size, HUGE_PAGE), PROT_READ);
  return error ? io_error("read", path) : PYCASS_OK;
}

static pycass_status open_fd(int fd, const char *path, pycass_loading loading, pycass_file *f) {
  struct stat st;
  if (fstat(fd, &st) != 0)
    return io_error("stat", path);
  if (!S_ISREG(st.st_mode))
    return cass_fail(PYCASS_ERR_IO, "%s is not a regular file", path);
  if (st.st_size == 0)
    return cass_fail(PYCASS_ERR_NOT_CASS, "%s is empty", path);
  f->size = (size_t)st.st_size;
  if (loading == PYCASS_LOAD_AUTO)
    loading = f->size >= SMALL_FILE && has_room(f->size) ? PYCASS_LOAD_READ : PYCASS_LOAD_MAP;
  RETURN_IF(loading == PYCASS_LOAD_READ ? read_file(fd, path, f) : map_file(fd, path, f));
  return format_parse(f->data, f->size, &f->format);
}

pycass_status loader_open(const char *path, pycass_loading loading, pycass_file **out) {
  if (!path || !out)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "no path");
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return io_error("open", path);
  pycass_file *f = calloc(1, sizeof *f);
  pycass_status status =
      f ? open_fd(fd, path, loading, f) : cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory to open %s", path);
  close(fd); /* the map stays */
  if (status != PYCASS_OK) {
    pycass_file_close(f);
    return status;
  }
  *out = f;
  return PYCASS_OK;
}

pycass_status loader_lock(const pycass_file *file) {
  if (mlock(file->data, file->size) != 0)
    return cass_fail(PYCASS_ERR_IO, "cannot lock %zu bytes in memory: %s", file->size, strerror(errno));
  return PYCASS_OK;
}

pycass_status pycass_file_open(const char *path, pycass_file **out) { return loader_open(path, PYCASS_LOAD_MAP, out); }

pycass_status pycass_file_open_buffer(const void *data, size_t size, pycass_file **out) {
  if (!data || !out || (uintptr_t)data % CASS_ALIGN)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "the buffer is not aligned to %u bytes", CASS_ALIGN);
  pycass_file *f = calloc(1, sizeof *f);
  if (!f)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory to open a file");
  f->data = data, f->size = size;
  pycass_status status = format_parse(f->data, f->size, &f->format);
  if (status != PYCASS_OK) {
    pycass_file_close(f);
    return status;
  }
  *out = f;
  return PYCASS_OK;
}

void pycass_file_close(pycass_file *f) {
  if (!f)
    return;
  format_free(&f->format);
  if (f->own == OWN_MAP)
    munmap((void *)(uintptr_t)f->data, f->size);
  if (f->own == OWN_MEMORY)
    munmap((void *)(uintptr_t)f->data, round_up(f->size, HUGE_PAGE));
  free(f);
}

const pycass_config *pycass_file_config(const pycass_file *f) { return &f->format.config; }
const float *pycass_file_rope_inv_freq(const pycass_file *f) { return f->format.rope_inv_freq; }
size_t pycass_file_tensor_count(const pycass_file *f) { return f->format.n_tensor; }
pycass_status pycass_file_verify(const pycass_file *f) { return format_verify(&f->format); }

const char *pycass_file_json(const pycass_file *f, size_t *len) {
  *len = f->format.section[SECTION_JSON].size;
  return (const char *)f->format.section[SECTION_JSON].data;
}

pycass_status pycass_file_tensor(const pycass_file *f, size_t i, pycass_tensor_info *out) {
  if (i >= f->format.n_tensor)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "tensor %zu of %zu", i, f->format.n_tensor);
  *out = f->format.tensor[i].info;
  return PYCASS_OK;
}

pycass_status pycass_file_tensor_bf16(const pycass_file *f, size_t i, uint16_t *out, size_t n) {
  if (i >= f->format.n_tensor)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "tensor %zu of %zu", i, f->format.n_tensor);
  const Matrix *m = &f->format.tensor[i].matrix;
  if (n != (size_t)m->rows * m->cols)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "tensor %s has %zu values, not %zu", f->format.tensor[i].name,
                     (size_t)m->rows * m->cols, n);
  matrix_bits(m, out);
  return PYCASS_OK;
}
