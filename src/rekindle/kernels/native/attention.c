/* Rotary positions, the KV pages, and attention over them.

Pages are attended in groups of GROUP_PAGES, in ascending position; a group gives its weighted values and its log-sum-exp,
and groups are merged by that. Attending the same groups one by one and merging them gives the same bits. Every number has
one order of sums, so that a row gets the same bits alone and among others. */

#include "norms.h"
#include "pool.h"
#include "program.h"

enum { PAGE = 64, GROUP_PAGES = 16, KEYS = PAGE * GROUP_PAGES };
enum { KV_F32, KV_BF16, KV_F16, KV_Q8 };
enum { COMBOS = 64 }; /* pairs of a row and a head that a task takes at most */
enum { Q8_BLOCK = 32 };

typedef struct {
    const uint8_t *at; /* [pages, 2, PAGE, kv_heads, row] */
    int64_t type, kv_heads, dim;
} Kv;

static int64_t row_bytes(const Kv *kv) {
    switch (kv->type) {
    case KV_F32: return 4 * kv->dim;
    case KV_Q8: return kv->dim + 2 * (kv->dim / Q8_BLOCK);
    }
    return 2 * kv->dim;
}

static const uint8_t *kv_row(const Kv *kv, int64_t page, int which, int64_t place, int64_t head) {
    return kv->at + (((page * 2 + which) * PAGE + place) * kv->kv_heads + head) * row_bytes(kv);
}

static void read_row(const Kv *kv, const uint8_t *from, float *room) { /* as floats */
    if (kv->type == KV_Q8) {
        for (int64_t i = 0; i < kv->dim; i++) {
            uint16_t scale;
            memcpy(&scale, from + kv->dim + 2 * (i / Q8_BLOCK), 2);
            room[i] = (float)((const int8_t *)from)[i] * half_to_float(scale);
        }
        return;
    }
    int64_t i = 0;
    for (; i + LANES <= kv->dim; i += LANES) save_f(room + i, kv->type == KV_F16 ? halves_f(from + 2 * i) : brains_f(from + 2 * i));
    for (; i < kv->dim; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, 2);
        uint32_t wide = (uint32_t)bits << 16;
        if (kv->type == KV_F16)
            room[i] = half_to_float(bits);
        else
            memcpy(room + i, &wide, 4);
    }
}

/* ---- storing ------------------------------------------------------------------------------------------------------ */

