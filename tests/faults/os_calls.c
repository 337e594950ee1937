/* Preloaded, it counts the calls to the operating system on paths below one folder, and at one of them it fails,
 * sends a signal to its own process group, or moves half of the bytes; or it stops before each change. It sees
 * what Python, Rust and C++ call; other folders and a process that is not armed are let through. The orders
 * stand in a file that all processes of a run map (struct orders; os_calls.py has the same in Python), so that
 * the count goes on in processes that the command starts. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_CALLS 8192
#define MAX_PATH 256

enum mode { COUNT, ONCE, LASTING, SIGNAL, SHORT, ALL_SHORT, EACH_CHANGE };
#define HALF (-1) /* a verdict: read or write half of what was asked for */

struct call {
    char op[16];
    char path[MAX_PATH];
};

struct orders {
    int armed;
    int mode;
    int error; /* or the signal of SIGNAL */
    int at;    /* fail at this call, from 0 */
    int count; /* calls so far */
    char op[16]; /* of the call that failed, for LASTING */
    char root[MAX_PATH];
    struct call calls[MAX_CALLS];
};

static struct orders *orders;

__attribute__((constructor)) static void map_orders(void) {
    const char *name = getenv("FAULTS_ORDERS");
    if (!name) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof(struct orders), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) orders = at;
    syscall(SYS_close, fd);
}

/* Whether a call may change what a disk holds, or says that it must hold it now. */
static int is_change(const char *op) {
    static const char *const changes[] = {"create", "write", "fsync", "rename", "link", "unlink", "mkdir"};
    for (size_t at = 0; at < sizeof changes / sizeof *changes; at++)
        if (!strcmp(op, changes[at])) return 1;
    return 0;
}

/* 0, the error that this call shall end with, or HALF. */
static int verdict(const char *op, const char *path) {
    size_t size = strlen(orders->root);
    if (strncmp(path, orders->root, size) || (path[size] != '/' && path[size])) return 0;
    if (orders->mode == EACH_CHANGE && !is_change(op)) return 0; /* they would fill the list */
    int number = __atomic_fetch_add(&orders->count, 1, __ATOMIC_SEQ_CST);
    if (number < MAX_CALLS) {
        struct call *call = &orders->calls[number];
        snprintf(call->op, sizeof call->op, "%s", op);
        snprintf(call->path, sizeof call->path, "%s", path + size);
    }
    if (orders->mode == EACH_CHANGE) {
        syscall(SYS_kill, 0, SIGSTOP);
        return 0;
    }
    if (orders->mode == COUNT || number < orders->at) return 0;
    if (orders->mode == SHORT || orders->mode == ALL_SHORT) {
        int is_hit = number == orders->at || orders->mode == ALL_SHORT;
        return is_hit && (!strcmp(op, "read") || !strcmp(op, "write")) ? HALF : 0;
    }
    if (orders->mode == LASTING) {
        if (number == orders->at) snprintf(orders->op, sizeof orders->op, "%s", op);
        return strcmp(op, orders->op) ? 0 : orders->error;
    }
    if (number > orders->at) return 0;
    if (orders->mode != SIGNAL) return orders->error;
    syscall(SYS_kill, 0, orders->error);
    return 0;
}

static int on_fd(const char *op, int fd) {
    if (!orders || !orders->armed) return 0;
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, name, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return verdict(op, path);
}

static int on_path(const char *op, int folder, const char *path) {
    if (!orders || !orders->armed || !path) return 0;
    if (!*path) return on_fd(op, folder); /* AT_EMPTY_PATH */
    if (*path == '/') return verdict(op, path);
    char name[64], whole[8192];
    if (folder == AT_FDCWD) snprintf(name, sizeof name, "/proc/self/cwd");
    else snprintf(name, sizeof name, "/proc/self/fd/%d", folder);
    long size = syscall(SYS_readlinkat, AT_FDCWD, name, whole, 4095);
    if (size <= 0) return 0;
    snprintf(whole + size, sizeof whole - (size_t)size, "/%s", path);
    return verdict(op, whole);
}

#define WRAP(type, name, parameters, arguments, failed, found)  \
    type name parameters {                                      \
        static type(*real) parameters;                          \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);   \
        int error = found;                                      \
        if (error) {                                            \
            errno = error;                                      \
            return failed;                                      \
        }                                                       \
        return real arguments;                                  \
    }
