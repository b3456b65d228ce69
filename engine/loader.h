/* Owns the bytes of a file: mapped, moved to huge pages, or borrowed. The only I/O of the engine. */
#ifndef CASS_LOADER_H
#define CASS_LOADER_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "format.h"

struct pycass_file {
  uint8_t *data;
  size_t size;
  bool own;         /* data is a map of whole huge pages of address space; else borrowed */
  int fd;           /* -1: none */
  Format format;
  bool moving;      /* a thread moves the bytes to huge pages */
  pthread_t mover;
  pid_t pid;        /* of the process that has it */
  atomic_bool stop; /* ends it */
};

pycass_status loader_open(const char *path, pycass_loading loading, pycass_file **out);
/* Whether a copy of size bytes fits well, by what the system and the process's control groups have left. root: "", or a
 * folder with another /proc and /sys. */
bool loader_has_room(uint64_t size, const char *root);
/* Bytes that the system can give without swapping, by /proc/meminfo; UINT64_MAX where nothing tells. */
uint64_t loader_memory_available(const char *root);
pycass_status loader_lock(const pycass_file *file); /* mlock */

#endif