static uint16_t to_brain(float x) { /* to the nearest, of two the even one; what is no number stays so */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t to_half(float x) {
    _Float16 h = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
}

static void write_q8(const float *x, int64_t dim, uint8_t *to) {
    for (int64_t first = 0; first < dim; first += Q8_BLOCK) {
        float most = 0;
        for (int i = 0; i < Q8_BLOCK; i++) most = fabsf(x[first + i]) <= most ? most : fabsf(x[first + i]);
        uint16_t scale = to_half(most / 127);
        float step = half_to_float(scale);
        memcpy(to + dim + 2 * (first / Q8_BLOCK), &scale, 2);
        for (int i = 0; i < Q8_BLOCK; i++) {
            float code = step == 0 ? rintf(x[first + i]) : rintf(x[first + i] / step);
            code = code > 127 ? 127 : code < -127 ? -127 : code;
            ((int8_t *)to)[first + i] = (int8_t)(code == code ? code : 0);
        }
    }
}

static void write_row(const Kv *kv, const float *x, uint8_t *to) {
    if (kv->type == KV_F32) {
        memcpy(to, x, (size_t)kv->dim * 4);
    } else if (kv->type == KV_Q8) {
        write_q8(x, kv->dim, to);
    } else {
        for (int64_t i = 0; i < kv->dim; i++) {
            uint16_t bits = kv->type == KV_F16 ? to_half(x[i]) : to_brain(x[i]);
            memcpy(to + 2 * i, &bits, 2);
        }
    }
}

typedef struct {
    const float *q, *k, *v; /* q: heads `head_stride` apart; k and v contiguous, [rows, kv_heads, dim] */
    int64_t q_stride, head_stride, rows, heads, half;
    const float *q_weight, *k_weight, *frequencies; /* weights may be left out */
    float eps;
    const int32_t *positions, *places, *segments, *tables;
    int64_t table_width;
    Kv kv;
    float *query; /* [rows, heads, dim] */
    Counter done;
} Turning;

static void turn(const float *x, const float *weight, float eps, int64_t dim, int64_t half, const float *cosines,
                 const float *sines, float *to) {
    if (weight)
        norm_row(x, weight, eps, dim, to);
    else
        memcpy(to, x, (size_t)dim * 4);
    for (int64_t j = 0; j < half; j++) {
        float a = to[j], b = to[half + j];
        to[j] = a * cosines[j] - b * sines[j];
        to[half + j] = b * cosines[j] + a * sines[j];
    }
}

static void turn_row(const Turning *t, int64_t row) {
    int64_t dim = t->kv.dim, place = t->places[row];
    int64_t page = t->tables[t->segments[row] * t->table_width + place / PAGE];
    float cosines[t->half + 1], sines[t->half + 1], turned[dim];
    for (int64_t j = 0; j < t->half; j++) { /* in 64 bits: at a million positions 32 are off by 0.03 rad */
        double angle = (double)t->positions[row] * (double)t->frequencies[j];
        cosines[j] = (float)cos(angle);
        sines[j] = (float)sin(angle);
    }
    for (int64_t h = 0; h < t->heads; h++)
        turn(t->q + row * t->q_stride + h * t->head_stride, t->q_weight, t->eps, dim, t->half, cosines, sines,
             t->query + (row * t->heads + h) * dim);
    for (int64_t h = 0; h < t->kv.kv_heads; h++) {
        int64_t at = (row * t->kv.kv_heads + h) * dim;
        turn(t->k + at, t->k_weight, t->eps, dim, t->half, cosines, sines, turned);
        write_row(&t->kv, turned, (uint8_t *)kv_row(&t->kv, page, 0, place % PAGE, h));
        write_row(&t->kv, t->v + at, (uint8_t *)kv_row(&t->kv, page, 1, place % PAGE, h));
    }
}

static void turn_rows(void *work) {
    Turning *t = work;
    int64_t row;
    while ((row = claim_pieces(&t->done, 1, t->rows)) >= 0) turn_row(t, row);
}

/* Norms and turns q and k, stores k and v in their pages. */
void turn_and_store(const float *q, int64_t q_stride, int64_t head_stride, const float *k, const float *v, int64_t rows,
                    int64_t heads, int64_t kv_heads, int64_t dim, int64_t half, const float *q_weight, const float *k_weight,
                    float eps, const float *frequencies, const int32_t *positions, const int32_t *places,
                    const int32_t *segments, const int32_t *tables, int64_t table_width, void *kv, int64_t kv_type, float *query) {
    Turning work = {q, k, v, q_stride, head_stride, rows, heads, half, q_weight, k_weight, frequencies, eps, positions, places,
                    segments, tables, table_width, {kv, kv_type, kv_heads, dim}, query, {0}};
    if (rows == 1) {
        turn_rows(&work);
        return;
    }
    pool_enter();
    share(turn_rows, &work);
    pool_leave();
}

void turn_and_store_call(const Word *w) {
    turn_and_store(w[0].p, w[1].i, w[2].i, w[3].p, w[4].p, w[5].i, w[6].i, w[7].i, w[8].i, w[9].i, w[10].p,
                   w[11].p, w[12].f, w[13].p, w[14].p, w[15].p, w[16].p, w[17].p, w[18].i, w[19].p, w[20].i, w[21].p);
}

/* ---- attending one group of pages ---------------------------------------------------------------------------------- */

typedef struct { /* consecutive rows of one segment over pages that ascend */
    const float *q; /* [rows, heads, dim] */
    const int32_t *pages;
    const int64_t *firsts;   /* the position of each page's first key */
    const int64_t *row_places; /* up to which a row sees */
    int64_t rows, heads, count; /* count: of pages */
    float scale;
    Kv kv;
    float *out, *lse; /* [rows, heads, dim], [rows, heads] */
} Part;

/* Keys of the group that a row at `place` sees; pages ascend, so they are the first ones. */
static int64_t visible(const Part *p, int64_t place) {
    int64_t keys = 0;
    for (int64_t i = 0; i < p->count; i++) {
        int64_t some = place - p->firsts[i] + 1;
        keys += some < 0 ? 0 : some > PAGE ? PAGE : some;
    }
    return keys;
}

static float soften(float *scores, int64_t count, float scale, float *total) { /* e^(s − most); the most, and the sum */
    float most = -INFINITY, rest = 0;
    for (int64_t i = 0; i < count; i++) {
        scores[i] *= scale;
        most = scores[i] > most ? scores[i] : most;
    }
    int64_t i = 0;
    F sum = all_f(0), base = all_f(most);
    for (; i + LANES <= count; i += LANES) {
        F e = exp_f(load_f(scores + i) - base);
        save_f(scores + i, e);
        sum += e;
    }
    for (; i < count; i++) {
        F e = exp_f(all_f(scores[i]) - base);
        scores[i] = e[0];
        rest += e[0];
    }
    *total = sum_f(sum) + rest;
    return most;
}

/* to[c][key] = ⟨q[c], k[key]⟩: in lanes, then across them, then what is left one by one. */
INLINE void dot_tile(const int combos, const float *const *q, const float *const *k, int64_t n, float (*to)[4]) {
    F sum[SUMS / 4][4];
    int64_t i = 0;
    for (int c = 0; c < SUMS / 4; c++)
        for (int r = 0; r < 4; r++) sum[c][r] = all_f(0);
    for (; i + LANES <= n; i += LANES) {
        F key[4];
        for (int r = 0; r < 4; r++) key[r] = load_f(k[r] + i);
        for (int c = 0; c < combos; c++)
            for (int r = 0; r < 4; r++) sum[c][r] = fma_f(load_f(q[c] + i), key[r], sum[c][r]);
    }
    sums_f(sum[0], to[0]);
    for (; i < n; i++)
        for (int c = 0; c < combos; c++)
            for (int r = 0; r < 4; r++) to[c][r] = fma_1(q[c][i], k[r][i], to[c][r]);
}

/* Queries times keys of a page, whose rows lie `stride` apart. Scores are written by fours: the last ones may be of no key. */
static void score_page(float *const *q, int64_t combos, const float *k, int64_t stride, int64_t keys, int64_t dim, float *const *to) {
    for (int64_t key = 0; key < keys; key += 4) {
        const float *four[4];
        for (int64_t r = 0; r < 4; r++) four[r] = k + (key + r < keys ? key + r : keys - 1) * stride;
        for (int64_t c = 0; c < combos; c += SUMS / 4) {
            const float *const *some = (const float *const *)q + c;
            float tile[SUMS / 4][4];
            int64_t left = combos - c < SUMS / 4 ? combos - c : SUMS / 4;
            if (left == SUMS / 4)
                dot_tile(SUMS / 4, some, four, dim, tile);
            else if (left == 3)
                dot_tile(SUMS / 4 > 2 ? 3 : 1, some, four, dim, tile);
            else
                left == 2 ? dot_tile(2, some, four, dim, tile) : dot_tile(1, some, four, dim, tile);
            for (int64_t i = 0; i < left; i++) memcpy(to[c + i] + key, tile[i], sizeof tile[i]);
        }
    }
}

static void add_scaled(float *to, const float *x, float by, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) save_f(to + i, fma_f(all_f(by), load_f(x + i), load_f(to + i)));
    for (; i < n; i++) to[i] = fma_1(by, x[i], to[i]);
}

