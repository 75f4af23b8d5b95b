/* Cold experts on the CPU, asked by the GPU itself.

A mailbox in pinned memory holds one request: rows of activations and a list of pairs (place of an expert in host
memory, row, weight). A kernel fills it and raises `asked`; the threads here see that, compute, and set `done` to the
same number; another kernel waits for it. No call into the driver and no Python between the two, so that the step may
be recorded.

A request has two phases, gate and up, then down; both are cut into tasks which whoever is awake claims. A claim counter
carries the number of its request in the upper half: a thread that overslept claims nothing of a later one, and a
claimed task keeps its request open, since `done` is not set before all tasks are. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint32_t words __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));
typedef float floats __attribute__((vector_size(64), aligned(4)));
typedef uint16_t shorts4 __attribute__((vector_size(8)));
typedef int32_t ints4 __attribute__((vector_size(16)));
typedef float floats4 __attribute__((vector_size(16)));
typedef int8_t bytes8 __attribute__((vector_size(8)));
typedef int32_t ints8 __attribute__((vector_size(32)));
typedef float floats8 __attribute__((vector_size(32)));

enum { Q4_K = 4, Q5_K = 5, Q6_K = 6 };
enum { UP_TASK = 16, DOWN_TASK = 32 };     /* outputs of one task */
enum { SPIN_NS = 3000000, NAP_NS = 50000 }; /* how long a thread looks without sleeping, and then sleeps at a time */
enum { LONG_NAP_NS = 500000, IDLE_NAP_NS = 5000000 };
#define AWAKE_NS 1000000000LL               /* after so long without work only one thread keeps looking, now and then */
#define IDLE_NS 2000000000LL                /* and after so long only 200 times a second: the next request begins up
                                               to 5 ms late, once; from it on all threads spin as before */
#ifndef OVERSLEEP
#define OVERSLEEP(number) ((void)0) /* a test's own build lets threads come late where this stands */
#endif

typedef struct {
    int64_t type, codes, high, scales, supers; /* addresses of the planes, as `Packed` describes them */
} Part;

typedef struct {
    int64_t width, hidden;
    Part gate, up, down;
} Layer;

typedef struct {
    int64_t layer, pairs, rows;
} Head;

typedef struct {
    _Atomic uint32_t *asked, *done;
    const Head *head;
    const int32_t *place, *row;
    const float *weight, *x; /* x [rows, hidden] */
    float *out;              /* [rows, hidden] */
} Mailbox;

typedef struct {
    Mailbox box;
    int threads;
    int64_t most_columns, most_pairs;
    float *inner; /* [pairs, width] of the request */
    pthread_t *ids;
    atomic_int stop;
    _Atomic uint32_t opening, opened;
    _Atomic uint64_t up_claims, down_claims, up_done, down_done;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
} Crew;

/* ---- one row of weights ---------------------------------------------------------------------------------------- */

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float half(uint32_t h) { /* finite numbers only */
    uint32_t sign = (h & 0x8000u) << 16;
    float size = as_float((h & 0x7fffu) << 13) * 0x1p112f;
    return sign ? -size : size;
}

static inline float sum_of4(floats4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }

