/* The mixer of a DeltaNet layer: convolution, gated delta rule row after row, gated norm.

A column of a head's state does not see the other columns, so threads take columns and run through all rows of a segment
with them. What a row does to the state is the same whether it comes alone or among others. Rows that are logged leave the
state as it is: their threads run on a copy of the columns, and delta_replay moves the state on by those that stay. */

#include "norms.h"
#include "pool.h"
#include "program.h"

typedef struct {
    int64_t key_heads, value_heads, key_dim, value_dim, width; /* width: taps of the convolution */
    const float *taps, *decay, *dt_bias, *norm;                /* taps [channels, width], oldest first */
    float eps;
} DeltaLayer;

typedef struct { /* the last block, by slot; `rows` of the longest one */
    float *windows, *inputs, *k, *delta, *g;
    int64_t rows;
} RewindLog;

typedef struct {
    const DeltaLayer *l;
    const float *inputs, *a, *b, *z; /* [rows, channels], [rows, value_heads] twice, [rows, inner] */
    const int32_t *starts, *slots;   /* of the segments */
    int64_t segments, rows, channels, keys;
    float *windows, *states, *out; /* [slots, width - 1, channels], [slots, value_heads, key_dim, value_dim], like z */
    int64_t window_slot, state_slot; /* values from one slot to the next */
    const RewindLog *rewind_log;
    float *mixed, *g, *beta; /* scratch: [rows, channels], [rows, value_heads] twice */
    float *copies;           /* scratch: [threads, key_dim, 4 * LANES], of logged rows */
    Counter places, convolved, prepared, mixed_heads, normed;
} Delta;

enum { CHANNELS = 128 }; /* of one task; a multiple of all LANES */
enum { MOST_TAPS = 8 };

/* ---- convolution -------------------------------------------------------------------------------------------------- */

static void keep_inputs(const Delta *d, int64_t slot, int64_t start, int64_t stop, int64_t first, int64_t count) {
    int64_t before = d->l->width - 1;
    size_t bytes = (size_t)count * 4;
    for (int64_t i = 0; i < before; i++) {
        memcpy(d->rewind_log->windows + (slot * before + i) * d->channels + first,
               d->windows + slot * d->window_slot + i * d->channels + first, bytes);
    }
    for (int64_t row = start; row < stop; row++)
        memcpy(d->rewind_log->inputs + (slot * d->rewind_log->rows + row - start) * d->channels + first,
               d->inputs + row * d->channels + first, bytes);
}

/* Row `row` of what the convolution sees: the window, then the segment's inputs. */
INLINE const float *seen_row(const Delta *d, int64_t slot, int64_t start, int64_t row) {
    int64_t before = d->l->width - 1;
    return row < before ? d->windows + slot * d->window_slot + row * d->channels : d->inputs + (start + row - before) * d->channels;
}

static void convolve(const Delta *d, int64_t segment, int64_t first, int64_t count) {
    int64_t slot = d->slots[segment], start = d->starts[segment], stop = d->starts[segment + 1], width = d->l->width;
    float taps[MOST_TAPS][CHANNELS], window[MOST_TAPS][CHANNELS];
    if (start == stop) return;
    if (d->rewind_log) keep_inputs(d, slot, start, stop, first, count);
    for (int64_t t = 0; t < width; t++)
        for (int64_t c = 0; c < count; c++) taps[t][c] = d->l->taps[(first + c) * width + t];
    for (int64_t row = 0; row < stop - start; row++) {
        float *to = d->mixed + (start + row) * d->channels + first;
        const float *from[MOST_TAPS];
        for (int64_t t = 0; t < width; t++) from[t] = seen_row(d, slot, start, row + t) + first;
        int64_t c = 0;
        for (; c + LANES <= count; c += LANES) {
            F total = load_f(from[0] + c) * load_f(taps[0] + c);
            for (int64_t t = 1; t < width; t++) total = fma_f(load_f(from[t] + c), load_f(taps[t] + c), total);
            save_f(to + c, silu_f(total));
        }
        for (; c < count; c++) {
            float total = from[0][c] * taps[0][c];
            for (int64_t t = 1; t < width; t++) total += from[t][c] * taps[t][c];
            to[c] = total / (1 + expf(-total));
        }
    }
    for (int64_t i = 0; i < width - 1; i++)
        memcpy(window[i], seen_row(d, slot, start, stop - start + i) + first, (size_t)count * 4);
    for (int64_t i = 0; i < width - 1; i++)
        memcpy(d->windows + slot * d->window_slot + i * d->channels + first, window[i], (size_t)count * 4);
}

