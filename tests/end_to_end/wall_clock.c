/* The wall clock of a process, set ahead or back by a test while it runs: preloaded with LD_PRELOAD.
 *
 * Only CLOCK_REALTIME moves, as it does when an administrator or a time service sets it: CLOCK_MONOTONIC and
 * CLOCK_BOOTTIME, and every timer of the kernel, go on as they were. How far it moves is read at each call from a file of
 * eight bytes, a signed count of milliseconds, which is mapped into every process that DELAYD_TEST_WALL_MS names it to.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *step_ms;

__attribute__((constructor)) static void map_step(void)
{
    const char *path = getenv("DELAYD_TEST_WALL_MS");
    int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor < 0)
        return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (found != MAP_FAILED)
        step_ms = found;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    /* Not through libc, whose own function this replaces. */
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && step_ms && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t step = *step_ms;
        now->tv_sec += step / 1000;
        now->tv_nsec += step % 1000 * 1000000;
        if (now->tv_nsec < 0) {
            now->tv_sec -= 1;
            now->tv_nsec += 1000000000;
        } else if (now->tv_nsec >= 1000000000) {
            now->tv_sec += 1;
            now->tv_nsec -= 1000000000;
        }
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    (void)zone;
    if (!failed) {
        now->tv_sec = precise.tv_sec;
        now->tv_usec = precise.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *now)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now)
        *now = precise.tv_sec;
    return precise.tv_sec;
}
