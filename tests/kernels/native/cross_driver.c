/* Products and attention for another machine: cases come on stdin, results go to stdout (test_neon.py knows both). */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t type, rows, columns;
    const uint8_t *data;
} Matrix;

void pool_resize(int64_t threads);
void pack_matrix(int64_t type, const uint8_t *from, int64_t stride, int64_t rows, int64_t columns, uint8_t *to);
int64_t packed_group_bytes(int64_t type, int64_t columns);
void packed_values(const Matrix *m, const int32_t *ids, int64_t count, float *to);
void multiply_all(const Matrix *const *matrices, int64_t count, const float *x, int64_t stride, int64_t rows, float *const *outs);
void attention_run(const float *q, int64_t heads, const void *kv, int64_t kv_type, int64_t kv_heads, int64_t dim,
                   const int32_t *starts, int64_t segments, const int32_t *places, const int32_t *tables, int64_t table_width,
                   int64_t most_rows, float scale, const float *gate, int64_t gate_stride, int64_t gate_head_stride, float *out);

static void *take(int64_t bytes) {
    void *memory = malloc((size_t)bytes);
    if (!memory || fread(memory, 1, (size_t)bytes, stdin) != (size_t)bytes) exit(3);
    return memory;
}

static void give(const float *values, int64_t count) {
    if (fwrite(values, 4, (size_t)count, stdout) != (size_t)count) exit(4);
}

/* The values of the matrix; x through it, all rows together, then one by one. */
static void products(void) {
    int64_t *n = take(5 * 8), type = n[0], outs = n[1], columns = n[2], bytes = n[3], rows = n[4];
    uint8_t *raw = take(outs * bytes), *data = malloc((size_t)((outs + 15) / 16 * packed_group_bytes(type, columns)));
    float *x = take(rows * columns * 4), *out = malloc((size_t)(rows * outs * 4)), *values = malloc((size_t)(outs * columns * 4));
    Matrix matrix = {type, outs, columns, data};
    const Matrix *const one[1] = {&matrix};
    pack_matrix(type, raw, bytes, outs, columns, data);
    for (int32_t i = 0; i < outs; i++) packed_values(&matrix, &i, 1, values + i * columns);
    give(values, outs * columns);
    memset(out, 255, (size_t)(rows * outs * 4));
    multiply_all(one, 1, x, columns, rows, &out);
    give(out, rows * outs);
    for (int64_t row = 0; row < rows; row++) {
        float *to = out + row * outs;
        multiply_all(one, 1, x + row * columns, columns, 1, &to);
    }
    give(out, rows * outs);
}

/* Attention of rows behind `place` over float32 pages that follow one another: together, then one by one. */
static void attention(void) {
    int64_t *n = take(5 * 8), heads = n[0], kv_heads = n[1], dim = n[2], place = n[3], rows = n[4], pages = (place + rows + 63) / 64;
    float *kv = take(pages * 2 * 64 * kv_heads * dim * 4), *q = take(rows * heads * dim * 4), *out = malloc((size_t)(rows * heads * dim * 4));
    int32_t *places = malloc((size_t)rows * 4), *table = malloc((size_t)pages * 4), all[2] = {0, (int32_t)rows}, one[2] = {0, 1};
    for (int64_t i = 0; i < rows; i++) places[i] = (int32_t)(place + i);
    for (int64_t i = 0; i < pages; i++) table[i] = (int32_t)i;
    attention_run(q, heads, kv, 0, kv_heads, dim, all, 1, places, table, pages, 256, 0.2f, NULL, 0, 0, out);
    give(out, rows * heads * dim);
    for (int64_t row = 0, size = heads * dim; row < rows; row++)
        attention_run(q + row * size, heads, kv, 0, kv_heads, dim, one, 1, places + row, table, pages, 256, 0.2f, NULL, 0, 0, out + row * size);
    give(out, rows * heads * dim);
}

int main(void) {
    int64_t kind;
    pool_resize(2);
    while (fread(&kind, 8, 1, stdin) == 1) kind ? attention() : products();
    return 0;
}