static inline float sum_of8(floats8 v) {
    return sum_of4(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
}

static inline float sum_of(floats v) {
    return sum_of8(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                   __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
}

/* x in the order of the interleaved nibbles, and its sums over every 16 weights.

Of a group of four blocks i, weight 16·s + 4·t + 2·u + h of block i stands at [4·h + 2·s + u][4·t + i]; its half block s
is summed up at [4·s + i]. */
static void arrange(const float *x, int64_t columns, float *to, float *sums) {
    for (int64_t g = 0; g < columns / 128; g++)
        for (int i = 0; i < 4; i++)
            for (int s = 0; s < 2; s++) {
                float total = 0;
                for (int o = 0; o < 16; o++) {
                    int t = o / 4, u = o / 2 % 2, h = o % 2;
                    float value = x[128 * g + 32 * i + 16 * s + o];
                    to[128 * g + 16 * (4 * h + 2 * s + u) + 4 * t + i] = value;
                    total += value;
                }
                sums[8 * g + 4 * s + i] = total;
            }
}

static inline words load_words(const void *from) {
    words w;
    memcpy(&w, from, 64);
    return w;
}

static inline floats load_floats(const float *from) {
    floats v;
    memcpy(&v, from, 64);
    return v;
}

static inline floats four_times(floats4 v) {
    return __builtin_shufflevector(v, v, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
}

static const words BY_FOURS = {0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12};
static const words BY_EIGHTS = {0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8};

/* Fifth bits, or the upper two of six, of a group: lane 4·t + i, to be shifted right by the place of (h, f). */
static inline words five_high(const uint32_t *high) {
    words v = {high[0], high[0], high[0], high[0], high[1], high[1], high[1], high[1],
               high[2], high[2], high[2], high[2], high[3], high[3], high[3], high[3]};
    return v >> BY_FOURS;
}

static inline words six_high(const uint32_t *high) {
    words v = {high[0], high[0], high[1], high[1], high[2], high[2], high[3], high[3],
               high[4], high[4], high[5], high[5], high[6], high[6], high[7], high[7]};
    return v >> BY_EIGHTS;
}

static float dot_scaled_min(const Part *p, int64_t row, int64_t columns, const float *x, const float *sums, int five) {
    int64_t groups = columns / 128;
    const char *codes = (const char *)p->codes + row * groups * 64;
    const uint32_t *high = (const uint32_t *)p->high + row * groups * 4;
    const uint16_t *scales = (const uint16_t *)p->scales + row * groups * 4;
    const uint32_t *supers = (const uint32_t *)p->supers + row * groups / 2;
    floats total = {0};
    floats4 least = {0};
    float d = 0, dmin = 0;
    for (int64_t g = 0; g < groups; g++) {
        words w = load_words(codes + 64 * g), top = {0};
        if (five) top = five_high(high + 4 * g);
        floats acc = {0};
        for (int j = 0; j < 8; j++) {
            words q = (w >> (4 * j)) & 15;
            if (five) q |= ((top >> (16 * (j / 4) + j % 4)) & 1) << 4;
            acc += __builtin_convertvector((ints)q, floats) * load_floats(x + 128 * g + 16 * j);
        }
        shorts4 both;
        floats4 low, high_half;
        memcpy(&both, scales + 4 * g, 8);
        memcpy(&low, sums + 8 * g, 16);
        memcpy(&high_half, sums + 8 * g + 4, 16);
        ints4 scale = __builtin_convertvector(both, ints4);
        if (g % 2 == 0) d = half(supers[g / 2] & 0xffff), dmin = half(supers[g / 2] >> 16);
        total += acc * four_times(d * __builtin_convertvector(scale & 255, floats4));
        least += dmin * __builtin_convertvector(scale >> 8, floats4) * (low + high_half);
    }
    return sum_of(total) - sum_of4(least);
}

static float dot_signed(const Part *p, int64_t row, int64_t columns, const float *x, const float *sums) {
    int64_t groups = columns / 128;
    const char *codes = (const char *)p->codes + row * groups * 64;
    const uint32_t *high = (const uint32_t *)p->high + row * groups * 8;
    const int8_t *scales = (const int8_t *)p->scales + row * groups * 8;
    const float *supers = (const float *)p->supers + row * groups / 2;
    floats total = {0};
    floats8 least = {0};
    for (int64_t g = 0; g < groups; g++) {
        words w = load_words(codes + 64 * g), top = six_high(high + 8 * g);
        floats acc[2] = {{0}, {0}}; /* the two halves of a block have scales of their own */
        for (int j = 0; j < 8; j++) {
            words q = ((w >> (4 * j)) & 15) | ((top >> (16 * (j / 4) + 2 * (j % 4))) & 3) << 4;
            acc[j % 4 / 2] += __builtin_convertvector((ints)q, floats) * load_floats(x + 128 * g + 16 * j);
        }
        bytes8 both;
        floats8 sum;
        memcpy(&both, scales + 8 * g, 8);
        memcpy(&sum, sums + 8 * g, 32);
        bytes8 by_half = __builtin_shufflevector(both, both, 0, 2, 4, 6, 1, 3, 5, 7);
        floats8 scale = supers[g / 2] * __builtin_convertvector(__builtin_convertvector(by_half, ints8), floats8);
        total += acc[0] * four_times(__builtin_shufflevector(scale, scale, 0, 1, 2, 3));
        total += acc[1] * four_times(__builtin_shufflevector(scale, scale, 4, 5, 6, 7));
        least += scale * sum;
    }
    return sum_of(total) - 32 * sum_of8(least);
}

static inline float dot(const Part *p, int64_t row, int64_t columns, const float *x, const float *sums) {
    if (p->type == Q6_K) return dot_signed(p, row, columns, x, sums);
    return dot_scaled_min(p, row, columns, x, sums, p->type == Q5_K);
}

/* ---- a request -------------------------------------------------------------------------------------------------- */

typedef struct {
    float *x, *sums; /* room for one row, or for the inner values of all pairs */
} Scratch;

static int64_t claim(_Atomic uint64_t *claims, uint32_t request, int64_t tasks) {
    uint64_t seen = atomic_load(claims);
    while ((uint32_t)(seen >> 32) == request && (int64_t)(uint32_t)seen < tasks)
        if (atomic_compare_exchange_weak(claims, &seen, seen + 1)) return (int64_t)(uint32_t)seen;
    return -1;
}

static void up_tasks(Crew *c, uint32_t request, const Layer *l, int64_t tasks, Scratch *s) {
    int64_t per_pair = (l->width + UP_TASK - 1) / UP_TASK, arranged = -1, task;
    while ((task = claim(&c->up_claims, request, tasks)) >= 0) {
        int64_t pair = task / per_pair, first = task % per_pair * UP_TASK;
        int64_t row = c->box.row[pair], base = c->box.place[pair] * l->width;
        if (row != arranged) arrange(c->box.x + row * l->hidden, l->hidden, s->x, s->sums);
        arranged = row;
        for (int64_t o = first; o < first + UP_TASK && o < l->width; o++) {
            float gate = dot(&l->gate, base + o, l->hidden, s->x, s->sums);
            float up = dot(&l->up, base + o, l->hidden, s->x, s->sums);
            c->inner[pair * l->width + o] = gate / (1 + expf(-gate)) * up;
        }
        atomic_fetch_add(&c->up_done, 1);
    }
}

static void down_tasks(Crew *c, uint32_t request, const Layer *l, int64_t tasks, Scratch *s) {
    int arranged = 0;
    int64_t task;
    while ((task = claim(&c->down_claims, request, tasks)) >= 0) {
        int64_t pairs = c->box.head->pairs, rows = c->box.head->rows, first = task * DOWN_TASK;
        int64_t stop = first + DOWN_TASK < l->hidden ? first + DOWN_TASK : l->hidden;
        for (int64_t n = 0; !arranged && n < pairs; n++)
            arrange(c->inner + n * l->width, l->width, s->x + n * l->width, s->sums + n * l->width / 16);
        arranged = 1;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = first; o < stop; o++) c->box.out[r * l->hidden + o] = 0;
        for (int64_t n = 0; n < pairs; n++) {
            int64_t base = c->box.place[n] * l->hidden;
            float *to = c->box.out + c->box.row[n] * l->hidden;
            for (int64_t o = first; o < stop; o++)
                to[o] += c->box.weight[n] *
                         dot(&l->down, base + o, l->width, s->x + n * l->width, s->sums + n * l->width / 16);
        }
        if ((int64_t)atomic_fetch_add(&c->down_done, 1) == tasks - 1)
            atomic_store_explicit(c->box.done, request, memory_order_release);
    }
}

static inline int is_over(Crew *c, uint32_t request) {
    return atomic_load(&c->stop) || (int32_t)(atomic_load_explicit(c->box.done, memory_order_acquire) - request) >= 0;
}

static void answer(Crew *c, uint32_t request, Scratch *s) {
    uint32_t before = atomic_load(&c->opening);
    /* Only forwards: a thread that overslept would open an old request again, over the counters of a running one. */
    if ((int32_t)(request - before) > 0 && atomic_compare_exchange_strong(&c->opening, &before, request)) {
        atomic_store(&c->up_done, 0);
        atomic_store(&c->down_done, 0);
        atomic_store(&c->up_claims, (uint64_t)request << 32);
        atomic_store(&c->down_claims, (uint64_t)request << 32);
        atomic_store(&c->opened, request);
    }
    while (atomic_load(&c->opened) != request)
        if (is_over(c, request)) return;
    Head head = *c->box.head;
    Layer l = *(const Layer *)head.layer;
    atomic_thread_fence(memory_order_acquire); /* both are read before the next look at `done` */
    if (is_over(c, request)) return; /* then what was just read may belong to the next one */
    int64_t up = head.pairs * ((l.width + UP_TASK - 1) / UP_TASK), down = (l.hidden + DOWN_TASK - 1) / DOWN_TASK;
    up_tasks(c, request, &l, up, s);
    while ((int64_t)atomic_load(&c->up_done) != up)
        if (is_over(c, request)) return;
    down_tasks(c, request, &l, down, s);
}

/* ---- threads ---------------------------------------------------------------------------------------------------- */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static inline void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void sleep_until_woken(Crew *c) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&c->mutex);
    pthread_cond_timedwait(&c->wake, &c->mutex, &until);
    pthread_mutex_unlock(&c->mutex);
}