/* to[c][n] += Σ over i of a[c][i] · b[i][n] for four c and all n; b's rows lie `stride` apart. */
enum { WIDE = LANES == 16 ? 4 : 2 };

INLINE void add_tile(const int combos, const int vectors, const float *const *a, int64_t count, const float *b, int64_t stride,
                     float *const *to, int64_t n) {
    F sum[4][WIDE];
    for (int c = 0; c < combos; c++)
        for (int u = 0; u < vectors; u++) sum[c][u] = load_f(to[c] + n + u * LANES);
    for (int64_t i = 0; i < count; i++)
        for (int u = 0; u < vectors; u++) {
            F column = load_f(b + i * stride + n + u * LANES);
            for (int c = 0; c < combos; c++) sum[c][u] = fma_f(all_f(a[c][i]), column, sum[c][u]);
        }
    for (int c = 0; c < combos; c++)
        for (int u = 0; u < vectors; u++) save_f(to[c] + n + u * LANES, sum[c][u]);
}

static void add_columns(const float *const *a, int64_t count, const float *b, int64_t stride, float *const *to, int64_t n,
                        int64_t columns, int combos) {
    for (; n + WIDE * LANES <= columns; n += WIDE * LANES)
        combos == 4 ? add_tile(4, WIDE, a, count, b, stride, to, n) : add_tile(1, WIDE, a, count, b, stride, to, n);
    for (; n + LANES <= columns; n += LANES)
        combos == 4 ? add_tile(4, 1, a, count, b, stride, to, n) : add_tile(1, 1, a, count, b, stride, to, n);
    for (; n < columns; n++)
        for (int c = 0; c < combos; c++)
            for (int64_t i = 0; i < count; i++) to[c][n] = fma_1(a[c][i], b[i * stride + n], to[c][n]);
}

