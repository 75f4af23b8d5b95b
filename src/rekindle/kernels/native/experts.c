/* Routed experts: who is chosen, and what the chosen compute, the shared expert among them. */

#include <math.h>

#include "products.h"
#include "program.h"

typedef struct {
    const Matrix *router; /* of floats */
    float *scores;        /* [rows, experts] */
    int64_t rows, used;
    int32_t *ids;
    float *weights; /* both [rows, used] */
    Counter done;
} Routing;

static const float LEAST_SUM = 6.1e-5f;

static void choose(const float *chances, int64_t experts, int64_t used, int32_t *ids, float *weights, uint8_t *taken) {
    float total = 0;
    memset(taken, 0, (size_t)experts);
    for (int64_t n = 0; n < used; n++) { /* of equals the lowest; what is no number is chosen by its place */
        int64_t best = -1;
        for (int64_t e = 0; e < experts; e++)
            if (!taken[e] && (best < 0 || chances[e] > chances[best])) best = e;
        taken[best] = 1;
        ids[n] = (int32_t)best;
        weights[n] = chances[best];
        total += chances[best];
    }
    float by = total < LEAST_SUM ? LEAST_SUM : total;
    for (int64_t n = 0; n < used; n++) weights[n] /= by;
}

static void soften(float *scores, int64_t count) {
    float most = scores[0], total = 0;
    for (int64_t i = 1; i < count; i++) most = scores[i] > most ? scores[i] : most;
    for (int64_t i = 0; i < count; i++) {
        F e = exp_f(all_f(scores[i] - most));
        scores[i] = e[0];
        total += e[0];
    }
    for (int64_t i = 0; i < count; i++) scores[i] /= total;
}

static void choose_rows(void *work) {
    Routing *w = work;
    int64_t experts = w->router->rows, row;
    uint8_t taken[experts];
    while ((row = claim_pieces(&w->done, 1, w->rows)) >= 0) {
        soften(w->scores + row * experts, experts);
        choose(w->scores + row * experts, experts, w->used, w->ids + row * w->used, w->weights + row * w->used, taken);
    }
}

/* Softmax over all experts, the `used` largest, their weights made to sum to one. */
void route(const Matrix *router, const float *h, int64_t rows, int64_t used, int32_t *ids, float *weights) {
    pool_enter();
    Routing work = {router, scratch(SHARES, rows * router->rows * 4), rows, used, ids, weights, {0}};
    multiply_inside(router, h, router->columns, rows, work.scores);
    if (rows > ALONE)
        share(choose_rows, &work);
    else
        choose_rows(&work);
    pool_leave();
}

void route_call(const Word *w) { route(w[0].p, w[1].p, w[2].i, w[3].i, w[4].p, w[5].p); }

/* ---- what they compute --------------------------------------------------------------------------------------------- */

typedef struct {
    Matrix gate, up, down; /* of all experts behind one another; `rows` is of one expert */
    int64_t experts;
} Stack;

typedef struct {
    const Stack *routed, *shared; /* shared: of one expert, or NULL */
    const float *scale;           /* [hidden], of the shared one */
    const float *h;
    const int32_t *ids;
    const float *weights;
    int64_t rows, used, hidden, pairs, lists; /* pairs: of a row with an expert, the shared one last */
    int32_t *order, *firsts; /* pairs by expert: [pairs]; where each list begins: [lists + 1] */
    int32_t *rows_of;        /* [pairs], in that order */
    int32_t *slots;          /* [pairs], in that order: where the pair's inner values lie */
    float *inner, *shares;   /* [pairs, widest], [pairs, hidden] */
    int64_t widest;
    Coded x, within, within_shared;
    Counter encoded, ups, inner_encoded, downs, sums;
} Moe;

static const Stack *stack_of(const Moe *m, int64_t list) { return list < m->routed->experts ? m->routed : m->shared; }

static Matrix expert_of(const Matrix *all, int64_t expert) {
    Matrix one = *all;
    one.data += expert * ((all->rows + GROUP - 1) / GROUP) * group_bytes((int)all->type, all->columns);
    return one;
}

