/* Many files in one call, during which Python's other threads run: a reader that came back to Python for every file would
wait for the interpreter's lock several times a file. Defined in Python by `PlainFiles` (snapshots/files.py). */

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NO_PLAIN_FILE = -(1 << 20) }; /* as in snapshots/files.py */

typedef struct {
    char *start;
    int64_t bytes;
} Memory;

/* Fill memories one after the other from byte `start` on: -> bytes, fewer where the file ends; or -errno. A call for each:
the system takes longer for a list of them. */
static int64_t fill(int file, int64_t start, const Memory *memory, int64_t count) {
    int64_t at = start;
    for (; count; memory++, count--) {
        for (int64_t filled = 0; filled < memory->bytes;) {
            ssize_t got = pread(file, memory->start + filled, memory->bytes - filled, at);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) return -errno;
            if (got == 0) return at - start;
            filled += got, at += got;
        }
    }
    return at - start;
}

static int64_t read_file(const char *path, int64_t start, const Memory *memories, int64_t count) {
    struct stat status;
    int64_t result;
    int file;
    do {
        file = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    } while (file < 0 && errno == EINTR);
    if (file < 0) return -errno;
    if (fstat(file, &status)) result = -errno;
    else if (!S_ISREG(status.st_mode)) result = NO_PLAIN_FILE;
    else result = fill(file, start, memories, count);
    close(file);
    return result;
}

/* The memories of all files stand behind each other, counts[n] of the n-th. */
void read_files(
    const char *const *paths, const int64_t *starts, const int64_t *counts, const Memory *memories, int64_t files,
    int64_t *results
) {
    for (int64_t n = 0; n < files; memories += counts[n], n++)
        results[n] = read_file(paths[n], starts[n], memories, counts[n]);
}

void file_sizes(const char *const *paths, int64_t files, int64_t *sizes) {
    struct stat status;
    for (int64_t n = 0; n < files; n++) {
        if (lstat(paths[n], &status)) sizes[n] = -errno;
        else sizes[n] = S_ISREG(status.st_mode) ? (int64_t)status.st_size : NO_PLAIN_FILE;
    }
}