/* to[c] += Σ over i < counts[c] of a[c][i] · b[i], for each c in ascending i. */
static void add_products(float *const *a, const int64_t *counts, const float *b, int64_t stride, float *const *to, int64_t columns, int64_t combos) {
    const float *const *from = (const float *const *)a;
    for (int64_t c = 0; c < combos; c += 4) {
        int64_t some = combos - c < 4 ? combos - c : 4, common = some < 4 ? 0 : counts[c];
        for (int64_t i = 0; i < some; i++) common = counts[c + i] < common ? counts[c + i] : common;
        if (common) add_columns(from + c, common, b, stride, to + c, 0, columns, 4);
        for (int64_t i = c; i < c + some; i++) {
            const float *rest = a[i] + common;
            if (counts[i] > common) add_columns(&rest, counts[i] - common, b + common * stride, stride, to + i, 0, columns, 1);
        }
    }
}

/* Keys (0) or values (1) of a page as float rows `stride` apart: where they lie, or expanded in `room` [PAGE, dim]. */
static const float *page_rows(const Part *p, int64_t page, int which, int64_t keys, int64_t head, float *room, int64_t *stride) {
    if (p->kv.type == KV_F32) {
        *stride = p->kv.kv_heads * p->kv.dim;
        return (const float *)kv_row(&p->kv, page, which, 0, head);
    }
    *stride = p->kv.dim;
    for (int64_t key = 0; key < keys; key++) read_row(&p->kv, kv_row(&p->kv, page, which, key, head), room + key * p->kv.dim);
    return room;
}

static int64_t clamped(int64_t n, int64_t most) { return n < 0 ? 0 : n > most ? most : n; }

/* Some rows, all heads of one kv head, page by page. */
static void attend_tile(const Part *p, int64_t first, int64_t rows, int64_t kv_head, float *room) {
    int64_t dim = p->kv.dim, share = p->heads / p->kv.kv_heads, combos = rows * share, limit = visible(p, p->row_places[first + rows - 1]);
    float *scores = room, *values = room + combos * KEYS, *a[COMBOS], *to[COMBOS];
    int64_t stride, seen[COMBOS], counts[COMBOS];
    for (int64_t c = 0; c < combos; c++) {
        a[c] = (float *)p->q + ((first + c / share) * p->heads + kv_head * share + c % share) * dim;
        seen[c] = visible(p, p->row_places[first + c / share]);
    }
    for (int64_t at = 0; at < limit; at += PAGE) {
        int64_t keys = clamped(limit - at, PAGE);
        const float *k = page_rows(p, p->pages[at / PAGE], 0, keys, kv_head, values, &stride);
        for (int64_t c = 0; c < combos; c++) to[c] = scores + c * KEYS + at;
        score_page(a, combos, k, stride, keys, dim, to);
    }
    for (int64_t c = 0; c < combos; c++) {
        int64_t at = (first + c / share) * p->heads + kv_head * share + c % share;
        float total, *own = scores + c * KEYS, most = soften(own, seen[c], p->scale, &total);
        p->lse[at] = seen[c] ? most + logf(total) : -INFINITY;
        for (int64_t key = 0; key < seen[c]; key++) own[key] /= total;
        to[c] = p->out + at * dim;
        memset(to[c], 0, (size_t)dim * 4);
    }
    for (int64_t at = 0; at < limit; at += PAGE) {
        int64_t keys = clamped(limit - at, PAGE);
        const float *v = page_rows(p, p->pages[at / PAGE], 1, keys, kv_head, values, &stride);
        for (int64_t c = 0; c < combos; c++) {
            a[c] = scores + c * KEYS + at;
            counts[c] = clamped(seen[c] - at, PAGE);
        }
        add_products(a, counts, v, stride, to, dim, combos);
    }
}