#define WRAP_FD(type, name, parameters, arguments, op) \
    WRAP(type, name, parameters, arguments, -1, on_fd(op, fd))
#define WRAP_PATH(type, name, parameters, arguments, op, folder) \
    WRAP(type, name, parameters, arguments, -1, on_path(op, folder, path))

#define HALF_OF(size) ((size) > 1 ? (size) / 2 : (size))
#define MOVE(name, parameters, arguments, op, halve)            \
    ssize_t name parameters {                                   \
        static ssize_t(*real) parameters;                       \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);   \
        int error = on_fd(op, fd);                              \
        if (error > 0) {                                        \
            errno = error;                                      \
            return -1;                                          \
        }                                                       \
        if (error == HALF) { halve; }                           \
        return real arguments;                                  \
    }
/* Of one buffer the half of its bytes, of several the first of them, halved. */
#define MOVE_BYTES(name, parameters, arguments, op) MOVE(name, parameters, arguments, op, size = HALF_OF(size))
#define MOVE_BUFFERS(name, parameters, arguments, op)                                               \
    MOVE(name, parameters, arguments, op, struct iovec half = *buffers; half.iov_len = HALF_OF(half.iov_len); \
         buffers = &half; size = 1; return real arguments)

MOVE_BYTES(read, (int fd, void *to, size_t size), (fd, to, size), "read")
MOVE_BYTES(pread, (int fd, void *to, size_t size, off_t at), (fd, to, size, at), "read")
MOVE_BYTES(pread64, (int fd, void *to, size_t size, off64_t at), (fd, to, size, at), "read")
MOVE_BYTES(write, (int fd, const void *from, size_t size), (fd, from, size), "write")
MOVE_BYTES(pwrite, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at), "write")
MOVE_BYTES(pwrite64, (int fd, const void *from, size_t size, off64_t at), (fd, from, size, at), "write")
MOVE_BYTES(sendfile, (int fd, int from, off_t *at, size_t size), (fd, from, at, size), "write")
MOVE_BYTES(sendfile64, (int fd, int from, off64_t *at, size_t size), (fd, from, at, size), "write")
MOVE_BUFFERS(readv, (int fd, const struct iovec *buffers, int size), (fd, buffers, size), "read")
MOVE_BUFFERS(preadv, (int fd, const struct iovec *buffers, int size, off_t at), (fd, buffers, size, at), "read")
MOVE_BUFFERS(preadv64, (int fd, const struct iovec *buffers, int size, off64_t at), (fd, buffers, size, at), "read")
MOVE_BUFFERS(preadv2, (int fd, const struct iovec *buffers, int size, off_t at, int flags),
             (fd, buffers, size, at, flags), "read")
MOVE_BUFFERS(preadv64v2, (int fd, const struct iovec *buffers, int size, off64_t at, int flags),
             (fd, buffers, size, at, flags), "read")
MOVE_BUFFERS(writev, (int fd, const struct iovec *buffers, int size), (fd, buffers, size), "write")
MOVE_BUFFERS(pwritev, (int fd, const struct iovec *buffers, int size, off_t at), (fd, buffers, size, at), "write")
MOVE_BUFFERS(pwritev64, (int fd, const struct iovec *buffers, int size, off64_t at),
             (fd, buffers, size, at), "write")
WRAP_FD(int, fsync, (int fd), (fd), "fsync")
WRAP_FD(int, fdatasync, (int fd), (fd), "fsync")
WRAP_FD(int, ftruncate, (int fd, off_t size), (fd, size), "write")
WRAP_FD(int, ftruncate64, (int fd, off64_t size), (fd, size), "write")
WRAP_FD(int, fchmod, (int fd, mode_t mode), (fd, mode), "chmod")
WRAP_FD(int, fstat, (int fd, struct stat *to), (fd, to), "stat")
WRAP_FD(int, fstat64, (int fd, struct stat64 *to), (fd, to), "stat")

