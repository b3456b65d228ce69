#include "loader.h"

#include <errno.h>
#include <fcntl.h>
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

static pycass_status read_file(int fd, const char *path, pycass_file *f) {
  uint8_t *p = cass_alloc(f->size);
  if (!p)
    return cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory for the %zu bytes of %s", f->size, path);
  f->data = p, f->own = OWN_MEMORY;
  for (size_t done = 0; done < f->size;) {
    ssize_t n = read(fd, p + done, min_size(f->size - done, (size_t)1 << 30));
    if (n < 0 && errno == EINTR)
      continue;
    if (n < 0)
      return io_error("read", path);
    if (n == 0)
      return cass_fail(PYCASS_ERR_TRUNCATED, "%s became shorter while it was read", path);
    done += (size_t)n;
  }
  return PYCASS_OK;
}

static pycass_status open_fd(int fd, const char *path, bool use_mmap, pycass_file *f) {
  struct stat st;
  if (fstat(fd, &st) != 0)
    return io_error("stat", path);
  if (!S_ISREG(st.st_mode))
    return cass_fail(PYCASS_ERR_IO, "%s is not a regular file", path);
  if (st.st_size == 0)
    return cass_fail(PYCASS_ERR_NOT_CASS, "%s is empty", path);
  f->size = (size_t)st.st_size;
  RETURN_IF(use_mmap ? map_file(fd, path, f) : read_file(fd, path, f));
  return format_parse(f->data, f->size, &f->format);
}

pycass_status loader_open(const char *path, bool use_mmap, pycass_file **out) {
  if (!path || !out)
    return cass_fail(PYCASS_ERR_INVALID_ARGUMENT, "no path");
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return io_error("open", path);
  pycass_file *f = calloc(1, sizeof *f);
  pycass_status status =
      f ? open_fd(fd, path, use_mmap, f) : cass_fail(PYCASS_ERR_OUT_OF_MEMORY, "no memory to open %s", path);
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

pycass_status pycass_file_open(const char *path, pycass_file **out) { return loader_open(path, true, out); }

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
    cass_free((void *)(uintptr_t)f->data);
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
