/* Cold experts on the CPU, asked by the GPU itself.

A mailbox in pinned memory holds one request: rows of activations and a list of pairs (place of an expert in host
memory, row, weight). A kernel fills it and raises `asked`; the threads here see that, compute, and set `done` to the
same number; another kernel waits for it. No call into the driver and no Python between the two, so that the step may
be recorded.

A request has two phases, gate and up, then down; both are cut into tasks claimed by awake threads. A claim counter
carries the number of its request in the upper half: a thread that overslept claims nothing of a later one, and a
claimed task keeps its request open, since `done` is not set before all tasks are. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef uint32_t words __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));
typedef float floats __attribute__((vector_size(64), aligned(4)));
typedef uint32_t words4 __attribute__((vector_size(16)));
typedef uint32_t words8 __attribute__((vector_size(32)));
typedef uint16_t shorts8 __attribute__((vector_size(16)));
typedef int8_t bytes16 __attribute__((vector_size(16)));
typedef int32_t ints8 __attribute__((vector_size(32)));
typedef float floats4 __attribute__((vector_size(16)));
typedef float floats8 __attribute__((vector_size(32)));

enum { Q4_K = 4, Q5_K = 5, Q6_K = 6 };
enum { UP_TASK = 8, DOWN_TASK = 16 };      /* outputs of one task */
enum { SPIN_NS = 3000000, NAP_NS = 50000 }; /* how long a thread looks without sleeping, and then sleeps at a time */
enum { LONG_NAP_NS = 500000, IDLE_NAP_NS = 5000000 };
#define AWAKE_NS 1000000000LL               /* after so long without work only one thread keeps looking, now and then */
#define IDLE_NS 2000000000LL                /* and after so long only 200 times a second: the next request begins up
                                               to 5 ms late, once; from it on all threads spin as before */
#ifndef OVERSLEEP
#define OVERSLEEP(number) ((void)0) /* a test's own build lets threads come late where this stands */
#endif

typedef struct {
    int64_t type, codes, high, scales, super_scales; /* addresses of the planes, as `Packed` describes them */
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
} ExpertThreads;

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

static inline floats8 folded(floats v) {
    return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}

/* One row of x as the dots take it, in 16-bit numbers: the largest of 256 columns is ±32767. */
typedef struct {
    int16_t *codes; /* [columns], in the order of the interleaved nibbles */
    float *factors; /* [columns / 256] */
    float *sums;    /* of the numbers as they are coded: [columns / 32] by block, then [columns / 16] by half block */
} Coded;

static inline Coded part_of(const Coded *all, int64_t n, int64_t columns) {
    return (Coded){all->codes + n * columns, all->factors + n * columns / 256, all->sums + n * columns / 32 * 3};
}

static float largest(const float *x) { /* as integers, which numbers without a sign are ordered like */
    uint32_t most = 0, bits[256];
    memcpy(bits, x, sizeof bits);
    for (int o = 0; o < 256; o++) {
        uint32_t size = bits[o] & 0x7fffffffu;
        most = size > most ? size : most;
    }
    return as_float(most);
}

/* Of a group of four blocks i, weights 16·s + 4·t + 2·u and the next of block i stand at [2·s + u][4·t + i]. */
static void arrange(const float *x, int64_t columns, Coded *to) {
    float *halves = to->sums + columns / 32;
    for (int64_t at = 0; at < columns; at += 256) {
        float factor = largest(x + at) / 32767, by = factor > 0 ? 1 / factor : 0;
        int16_t codes[256];
        for (int o = 0; o < 256; o++) codes[o] = (int16_t)rintf(x[at + o] * by);
        for (int run = 0; run < 16; run++) { /* of 16 columns */
            int g = run / 8, i = run / 2 % 4, s = run % 2;
            int32_t total = 0;
            for (int o = 0; o < 16; o++) total += codes[16 * run + o];
            halves[at / 16 + run] = (float)total * factor;
            for (int t = 0; t < 4; t++)
                for (int u = 0; u < 2; u++)
                    memcpy(to->codes + at + 128 * g + 32 * (2 * s + u) + 2 * (4 * t + i),
                           codes + 16 * run + 4 * t + 2 * u, 4);
        }
        for (int block = 0; block < 8; block++)
            to->sums[at / 32 + block] = halves[at / 16 + 2 * block] + halves[at / 16 + 2 * block + 1];
        to->factors[at / 256] = factor;
    }
}