static void convolve_pieces(void *work) {
    Delta *d = work;
    int64_t per = (d->channels + CHANNELS - 1) / CHANNELS, piece;
    while ((piece = claim_pieces(&d->convolved, 1, per * d->segments)) >= 0) {
        int64_t first = piece % per * CHANNELS, left = d->channels - first;
        convolve(d, piece / per, first, left < CHANNELS ? left : CHANNELS);
    }
}

/* ---- what the rule reads ------------------------------------------------------------------------------------------ */

INLINE void make_unit(float *x, int64_t n, float by) { scale_row(x, by / sqrtf(sum_of_squares(x, n) + 1e-6f), NULL, n, x); }

static void prepare_rows(void *work) {
    Delta *d = work;
    const DeltaLayer *l = d->l;
    float by = 1.0f / sqrtf((float)l->key_dim);
    int64_t row;
    while ((row = claim_pieces(&d->prepared, 1, d->rows)) >= 0) {
        float *q = d->mixed + row * d->channels, *k = q + d->keys;
        for (int64_t h = 0; h < l->key_heads; h++) {
            make_unit(q + h * l->key_dim, l->key_dim, by);
            make_unit(k + h * l->key_dim, l->key_dim, 1.0f);
        }
        for (int64_t h = 0; h < l->value_heads; h++) {
            int64_t at = row * l->value_heads + h;
            float a = d->a[at] + l->dt_bias[h];
            d->g[at] = l->decay[h] * (a > 20.0f ? a : log1pf(expf(a)));
            d->beta[at] = 1.0f / (1.0f + expf(-d->b[at]));
        }
    }
}

/* ---- the rule ----------------------------------------------------------------------------------------------------- */

/* One row on some columns of a state [key_dim, value_dim]: S ← e^g S; δ = β (v − Sᵀk); S ← S + k δᵀ; o = Sᵀq. */
#define STEP(NAME, VECTORS)                                                                                              \
    INLINE void NAME(float *s, int64_t stride, int64_t n, const float *q, const float *k, const float *v, float keep,    \
                     float beta, float *o, float *delta) {                                                               \
        F read[VECTORS], sum[VECTORS], d[VECTORS], by = all_f(keep);                                                     \
        for (int u = 0; u < VECTORS; u++) read[u] = sum[u] = all_f(0);                                                   \
        for (int64_t i = 0; i < n; i++)                                                                                  \
            for (int u = 0; u < VECTORS; u++) read[u] = fma_f(all_f(k[i]), load_f(s + i * stride + u * LANES) * by, read[u]); \
        for (int u = 0; u < VECTORS; u++) {                                                                              \
            d[u] = all_f(beta) * (load_f(v + u * LANES) - read[u]);                                                      \
            if (delta) save_f(delta + u * LANES, d[u]);                                                                  \
        }                                                                                                                \
        for (int64_t i = 0; i < n; i++)                                                                                  \
            for (int u = 0; u < VECTORS; u++) {                                                                          \
                F next = fma_f(all_f(k[i]), d[u], load_f(s + i * stride + u * LANES) * by);                              \
                save_f(s + i * stride + u * LANES, next);                                                                \
                sum[u] = fma_f(all_f(q[i]), next, sum[u]);                                                               \
            }                                                                                                            \
        for (int u = 0; u < VECTORS; u++) save_f(o + u * LANES, sum[u]);                                                 \
    }

STEP(step_four, 4)
STEP(step_one, 1)

