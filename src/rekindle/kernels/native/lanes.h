/* A few lanes of 32 bits, as wide as the instruction set has them. Compiled once per set (build.py). */

#ifndef LANES_H
#define LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define LANES 8
#elif defined(__aarch64__)
#include <arm_neon.h>
#define LANES 4
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef int16_t S __attribute__((vector_size(4 * LANES)));
typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t AnyI __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int32_t AnyWord __attribute__((aligned(1), may_alias));
typedef float AnyF __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

INLINE I load_i(const void *at) { return *(const AnyI *)at; }
INLINE F load_f(const void *at) { return *(const AnyF *)at; }
INLINE void save_f(void *at, F v) { *(AnyF *)at = v; }

INLINE int32_t word_at(const void *at) {
    int32_t word;
    memcpy(&word, at, 4);
    return word;
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = (uint32_t)(h & 0x7fffu) << 13;
    float size, infinite;
    memcpy(&size, &rest, 4);
    size *= 0x1p112f;
    uint32_t full = rest + 0x70000000u; /* infinities and what is no number */
    memcpy(&infinite, &full, 4);
    if ((h & 0x7c00u) == 0x7c00u) size = infinite;
    return sign ? -size : size;
}

#if LANES == 16

INLINE F all_f(float x) { return (F)_mm512_set1_ps(x); }
INLINE I all_i(int32_t x) { return (I)_mm512_set1_epi32(x); }
INLINE F fma_f(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE F fnma_f(F a, F b, F c) { return (F)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE F to_f(I v) { return (F)_mm512_cvtepi32_ps((__m512i)v); }
INLINE F halves_f(const void *at) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256(at)); }
INLINE F brains_f(const void *at) {
    return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at)), 16);
}
INLINE F bytes_f(const void *at) { return to_f((I)_mm512_cvtepu8_epi32(_mm_loadu_si128(at))); }
INLINE F signed_bytes_f(const void *at) { return to_f((I)_mm512_cvtepi8_epi32(_mm_loadu_si128(at))); }
/* acc + the products of the four bytes in every lane of w, which have no sign, with the four at x, which have one. */
INLINE I dot(I acc, I w, const void *x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const AnyWord *)x)); /* compilers load x by itself */
    return acc;
}
INLINE I look_up(const int8_t *table, I codes) {
    __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table));
    return (I)_mm512_shuffle_epi8(all, (__m512i)codes);
}
INLINE F round_f(F x) { return (F)_mm512_roundscale_ps((__m512)x, 8); }
INLINE float sum_f(F v) {
    __m256 both = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
/* to[i] = sum_f(v[i]), sixteen at once. */
enum { SUMS = 16 };
INLINE void sums_f(const F *v, float *to) {
    __m512 four[4];
    for (int r = 0; r < 4; r++) { /* a quarter of four[r] belongs to v[r], the next one to v[r + 4] … */
        __m512 a = (__m512)v[r], b = (__m512)v[r + 4], c = (__m512)v[r + 8], d = (__m512)v[r + 12];
        a = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        c = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
        four[r] = _mm512_add_ps(_mm512_shuffle_f32x4(a, c, 0x88), _mm512_shuffle_f32x4(a, c, 0xdd));
    }
    __m512 first = _mm512_add_ps(_mm512_shuffle_ps(four[0], four[1], 0x44), _mm512_shuffle_ps(four[0], four[1], 0xee));
    __m512 second = _mm512_add_ps(_mm512_shuffle_ps(four[2], four[3], 0x44), _mm512_shuffle_ps(four[2], four[3], 0xee));
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x88), _mm512_shuffle_ps(first, second, 0xdd)));
}

#elif LANES == 8