static void sort_pairs(Moe *m) {
    int64_t experts = m->routed->experts, routed = m->rows * m->used;
    memset(m->firsts, 0, (size_t)(m->lists + 1) * 4);
    for (int64_t n = 0; n < routed; n++) m->firsts[m->ids[n] + 1]++;
    if (m->shared) m->firsts[experts + 1] = (int32_t)m->rows;
    for (int64_t e = 0; e < m->lists; e++) m->firsts[e + 1] += m->firsts[e];
    int32_t next[m->lists];
    memcpy(next, m->firsts, sizeof next);
    for (int64_t n = 0; n < routed; n++) {
        int32_t at = next[m->ids[n]]++;
        m->order[n] = at;
        m->rows_of[at] = (int32_t)(n / m->used);
    }
    for (int64_t n = routed; n < m->pairs; n++) m->rows_of[n] = (int32_t)(n - routed);
    for (int64_t n = 0; n < m->pairs; n++) m->slots[n] = (int32_t)n;
}

static void encode_x(void *work) {
    Moe *m = work;
    int64_t row;
    while ((row = claim_pieces(&m->encoded, 1, m->rows)) >= 0) encode_row(&m->x, row);
}

/* The inner values of the pairs of one list, one group of outputs. */
static void up_group(const Moe *m, int64_t list, int64_t g) {
    const Stack *stack = stack_of(m, list);
    int64_t expert = stack == m->shared ? 0 : list, width = stack->gate.rows, first = g * GROUP;
    int64_t lanes = width - first < GROUP ? width - first : GROUP;
    Matrix gate = expert_of(&stack->gate, expert), up = expert_of(&stack->up, expert);
    for (int64_t at = m->firsts[list]; at < m->firsts[list + 1]; at += TILE) {
        int count = m->firsts[list + 1] - at < TILE ? (int)(m->firsts[list + 1] - at) : TILE;
        float a[TILE][GROUP], b[TILE][GROUP];
        multiply_tile(&gate, g, &m->x, m->rows_of + at, count, a);
        multiply_tile(&up, g, &m->x, m->rows_of + at, count, b);
        for (int r = 0; r < count; r++) {
            for (int lane = 0; lane < GROUP; lane += LANES)
                save_f(a[r] + lane, silu_f(load_f(a[r] + lane)) * load_f(b[r] + lane));
            memcpy(m->inner + (at + r) * m->widest + first, a[r], (size_t)lanes * 4);
        }
    }
}

static void down_group(const Moe *m, int64_t list, int64_t g) {
    const Stack *stack = stack_of(m, list);
    Matrix down = expert_of(&stack->down, stack == m->shared ? 0 : list);
    int64_t first = g * GROUP, lanes = m->hidden - first < GROUP ? m->hidden - first : GROUP;
    for (int64_t at = m->firsts[list]; at < m->firsts[list + 1]; at += TILE) {
        int count = m->firsts[list + 1] - at < TILE ? (int)(m->firsts[list + 1] - at) : TILE;
        float to[TILE][GROUP];
        multiply_tile(&down, g, stack == m->shared ? &m->within_shared : &m->within, m->slots + at, count, to);
        for (int r = 0; r < count; r++) memcpy(m->shares + (at + r) * m->hidden + first, to[r], (size_t)lanes * 4);
    }
}

enum { GROUPS = 2 }; /* of one task */

static void run_groups(Moe *m, Counter *counter, void (*run)(const Moe *, int64_t, int64_t), int64_t groups, int64_t shared_groups) {
    int64_t per = (groups + GROUPS - 1) / GROUPS, extra = m->shared ? (shared_groups + GROUPS - 1) / GROUPS : 0, piece;
    while ((piece = claim_pieces(counter, 1, per * m->routed->experts + extra)) >= 0) {
        int64_t list = piece / per < m->routed->experts ? piece / per : m->routed->experts;
        if (m->firsts[list] == m->firsts[list + 1]) continue;
        int64_t first = (piece - list * per) * GROUPS, last = list < m->routed->experts ? groups : shared_groups;
        for (int64_t g = first; g < first + GROUPS && g < last; g++) run(m, list, g);
    }
}

static int64_t groups_of(const Matrix *matrix) { return (matrix->rows + GROUP - 1) / GROUP; }

static void run_up(void *work) {
    Moe *m = work;
    run_groups(m, &m->ups, up_group, groups_of(&m->routed->gate), m->shared ? groups_of(&m->shared->gate) : 0);
}

static void encode_inner(void *work) {
    Moe *m = work;
    int64_t pair, routed = m->rows * m->used;
    while ((pair = claim_pieces(&m->inner_encoded, 1, m->pairs)) >= 0)
        encode_row(pair < routed ? &m->within : &m->within_shared, pair);
}

static void run_down(void *work) {
    Moe *m = work;
    run_groups(m, &m->downs, down_group, groups_of(&m->routed->down), m->shared ? groups_of(&m->shared->down) : 0);
}