static void step_column(float *s, int64_t stride, int64_t n, const float *q, const float *k, float v, float keep,
                        float beta, float *o, float *delta) {
    float read = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) read = fma_1(k[i], s[i * stride] * keep, read);
    float d = beta * (v - read);
    if (delta) *delta = d;
    for (int64_t i = 0; i < n; i++) {
        s[i * stride] = fma_1(k[i], d, s[i * stride] * keep);
        sum = fma_1(q[i], s[i * stride], sum);
    }
    *o = sum;
}

/* copy: NULL, or room for the columns, which are then run there. */
static void run_columns(const Delta *d, int64_t segment, int64_t head, int64_t first, int64_t count, float *copy) {
    const DeltaLayer *l = d->l;
    int64_t slot = d->slots[segment], start = d->starts[segment], key = head % l->key_heads * l->key_dim;
    int64_t stride = copy ? count : l->value_dim;
    float *state = d->states + slot * d->state_slot + head * l->key_dim * l->value_dim + first;
    if (copy) {
        for (int64_t i = 0; i < l->key_dim; i++) memcpy(copy + i * stride, state + i * l->value_dim, (size_t)count * 4);
        state = copy;
    }
    for (int64_t row = start; row < d->starts[segment + 1]; row++) {
        int64_t at = row * l->value_heads + head;
        float *q = d->mixed + row * d->channels + key, *k = q + d->keys;
        float *v = d->mixed + row * d->channels + 2 * d->keys + head * l->value_dim + first;
        float *delta = NULL, keep = expf(d->g[at]), beta = d->beta[at];
        if (d->rewind_log) delta = d->rewind_log->delta + ((slot * d->rewind_log->rows + row - start) * l->value_heads + head) * l->value_dim + first;
        /* the output takes the place of v, which no other code reads */
        if (count == 4 * LANES)
            step_four(state, stride, l->key_dim, q, k, v, keep, beta, v, delta);
        else if (count == LANES)
            step_one(state, stride, l->key_dim, q, k, v, keep, beta, v, delta);
        else
            for (int64_t c = 0; c < count; c++)
                step_column(state + c, stride, l->key_dim, q, k, v[c], keep, beta, v + c, delta ? delta + c : NULL);
    }
}

/* The columns of a head in runs of four vectors, then of one, then what is left. */
static int64_t runs_of(int64_t columns) { return columns / (4 * LANES) + columns % (4 * LANES) / LANES + (columns % LANES > 0); }

static int64_t run_at(int64_t columns, int64_t number, int64_t *count) {
    int64_t fours = columns / (4 * LANES), ones = columns % (4 * LANES) / LANES;
    *count = number < fours ? 4 * LANES : number < fours + ones ? LANES : columns % LANES;
    return number < fours ? number * 4 * LANES : fours * 4 * LANES + (number - fours) * LANES;
}

static void keep_rows(const Delta *d, int64_t segment, int64_t head) {
    const DeltaLayer *l = d->l;
    int64_t slot = d->slots[segment], start = d->starts[segment], stop = d->starts[segment + 1];
    for (int64_t row = start; row < stop; row++) {
        int64_t to = slot * d->rewind_log->rows + row - start;
        d->rewind_log->g[to * l->value_heads + head] = d->g[row * l->value_heads + head];
        if (head < l->key_heads)
            memcpy(d->rewind_log->k + (to * l->key_heads + head) * l->key_dim,
                   d->mixed + row * d->channels + d->keys + head * l->key_dim, (size_t)l->key_dim * 4);
    }
}

static void mix_heads(void *work) {
    Delta *d = work;
    const DeltaLayer *l = d->l;
    int64_t runs = runs_of(l->value_dim), piece;
    float *copy = d->rewind_log ? d->copies + atomic_fetch_add(&d->places.next, 1) * l->key_dim * 4 * LANES : NULL;
    while ((piece = claim_pieces(&d->mixed_heads, 1, runs * l->value_heads * d->segments)) >= 0) {
        int64_t segment = piece / runs / l->value_heads, head = piece / runs % l->value_heads, count;
        int64_t first = run_at(l->value_dim, piece % runs, &count);
        if (d->starts[segment] == d->starts[segment + 1]) continue;
        if (d->rewind_log && piece % runs == 0) keep_rows(d, segment, head);
        run_columns(d, segment, head, first, count, copy);
    }
}