static void rest(Crew *c, int is_first, int64_t idle) {
    if (idle < SPIN_NS) {
        for (int i = 0; i < 64; i++) pause_a_little();
    } else if (is_first || idle < AWAKE_NS) {
        nanosleep(&(struct timespec){0, idle < AWAKE_NS ? NAP_NS : idle < IDLE_NS ? LONG_NAP_NS : IDLE_NAP_NS}, NULL);
    } else {
        sleep_until_woken(c);
    }
}

typedef struct {
    Crew *crew;
    int number;
    Scratch scratch;
} Place;

/* Room for one thread: 4¼ bytes for each of most_columns · most_pairs, 557 KB for 2048 and 64. */
static Place *make_place(Crew *c, int number) {
    size_t values = (size_t)(c->most_columns * c->most_pairs);
    Place *place = malloc(sizeof(Place));
    if (!place) return NULL;
    *place = (Place){c, number, {malloc(values * 4), malloc(values / 4)}};
    return place;
}

static void free_place(Place *place) {
    if (!place) return;
    free(place->scratch.x);
    free(place->scratch.sums);
    free(place);
}

static void *work(void *argument) {
    Place *place = argument;
    Crew *c = place->crew;
    uint32_t last = atomic_load(c->box.done);
    int64_t worked = now_ns();
    while (!atomic_load(&c->stop)) {
        uint32_t request = atomic_load_explicit(c->box.asked, memory_order_acquire);
        if (request == last) {
            rest(c, place->number == 0, now_ns() - worked);
            continue;
        }
        if (place->number == 0 && now_ns() - worked > AWAKE_NS) pthread_cond_broadcast(&c->wake);
        OVERSLEEP(place->number);
        answer(c, request, &place->scratch);
        last = request;
        worked = now_ns();
    }
    free_place(place);
    return NULL;
}

