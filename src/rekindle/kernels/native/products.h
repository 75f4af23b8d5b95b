/* Rows of activations times packed matrices.

Every number of a result is computed by itself, in one order: it depends on its row of x and its row of the matrix, not on
the rows beside it, the threads or (where it has a fused multiply-add) the instruction set. */

#ifndef PRODUCTS_H
#define PRODUCTS_H

#include "blocks.h"
#include "pool.h"

enum { TILE = LANES == 16 ? 16 : 4 }; /* rows of x that are multiplied at once */
enum { ALONE = 4 };                   /* rows that one thread prepares sooner than it asks others */

/* Rows of x as the integer products take them: 16-bit codes, the largest of 32 columns is ±MOST_CODE. Codes of four columns lie
   together: where lanes multiply bytes, the four upper bytes and then the four lower ones, each with a sign; else the first,
   the third, the second and the fourth. */
enum { BYTES = LANES == 16 };
enum { MOST_CODE = 127 * 256 + 127 }; /* 256 · upper + lower */

typedef struct {
    const float *x; /* [rows, columns], for matrices of floats */
    int64_t stride, columns;
    int16_t *codes;  /* [rows, columns] */
    float *scales;   /* [rows, columns / 32] */
    float *sums;     /* of the coded values, [rows, columns / 32] */
    int32_t *negs;   /* minus the sum of the codes, [rows, columns / 16] */
} Coded;

/* The codes of so many rows, in memory of coded_bytes. */
Coded coded_room(const float *x, int64_t stride, int64_t rows, int64_t columns, void *memory);
int64_t coded_bytes(int64_t rows, int64_t columns);
void encode_row(const Coded *c, int64_t row);

/* Rows numbers[0 … count) of x through group g of the matrix; count is at most TILE. */
void multiply_tile(const Matrix *m, int64_t g, const Coded *x, const int32_t *numbers, int count, float (*to)[GROUP]);

/* x [rows, columns] through the matrix, by the threads that have entered the pool. */
void multiply_inside(const Matrix *matrix, const float *x, int64_t stride, int64_t rows, float *out);

#endif
