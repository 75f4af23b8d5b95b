#include "products.h"
#include "program.h"

typedef struct {
    const float *x;
    const int16_t *codes;
    const float *scales, *sums;
    const int32_t *negs;
} Row;

/* ---- activations in 16 bits --------------------------------------------------------------------------------------- */

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t coded_bytes(int64_t rows, int64_t columns) {
    int64_t blocks = (columns + BLOCK - 1) / BLOCK;
    return aligned(rows * blocks * BLOCK * 2) + 2 * aligned(rows * blocks * 4) + aligned(rows * blocks * 8);
}

Coded coded_room(const float *x, int64_t stride, int64_t rows, int64_t columns, void *memory) {
    int64_t blocks = (columns + BLOCK - 1) / BLOCK;
    uint8_t *sums = (uint8_t *)memory + aligned(rows * blocks * BLOCK * 2), *scales = sums + aligned(rows * blocks * 4);
    return (Coded){x, stride, columns, memory, (float *)scales, (float *)sums, (int32_t *)(scales + aligned(rows * blocks * 4))};
}

INLINE float largest(const float *x) { /* as integers, which numbers without a sign are ordered like, and NaN above all */
    uint32_t most = 0, bits[BLOCK];
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < BLOCK; i++) {
        uint32_t size = bits[i] & 0x7fffffffu;
        most = size > most ? size : most;
    }
    float value;
    memcpy(&value, &most, 4);
    return value;
}

INLINE void lay_four(const int16_t *from, int16_t *to) {
    for (int i = 0; BYTES && i < 4; i++) {
        int upper = (from[i] + 128) >> 8;
        ((int8_t *)to)[i] = (int8_t)upper;
        ((int8_t *)to)[4 + i] = (int8_t)(from[i] - 256 * upper);
    }
    for (int i = 0; !BYTES && i < 4; i++) to[i] = from[i % 2 * 2 + i / 2];
}

/* What is no number, or infinite, makes the scale none, and with it every product of the block. */
static void encode_block(const float *x, int16_t *codes, float *scale, float *sum, int32_t *negs) {
    float most = largest(x), by = most >= 1e-30f && most - most == 0.0f ? (float)MOST_CODE / most : 0.0f;
    int16_t plain[BLOCK];
    *scale = most - most == 0.0f ? (by > 0 ? most / (float)MOST_CODE : 0.0f) : __builtin_nanf("");
    for (int i = 0; i < BLOCK; i++) plain[i] = by > 0 ? (int16_t)(int32_t)__builtin_rintf(x[i] * by) : 0;
    for (int half = 0; half < 2; half++) {
        int32_t total = 0;
        for (int i = 0; i < HALF; i++) total += plain[HALF * half + i];
        negs[half] = -total;
    }
    *sum = *scale * (float)-(negs[0] + negs[1]);
    for (int i = 0; i < BLOCK; i += 4) lay_four(plain + i, codes + i);
}

void encode_row(const Coded *c, int64_t row) {
    int64_t blocks = c->columns / BLOCK;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t at = row * blocks + b;
        encode_block(c->x + row * c->stride + b * BLOCK, c->codes + at * BLOCK, c->scales + at, c->sums + at, c->negs + 2 * at);
    }
}

/* ---- one group of sixteen rows ------------------------------------------------------------------------------------ */

/* Codes as they are multiplied: bytes without a sign, 128 more where they have one; or pairs of 16 bits. */
enum { CODES_OF_BLOCK = BYTES ? 8 : 16 };
INLINE int taken_off(const int type) { return BYTES && is_signed(type) ? 7 : offset_bits(type); } /* a power of two; 0: nothing */

INLINE void load_codes(const int type, const uint8_t *at, int b, int lane, I *w) {
    I words[8];
    load_words(type, at, b, lane, words);
    for (int j = 0; j < 8; j++) {
        if (BYTES) {
            w[j] = is_signed(type) ? words[j] ^ all_i((int32_t)0x80808080) : words[j];
        } else if (is_signed(type)) {
            w[2 * j] = (I)((S)((S)words[j] << 8) >> 8);
            w[2 * j + 1] = (I)((S)words[j] >> 8);
        } else {
            w[2 * j] = words[j] & all_i(0x00ff00ff);
            w[2 * j + 1] = (I)((U)words[j] >> 8) & all_i(0x00ff00ff);
        }
    }
}

