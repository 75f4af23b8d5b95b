/* Many files in one call, during which Python's other threads run: a reader that came back to Python for every file would
wait for the interpreter's lock several times a file. Defined in Python by `PlainFiles` (snapshots/files.py). */

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NO_PLAIN_FILE = -(1 << 20) }; /* as in snapshots/files.py */
enum { AT_ONCE = 1024 };             /* memories that Linux fills in one call */

/* Skip the first `got` bytes of memories: -> those that are left. */
static struct iovec *skip(struct iovec *memory, const struct iovec *end, size_t got) {
    for (; memory < end && got >= memory->iov_len; memory++) got -= memory->iov_len;
    if (memory < end) {
        memory->iov_base = (char *)memory->iov_base + got;
        memory->iov_len -= got;
    }
    return memory;
}

/* Fill memories one after the other from byte `start` on: -> bytes, fewer where the file ends; or -errno. */
static int64_t fill(int file, int64_t start, struct iovec *memory, const struct iovec *end) {
    int64_t at = start;
    while ((memory = skip(memory, end, 0)) < end) {
        ssize_t got = preadv(file, memory, end - memory < AT_ONCE ? (int)(end - memory) : AT_ONCE, at);
        if (got < 0 && errno != EINTR) return -errno;
        if (got == 0) break;
        if (got > 0) at += got, memory = skip(memory, end, (size_t)got);
    }
    return at - start;
}

static int64_t read_file(const char *path, int64_t start, struct iovec *memory, const struct iovec *end) {
    struct stat status;
    int64_t result;
    int file;
    do {
        file = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    } while (file < 0 && errno == EINTR);
    if (file < 0) return -errno;
    if (fstat(file, &status)) result = -errno;
    else if (!S_ISREG(status.st_mode)) result = NO_PLAIN_FILE;
    else result = fill(file, start, memory, end);
    close(file);
    return result;
}

/* The memories of all files stand behind each other, counts[n] of the n-th; they are changed. */
void read_files(
    const char *const *paths, const int64_t *starts, const int64_t *counts, struct iovec *memories, int64_t files,
    int64_t *results
) {
    for (int64_t n = 0; n < files; memories += counts[n], n++)
        results[n] = read_file(paths[n], starts[n], memories, memories + counts[n]);
}

void file_sizes(const char *const *paths, int64_t files, int64_t *sizes) {
    struct stat status;
    for (int64_t n = 0; n < files; n++) {
        if (lstat(paths[n], &status)) sizes[n] = -errno;
        else sizes[n] = S_ISREG(status.st_mode) ? (int64_t)status.st_size : NO_PLAIN_FILE;
    }
}
