/* A disk that fails to read some files for a while: preloaded with LD_PRELOAD.
 *
 * DELAYD_TEST_BAD_READS names a file that is mapped into every process: eight bytes that count the reads that have
 * failed, then a part of a path, ended by a zero. While there is one, every positioned read of a file whose path
 * contains it fails with EIO. Nothing else does: files open, and what is written to them arrives.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PART_BYTES 248

struct control {
    uint64_t failed;
    char part[PART_BYTES];
};

static struct control *control;

__attribute__((constructor)) static void map_control(void)
{
    const char *path = getenv("DELAYD_TEST_BAD_READS");
    int descriptor = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (descriptor < 0)
        return;
    void *found = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (found != MAP_FAILED)
        control = found;
}

static int fails(int descriptor)
{
    char name[32], path[PATH_MAX], part[PART_BYTES];
    if (!control || !*(volatile char *)control->part)
        return 0;
    /* A copy, for a test may end the fault at this moment, and every path contains an empty part. */
    memcpy(part, control->part, PART_BYTES);
    part[PART_BYTES - 1] = 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0 || !part[0])
        return 0;
    path[length] = 0;
    if (!strstr(path, part))
        return 0;
    __atomic_add_fetch(&control->failed, 1, __ATOMIC_RELAXED);
    errno = EIO;
    return 1;
}

/* Not through libc, whose own functions these replace. */

ssize_t pread(int descriptor, void *buffer, size_t size, off_t position)
{
    return fails(descriptor) ? -1 : syscall(SYS_pread64, descriptor, buffer, size, position);
}

ssize_t pread64(int descriptor, void *buffer, size_t size, off64_t position)
{
    return fails(descriptor) ? -1 : syscall(SYS_pread64, descriptor, buffer, size, position);
}

ssize_t preadv(int descriptor, const struct iovec *buffers, int count, off_t position)
{
    return fails(descriptor) ? -1 : syscall(SYS_preadv, descriptor, buffers, count, position, 0);
}

ssize_t preadv64(int descriptor, const struct iovec *buffers, int count, off64_t position)
{
    return fails(descriptor) ? -1 : syscall(SYS_preadv, descriptor, buffers, count, position, 0);
}

ssize_t preadv2(int descriptor, const struct iovec *buffers, int count, off_t position, int flags)
{
    return fails(descriptor) ? -1 : syscall(SYS_preadv2, descriptor, buffers, count, position, 0, flags);
}

ssize_t preadv64v2(int descriptor, const struct iovec *buffers, int count, off64_t position, int flags)
{
    return fails(descriptor) ? -1 : syscall(SYS_preadv2, descriptor, buffers, count, position, 0, flags);
}