/* ---- tasks --------------------------------------------------------------------------------------------------------- */

typedef struct { /* the same rows over several groups of pages, merged into `to` and gated */
    const Part *parts;
    int64_t groups, at_once, pieces; /* a piece is a group, some rows and one kv head */
    float *room, *to;
    int64_t room_size;
    const float *gate; /* NULL, or [rows, heads, dim] in any row and head stride */
    int64_t gate_stride, gate_head_stride;
    Counter places, done, finished;
} Attending;

static int64_t rows_at_once(const Part *p) { /* every row's heads of one kv head stay together */
    int64_t rows = COMBOS / (p->heads / p->kv.kv_heads);
    return rows < 1 ? 1 : rows < p->rows ? rows : p->rows;
}

static int64_t room_of(const Part *p) { /* floats */
    int64_t combos = rows_at_once(p) * (p->heads / p->kv.kv_heads);
    return (combos * KEYS + PAGE * p->kv.dim + 15) / 16 * 16;
}

static void attend_pieces(void *work) {
    Attending *w = work;
    float *room = w->room + atomic_fetch_add(&w->places.next, 1) * w->room_size;
    int64_t kv_heads = w->parts->kv.kv_heads, tiles = (w->parts->rows + w->at_once - 1) / w->at_once, piece;
    while ((piece = claim_pieces(&w->done, 1, w->pieces)) >= 0) {
        const Part *p = w->parts + piece / kv_heads / tiles;
        int64_t first = piece / kv_heads % tiles * w->at_once, left = p->rows - first;
        attend_tile(p, first, w->at_once < left ? w->at_once : left, piece % kv_heads, room);
    }
}

static void attend_groups(Attending *w) {
    w->at_once = rows_at_once(w->parts);
    w->pieces = w->groups * w->parts->kv.kv_heads * ((w->parts->rows + w->at_once - 1) / w->at_once);
    w->room_size = room_of(w->parts);
    w->room = scratch(SCORES, w->room_size * 4 * pool_width());
    share(attend_pieces, w);
}

static void merge_row(const float *const *outs, const float *const *lses, int64_t parts, int64_t at, int64_t dim, float *to) {
    float most = -INFINITY, total = 0;
    for (int64_t i = 0; i < parts; i++) most = lses[i][at] > most ? lses[i][at] : most;
    if (most == -INFINITY) most = 0;
    memset(to, 0, (size_t)dim * 4);
    for (int64_t i = 0; i < parts; i++) {
        float share = expf(lses[i][at] - most);
        total += share;
        add_scaled(to, outs[i] + at * dim, share, dim);
    }
    if (total < 1e-30f) total = 1e-30f;
    for (int64_t n = 0; n < dim; n++) to[n] /= total;
}

static void gate_values(float *o, const float *gate, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) save_f(o + i, load_f(o + i) * sigmoid_f(load_f(gate + i)));
    for (; i < n; i++) o[i] *= 1 / (1 + expf(-gate[i]));
}

static void finish_rows(void *work) {
    Attending *w = work;
    int64_t heads = w->parts->heads, dim = w->parts->kv.dim, row;
    const float *outs[w->groups], *lses[w->groups];
    for (int64_t g = 0; g < w->groups; g++) {
        outs[g] = w->parts[g].out;
        lses[g] = w->parts[g].lse;
    }
    while ((row = claim_pieces(&w->finished, 1, w->parts->rows)) >= 0)
        for (int64_t h = 0; h < heads; h++) {
            float *to = w->to + (row * heads + h) * dim;
            if (w->groups > 1) merge_row(outs, lses, w->groups, row * heads + h, dim, to);
            if (w->gate) gate_values(to, w->gate + row * w->gate_stride + h * w->gate_head_stride, dim);
        }
}

/* Attention over the union of parts: outs [rows, heads, dim], lses [rows, heads] of each -> to. */
void attention_merge(const float *const *outs, const float *const *lses, int64_t parts, int64_t rows_heads, int64_t dim, float *to) {
    for (int64_t at = 0; at < rows_heads; at++) merge_row(outs, lses, parts, at, dim, to + at * dim);
}

