#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base.h"

static _Thread_local char detail[512];

const char *pycass_error_detail(void) { return detail; }
const char *pycass_version(void) { return "0.1.0"; }

pycass_status cass_fail(pycass_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(detail, sizeof detail, format, args);
  va_end(args);
  return status;
}

const char *pycass_status_string(pycass_status status) {
  switch (status) {
  case PYCASS_OK: return "ok";
  case PYCASS_ERR_INVALID_ARGUMENT: return "invalid argument";
  case PYCASS_ERR_OUT_OF_MEMORY: return "out of memory";
  case PYCASS_ERR_IO: return "input/output error";
  case PYCASS_ERR_NOT_CASS: return "not a .cass file";
  case PYCASS_ERR_VERSION: return "unknown format version";
  case PYCASS_ERR_TRUNCATED: return "truncated file";
  case PYCASS_ERR_TRAILING: return "trailing bytes";
  case PYCASS_ERR_CORRUPT: return "corrupt file";
  case PYCASS_ERR_CHECKSUM: return "checksum mismatch";
  case PYCASS_ERR_UNSUPPORTED: return "unsupported";
  case PYCASS_ERR_CONTEXT_FULL: return "context full";
  case PYCASS_ERR_STATE_MISMATCH: return "state of another model";
  case PYCASS_ERR_KERNEL: return "kernel set not available";
  case PYCASS_ERR_DEVICE: return "GPU not available";
  }
  return "unknown status";
}

/* calloc, since it does not touch large blocks: what is never used never becomes resident. Its own pointer stands in
 * front of the aligned one. */
void *cass_alloc(size_t size) {
  if (size > SIZE_MAX - 2 * CASS_ALIGN)
    return NULL;
  uint8_t *block = calloc(1, size + CASS_ALIGN);
  if (!block)
    return NULL;
  uint8_t *p = (uint8_t *)round_up((uintptr_t)block + sizeof block, CASS_ALIGN);
  memcpy(p - sizeof block, &block, sizeof block);
  return p;
}

void cass_free(void *p) {
  void *block = NULL;
  if (p)
    memcpy(&block, (uint8_t *)p - sizeof block, sizeof block);
  free(block);
}