INLINE F all_f(float x) { return (F)_mm256_set1_ps(x); }
INLINE I all_i(int32_t x) { return (I)_mm256_set1_epi32(x); }
INLINE F fma_f(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE F fnma_f(F a, F b, F c) { return (F)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE F to_f(I v) { return (F)_mm256_cvtepi32_ps((__m256i)v); }
INLINE F halves_f(const void *at) { return (F)_mm256_cvtph_ps(_mm_loadu_si128(at)); }
INLINE F brains_f(const void *at) { return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16); }
INLINE F bytes_f(const void *at) { return to_f((I)_mm256_cvtepu8_epi32(_mm_loadl_epi64(at))); }
INLINE F signed_bytes_f(const void *at) { return to_f((I)_mm256_cvtepi8_epi32(_mm_loadl_epi64(at))); }
/* acc + the products of the two 16-bit numbers in every lane of w with the two at x. */
INLINE I dot(I acc, I w, const void *x) { return acc + (I)_mm256_madd_epi16((__m256i)w, (__m256i)all_i(word_at(x))); }
INLINE I look_up(const int8_t *table, I codes) {
    __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
    return (I)_mm256_shuffle_epi8(all, (__m256i)codes);
}
INLINE F round_f(F x) { return (F)_mm256_round_ps((__m256)x, 8); }
INLINE float sum_f(F v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
enum { SUMS = 8 };
INLINE void sums_f(const F *v, float *to) {
    __m256 two[4];
    for (int r = 0; r < 4; r++) {
        __m256 a = (__m256)v[r], b = (__m256)v[r + 4];
        two[r] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    __m256 first = _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x44), _mm256_shuffle_ps(two[0], two[1], 0xee));
    __m256 second = _mm256_add_ps(_mm256_shuffle_ps(two[2], two[3], 0x44), _mm256_shuffle_ps(two[2], two[3], 0xee));
    _mm256_storeu_ps(to, _mm256_add_ps(_mm256_shuffle_ps(first, second, 0x88), _mm256_shuffle_ps(first, second, 0xdd)));
}

#elif defined(__aarch64__)

INLINE F all_f(float x) { return (F)vdupq_n_f32(x); }
INLINE I all_i(int32_t x) { return (I)vdupq_n_s32(x); }
INLINE F fma_f(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE F fnma_f(F a, F b, F c) { return (F)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE F to_f(I v) { return (F)vcvtq_f32_s32((int32x4_t)v); }
INLINE F halves_f(const void *at) { return (F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }
INLINE F brains_f(const void *at) { return (F)vshll_n_u16(vld1_u16(at), 16); }
INLINE F bytes_f(const void *at) {
    uint16x8_t wide = vmovl_u8(vcreate_u8((uint32_t)word_at(at)));
    return (F)vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}
INLINE F signed_bytes_f(const void *at) {
    int16x8_t wide = vmovl_s8(vcreate_s8((uint32_t)word_at(at)));
    return (F)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
INLINE I dot(I acc, I w, const void *x) {
    int16x8_t codes = (int16x8_t)w, by = vreinterpretq_s16_s32(vdupq_n_s32(word_at(x)));
    int32x4_t low = vmull_s16(vget_low_s16(codes), vget_low_s16(by)), high = vmull_high_s16(codes, by);
    return acc + (I)vpaddq_s32(low, high);
}
INLINE I look_up(const int8_t *table, I codes) { return (I)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)codes); }
INLINE F round_f(F x) { return (F)vrndnq_f32((float32x4_t)x); }
INLINE float sum_f(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }

#else

INLINE F all_f(float x) { return (F){x, x, x, x}; }
INLINE I all_i(int32_t x) { return (I){x, x, x, x}; }
INLINE F fma_f(F a, F b, F c) { return a * b + c; }
INLINE F fnma_f(F a, F b, F c) { return c - a * b; }
INLINE F to_f(I v) { return __builtin_convertvector(v, F); }
INLINE F halves_f(const void *at) {
    uint16_t h[4];
    memcpy(h, at, 8);
    return (F){half_to_float(h[0]), half_to_float(h[1]), half_to_float(h[2]), half_to_float(h[3])};
}
INLINE F brains_f(const void *at) {
    uint16_t h[4];
    memcpy(h, at, 8);
    return (F)((U){h[0], h[1], h[2], h[3]} << 16);
}
INLINE F bytes_f(const void *at) {
    const uint8_t *b = at;
    return to_f((I){b[0], b[1], b[2], b[3]});
}
INLINE F signed_bytes_f(const void *at) {
    const int8_t *b = at;
    return to_f((I){b[0], b[1], b[2], b[3]});
}
INLINE I dot(I acc, I w, const void *x) {
    int32_t both = word_at(x);
    return acc + ((w << 16) >> 16) * (int32_t)(int16_t)both + (w >> 16) * (both >> 16);
}
INLINE I look_up(const int8_t *table, I codes) {
    uint8_t bytes[16];
    memcpy(bytes, &codes, 16);
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)table[bytes[i]];
    memcpy(&codes, bytes, 16);
    return codes;
}
INLINE F round_f(F x) {
    for (int i = 0; i < 4; i++) x[i] = __builtin_rintf(x[i]);
    return x;
}
INLINE float sum_f(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }

#endif

#if LANES > 4 || defined(__aarch64__)
INLINE float fma_1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE float fma_1(float a, float b, float c) { return a * b + c; }
#endif

#if LANES == 4
enum { SUMS = 8 };
INLINE void sums_f(const F *v, float *to) {
    for (int i = 0; i < SUMS; i++) to[i] = sum_f(v[i]);
}
#endif

INLINE F pick_f(I where, F yes, F no) { return (F)((where & (I)yes) | (~where & (I)no)); }

/* e^x, to two units in the last place; what is no number stays so, what is too small becomes the least normal one. */
INLINE F exp_f(F x) {
    F most = all_f(88.37f), least = all_f(-87.33f);
    x = pick_f((I)(x > most), most, x);
    x = pick_f((I)(x < least), least, x);
    F n = round_f(x * all_f(1.44269504f));
    F r = fnma_f(n, all_f(0.693359375f), x);
    r = fnma_f(n, all_f(-2.12194440e-4f), r);
    F p = all_f(1.9875691500e-4f);
    p = fma_f(p, r, all_f(1.3981999507e-3f));
    p = fma_f(p, r, all_f(8.3334519073e-3f));
    p = fma_f(p, r, all_f(4.1665795894e-2f));
    p = fma_f(p, r, all_f(1.6666665459e-1f));
    p = fma_f(p, r, all_f(5.0000001201e-1f));
    p = fma_f(p, r * r, r + all_f(1.0f));
    I exponent = (I)(n + all_f(12582912.0f)) - all_i(0x4b400000); /* n as an integer, by its last bits */
    return p * (F)((exponent + all_i(127)) << 23);
}

INLINE F sigmoid_f(F x) { return all_f(1.0f) / (all_f(1.0f) + exp_f(-x)); }
INLINE F silu_f(F x) { return x / (all_f(1.0f) + exp_f(-x)); }

#endif