/* start + the codes of columns [4 · first, 4 · last) times those of x. */
INLINE I sum_words(I start, const I *w, const int16_t *x, int first, int last) {
    I upper = all_i(0), second = all_i(0);
    for (int j = first; j < last; j++) {
        if (BYTES) {
            upper = dot(upper, w[j], x + 4 * j);
            start = dot(start, w[j], x + 4 * j + 2);
        } else {
            start = dot(start, w[2 * j], x + 4 * j);
            second = dot(second, w[2 * j + 1], x + 4 * j + 2);
        }
    }
    return start + (BYTES ? upper << 8 : second);
}

INLINE F add_block(const int type, F total, const I *w, const F *scale, F least, const Row *row, int64_t at) {
    const int16_t *x = row->codes + BLOCK * at;
    const int32_t *negs = row->negs + 2 * at;
    F by = all_f(row->scales[at]);
    const int bits = taken_off(type);
    if (scales_per_block(type) == 2) {
        I first = sum_words(all_i(negs[0] << bits), w, x, 0, 4), second = sum_words(all_i(negs[1] << bits), w, x, 4, 8);
        total = fma_f(to_f(first), scale[0] * by, total);
        return fma_f(to_f(second), scale[1] * by, total);
    }
    I sum = sum_words(bits ? all_i((negs[0] + negs[1]) << bits) : all_i(0), w, x, 0, 8);
    total = fma_f(to_f(sum), scale[0] * by, total);
    return has_least(type) ? fnma_f(least, all_f(row->sums[at]), total) : total;
}

enum { AHEAD = 4096 }; /* bytes */

/* The processor looks ahead by itself; prefetch instructions make it 20 to 40 % faster. */
INLINE void fetch_ahead(const uint8_t *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + AHEAD + i, 0, 3);
}

INLINE void codes_tile(const int type, const int count, const uint8_t *group, int64_t columns, const Row *rows, float (*to)[GROUP]) {
    const int per = blocks_of(type);
    const int64_t supers = columns / (BLOCK * per);
    for (int lane = 0; lane < GROUP; lane += LANES) {
        const uint8_t *at = group;
        F total[TILE];
        for (int r = 0; r < count; r++) total[r] = all_f(0);
        for (int64_t s = 0; s < supers; s++, at += super_bytes(type))
#pragma GCC unroll 1
            for (int b = 0; b < per; b++) {
                fetch_ahead(at + block_at(type, b), block_bytes(type));
                I w[CODES_OF_BLOCK];
                load_codes(type, at, b, lane, w);
                F scale[2] = {load_scale(type, at, b, 0, lane), all_f(0)}, least = all_f(0);
                if (scales_per_block(type) == 2) scale[1] = load_scale(type, at, b, 1, lane);
                if (has_least(type)) least = load_least(type, at, b, lane);
#pragma GCC unroll 16
                for (int r = 0; r < count; r++) total[r] = add_block(type, total[r], w, scale, least, rows + r, s * per + b);
            }
        for (int r = 0; r < count; r++) save_f(to[r] + lane, total[r]);
    }
}

INLINE F load_values(const int type, const uint8_t *at) {
    return type == F32 ? load_f(at) : type == F16 ? halves_f(at) : brains_f(at);
}

INLINE void values_tile(const int type, const int count, const uint8_t *group, int64_t columns, const Row *rows, float (*to)[GROUP]) {
    const int size = type == F32 ? 4 : 2;
    for (int lane = 0; lane < GROUP; lane += LANES) {
        F total[TILE];
        for (int r = 0; r < count; r++) total[r] = all_f(0);
        for (int64_t first = 0; first < columns; first += BLOCK) { /* sums of a block, then their sum: less is lost */
            int64_t last = first + BLOCK < columns ? first + BLOCK : columns;
            F part[TILE];
            for (int r = 0; r < count; r++) part[r] = all_f(0);
            for (int64_t c = first; c < last; c++) {
                F w = load_values(type, group + size * (c * GROUP + lane));
                for (int r = 0; r < count; r++) part[r] = fma_f(w, all_f(rows[r].x[c]), part[r]);
            }
            for (int r = 0; r < count; r++) total[r] += part[r];
        }
        for (int r = 0; r < count; r++) save_f(to[r] + lane, total[r]);
    }
}