/* to = Σ weight · share, in the order of the places; shares lie at order[n], or at n without one. */
static void sum_row(const float *shares, const int32_t *order, const float *weights, int64_t first, int64_t used, int64_t hidden, float *to) {
    memset(to, 0, (size_t)hidden * 4);
    for (int64_t n = first; n < first + used; n++) {
        const float *share = shares + (order ? order[n] : n) * hidden;
        for (int64_t i = 0; i < hidden; i++) to[i] = fma_1(weights[n], share[i], to[i]);
    }
}

/* to += sigmoid(⟨scale, h⟩) · share */
static void add_shared_row(const float *share, const float *scale, const float *h, int64_t hidden, float *to) {
    F total = all_f(0);
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= hidden; i += LANES) total = fma_f(load_f(h + i), load_f(scale + i), total);
    for (; i < hidden; i++) rest = fma_1(h[i], scale[i], rest);
    float by = 1.0f / (1.0f + expf(-(sum_f(total) + rest)));
    for (i = 0; i < hidden; i++) to[i] = fma_1(by, share[i], to[i]);
}

typedef struct {
    Moe *m;
    float *out;
} Summing;

static void add_shares(void *work) {
    Summing *s = work;
    const Moe *m = s->m;
    int64_t row, routed = m->rows * m->used;
    while ((row = claim_pieces(&s->m->sums, 1, m->rows)) >= 0) {
        float *to = s->out + row * m->hidden;
        sum_row(m->shares, m->order, m->weights, row * m->used, m->used, m->hidden, to);
        if (m->shared) add_shared_row(m->shares + (routed + row) * m->hidden, m->scale, m->h + row * m->hidden, m->hidden, to);
    }
}

/* The two steps of that by themselves, for callers with shares [rows, used, hidden] from elsewhere: the same bits. */
void sum_shares(const float *shares, const float *weights, int64_t rows, int64_t used, int64_t hidden, float *out) {
    for (int64_t row = 0; row < rows; row++) sum_row(shares, NULL, weights, row * used, used, hidden, out + row * hidden);
}

void add_shared(const float *shares, const float *scale, const float *h, int64_t rows, int64_t hidden, float *out) {
    for (int64_t row = 0; row < rows; row++) add_shared_row(shares + row * hidden, scale, h + row * hidden, hidden, out + row * hidden);
}

static void lay_out(Moe *m) {
    int64_t width = m->routed->gate.rows, shared = m->shared ? m->shared->gate.rows : 0;
    m->widest = (width > shared ? width : shared) + 15;
    m->widest -= m->widest % 16;
    int32_t *numbers = scratch(LISTS, (4 * m->pairs + m->lists + 2) * 4);
    m->order = numbers;
    m->rows_of = numbers + m->pairs;
    m->slots = m->rows_of + m->pairs;
    m->firsts = m->slots + m->pairs;
    m->inner = scratch(INNER, m->pairs * m->widest * 4);
    m->shares = scratch(SHARES, m->pairs * m->hidden * 4);
    m->x = coded_room(m->h, m->hidden, m->rows, m->hidden, scratch(CODES, coded_bytes(m->rows, m->hidden)));
    m->within = coded_room(m->inner, m->widest, m->pairs, width, scratch(INNER_CODES, coded_bytes(m->pairs, width)));
    m->within_shared = coded_room(m->inner, m->widest, m->pairs, shared, scratch(SHARED_CODES, coded_bytes(m->pairs, shared)));
}

/* h [rows, hidden] through its chosen experts and the shared one -> out [rows, hidden]. */
void moe(const Stack *routed, const Stack *shared, const float *scale, const float *h, const int32_t *ids, const float *weights,
         int64_t rows, int64_t used, float *out) {
    Moe m = {.routed = routed, .shared = shared, .scale = scale, .h = h, .ids = ids, .weights = weights, .rows = rows, .used = used,
             .hidden = routed->gate.columns, .pairs = rows * (used + (shared != NULL)), .lists = routed->experts + (shared != NULL)};
    pool_enter();
    lay_out(&m);
    sort_pairs(&m);
    if (rows > ALONE)
        share(encode_x, &m);
    else
        encode_x(&m);
    share(run_up, &m);
    if (rows > ALONE)
        share(encode_inner, &m);
    else
        encode_inner(&m);
    share(run_down, &m);
    Summing sums = {&m, out};
    if (rows > ALONE)
        share(add_shares, &sums);
    else
        add_shares(&sums);
    pool_leave();
}

void moe_call(const Word *w) { moe(w[0].p, w[1].p, w[2].p, w[3].p, w[4].p, w[5].p, w[6].i, w[7].i, w[8].p); }