static inline words load_words(const void *from) {
    words w;
    memcpy(&w, from, 64);
    return w;
}

/* sum + the products of the 16-bit halves of q and x, lane by lane; what q holds is small and not negative. */
static inline ints add_products(ints sum, words q, const int16_t *x) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)q, _mm512_loadu_si512(x));
#elif defined(__AVX2__)
    __m256i halves[2], both[2];
    memcpy(halves, &q, 64);
    for (int i = 0; i < 2; i++)
        both[i] = _mm256_madd_epi16(halves[i], _mm256_loadu_si256((const __m256i *)(x + 16 * i)));
    ints product;
    memcpy(&product, both, 64);
    return sum + product;
#else
    ints pair = (ints)load_words(x);
    return sum + (ints)(q & 0xffff) * ((ints)((words)pair << 16) >> 16) + (ints)(q >> 16) * (pair >> 16);
#endif
}

/* Lane 4·t + i takes number i of the first, or of the second four; or with a stride of two, from `first` on. */
#define OF_BLOCKS(v, first, by)                                                                               \
    __builtin_shufflevector(v, v, first, first + by, first + 2 * by, first + 3 * by, first, first + by,       \
                            first + 2 * by, first + 3 * by, first, first + by, first + 2 * by, first + 3 * by, \
                            first, first + by, first + 2 * by, first + 3 * by)

static const words BY_FOURS = {0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12};
static const words BY_EIGHTS = {0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8};

/* Fifth bits, or the upper two of six, of a group: lane 4·t + i, to be shifted right by the place of the nibble. */
static inline words five_high(const uint32_t *high) {
    words4 v;
    memcpy(&v, high, 16);
    return __builtin_shufflevector(v, v, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3) >> BY_FOURS;
}

static inline words six_high(const uint32_t *high) {
    words8 v;
    memcpy(&v, high, 32);
    return __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7) >> BY_EIGHTS;
}

/* Σ code · x of a group, by block and t. */
static inline ints group_sum(const char *codes, const uint32_t *high, const int16_t *x, int five) {
    words w = load_words(codes), top = {0};
    if (five) top = five_high(high) << 4;
    ints acc = {0};
    for (int j = 0; j < 4; j++) { /* two nibbles at a time */
        words q = (w >> (4 * j)) & 0x000f000f;
        if (five) q |= (top >> j) & 0x00100010;
        acc = add_products(acc, q, x + 32 * j);
    }
    return acc;
}

static inline float dot_scaled_min(const Part *p, int64_t row, int64_t columns, const Coded *x, int five) {
    int64_t supers = columns / 256; /* of two groups */
    const char *codes = (const char *)p->codes + row * supers * 128;
    const uint32_t *high = (const uint32_t *)p->high + row * supers * 8;
    const uint16_t *scales = (const uint16_t *)p->scales + row * supers * 8;
    const uint32_t *factors = (const uint32_t *)p->super_scales + row * supers;
    floats total = {0}, other = {0};
    floats8 least = {0};
    for (int64_t s = 0; s < supers; s++) {
        ints first = group_sum(codes + 128 * s, high + 8 * s, x->codes + 256 * s, five);
        ints second = group_sum(codes + 128 * s + 64, high + 8 * s + 4, x->codes + 256 * s + 128, five);
        shorts8 both;
        floats8 sums;
        memcpy(&both, scales + 8 * s, 16);
        memcpy(&sums, x->sums + 8 * s, 32);
        ints8 scale = __builtin_convertvector(both, ints8);
        floats8 by = half(factors[s] & 0xffff) * x->factors[s] * __builtin_convertvector(scale & 255, floats8);
        total += __builtin_convertvector(first, floats) * OF_BLOCKS(by, 0, 1);
        other += __builtin_convertvector(second, floats) * OF_BLOCKS(by, 4, 1);
        least += half(factors[s] >> 16) * __builtin_convertvector(scale >> 8, floats8) * sums;
    }
    return sum_of8(folded(total + other) - least);
}

