#include "norms.h"
#include "pool.h"
#include "program.h"

enum { SHARED_FROM = 65536 }; /* values: fewer are done sooner than others are asked */

typedef struct {
    const float *x, *y, *weight; /* y may be left out */
    float eps, *total, *out;     /* total: of x + y */
    int64_t rows, n;
    Counter done;
} Norm;

static void norm_rows(void *work) {
    Norm *w = work;
    int64_t row;
    while ((row = claim_pieces(&w->done, 1, w->rows)) >= 0) {
        const float *x = w->x + row * w->n;
        if (w->y) {
            float *total = w->total + row * w->n;
            for (int64_t i = 0; i < w->n; i++) total[i] = x[i] + w->y[row * w->n + i];
            x = total;
        }
        norm_row(x, w->weight, w->eps, w->n, w->out + row * w->n);
    }
}

/* out = the norm of x, or of total = x + y; all [rows, n], contiguous. */
void rms_norm(const float *x, const float *y, const float *weight, float eps, int64_t rows, int64_t n, float *total, float *out) {
    Norm work = {x, y, weight, eps, total, out, rows, n, {0}};
    if (rows * n < SHARED_FROM) {
        norm_rows(&work);
        return;
    }
    pool_enter();
    share(norm_rows, &work);
    pool_leave();
}

void rms_norm_call(const Word *w) { rms_norm(w[0].p, w[1].p, w[2].p, w[3].f, w[4].i, w[5].i, w[6].p, w[7].p); }

void add_rows(const float *x, const float *y, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] = x[i] + y[i];
}

void add_rows_call(const Word *w) { add_rows(w[0].p, w[1].p, w[2].i, w[3].p); }
