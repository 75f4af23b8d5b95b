/* The threads. A job is open or closed; a thread enters an open one and leaves it; the caller closes it when nothing is
left to claim, and then waits for those inside, each of which has at most one piece in hand. */

#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 256 };                        /* threads */
enum { LOOKS = 64 };                        /* at the gate between two looks at the clock */
enum { EAGER_NS = 60000, POLITE_NS = 400000 }; /* so long a thread spins, then gives its core to others, then sleeps */

#define OPEN 0x80000000u /* in the lower half of the gate; below it the threads inside; the upper half numbers the jobs */

static _Atomic uint64_t gate;
static _Atomic uint32_t bell; /* rung for those who sleep */
static _Atomic int sleeping;
static Task current_task;
static void *current_work;
static int width = 1;   /* wanted */
static int started = 1; /* the caller counts */
static pid_t owner;     /* threads do not survive a fork */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    void *at;
    int64_t bytes;
} scratch_buffers[SCRATCHES];

static inline void pause_a_moment(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void sleep_until_rung(uint64_t seen) {
    uint32_t rung = atomic_load(&bell);
    atomic_fetch_add(&sleeping, 1);
    if (atomic_load(&gate) >> 32 == seen >> 32) syscall(SYS_futex, &bell, FUTEX_WAIT_PRIVATE, rung, NULL, NULL, 0);
    atomic_fetch_sub(&sleeping, 1);
}

/* The gate as it is when another job than `last` is open. */
static uint64_t wait_for_job(uint32_t last) {
    int64_t began = now_ns();
    for (;;) {
        for (int look = 0; look < LOOKS; look++) {
            uint64_t seen = atomic_load_explicit(&gate, memory_order_acquire);
            if ((uint32_t)(seen >> 32) != last && seen & OPEN) return seen;
            pause_a_moment();
        }
        int64_t waited = now_ns() - began;
        if (waited > POLITE_NS) {
            uint64_t seen = atomic_load(&gate);
            if (!(seen & OPEN) || (uint32_t)(seen >> 32) == last) sleep_until_rung(seen);
            began = now_ns();
        } else if (waited > EAGER_NS)
            sched_yield();
    }
}

static void *serve(void *unused) {
    (void)unused;
    uint32_t last = 0;
    for (;;) {
        uint64_t seen = wait_for_job(last);
        if (!atomic_compare_exchange_strong(&gate, &seen, seen + 1)) continue;
        last = (uint32_t)(seen >> 32);
        current_task(current_work);
        atomic_fetch_sub_explicit(&gate, 1, memory_order_release);
    }
    return NULL;
}

static void start_missing(void) {
    if (owner != getpid()) {
        owner = getpid();
        started = 1;
        atomic_store(&sleeping, 0);
        atomic_store(&gate, atomic_load(&gate) >> 32 << 32);
    }
    for (; started < width; started++) {
        pthread_t id;
        if (pthread_create(&id, NULL, serve, NULL)) return; /* with fewer it works as well */
        pthread_detach(id);
    }
}

void pool_resize(int64_t threads) {
    pthread_mutex_lock(&mutex);
    width = threads < 1 ? 1 : threads > MOST ? MOST : (int)threads;
    pthread_mutex_unlock(&mutex);
}

/* Threads that were started stay when fewer are wanted, and may come. */
int pool_width(void) { return width > started ? width : started; }

void pool_enter(void) {
    pthread_mutex_lock(&mutex);
    if (started < width || owner != getpid()) start_missing();
}

void pool_leave(void) { pthread_mutex_unlock(&mutex); }

void share(Task task, void *work) {
    if (width == 1 || started == 1) {
        task(work);
        return;
    }
    current_task = task;
    current_work = work;
    uint64_t number = (atomic_load(&gate) >> 32) + 1;
    atomic_store(&gate, number << 32 | OPEN);
    if (atomic_load(&sleeping)) {
        atomic_fetch_add(&bell, 1);
        syscall(SYS_futex, &bell, FUTEX_WAKE_PRIVATE, MOST, NULL, NULL, 0);
    }
    task(work);
    atomic_fetch_and(&gate, ~(uint64_t)OPEN);
    for (int look = 1; (uint32_t)atomic_load_explicit(&gate, memory_order_acquire); look++)
        if (look % 1024)
            pause_a_moment();
        else
            sched_yield();
}

void *scratch(int which, int64_t bytes) {
    if (scratch_buffers[which].bytes < bytes) {
        free(scratch_buffers[which].at);
        int64_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        if (posix_memalign(&scratch_buffers[which].at, 64, size)) abort(); /* as Python itself ends when memory does */
        scratch_buffers[which].bytes = size;
    }
    return scratch_buffers[which].at;
}
