/* GGUF rows into groups of sixteen, and groups into values. */

#include "blocks.h"
#include "pool.h"
#include "program.h"

typedef struct {
    uint8_t codes[BLOCK]; /* as they are multiplied, less the offset */
    uint8_t scales[2], least;
    uint16_t factor, least_factor; /* 16-bit floats */
} Block;

static int64_t stored_bytes(int type) { /* of a block, or of a super */
    switch (type) {
    case Q4_0: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case IQ4_NL: return 18;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    case IQ4_XS: return 136;
    }
    return 0;
}

static uint16_t short_at(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

static void read_nibbles(const uint8_t *from, uint8_t *codes) { /* columns 0 … 15 low, 16 … 31 high */
    for (int i = 0; i < 16; i++) {
        codes[i] = from[i] & 15;
        codes[16 + i] = from[i] >> 4;
    }
}

static void read_simple(int type, const uint8_t *from, Block *to) {
    to->factor = short_at(from);
    from += 2;
    if (has_least(type)) {
        to->least_factor = short_at(from);
        from += 2;
    }
    if (type == Q8_0) {
        memcpy(to->codes, from, BLOCK);
        return;
    }
    uint32_t fifth = 0;
    if (has_fifth(type)) {
        memcpy(&fifth, from, 4);
        from += 4;
    }
    read_nibbles(from, to->codes);
    for (int i = 0; i < BLOCK; i++) to->codes[i] |= (fifth >> i & 1) << 4;
}

static void read_scaled_min(int type, const uint8_t *from, int b, Block *to) { /* Q4_K, Q5_K */
    const uint8_t *s = from + 4, *codes = from + (type == Q5_K ? 48 : 16) + 32 * (b / 2), *fifth = from + 16;
    to->factor = short_at(from);
    to->least_factor = short_at(from + 2);
    to->scales[0] = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | s[b - 4] >> 6 << 4;
    to->least = b < 4 ? s[b + 4] & 63 : s[b + 4] >> 4 | s[b] >> 6 << 4;
    for (int i = 0; i < BLOCK; i++) {
        to->codes[i] = b % 2 ? codes[i] >> 4 : codes[i] & 15;
        if (type == Q5_K) to->codes[i] |= (fifth[i] >> b & 1) << 4;
    }
}

static void read_six(const uint8_t *from, int b, Block *to) { /* Q6_K */
    int half = b / 4, part = b % 4;
    const uint8_t *low = from + 64 * half + 32 * (part % 2), *high = from + 128 + 32 * half;
    for (int i = 0; i < BLOCK; i++)
        to->codes[i] = (part < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * part & 3) << 4;
    memcpy(to->scales, from + 192 + 2 * b, 2);
    to->factor = short_at(from + 208);
}

static void read_looked_up(const uint8_t *from, int b, Block *to) { /* IQ4_XS */
    int low = from[4 + b / 2] >> 4 * (b % 2) & 15, high = short_at(from + 2) >> 2 * b & 3;
    to->factor = short_at(from);
    to->scales[0] = (uint8_t)(int8_t)((low | high << 4) - 32);
    read_nibbles(from + 8 + 16 * b, to->codes);
}

static void read_block(int type, const uint8_t *super, int b, Block *to) {
    if (type == Q6_K)
        read_six(super, b, to);
    else if (type == IQ4_XS)
        read_looked_up(super, b, to);
    else if (is_super(type))
        read_scaled_min(type, super, b, to);
    else
        read_simple(type, super, to);
}

static void write_block(int type, uint8_t *super, int b, int row, const Block *from) {
    uint8_t *block = super + block_at(type, b), *codes = block + 4 * row, *high = codes + code_bytes(type);
    for (int i = 0; i < BLOCK; i++) {
        int j = i / 4, k = i % 4, code = from->codes[i];
        if (type == Q8_0)
            codes[64 * j + k] = (uint8_t)code;
        else
            codes[64 * (j / 2) + k] |= (uint8_t)((code & 15) << 4 * (j % 2));
        if (has_fifth(type)) high[k] |= (uint8_t)((code >> 4) << j);
        if (type == Q6_K) high[64 * (j / 4) + k] |= (uint8_t)((code >> 4) << 2 * (j % 4));
    }
    if (is_super(type)) {
        int count = scales_per_block(type);
        for (int n = 0; n < count; n++) block[scales_at(type) + GROUP * n + row] = from->scales[n];
        if (has_least(type)) block[leasts_at(type) + row] = from->least;
    }
    memcpy(super + 2 * row, &from->factor, 2);
    if (has_least(type)) memcpy(super + 2 * GROUP + 2 * row, &from->least_factor, 2);
}

static void pack_values(int size, const uint8_t *from, int row, int64_t columns, uint8_t *to) {
    for (int64_t c = 0; c < columns; c++) memcpy(to + size * (c * GROUP + row), from + size * c, (size_t)size);
}

static void pack_row(int type, const uint8_t *from, int row, int64_t columns, uint8_t *to) {
    if (is_float(type)) {
        pack_values(type == F32 ? 4 : 2, from, row, columns, to);
        return;
    }
    int64_t supers = columns / (BLOCK * blocks_of(type));
    for (int64_t s = 0; s < supers; s++, from += stored_bytes(type), to += super_bytes(type))
        for (int b = 0; b < blocks_of(type); b++) {
            Block block = {0};
            read_block(type, from, b, &block);
            write_block(type, to, b, row, &block);
        }
}

typedef struct {
    int type;
    const uint8_t *from;
    int64_t stride, rows, columns;
    uint8_t *to;
    Counter groups;
} Packing;

static void pack_groups(void *work) {
    Packing *p = work;
    int64_t bytes = group_bytes(p->type, p->columns), groups = (p->rows + GROUP - 1) / GROUP, g;
    while ((g = claim_pieces(&p->groups, 1, groups)) >= 0) {
        uint8_t *to = p->to + g * bytes;
        memset(to, 0, (size_t)bytes);
        for (int row = 0; row < GROUP && g * GROUP + row < p->rows; row++)
            pack_row(p->type, p->from + (g * GROUP + row) * p->stride, row, p->columns, to);
    }
}

/* Rows of a GGUF tensor, `stride` bytes apart -> groups; the last one is filled up with zeros. */
void pack_matrix(int64_t type, const uint8_t *from, int64_t stride, int64_t rows, int64_t columns, uint8_t *to) {
    Packing packing = {(int)type, from, stride, rows, columns, to, {0}};
    pool_enter();
    share(pack_groups, &packing);
    pool_leave();
}

int64_t packed_group_bytes(int64_t type, int64_t columns) { return group_bytes((int)type, columns); }

/* ---- values ------------------------------------------------------------------------------------------------------ */

static void float_values(int type, const uint8_t *group, int row, int64_t columns, float *to) {
    for (int64_t c = 0; c < columns; c++) {
        const uint8_t *at = group + (type == F32 ? 4 : 2) * (c * GROUP + row);
        if (type == F32) {
            memcpy(to + c, at, 4);
        } else if (type == F16) {
            to[c] = half_to_float(short_at(at));
        } else {
            uint32_t bits = (uint32_t)short_at(at) << 16;
            memcpy(to + c, &bits, 4);
        }
    }
}

static void block_values(int type, const uint8_t *super, int b, int row, float *to) {
    int lane = row / LANES * LANES, at = row % LANES, offset = offset_bits(type) ? 1 << offset_bits(type) : 0;
    I w[8];
    load_words(type, super, b, lane, w);
    for (int i = 0; i < BLOCK; i++) {
        F scale = load_scale(type, super, b, scales_per_block(type) == 2 ? i / HALF : 0, lane);
        int32_t byte = w[i / 4][at] >> 8 * (i % 4), code = is_signed(type) ? (int8_t)byte : (uint8_t)byte;
        volatile float scaled = scale[at] * (float)(code - offset); /* rounded here, as in the definition of the type */
        to[i] = scaled - (has_least(type) ? load_least(type, super, b, lane)[at] : 0);
    }
}

/* The values of one row of a packed matrix. */
static void row_values(const Matrix *m, int64_t row, float *to) {
    int type = (int)m->type;
    const uint8_t *group = m->data + row / GROUP * group_bytes(type, m->columns);
    if (is_float(type)) {
        float_values(type, group, (int)(row % GROUP), m->columns, to);
        return;
    }
    for (int64_t c = 0; c < m->columns; c += BLOCK) {
        int64_t block = c / BLOCK;
        const uint8_t *super = group + block / blocks_of(type) * super_bytes(type);
        block_values(type, super, (int)(block % blocks_of(type)), (int)(row % GROUP), to + c);
    }
}

/* Whether the table has this row; if not, none of its values are numbers. */
static int has_row(int64_t rows, int32_t id, int64_t columns, float *to) {
    if (id >= 0 && id < rows) return 1;
    for (int64_t c = 0; c < columns; c++) to[c] = __builtin_nanf("");
    return 0;
}

/* Rows ids[0 … count) of a packed matrix as values [count, columns]. */
void packed_values(const Matrix *m, const int32_t *ids, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++, to += m->columns)
        if (has_row(m->rows, ids[i], m->columns, to)) row_values(m, ids[i], to);
}

void packed_values_call(const Word *w) { packed_values(w[0].p, w[1].p, w[2].i, w[3].p); }

/* Rows ids[0 … count) of `rows` rows as a file stores them -> values [count, columns]. */
void stored_values(int64_t type, const uint8_t *from, int64_t stride, int64_t rows, int64_t columns, const int32_t *ids,
                   int64_t count, float *to) {
    pool_enter();
    int64_t bytes = group_bytes((int)type, columns);
    uint8_t *group = scratch(INNER, bytes);
    Matrix one = {type, 1, columns, group};
    for (int64_t i = 0; i < count; i++, to += columns) {
        if (!has_row(rows, ids[i], columns, to)) continue;
        memset(group, 0, (size_t)bytes);
        pack_row((int)type, from + ids[i] * stride, 0, columns, group);
        row_values(&one, 0, to);
    }
    pool_leave();
}

void stored_values_call(const Word *w) { stored_values(w[0].i, w[1].p, w[2].i, w[3].i, w[4].i, w[5].p, w[6].i, w[7].p); }
