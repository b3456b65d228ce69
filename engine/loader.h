/* Owns the bytes of a file: mapped, read, or borrowed. The only I/O of the engine. */
#ifndef CASS_LOADER_H
#define CASS_LOADER_H

#include "format.h"

struct pycass_file {
  const uint8_t *data;
  size_t size;
  enum { OWN_NOTHING, OWN_MAP, OWN_MEMORY } own;
  Format format;
};

pycass_status loader_open(const char *path, pycass_loading loading, pycass_file **out);
pycass_status loader_lock(const pycass_file *file); /* mlock */

#endif