static inline float dot_signed(const Part *p, int64_t row, int64_t columns, const Coded *x) {
    int64_t supers = columns / 256;
    const char *codes = (const char *)p->codes + row * supers * 128;
    const uint32_t *high = (const uint32_t *)p->high + row * supers * 16;
    const int8_t *scales = (const int8_t *)p->scales + row * supers * 16;
    const float *factors = (const float *)p->super_scales + row * supers, *halves = x->sums + columns / 32;
    floats total = {0}, least = {0};
    for (int64_t s = 0; s < supers; s++) {
        bytes16 sixteen;
        memcpy(&sixteen, scales + 16 * s, 16);
        floats scale = factors[s] * __builtin_convertvector(__builtin_convertvector(sixteen, ints), floats);
        floats by = scale * x->factors[s];
        floats of[4] = {OF_BLOCKS(by, 0, 2), OF_BLOCKS(by, 1, 2), OF_BLOCKS(by, 8, 2), OF_BLOCKS(by, 9, 2)};
        for (int g = 0; g < 2; g++) {
            words w = load_words(codes + 128 * s + 64 * g), top = six_high(high + 16 * s + 8 * g) << 4;
            for (int h = 0; h < 2; h++) { /* the two halves of a block have scales of their own */
                ints acc = {0};
                for (int j = 2 * h; j < 2 * h + 2; j++) {
                    words q = ((w >> (4 * j)) & 0x000f000f) | ((top >> (2 * j)) & 0x00300030);
                    acc = add_products(acc, q, x->codes + 256 * s + 128 * g + 32 * j);
                }
                total += __builtin_convertvector(acc, floats) * of[2 * g + h];
            }
        }
        floats sums;
        memcpy(&sums, halves + 16 * s, 64);
        least += scale * sums;
    }
    return sum_of8(folded(total - 32 * least));
}

static float dot(const Part *p, int64_t row, int64_t columns, const Coded *x) {
    if (p->type == Q6_K) return dot_signed(p, row, columns, x);
    return p->type == Q5_K ? dot_scaled_min(p, row, columns, x, 1) : dot_scaled_min(p, row, columns, x, 0);
}

/* ---- a request -------------------------------------------------------------------------------------------------- */

static int64_t claim(_Atomic uint64_t *claims, uint32_t request, int64_t tasks) {
    uint64_t seen = atomic_load(claims);
    while ((uint32_t)(seen >> 32) == request && (int64_t)(uint32_t)seen < tasks)
        if (atomic_compare_exchange_weak(claims, &seen, seen + 1)) return (int64_t)(uint32_t)seen;
    return -1;
}

static void up_tasks(ExpertThreads *c, uint32_t request, const Layer *l, int64_t tasks, Coded *room) {
    int64_t per_pair = (l->width + UP_TASK - 1) / UP_TASK, arranged = -1, task;
    while ((task = claim(&c->up_claims, request, tasks)) >= 0) {
        int64_t pair = task / per_pair, first = task % per_pair * UP_TASK;
        int64_t row = c->box.row[pair], base = c->box.place[pair] * l->width;
        if (row != arranged) arrange(c->box.x + row * l->hidden, l->hidden, room);
        arranged = row;
        for (int64_t o = first; o < first + UP_TASK && o < l->width; o++) {
            float gate = dot(&l->gate, base + o, l->hidden, room);
            float up = dot(&l->up, base + o, l->hidden, room);
            c->inner[pair * l->width + o] = gate / (1 + expf(-gate)) * up;
        }
        atomic_fetch_add(&c->up_done, 1);
    }
}

