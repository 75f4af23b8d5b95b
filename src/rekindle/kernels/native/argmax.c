#include <math.h>

#include "lanes.h"

/* The place of the first of the highest; -1 where one is no number, or the highest is infinite. */
static int64_t first_highest(const float *x, int64_t n) {
    F most = all_f(-INFINITY);
    I strange = all_i(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        F v = load_f(x + i);
        most = pick_f((I)(v > most), v, most);
        strange |= (I)(v != v);
    }
    float highest = -INFINITY;
    int bad = 0;
    for (int lane = 0; lane < LANES; lane++) {
        highest = most[lane] > highest ? most[lane] : highest;
        bad |= strange[lane];
    }
    for (; i < n; i++) {
        highest = x[i] > highest ? x[i] : highest;
        bad |= x[i] != x[i];
    }
    if (bad || isinf(highest)) return -1;
    for (i = 0; x[i] != highest; i++) {}
    return i;
}

void argmax_rows(const float *x, int64_t stride, int64_t rows, int64_t n, int64_t *out) {
    for (int64_t row = 0; row < rows; row++) out[row] = first_highest(x + row * stride, n);
}
