/* Root-mean-square norms of single rows. */

#ifndef NORMS_H
#define NORMS_H

#include <math.h>

#include "lanes.h"

/* Σ x² in lanes, then the rest one by one: an order that n alone decides. */
INLINE float sum_of_squares(const float *x, int64_t n) {
    F total = all_f(0), other = all_f(0);
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        F a = load_f(x + i), b = load_f(x + i + LANES);
        total = fma_f(a, a, total);
        other = fma_f(b, b, other);
    }
    float rest = 0;
    for (; i < n; i++) rest += x[i] * x[i];
    return sum_f(total + other) + rest;
}

/* to = x · by · weight; weight may be left out. */
INLINE void scale_row(const float *x, float by, const float *weight, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i++) to[i] = weight ? x[i] * by * weight[i] : x[i] * by;
}

INLINE void norm_row(const float *x, const float *weight, float eps, int64_t n, float *to) {
    scale_row(x, 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps), weight, n, to);
}

#endif
