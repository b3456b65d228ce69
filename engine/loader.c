#include "loader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static pycass_status io_error(const char *what, const char *path) {
  return cass_fail(PYCASS_ERR_IO, "cannot %s %s: %s", what, path, strerror(errno));
}

enum { HUGE_PAGE = 2 << 20, CHUNK = 32 << 20, SMALL_FILE = 32 << 20, SPARE = 512 << 20 };

/* Address space of whole huge pages; nothing is resident. */
static uint8_t *reserve(size_t size, int protection) {
  size_t whole = round_up(size, HUGE_PAGE);
  uint8_t *p = mmap(NULL, whole + HUGE_PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return NULL;
  uint8_t *start = (uint8_t *)round_up((uintptr_t)p, HUGE_PAGE), *end = start + whole;
  if (start > p)
    munmap(p, (size_t)(start - p));
  if (p + whole + HUGE_PAGE > end)
    munmap(end, (size_t)(p + whole + HUGE_PAGE - end));
  return start;
}

static pycass_status map_file(int fd, const char *path, pycass_file *f) {
  uint8_t *p = reserve(f->size, PROT_NONE);
  if (!p)
    return io_error("map", path);
  f->data = p, f->own = true;
  return mmap(p, f->size, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED ? io_error("map", path) : PYCASS_OK;
}

/* ---- moving to huge pages: 4 KB pages cost a fifth of the speed at which weights stream by ------------------------- */

/* Number after the key in the first line of a text file that has one; otherwise fallback. */
static uint64_t number_in(const char *path, const char *key, uint64_t fallback) {
  char line[256];
  FILE *f = fopen(path, "re");
  while (f && fgets(line, sizeof line, f)) {
    unsigned long long v;
    if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%llu", &v) == 1) {
      fclose(f);
      return v;
    }
  }
  if (f)
    fclose(f);
  return fallback;
}

/* Whether a control group and those above it leave size bytes. base: where its kind is mounted; group: its path there, cut
 * while going up. Of a container only its own group may be seen, as the topmost. */
static bool group_has_room(uint64_t size, const char *base, char *group, const char *most, const char *used) {
  for (;;) {
    char path[1024];
    snprintf(path, sizeof path, "%s%s/%s", base, group, most);
    uint64_t limit = number_in(path, "", UINT64_MAX);
    snprintf(path, sizeof path, "%s%s/%s", base, group, used);
    uint64_t now = number_in(path, "", 0);
    if (limit < now || limit - now <= size)
      return false;
    char *slash = strrchr(group, '/');
    if (!slash)
      return true;
    *slash = 0;
  }
}

uint64_t loader_memory_available(const char *root) {
  char path[512];
  snprintf(path, sizeof path, "%s/proc/meminfo", root);
  uint64_t kb = number_in(path, "MemAvailable:", UINT64_MAX);
  return kb > UINT64_MAX >> 10 ? UINT64_MAX : kb << 10;
}

bool loader_has_room(uint64_t size, const char *root) {
  char path[512], line[1024];
  uint64_t available = loader_memory_available(root);
  if (available == UINT64_MAX || available <= size + SPARE)
    return false;
  snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
  FILE *f = fopen(path, "re");
  bool room = true;
  while (f && room && fgets(line, sizeof line, f)) { /* NUMBER:KINDS:/PATH; version 2 has no kinds */
    line[strcspn(line, "\n")] = 0;
    char *kinds = strchr(line, ':'), *group = kinds ? strchr(kinds + 1, ':') : NULL;
    if (!group)
      continue;
    *group++ = 0;
    bool unified = !kinds[1];
    snprintf(path, sizeof path, "%s/sys/fs/cgroup%s", root, unified ? "" : "/memory");
    if (unified)
      room = group_has_room(size + SPARE, path, group, "memory.max", "memory.current");
    else if (strstr(kinds, "memory"))
      room = group_has_room(size + SPARE, path, group, "memory.limit_in_bytes", "memory.usage_in_bytes");
  }
  if (f)
    fclose(f);
  return room;
}

#if defined(__linux__)
/* 0, an errno, or -1 if the file has become shorter. */
static int read_all(int fd, uint8_t *to, size_t from, size_t size) {
  while (size) {
    ssize_t n = pread(fd, to, size, (off_t)from);
    if (n < 0 && errno == EINTR)
      continue;
    if (n <= 0)
      return n < 0 ? errno : -1;
    to += n, from += (size_t)n, size -= (size_t)n;
  }
  return 0;
}

/* Puts huge pages with the file's bytes in the place of the map, a chunk at a time, so that little is there twice. The
 * addresses stay, and so do the bytes: others may read them meanwhile. As read_all. */
static int move_to_huge_pages(pycass_file *f) {
  int error = 0;
  for (size_t at = 0; at < f->size && !error && !atomic_load(&f->stop); at += CHUNK) {
    size_t n = min_size(CHUNK, f->size - at), whole = round_up(n, HUGE_PAGE);
    uint8_t *p = reserve(n, PROT_READ | PROT_WRITE);
    if (!p)
      return ENOMEM;
    madvise(p, whole, MADV_HUGEPAGE);
    error = read_all(f->fd, p, at, n);
    if (!error && (mprotect(p, whole, PROT_READ) != 0 || mremap(p, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED,
                                                                f->data + at) == MAP_FAILED))
      error = errno;
    if (error)
      munmap(p, whole);
  }
  return error;
}

static void *mover(void *file) {
  move_to_huge_pages(file); /* without success the map does as well, only slower */
  return NULL;
}
#endif

static pycass_status place(pycass_file *f, const char *path, pycass_loading loading) {
#if defined(__linux__)
  if (loading == PYCASS_LOAD_READ) {
    int error = move_to_huge_pages(f);
    errno = error;
    return error == -1 ? cass_fail(PYCASS_ERR_TRUNCATED, "%s became shorter while it was read", path)
           : error     ? io_error("read", path)
                       : PYCASS_OK;
  }
  if (loading == PYCASS_LOAD_AUTO && f->size >= SMALL_FILE && loader_has_room(f->size, ""))
    f->pid = getpid(), f->moving = pthread_create(&f->mover, NULL, mover, f) == 0;
#else
  (void)f, (void)path, (void)loading;
#endif
  return PYCASS_OK;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

static pycass_status open_fd(const char *path, pycass_loading loading, pycass_file *f) {
  struct stat st;
  if (fstat(f->fd, &st) != 0)
    return io_error("stat", path);
  if (!S_ISREG(st.st_mode))
    return cass_fail(PYCASS_ERR_IO, "%s is not a regular file", path);
  if (st.st_size == 0)
    return cass_fail(PYCASS_ERR_NOT_CASS, "%s is empty", path);
  f->size = (size_t)st.st_size;
  RETURN_IF(map_file(f->fd, path, f));
  RETURN_IF(format_parse(f->data, f->size, &f->format));
  return place(f, path, loading);
}

pycass_status loader_open(const char *path, pycass_loading loading, pycass_file **out) {
  if (!path || !out)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "no path");
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO without a writer must not wait */
  if (fd < 0)
    return io_error("open", path);
  pycass_file *f = calloc(1, sizeof *f);
  if (!f) {
    close(fd);
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory to open %s", path);
  }
  f->fd = fd;
  pycass_status status = open_fd(path, loading, f);
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
  f->data = (uint8_t *)(uintptr_t)data, f->size = size, f->fd = -1;
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
  if (f->moving && f->pid == getpid()) { /* a fork's child has no such thread */
    atomic_store(&f->stop, true);
    pthread_join(f->mover, NULL);
  }
  format_free(&f->format);
  if (f->own)
    munmap(f->data, round_up(f->size, HUGE_PAGE));
  if (f->fd >= 0)
    close(f->fd);
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

pycass_status pycass_file_tensor_bf16(const pycass_file *f, size_t i, uint64_t row0, uint64_t row1, uint16_t *out, size_t n) {
  if (i >= f->format.n_tensor)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "tensor %zu of %zu", i, f->format.n_tensor);
  const Matrix *m = &f->format.tensor[i].matrix;
  if (row0 > row1 || row1 > m->rows || n != (size_t)(row1 - row0) * m->cols)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "tensor %s has %u rows of %u: %zu values are not rows %llu to %llu",
                     f->format.tensor[i].name, m->rows, m->cols, n, (unsigned long long)row0, (unsigned long long)row1);
  matrix_bits(m, (uint32_t)row0, (uint32_t)row1, out);
  return PYCASS_OK;
}

const uint8_t *pycass_file_tensor_part(const pycass_file *f, size_t i, uint32_t type, size_t *size) {
  return i < f->format.n_tensor ? format_part(&f->format, &f->format.tensor[i], type, size) : NULL;
}