/* NULL, or a crew with fewer threads than asked for, where memory or threads are short. */
Crew *crew_start(const int64_t *box, int threads, int64_t most_columns, int64_t most_pairs) {
    Crew *c = calloc(1, sizeof(Crew));
    if (!c) return NULL;
    c->box = (Mailbox){(void *)box[0], (void *)box[1], (void *)box[2], (void *)box[3],
                       (void *)box[4], (void *)box[5], (void *)box[6], (void *)box[7]};
    c->most_columns = most_columns;
    c->most_pairs = most_pairs;
    c->inner = malloc((size_t)(most_columns * most_pairs) * 4);
    c->ids = calloc((size_t)threads, sizeof(pthread_t));
    if (!c->inner || !c->ids) threads = 0;
    uint32_t start = atomic_load(c->box.done);
    atomic_store(&c->opening, start);
    atomic_store(&c->opened, start);
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->wake, NULL);
    for (; c->threads < threads; c->threads++) {
        Place *place = make_place(c, c->threads);
        int has_room = place && place->scratch.x && place->scratch.sums;
        if (!has_room || pthread_create(&c->ids[c->threads], NULL, work, place)) {
            free_place(place);
            break;
        }
    }
    return c;
}

int crew_threads(const Crew *c) { return c ? c->threads : 0; }

/* What the kernels do, from the host: raise `asked`, wait for `done`. 0 if that did not come within so many ns. */
int crew_ask(Crew *c, int64_t patience) {
    uint32_t request = atomic_load(c->box.asked) + 1;
    int64_t until = now_ns() + patience;
    atomic_store_explicit(c->box.asked, request, memory_order_release);
    while (atomic_load_explicit(c->box.done, memory_order_acquire) != request) {
        if (now_ns() > until) return 0;
        pause_a_little();
    }
    return 1;
}

void crew_stop(Crew *c) {
    if (!c) return;
    atomic_store(&c->stop, 1);
    pthread_cond_broadcast(&c->wake);
    for (int i = 0; i < c->threads; i++) pthread_join(c->ids[i], NULL);
    free(c->ids);
    free(c->inner);
    free(c);
}
