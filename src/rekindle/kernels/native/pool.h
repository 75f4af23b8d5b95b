/* Threads that share the work of one call.

`share` runs `task` on the calling thread and on whichever of the pool's threads is awake in time. No caller waits for a
thread that has not begun: on a busy machine the caller does all of the work itself. Tasks claim pieces of the work from
a counter, so what is computed does not depend on who computes it. */

#ifndef POOL_H
#define POOL_H

#include <stdatomic.h>
#include <stdint.h>

typedef void (*Task)(void *work);

/* One call at a time uses the pool and the scratch memory. */
void pool_enter(void);
void pool_leave(void);
void share(Task task, void *work);

/* How many threads may work, the caller among them. */
int pool_width(void);

/* The next `step` pieces of `count`: the first of them, or -1 when none is left. */
typedef struct {
    _Atomic int64_t next;
} Counter;

static inline int64_t claim_pieces(Counter *counter, int64_t step, int64_t count) {
    int64_t first = atomic_fetch_add_explicit(&counter->next, step, memory_order_relaxed);
    return first < count ? first : -1;
}

/* Scratch memory number `which`, of at least so many bytes, until the pool is left; aligned to 64. */
enum { CODES, INNER, INNER_CODES, SHARED_CODES, SHARES, LISTS, SCORES, SCRATCHES };
void *scratch(int which, int64_t bytes);

#endif
