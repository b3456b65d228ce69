/* What the loader asks the system: memory left, by control groups too. A FIFO does not hang it. */
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "loader.h"

static char root[] = "/tmp/pycass-root-XXXXXX";

/* Makes root/path with its folders and writes a text. */
static void put(const char *path, const char *text) {
  char full[512];
  snprintf(full, sizeof full, "%s%s", root, path);
  for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')) != NULL; p++) {
    *p = 0;
    CHECK(mkdir(full, 0700) == 0 || errno == EEXIST, "%s", full);
    *p = '/';
  }
  FILE *f = fopen(full, "w");
  CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0, "%s", full);
}

static void expect(const char *what, uint64_t megabytes, bool room) {
  CHECK(loader_has_room(megabytes << 20, root) == room, "%s: room for %u MB is not %d", what, (unsigned)megabytes, room);
}

/* Half a gigabyte is to stay free. */
static void test_room(void) {
  expect("no system files", 1, false);
  put("/proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 4194304 kB\n");
  expect("memory", 3000, true);
  expect("memory", 3600, false);
  CHECK(loader_memory_available(root) == (uint64_t)4194304 << 10, "MemAvailable");
  CHECK(loader_memory_available("/no such folder") == UINT64_MAX, "a system that does not tell");
  put("/proc/self/cgroup", "4:cpu:/\n0::/user/one\n");
  expect("no limits", 3000, true);
  put("/sys/fs/cgroup/user/one/memory.max", "max\n");
  put("/sys/fs/cgroup/user/one/memory.current", "1048576000\n");
  expect("max", 3000, true);
  put("/sys/fs/cgroup/user/memory.max", "2097152000\n"); /* of the group above */
  put("/sys/fs/cgroup/user/memory.current", "1048576000\n");
  expect("a limit above", 400, true);
  expect("a limit above", 600, false);
  put("/sys/fs/cgroup/memory.max", "209715200\n"); /* a container's own, as its root */
  expect("a container's limit", 1, false);
  put("/proc/self/cgroup", "9:blkio:/\n5:cpu,memory:/a/b\n1:name=systemd:/x\n");
  expect("version 1, no limits", 3000, true);
  put("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
  put("/sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "104857600\n");
  expect("version 1, no limit", 3000, true);
  put("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "1048576000\n");
  expect("version 1", 300, true);
  expect("version 1", 400, false);
}

static void test_fifo(void) {
  char path[512];
  snprintf(path, sizeof path, "%s/fifo", root);
  CHECK(mkfifo(path, 0600) == 0, "mkfifo");
  pycass_file *f = NULL;
  alarm(20);
  for (int loading = PYCASS_LOAD_AUTO; loading <= PYCASS_LOAD_READ; loading++)
    CHECK(loader_open(path, (pycass_loading)loading, &f) == PYCASS_ERR_IO && !f, "a FIFO was opened");
  alarm(0);
}

int main(void) {
  CHECK(mkdtemp(root), "no temporary folder");
  test_room();
  test_fifo();
  char command[64];
  snprintf(command, sizeof command, "rm -r %s", root);
  CHECK(system(command) == 0, "%s", command);
  printf("ok\n");
  return 0;
}