/* ---- behind it ---------------------------------------------------------------------------------------------------- */

static void gate_head(const float *o, const float *z, const DeltaLayer *l, float *to) {
    norm_row(o, l->norm, l->eps, l->value_dim, to);
    int64_t i = 0;
    for (; i + LANES <= l->value_dim; i += LANES) save_f(to + i, load_f(to + i) * silu_f(load_f(z + i)));
    for (; i < l->value_dim; i++) to[i] *= z[i] / (1 + expf(-z[i]));
}

static void gate_rows(void *work) {
    Delta *d = work;
    int64_t heads = d->l->value_heads, dim = d->l->value_dim, row;
    while ((row = claim_pieces(&d->normed, 1, d->rows)) >= 0)
        for (int64_t h = 0; h < heads; h++) {
            int64_t at = row * heads * dim + h * dim;
            const float *o = d->mixed + row * d->channels + 2 * d->keys + h * dim;
            if (d->z)
                gate_head(o, d->z + at, d->l, d->out + at);
            else
                memcpy(d->out + at, o, (size_t)dim * 4);
        }
}

static void share_if(int many, Task task, Delta *d) {
    if (many)
        share(task, d);
    else
        task(d);
}

/* Without z the output is not normed. rewind_log: NULL, or where the rows go, and the state stays. window_slot, state_slot:
values from one slot to the next. */
void delta_run(int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t width, const float *taps,
               const float *decay, const float *dt_bias, const float *norm, float eps, const float *inputs, const float *a,
               const float *b, const float *z, const int32_t *starts, const int32_t *slots, int64_t segments, int64_t rows,
               float *windows, int64_t window_slot, float *states, int64_t state_slot, const RewindLog *rewind_log, float *out) {
    const DeltaLayer layer = {key_heads, value_heads, key_dim, value_dim, width, taps, decay, dt_bias, norm, eps}, *l = &layer;
    int64_t keys = key_heads * key_dim, channels = 2 * keys + value_heads * value_dim;
    Delta d = {.l = l, .inputs = inputs, .a = a, .b = b, .z = z, .starts = starts, .slots = slots, .segments = segments,
               .rows = rows, .channels = channels, .keys = keys, .windows = windows, .window_slot = window_slot, .states = states,
               .state_slot = state_slot, .out = out, .rewind_log = rewind_log};
    pool_enter();
    d.mixed = scratch(INNER, rows * (channels + 2 * value_heads) * 4);
    d.g = d.mixed + rows * channels;
    d.beta = d.g + rows * value_heads;
    if (rewind_log) d.copies = scratch(SHARES, pool_width() * key_dim * 4 * LANES * 4);
    share(convolve_pieces, &d);
    share_if(rows > 1, prepare_rows, &d);
    share(mix_heads, &d);
    share_if(rows > 1, gate_rows, &d);
    pool_leave();
}

void delta_run_call(const Word *w) {
    delta_run(w[0].i, w[1].i, w[2].i, w[3].i, w[4].i, w[5].p, w[6].p, w[7].p, w[8].p, w[9].f, w[10].p, w[11].p,
              w[12].p, w[13].p, w[14].p, w[15].p, w[16].i, w[17].i, w[18].p, w[19].i, w[20].p, w[21].i, w[22].p,
              w[23].p);
}

/* ---- rewind ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const DeltaLayer *l;
    const RewindLog *log;
    int64_t slot, count;
    float *states; /* of the slot */
    Counter moved;
} Replay;

enum { AT_ONCE = 8 }; /* rows */