/* Compiled for 1, 2, 4, 8 and, where sums of codes fit the registers, 16 rows; others are put together. */
#define RUN(kind, type, n, most)                                                                                      \
    for (; count >= n && most >= n && TILE >= n; count -= n, rows += n, to += n)                                      \
        kind(type, most >= n && TILE >= n ? n : 1, group, columns, rows, to);

#define BY_COUNT(kind, type, most)                                                                                    \
    static void type##_tile(const uint8_t *group, int64_t columns, const Row *rows, int count, float (*to)[GROUP]) {  \
        RUN(kind, type, 16, most)                                                                                     \
        RUN(kind, type, 8, most)                                                                                      \
        RUN(kind, type, 4, most)                                                                                      \
        RUN(kind, type, 2, most)                                                                                      \
        RUN(kind, type, 1, most)                                                                                      \
    }

BY_COUNT(codes_tile, Q4_0, 16)
BY_COUNT(codes_tile, Q4_1, 16)
BY_COUNT(codes_tile, Q5_0, 16)
BY_COUNT(codes_tile, Q5_1, 16)
BY_COUNT(codes_tile, Q8_0, 16)
BY_COUNT(codes_tile, Q4_K, 16)
BY_COUNT(codes_tile, Q5_K, 16)
BY_COUNT(codes_tile, Q6_K, 16)
BY_COUNT(codes_tile, IQ4_NL, 16)
BY_COUNT(codes_tile, IQ4_XS, 16)
BY_COUNT(values_tile, F32, 8)
BY_COUNT(values_tile, F16, 8)
BY_COUNT(values_tile, BF16, 8)

typedef void (*TileOf)(const uint8_t *, int64_t, const Row *, int, float (*)[GROUP]);

static const TileOf TILES[BF16 + 1] = {
    [Q4_0] = Q4_0_tile, [Q4_1] = Q4_1_tile, [Q5_0] = Q5_0_tile, [Q5_1] = Q5_1_tile,     [Q8_0] = Q8_0_tile,
    [Q4_K] = Q4_K_tile, [Q5_K] = Q5_K_tile, [Q6_K] = Q6_K_tile, [IQ4_NL] = IQ4_NL_tile, [IQ4_XS] = IQ4_XS_tile,
    [F32] = F32_tile,   [F16] = F16_tile,   [BF16] = BF16_tile,
};

void multiply_tile(const Matrix *m, int64_t g, const Coded *x, const int32_t *numbers, int count, float (*to)[GROUP]) {
    Row rows[TILE];
    int64_t blocks = x->columns / BLOCK;
    for (int r = 0; r < count; r++) {
        int64_t n = numbers[r];
        rows[r] = (Row){x->x + n * x->stride, x->codes + n * blocks * BLOCK, x->scales + n * blocks, x->sums + n * blocks,
                        x->negs + 2 * n * blocks};
    }
    TILES[m->type](m->data + g * group_bytes((int)m->type, m->columns), m->columns, rows, count, to);
}

/* ---- whole matrices ----------------------------------------------------------------------------------------------- */

enum { FEW = 16, AT_ONCE = 64 }; /* rows of x: up to FEW in one go, else AT_ONCE, which stay in the second cache */

typedef struct {
    const Matrix *const *matrices;
    float *const *outs; /* [rows, rows of the matrix] each; of gated ones [rows, width] */
    int count;
    int gated; /* two matrices of one shape: silu(first) · second */
    int64_t rows, groups, step, steps;
    Coded x;
    Counter encoded, done;
} Product;

static void encode_rows(void *work) {
    Product *p = work;
    int64_t row;
    while ((row = claim_pieces(&p->encoded, 1, p->rows)) >= 0) encode_row(&p->x, row);
}

static void write_tile(float (*from)[GROUP], int64_t row, int count, int64_t g, int64_t width, float *out) {
    int64_t first = g * GROUP, lanes = width - first < GROUP ? width - first : GROUP;
    for (int r = 0; r < count; r++) memcpy(out + (row + r) * width + first, from[r], (size_t)lanes * 4);
}