static void down_tasks(ExpertThreads *c, uint32_t request, const Layer *l, int64_t tasks, Coded *room) {
    int arranged = 0;
    int64_t task;
    while ((task = claim(&c->down_claims, request, tasks)) >= 0) {
        int64_t pairs = c->box.head->pairs, rows = c->box.head->rows, first = task * DOWN_TASK;
        int64_t stop = first + DOWN_TASK < l->hidden ? first + DOWN_TASK : l->hidden;
        for (int64_t n = 0; !arranged && n < pairs; n++) {
            Coded to = part_of(room, n, l->width);
            arrange(c->inner + n * l->width, l->width, &to);
        }
        arranged = 1;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = first; o < stop; o++) c->box.out[r * l->hidden + o] = 0;
        for (int64_t n = 0; n < pairs; n++) {
            int64_t base = c->box.place[n] * l->hidden;
            float *to = c->box.out + c->box.row[n] * l->hidden;
            Coded inner = part_of(room, n, l->width);
            for (int64_t o = first; o < stop; o++)
                to[o] += c->box.weight[n] * dot(&l->down, base + o, l->width, &inner);
        }
        if ((int64_t)atomic_fetch_add(&c->down_done, 1) == tasks - 1)
            atomic_store_explicit(c->box.done, request, memory_order_release);
    }
}

static inline int is_over(ExpertThreads *c, uint32_t request) {
    return atomic_load(&c->stop) || (int32_t)(atomic_load_explicit(c->box.done, memory_order_acquire) - request) >= 0;
}

static void answer(ExpertThreads *c, uint32_t request, Coded *room) {
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
    up_tasks(c, request, &l, up, room);
    while ((int64_t)atomic_load(&c->up_done) != up)
        if (is_over(c, request)) return;
    down_tasks(c, request, &l, down, room);
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

static void sleep_until_woken(ExpertThreads *c) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&c->mutex);
    pthread_cond_timedwait(&c->wake, &c->mutex, &until);
    pthread_mutex_unlock(&c->mutex);
}

static void rest(ExpertThreads *c, int is_first, int64_t idle) {
    if (idle < SPIN_NS) {
        for (int i = 0; i < 8; i++) pause_a_little();
    } else if (is_first || idle < AWAKE_NS) {
        nanosleep(&(struct timespec){0, idle < AWAKE_NS ? NAP_NS : idle < IDLE_NS ? LONG_NAP_NS : IDLE_NAP_NS}, NULL);
    } else {
        sleep_until_woken(c);
    }
}

typedef struct {
    ExpertThreads *owner;
    int number;
    Coded room; /* for one row of x, or for the inner values of all pairs */
} Place;

/* Room for one thread: 2⅖ bytes for each of most_columns · most_pairs, 314 KB for 2048 and 64. */
static Place *make_place(ExpertThreads *c, int number) {
    size_t values = (size_t)(c->most_columns * c->most_pairs);
    Place *place = malloc(sizeof(Place));
    if (!place) return NULL;
    *place = (Place){c, number, {malloc(values * 2), malloc(values / 64), malloc(values / 8 * 3)}};
    return place;
}

static void free_place(Place *place) {
    if (!place) return;
    free(place->room.codes);
    free(place->room.factors);
    free(place->room.sums);
    free(place);
}

static void *work(void *argument) {
    Place *place = argument;
    ExpertThreads *c = place->owner;
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
        answer(c, request, &place->room);
        last = request;
        worked = now_ns();
    }
    free_place(place);
    return NULL;
}

/* NULL, or fewer threads than asked for, where memory or threads are short. */
ExpertThreads *expert_threads_start(const int64_t *box, int threads, int64_t most_columns, int64_t most_pairs) {
    ExpertThreads *c = calloc(1, sizeof(ExpertThreads));
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
        int has_room = place && place->room.codes && place->room.factors && place->room.sums;
        if (!has_room || pthread_create(&c->ids[c->threads], NULL, work, place)) {
            free_place(place);
            break;
        }
    }
    return c;
}

int expert_threads_count(const ExpertThreads *c) { return c ? c->threads : 0; }

void expert_threads_stop(ExpertThreads *c) {
    if (!c) return;
    atomic_store(&c->stop, 1);
    pthread_cond_broadcast(&c->wake);
    for (int i = 0; i < c->threads; i++) pthread_join(c->ids[i], NULL);
    free(c->ids);
    free(c->inner);
    free(c);
}