WRAP_PATH(int, stat, (const char *path, struct stat *to), (path, to), "stat", AT_FDCWD)
WRAP_PATH(int, stat64, (const char *path, struct stat64 *to), (path, to), "stat", AT_FDCWD)
WRAP_PATH(int, lstat, (const char *path, struct stat *to), (path, to), "stat", AT_FDCWD)
WRAP_PATH(int, lstat64, (const char *path, struct stat64 *to), (path, to), "stat", AT_FDCWD)
WRAP_PATH(int, fstatat, (int folder, const char *path, struct stat *to, int flags),
          (folder, path, to, flags), "stat", folder)
WRAP_PATH(int, fstatat64, (int folder, const char *path, struct stat64 *to, int flags),
          (folder, path, to, flags), "stat", folder)
WRAP_PATH(int, statx, (int folder, const char *path, int flags, unsigned mask, struct statx *to),
          (folder, path, flags, mask, to), "stat", folder)
WRAP_PATH(int, access, (const char *path, int mode), (path, mode), "stat", AT_FDCWD)
WRAP_PATH(int, faccessat, (int folder, const char *path, int mode, int flags),
          (folder, path, mode, flags), "stat", folder)
WRAP_PATH(int, rename, (const char *path, const char *to), (path, to), "rename", AT_FDCWD)
WRAP_PATH(int, renameat, (int folder, const char *path, int there, const char *to),
          (folder, path, there, to), "rename", folder)
WRAP_PATH(int, link, (const char *path, const char *to), (path, to), "link", AT_FDCWD)
WRAP_PATH(int, linkat, (int folder, const char *path, int there, const char *to, int flags),
          (folder, path, there, to, flags), "link", folder)
WRAP_PATH(int, unlink, (const char *path), (path), "unlink", AT_FDCWD)
WRAP_PATH(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags), "unlink", folder)
WRAP_PATH(int, rmdir, (const char *path), (path), "unlink", AT_FDCWD)
WRAP_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode), "mkdir", AT_FDCWD)
WRAP_PATH(int, mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), "mkdir", folder)
WRAP_PATH(int, chmod, (const char *path, mode_t mode), (path, mode), "chmod", AT_FDCWD)
WRAP_PATH(ssize_t, readlink, (const char *path, char *to, size_t size), (path, to, size), "stat", AT_FDCWD)

WRAP(DIR *, opendir, (const char *path), (path), NULL, on_path("open", AT_FDCWD, path))
WRAP(DIR *, fdopendir, (int fd), (fd), NULL, on_fd("open", fd))
WRAP(struct dirent *, readdir, (DIR *folder), (folder), NULL, on_fd("readdir", dirfd(folder)))
WRAP(struct dirent64 *, readdir64, (DIR *folder), (folder), NULL, on_fd("readdir", dirfd(folder)))
WRAP(FILE *, fopen, (const char *path, const char *mode), (path, mode), NULL, on_path("open", AT_FDCWD, path))
WRAP(FILE *, fopen64, (const char *path, const char *mode), (path, mode), NULL, on_path("open", AT_FDCWD, path))

/* The descriptor is closed whatever close() says, as Linux does it. A folder's close never fails, and of
 * a file that was only read it does so rarely; of a written one it says what became of the last bytes. */
int close(int fd) {
    static int (*real)(int);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "close");
    int flags = orders && orders->armed ? fcntl(fd, F_GETFL) : -1;
    int is_counted = flags >= 0 && !(flags & (O_DIRECTORY | O_PATH));
    int error = is_counted ? on_fd((flags & O_ACCMODE) == O_RDONLY ? "close" : "close written", fd) : 0;
    int result = real(fd);
    if (!error) return result;
    errno = error;
    return -1;
}

static int open_at(int folder, const char *path, int flags, mode_t mode) {
    int error = on_path(flags & O_CREAT ? "create" : "open", folder, path);
    if (error) {
        errno = error;
        return -1;
    }
    return (int)syscall(SYS_openat, folder, path, flags, mode);
}

#define WITH_MODE                                   \
    va_list rest;                                   \
    va_start(rest, flags);                          \
    mode_t mode = (mode_t)va_arg(rest, int);        \
    va_end(rest);

int open(const char *path, int flags, ...) { WITH_MODE return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { WITH_MODE return open_at(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { WITH_MODE return open_at(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { WITH_MODE return open_at(folder, path, flags, mode); }
