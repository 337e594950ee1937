/* A file system far away, by LD_PRELOAD: each call that would be a round trip is counted, and waits.

   gcc -shared -fPIC -O2 -o slow_files.so slow_files.c -ldl
   LD_PRELOAD=./slow_files.so SLOW_ROOT=/data SLOW_MS=0.2 SLOW_TAIL_MS=20 SLOW_COUNTS=/tmp/counts COMMAND

   Only paths under SLOW_ROOT count, and descriptors that were opened there. A wait is SLOW_MS in the middle, with
   a tail up to SLOW_TAIL_MS: one in a hundred is ten times as long. SLOW_MS=0 only counts. At its end a process
   appends a line for each kind of call to SLOW_COUNTS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN, STAT, READ, WRITE, SYNC, RENAME, UNLINK, NUM_KINDS };
static const char *const NAMES[] = {"open", "stat", "read", "write", "fsync", "rename", "unlink"};
#define MAX_FDS 65536
static char is_slow_fd[MAX_FDS];
static long counts[NUM_KINDS];
static char root[PATH_MAX];
static size_t root_len;
static double median_ms, tail_ms;

__attribute__((constructor)) static void begin(void) {
  const char *given = getenv("SLOW_ROOT");
  if (given) root_len = strlen(strncpy(root, given, sizeof root - 1));
  median_ms = getenv("SLOW_MS") ? atof(getenv("SLOW_MS")) : 0;
  tail_ms = getenv("SLOW_TAIL_MS") ? atof(getenv("SLOW_TAIL_MS")) : 0;
}

__attribute__((destructor)) static void end(void) {
  const char *path = getenv("SLOW_COUNTS");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  for (int kind = 0; kind < NUM_KINDS; kind++)
    if (counts[kind]) fprintf(file, "%s %ld\n", NAMES[kind], counts[kind]);
  fclose(file);
}

static int is_slow(const char *path) {
  char full[PATH_MAX];
  if (!root_len || !path) return 0;
  if (path[0] != '/') {
    if (!getcwd(full, sizeof full)) return 0;
    path = strncat(strncat(full, "/", sizeof full - strlen(full) - 1), path, sizeof full - strlen(full) - 1);
  }
  return !strncmp(path, root, root_len) && (path[root_len] == '/' || !path[root_len]);
}

static int is_slow_at(int fd, const char *path) {
  if (path && path[0] == '/') return is_slow(path);
  return fd == AT_FDCWD ? is_slow(path) : fd >= 0 && fd < MAX_FDS && is_slow_fd[fd];
}

static void wait_as_far_away(int kind) {
  static __thread uint64_t state;
  __atomic_add_fetch(&counts[kind], 1, __ATOMIC_RELAXED);
  if (median_ms <= 0) return;
  if (!state) state = (uint64_t)getpid() * 2654435761u + (uintptr_t)&state;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  double share = (double)(state >> 11) / 9007199254740992.0; /* 0 to 1 */
  double ms = share > 0.99 ? median_ms * 10 * (1 + (share - 0.99) * 100) : median_ms * (0.5 + share);
  if (tail_ms > 0 && ms > tail_ms) ms = tail_ms;
  struct timespec span = {(time_t)(ms / 1000), (long)(ms * 1e6) % 1000000000L};
  nanosleep(&span, NULL);
}

#define REAL(result, name, ...)                                   \
  static result (*real)(__VA_ARGS__);                             \
  if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static int opened(int fd, int slow) {
  if (fd >= 0 && fd < MAX_FDS) is_slow_fd[fd] = (char)slow;
  return fd;
}

#define OPEN_CALL(name)                                           \
  int name(const char *path, int flags, ...) {                    \
    REAL(int, name, const char *, int, ...);                      \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    mode_t mode = va_arg(rest, mode_t);                           \
    va_end(rest);                                                 \
    int slow = is_slow(path);                                     \
    if (slow) wait_as_far_away(OPEN);                             \
    return opened(real(path, flags, mode), slow);                 \
  }
OPEN_CALL(open)
OPEN_CALL(open64)