static void gate_tile(float (*gate)[GROUP], float (*up)[GROUP], int count) {
    for (int r = 0; r < count; r++)
        for (int lane = 0; lane < GROUP; lane += LANES)
            save_f(gate[r] + lane, silu_f(load_f(gate[r] + lane)) * load_f(up[r] + lane));
}

static void multiply_rows(Product *p, int64_t g, int64_t row, int64_t stop) {
    int which = 0;
    for (; g >= (p->matrices[which]->rows + GROUP - 1) / GROUP; which++) g -= (p->matrices[which]->rows + GROUP - 1) / GROUP;
    float to[TILE][GROUP], up[TILE][GROUP];
    for (; row < stop; row += TILE) {
        int32_t numbers[TILE];
        int count = stop - row < TILE ? (int)(stop - row) : TILE;
        for (int r = 0; r < count; r++) numbers[r] = (int32_t)(row + r);
        multiply_tile(p->matrices[which], g, &p->x, numbers, count, to);
        if (p->gated) {
            multiply_tile(p->matrices[1], g, &p->x, numbers, count, up);
            gate_tile(to, up, count);
        }
        write_tile(to, row, count, g, p->matrices[which]->rows, p->outs[which]);
    }
}

static void multiply_pieces(void *work) {
    Product *p = work;
    int64_t at_once = p->rows > FEW ? AT_ONCE : FEW, turns = (p->rows + at_once - 1) / at_once, piece;
    while ((piece = claim_pieces(&p->done, 1, turns * p->steps)) >= 0) {
        int64_t row = piece / p->steps * at_once, first = piece % p->steps * p->step;
        int64_t stop = row + at_once < p->rows ? row + at_once : p->rows;
        for (int64_t g = first; g < first + p->step && g < p->groups; g++) multiply_rows(p, g, row, stop);
    }
}

/* A few rows wait for memory, which likes long runs; more of them compute, and end together if pieces are small. */
static int64_t piece_size(int64_t groups, int64_t rows) {
    int64_t most = rows > ALONE ? 4 : 16, step = groups / ((rows > ALONE ? 32 : 8) * pool_width());
    return step < 1 ? 1 : step > most ? most : step;
}

static void run_product(Product *p) {
    const Matrix *first = p->matrices[0];
    int coded = 0;
    for (int i = 0; i < p->count; i++) {
        if (!p->gated || i == 0) p->groups += (p->matrices[i]->rows + GROUP - 1) / GROUP;
        coded |= !is_float((int)p->matrices[i]->type);
    }
    p->x = coded_room(p->x.x, p->x.stride, p->rows, first->columns, scratch(CODES, coded_bytes(p->rows, first->columns)));
    if (coded && p->rows > ALONE)
        share(encode_rows, p);
    else if (coded)
        encode_rows(p);
    p->step = piece_size(p->groups, p->rows);
    p->steps = (p->groups + p->step - 1) / p->step;
    share(multiply_pieces, p);
}

void multiply_inside(const Matrix *matrix, const float *x, int64_t stride, int64_t rows, float *out) {
    Product product = {.matrices = &matrix, .outs = &out, .count = 1, .rows = rows, .x = {.x = x, .stride = stride}};
    run_product(&product);
}

/* x [rows, columns], `stride` floats apart, through each of the matrices. */
void multiply_all(const Matrix *const *matrices, int64_t count, const float *x, int64_t stride, int64_t rows, float *const *outs) {
    Product product = {.matrices = matrices, .outs = outs, .count = (int)count, .rows = rows, .x = {.x = x, .stride = stride}};
    pool_enter();
    run_product(&product);
    pool_leave();
}

void multiply_all_call(const Word *w) { multiply_all(w[0].p, w[1].i, w[2].p, w[3].i, w[4].i, w[5].p); }

void multiply_gated(const Matrix *gate, const Matrix *up, const float *x, int64_t stride, int64_t rows, float *out) {
    const Matrix *both[2] = {gate, up};
    float *outs[1] = {out};
    Product product = {.matrices = both, .outs = outs, .count = 2, .gated = 1, .rows = rows, .x = {.x = x, .stride = stride}};
    pool_enter();
    run_product(&product);
    pool_leave();
}

void multiply_gated_call(const Word *w) { multiply_gated(w[0].p, w[1].p, w[2].p, w[3].i, w[4].i, w[5].p); }