/* Some rows on VECTORS vectors of columns of a state, every value of which is loaded and saved once. */
#define MOVE(NAME, VECTORS)                                                                                              \
    INLINE void NAME(float *s, int64_t stride, int64_t n, const float *k, int64_t k_stride, const float *delta,          \
                     int64_t delta_stride, const float *keep, int64_t rows) {                                            \
        F d[AT_ONCE][VECTORS];                                                                                           \
        for (int64_t row = 0; row < rows; row++)                                                                         \
            for (int u = 0; u < VECTORS; u++) d[row][u] = load_f(delta + row * delta_stride + u * LANES);                \
        for (int64_t i = 0; i < n; i++, s += stride) {                                                                   \
            F x[VECTORS];                                                                                                \
            for (int u = 0; u < VECTORS; u++) x[u] = load_f(s + u * LANES);                                              \
            for (int64_t row = 0; row < rows; row++)                                                                     \
                for (int u = 0; u < VECTORS; u++) x[u] = fma_f(all_f(k[row * k_stride + i]), d[row][u], x[u] * all_f(keep[row])); \
            for (int u = 0; u < VECTORS; u++) save_f(s + u * LANES, x[u]);                                               \
        }                                                                                                                \
    }

MOVE(move_four, 4)
MOVE(move_one, 1)

static void move_column(float *s, int64_t stride, int64_t n, const float *k, int64_t k_stride, const float *delta,
                        int64_t delta_stride, const float *keep, int64_t rows) {
    for (int64_t i = 0; i < n; i++, s += stride)
        for (int64_t row = 0; row < rows; row++) *s = fma_1(k[row * k_stride + i], delta[row * delta_stride], *s * keep[row]);
}

/* Rows [first, first + count) on one head's state. */
static void move_on(const Replay *r, int64_t head, int64_t first, int64_t count) {
    const DeltaLayer *l = r->l;
    int64_t at = r->slot * r->log->rows + first, keys = l->key_heads * l->key_dim, inner = l->value_heads * l->value_dim;
    const float *k = r->log->k + at * keys + head % l->key_heads * l->key_dim;
    const float *delta = r->log->delta + at * inner + head * l->value_dim;
    float *s = r->states + head * l->key_dim * l->value_dim, keep[AT_ONCE];
    for (int64_t row = 0; row < count; row++) keep[row] = expf(r->log->g[(at + row) * l->value_heads + head]);
    int64_t c = 0;
    for (; c + 4 * LANES <= l->value_dim; c += 4 * LANES)
        move_four(s + c, l->value_dim, l->key_dim, k, keys, delta + c, inner, keep, count);
    for (; c + LANES <= l->value_dim; c += LANES) move_one(s + c, l->value_dim, l->key_dim, k, keys, delta + c, inner, keep, count);
    for (; c < l->value_dim; c++) move_column(s + c, l->value_dim, l->key_dim, k, keys, delta + c, inner, keep, count);
}

static void move_heads(void *work) {
    Replay *r = work;
    int64_t head;
    while ((head = claim_pieces(&r->moved, 1, r->l->value_heads)) >= 0)
        for (int64_t row = 0; row < r->count; row += AT_ONCE)
            move_on(r, head, row, r->count - row < AT_ONCE ? r->count - row : AT_ONCE);
}

static void put_window(const Replay *r, float *window) {
    const DeltaLayer *l = r->l;
    int64_t before = l->width - 1, channels = 2 * l->key_heads * l->key_dim + l->value_heads * l->value_dim;
    for (int64_t i = 0; i < before; i++) {
        int64_t from = r->count + i; /* in the window, then the block's inputs */
        const float *row = from < before ? r->log->windows + (r->slot * before + from) * channels
                                         : r->log->inputs + (r->slot * r->log->rows + from - before) * channels;
        memcpy(window + i * channels, row, (size_t)channels * 4);
    }
}

/* Moves the state of a slot on by the first `count` rows of its last block, bit for bit as delta_run does without a log. */
void delta_replay(int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t width, const RewindLog *rewind_log,
                  int64_t slot, int64_t count, float *states, int64_t state_slot, float *windows, int64_t window_slot) {
    const DeltaLayer layer = {.key_heads = key_heads, .value_heads = value_heads, .key_dim = key_dim, .value_dim = value_dim,
                              .width = width};
    Replay r = {.l = &layer, .log = rewind_log, .slot = slot, .count = count, .states = states + slot * state_slot};
    pool_enter();
    share(move_heads, &r);
    pool_leave();
    put_window(&r, windows + slot * window_slot);
}