#define OPENAT_CALL(name)                                         \
  int name(int dir, const char *path, int flags, ...) {           \
    REAL(int, name, int, const char *, int, ...);                 \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    mode_t mode = va_arg(rest, mode_t);                           \
    va_end(rest);                                                 \
    int slow = is_slow_at(dir, path);                             \
    if (slow) wait_as_far_away(OPEN);                             \
    return opened(real(dir, path, flags, mode), slow);            \
  }
OPENAT_CALL(openat)
OPENAT_CALL(openat64)

#define STAT_CALL(name, type)                                     \
  int name(const char *path, struct type *found) {                \
    REAL(int, name, const char *, struct type *);                 \
    if (is_slow(path)) wait_as_far_away(STAT);                    \
    return real(path, found);                                     \
  }
STAT_CALL(stat, stat)
STAT_CALL(stat64, stat64)
STAT_CALL(lstat, stat)
STAT_CALL(lstat64, stat64)

#define FSTATAT_CALL(name, type)                                  \
  int name(int dir, const char *path, struct type *found, int flags) { \
    REAL(int, name, int, const char *, struct type *, int);       \
    if (is_slow_at(dir, path)) wait_as_far_away(STAT);            \
    return real(dir, path, found, flags);                         \
  }
FSTATAT_CALL(fstatat, stat)
FSTATAT_CALL(fstatat64, stat64)

int statx(int dir, const char *path, int flags, unsigned mask, struct statx *found) {
  REAL(int, statx, int, const char *, int, unsigned, struct statx *);
  if (*path && is_slow_at(dir, path)) wait_as_far_away(STAT);
  return real(dir, path, flags, mask, found);
}

static int fd_is_slow(int fd) { return fd >= 0 && fd < MAX_FDS && is_slow_fd[fd]; }

ssize_t read(int fd, void *to, size_t size) {
  REAL(ssize_t, read, int, void *, size_t);
  if (fd_is_slow(fd)) wait_as_far_away(READ);
  return real(fd, to, size);
}

#define PREAD_CALL(name, type)                                    \
  ssize_t name(int fd, void *to, size_t size, type at) {          \
    REAL(ssize_t, name, int, void *, size_t, type);               \
    if (fd_is_slow(fd)) wait_as_far_away(READ);                   \
    return real(fd, to, size, at);                                \
  }
PREAD_CALL(pread, off_t)
PREAD_CALL(pread64, off64_t)

#define PREADV_CALL(name, type)                                   \
  ssize_t name(int fd, const struct iovec *parts, int number, type at) { \
    REAL(ssize_t, name, int, const struct iovec *, int, type);    \
    if (fd_is_slow(fd)) wait_as_far_away(READ);                   \
    return real(fd, parts, number, at);                           \
  }
PREADV_CALL(preadv, off_t)
PREADV_CALL(preadv64, off64_t)

ssize_t write(int fd, const void *from, size_t size) {
  REAL(ssize_t, write, int, const void *, size_t);
  if (fd_is_slow(fd)) wait_as_far_away(WRITE);
  return real(fd, from, size);
}

int fsync(int fd) {
  REAL(int, fsync, int);
  if (fd_is_slow(fd)) wait_as_far_away(SYNC);
  return real(fd);
}

#define TWO_PATHS(name)                                           \
  int name(const char *from, const char *to) {                    \
    REAL(int, name, const char *, const char *);                  \
    if (is_slow(to)) wait_as_far_away(RENAME);                    \
    return real(from, to);                                        \
  }
TWO_PATHS(rename)
TWO_PATHS(link)

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
  REAL(int, renameat, int, const char *, int, const char *);
  if (is_slow_at(to_dir, to)) wait_as_far_away(RENAME);
  return real(from_dir, from, to_dir, to);
}

int unlink(const char *path) {
  REAL(int, unlink, const char *);
  if (is_slow(path)) wait_as_far_away(UNLINK);
  return real(path);
}

int unlinkat(int dir, const char *path, int flags) {
  REAL(int, unlinkat, int, const char *, int);
  if (is_slow_at(dir, path)) wait_as_far_away(UNLINK);
  return real(dir, path, flags);
}

int close(int fd) {
  REAL(int, close, int);
  if (fd >= 0 && fd < MAX_FDS) is_slow_fd[fd] = 0;
  return real(fd);
}