/* Rows of one segment over pages of at most one group. */
void attention_part(const float *q, int64_t rows, int64_t heads, const void *kv, int64_t kv_type, int64_t kv_heads, int64_t dim,
                    const int32_t *pages, const int64_t *firsts, int64_t count, const int64_t *row_places, float scale,
                    float *out, float *lse) {
    Part part = {q, pages, firsts, row_places, rows, heads, count, scale, {kv, kv_type, kv_heads, dim}, out, lse};
    Attending work = {.parts = &part, .groups = 1};
    pool_enter();
    attend_groups(&work);
    pool_leave();
}

enum { BETWEEN = 1 << 22 }; /* floats that groups may leave to be merged at one time */

typedef struct {
    const float *q, *gate;
    int64_t heads, gate_stride, gate_head_stride;
    Kv kv;
    float scale, *out;
} Call;

/* Rows [row, row + rows) of the batch: they belong to one segment, the first of them lies at `place`. */
static void attend_rows(const Call *c, int64_t row, int64_t rows, const int32_t *table, int64_t place) {
    int64_t pages = (place + rows + PAGE - 1) / PAGE, groups = (pages + GROUP_PAGES - 1) / GROUP_PAGES;
    int64_t size = rows * c->heads, at = row * c->heads * c->kv.dim;
    Part parts[groups];
    float *memory = scratch(SHARES, groups * size * (c->kv.dim + 1) * 4), *lse = memory + groups * size * c->kv.dim;
    int64_t *firsts = scratch(LISTS, (pages + rows) * 8), *places = firsts + pages;
    for (int64_t i = 0; i < pages; i++) firsts[i] = i * PAGE;
    for (int64_t i = 0; i < rows; i++) places[i] = place + i;
    for (int64_t g = 0; g < groups; g++) {
        int64_t first = g * GROUP_PAGES, count = pages - first < GROUP_PAGES ? pages - first : GROUP_PAGES;
        float *to = groups == 1 ? c->out + at : memory + g * size * c->kv.dim;
        parts[g] = (Part){c->q + at, table + first, firsts + first, places, rows, c->heads, count, c->scale, c->kv, to, lse + g * size};
    }
    Attending work = {.parts = parts, .groups = groups, .to = c->out + at, .gate = c->gate ? c->gate + row * c->gate_stride : NULL,
                      .gate_stride = c->gate_stride, .gate_head_stride = c->gate_head_stride};
    attend_groups(&work);
    if (rows > 1 && (groups > 1 || c->gate))
        share(finish_rows, &work);
    else
        finish_rows(&work);
}

/* Every segment's rows over all of its table up to their own places, in blocks of `most_rows`. gate: NULL, or [rows, heads, dim] in any row and head stride. */
void attention_run(const float *q, int64_t heads, const void *kv, int64_t kv_type, int64_t kv_heads, int64_t dim,
                   const int32_t *starts, int64_t segments, const int32_t *places, const int32_t *tables, int64_t table_width,
                   int64_t most_rows, float scale, const float *gate, int64_t gate_stride, int64_t gate_head_stride, float *out) {
    Call call = {q, gate, heads, gate_stride, gate_head_stride, {kv, kv_type, kv_heads, dim}, scale, out};
    pool_enter();
    for (int64_t s = 0; s < segments; s++)
        for (int64_t row = starts[s]; row < starts[s + 1]; row += most_rows) {
            int64_t rows = starts[s + 1] - row < most_rows ? starts[s + 1] - row : most_rows;
            int64_t groups = places[row] / KEYS + 2, some = BETWEEN / (groups * heads * dim);
            some = groups == 2 || some > rows ? rows : some < 1 ? 1 : some;
            for (int64_t first = row; first < row + rows; first += some) {
                int64_t left = row + rows - first;
                attend_rows(&call, first, left < some ? left : some, tables + s * table_width, places[first]);
            }
        }
    pool_leave();
}

void attention_run_call(const Word *w) {
    attention_run(w[0].p, w[1].i, w[2].p, w[3].i, w[4].i, w[5].i, w[6].p, w[7].i, w[8].p, w[9].p, w[10].i,
                  w[11].i, w[12].f, w[13].p, w[14].i, w[15].i, w[16].p);
}

/* o [rows, heads, dim] times the sigmoid of its gate, in place, as attention_run does it. */
void attention_gate(float *o, int64_t rows, int64_t heads, int64_t dim, const float *gate, int64_t gate_stride, int64_t gate_head_stride) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t h = 0; h < heads; h++)
            gate_values(o + (row * heads + h) * dim, gate + row * gate_stride + h * gate_head_stride, dim);
}
