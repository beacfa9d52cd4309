/* Stands before pwritev and fdatasync of a kernel that tests build with the linker's --wrap: each call takes the next
   number of a script.

   A number that is not negative lets so many bytes of a write through; a negative one is an errno, and nothing is done.
   Behind the end of its script a call does all. */

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <sys/uio.h>
#include <unistd.h>

#define CALLS 16

static int writes[CALLS], syncs[CALLS], write_at = CALLS, sync_at = CALLS;

void script(int is_sync, int count, const int *numbers);
ssize_t __real_pwritev64(int descriptor, const struct iovec *parts, int count, off_t position);
int __real_fdatasync(int descriptor);
ssize_t __wrap_pwritev64(int descriptor, const struct iovec *parts, int count, off_t position);
int __wrap_fdatasync(int descriptor);

void script(int is_sync, int count, const int *numbers) {
    int *to = is_sync ? syncs : writes, from = CALLS - count;
    for (int at = 0; at < count; at++)
        to[from + at] = numbers[at];
    *(is_sync ? &sync_at : &write_at) = from;
}

ssize_t __wrap_pwritev64(int descriptor, const struct iovec *parts, int count, off_t position) {
    int most = write_at < CALLS ? writes[write_at++] : INT_MAX;
    if (most < 0) {
        errno = -most;
        return -1;
    }
    struct iovec some[IOV_MAX];
    int taken = 0;
    for (size_t left = (size_t)most; taken < count && left; taken++) {
        some[taken] = parts[taken];
        if (some[taken].iov_len > left)
            some[taken].iov_len = left;
        left -= some[taken].iov_len;
    }
    return taken ? __real_pwritev64(descriptor, some, taken, position) : 0;
}

int __wrap_fdatasync(int descriptor) {
    int number = sync_at < CALLS ? syncs[sync_at++] : 0;
    if (number < 0) {
        errno = -number;
        return -1;
    }
    return __real_fdatasync(descriptor);
}
