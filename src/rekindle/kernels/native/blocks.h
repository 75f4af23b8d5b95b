/* Weights as the products read them, made from GGUF blocks by `pack.c`.

Sixteen rows of a matrix lie side by side (a group), so that a lane is a row and nothing is summed across lanes. Codes of
32 columns (a block) are words of four columns, one word per row: 64 bytes hold one word of all sixteen rows, or, of 4-bit
codes, two words (the even one in the low nibbles). Fifth bits: bit j of a byte belongs to word j. Upper two of six bits:
bits 2·(j % 4) and the next belong to word j, in the first 64 bytes for j < 4. A super is 256 columns where their blocks
have 6- or 8-bit scales beneath one factor (a 16-bit float), else 32. Values of 32 or 16 bits lie column by column. */

#ifndef BLOCKS_H
#define BLOCKS_H

#include "lanes.h"

enum { GROUP = 16, BLOCK = 32, HALF = 16, SUPER = 8 };

/* As GGUF numbers them. */
enum {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20,
    IQ4_XS = 23, BF16 = 30
};

typedef struct {
    int64_t type, rows, columns;
    const uint8_t *data; /* groups of rows behind one another; the last one is filled up with zeros */
} Matrix;

INLINE int is_float(int type) { return type == F32 || type == F16 || type == BF16; }
INLINE int is_super(int type) { return type == Q4_K || type == Q5_K || type == Q6_K || type == IQ4_XS; }
INLINE int is_signed(int type) { return type == Q8_0 || type == IQ4_NL || type == IQ4_XS; }
INLINE int has_least(int type) { return type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K; }
INLINE int has_fifth(int type) { return type == Q5_0 || type == Q5_1 || type == Q5_K; }
INLINE int scales_per_block(int type) { return type == Q6_K ? 2 : 1; }

/* What is taken off every code, as a power of two; 0: nothing. */
INLINE int offset_bits(int type) {
    return type == Q4_0 ? 3 : type == Q5_0 ? 4 : type == Q6_K ? 5 : 0;
}

/* Of one group, in bytes: a super is its factors, then its blocks, each of which is codes, high bits, scales and minimums
   behind one another; read as it lies, it comes from memory as fast as memory is. */
INLINE int code_bytes(int type) { return type == Q8_0 ? 512 : 256; }
INLINE int high_bytes(int type) { return type == Q6_K ? 128 : has_fifth(type) ? 64 : 0; }
INLINE int scale_bytes(int type) { return is_super(type) ? GROUP * scales_per_block(type) : 0; }
INLINE int least_bytes(int type) { return is_super(type) && has_least(type) ? GROUP : 0; }
INLINE int blocks_of(int type) { return is_super(type) ? SUPER : 1; }
INLINE int factor_bytes(int type) { return 2 * GROUP * (1 + has_least(type)); }
INLINE int scales_at(int type) { return code_bytes(type) + high_bytes(type); }
INLINE int leasts_at(int type) { return scales_at(type) + scale_bytes(type); }
INLINE int block_bytes(int type) { return leasts_at(type) + least_bytes(type); }
INLINE int block_at(int type, int b) { return factor_bytes(type) + b * block_bytes(type); }
INLINE int super_bytes(int type) { return block_at(type, blocks_of(type)); }

INLINE int64_t group_bytes(int type, int64_t columns) {
    if (is_float(type)) return columns * GROUP * (type == F32 ? 4 : 2);
    return columns / (BLOCK * blocks_of(type)) * super_bytes(type);
}

static const int8_t TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* The codes of block b for lanes [lane, lane + LANES): eight words of four bytes, with a sign where the type has one. */
INLINE void load_words(const int type, const uint8_t *at, int b, int lane, I w[8]) {
    const uint8_t *codes = at + block_at(type, b) + 4 * lane, *highs = codes + code_bytes(type);
    for (int j = 0; j < 8; j++) {
        if (type == Q8_0) {
            w[j] = load_i(codes + 64 * j);
            continue;
        }
        I both = load_i(codes + 64 * (j / 2));
        w[j] = (j % 2 ? (I)((U)both >> 4) : both) & all_i(0x0f0f0f0f);
        if (is_signed(type)) w[j] = look_up(TABLE, w[j]);
        if (has_fifth(type)) {
            I high = load_i(highs);
            w[j] |= (j < 4 ? high << (4 - j) : (I)((U)high >> (j - 4))) & all_i(0x10101010);
        }
        if (type == Q6_K) {
            I high = load_i(highs + 64 * (j / 4));
            int shift = 2 * (j % 4) - 4;
            w[j] |= (shift < 0 ? high << -shift : (I)((U)high >> shift)) & all_i(0x30303030);
        }
    }
}

/* Scale of codes 16·half … of block b, and what every value of it is less by. */
INLINE F load_scale(const int type, const uint8_t *at, int b, int half, int lane) {
    F factor = halves_f(at + 2 * lane);
    if (!is_super(type)) return factor;
    const uint8_t *scales = at + block_at(type, b) + scales_at(type) + GROUP * half + lane;
    return factor * (type == Q6_K || type == IQ4_XS ? signed_bytes_f(scales) : bytes_f(scales));
}

INLINE F load_least(const int type, const uint8_t *at, int b, int lane) {
    F factor = halves_f(at + 2 * GROUP + 2 * lane);
    return is_super(type) ? factor * bytes_f(at + block_at(type, b) + leasts_at(type) + lane) : -factor;
}

#endif
