// Lanes of floats, and the few functions a recurrent expert needs of them. One source for AVX-512, AVX2, NEON and plain SSE:
// GCC and Clang vector types, with an intrinsic only where a type has no operator for it. A lane is a sequence.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINED __attribute__((always_inline))
#define INLINE static inline INLINED
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

// W: lanes of a vector. WIDEST: vectors of a tile at most. SUMS: accumulators that registers hold while a matrix is multiplied.
#if defined(__AVX512F__)
constexpr int W = 16, WIDEST = 4, SUMS = 16;
#elif defined(__AVX__)
constexpr int W = 8, WIDEST = 2, SUMS = 8;
#elif defined(__aarch64__)
constexpr int W = 4, WIDEST = 4, SUMS = 16;
#else
constexpr int W = 4, WIDEST = 2, SUMS = 8;
#endif
constexpr int GO = 4;  // outputs of a packed group: the four gates of an LSTM's unit

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint64_t vu2 __attribute__((vector_size(8 * W)));

INLINE vf splat(float a) { return a - (vf){}; }

INLINE vf larger(vf x, vf y) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX__)
  return (vf)_mm256_max_ps((__m256)x, (__m256)y);
#else
  return x > y ? x : y;
#endif
}

// x cut off at ±limit. What a NaN becomes is not said: weights are known to be finite, and an infinite residual stream shows in the last norm.
INLINE vf within(vf x, float limit) {
#if defined(__AVX512DQ__)
  return (vf)_mm512_range_ps((__m512)x, (__m512)splat(limit), 2);  // the smaller magnitude, with the sign of x
#elif defined(__AVX__) && !defined(__AVX512F__)
  return (vf)_mm256_max_ps(_mm256_min_ps((__m256)x, (__m256)splat(limit)), (__m256)splat(-limit));
#else
  vf top = x < limit ? x : splat(limit);
  return top > -limit ? top : splat(-limit);
#endif
}

// 1/x for x of ordinary size: an estimate and one or two Newton steps, good to a rounding or two.
INLINE vf reciprocal(vf x) {
#if defined(__AVX512F__)
  vf y = (vf)_mm512_rcp14_ps((__m512)x);
  return y * (2.0f - x * y);
#elif defined(__AVX__)
  vf y = (vf)_mm256_rcp_ps((__m256)x);
  return y * (2.0f - x * y);
#elif defined(__aarch64__)
  vf y = (vf)vrecpeq_f32((float32x4_t)x);
  y = y * (2.0f - x * y);
  y = y * (2.0f - x * y);
  return y * (2.0f - x * y);
#else
  return 1.0f / x;
#endif
}

// 2^(scale · x), |scale · x| <= 126, relative error 1e-8 before rounding. The magic number rounds to an integer; shifted, its low bits are the exponent.
INLINE vf exp2_of(vf x, float scale) {
  const float magic = 12582912.0f;  // 1.5 · 2^23
  vf r = x * scale + magic, f = x * scale - (r - magic);
  vf p = splat(0.00015345812010327943f);  // minimax on [-1/2, 1/2]
  p = p * f + 0.0013399931219358742f;
  p = p * f + 0.0096184889570899f;
  p = p * f + 0.05550328776964753f;
  p = p * f + 0.240226468906343f;
  p = p * f + 0.693147205737268f;
  p = p * f + 1.0f;
  return (vf)((vi)p + ((vi)r << 23));
}
constexpr float LOG2E = 1.4426950408889634f;
constexpr double LN2 = 0.6931471805599453;

// exp(-scale · x), cut off where a sigmoid or tanh no longer feels it: three of them multiply to a finite number.
INLINE vf exp_minus(vf x, float scale = 1.0f) { return exp2_of(within(x, 28.0f / scale), -LOG2E * scale); }

INLINE vf sigmoid(vf x) { return reciprocal(1.0f + exp_minus(x)); }
INLINE vf tanh_of(vf x) { vf e = exp_minus(x, 2.0f); return (1.0f - e) * reciprocal(1.0f + e); }

// Φ(x) of the normal distribution, Φ(x) - 1/2 = x · Q(x²): a polynomial on |x| <= 5.5, beyond which Φ is 0 or 1 to 2e-8.
INLINE vf normal_cdf(vf x) {
  vf z = within(x, 5.5f), w = z * z * (2.0f / 30.25f) - 1.0f;
  vf q = splat(-0.000190655567f);
  q = q * w + 0.000592047749f; q = q * w - 0.000673302884f; q = q * w + 0.000841154721f; q = q * w - 0.00224018176f; q = q * w + 0.00447751606f;
  q = q * w - 0.00692995734f; q = q * w + 0.0103121173f; q = q * w - 0.0149637488f; q = q * w + 0.0203396221f; q = q * w - 0.0260538685f;
  q = q * w + 0.0320737187f; q = q * w - 0.0387924128f; q = q * w + 0.0477374508f; q = q * w - 0.0641723453f; q = q * w + 0.128551932f;
  return z * q + 0.5f;
}
INLINE vf gelu(vf x) { return x * normal_cdf(x); }
INLINE vf gelu_slope(vf x) { vf z = within(x, 12.0f); return normal_cdf(x) + z * (0.3989422804f * exp2_of(z * z, -0.5f * LOG2E)); }

// 1/√x, rounded twice; not a number where x is infinite, so that an overflow shows.
INLINE vf inverse_root(vf x) {
  const vf overflow = x - x;
  float f[W];
  memcpy(f, &x, sizeof f);
  for (int i = 0; i < W; i++) f[i] = 1.0f / std::sqrt(f[i]);
  memcpy(&x, f, sizeof f);
  return x + overflow;
}

// Does a comparison hold in any lane?
INLINE bool any(vi mask) {
  int32_t m[W], found = 0;
  memcpy(m, &mask, sizeof m);
  for (int i = 0; i < W; i++) found |= m[i];
  return found != 0;
}

// out[c][lane] = from[lane][c] for four consecutive floats of W places: a gather that reads whole quarters.
INLINE void gather4(const float* const* from, int offset, vf* out) {
#if defined(__AVX512F__)
  __m512 a[4];
  UNROLL for (int s = 0; s < 4; s++) {
    a[s] = _mm512_castps128_ps512(_mm_loadu_ps(from[s] + offset));
    a[s] = _mm512_insertf32x4(a[s], _mm_loadu_ps(from[s + 4] + offset), 1);
    a[s] = _mm512_insertf32x4(a[s], _mm_loadu_ps(from[s + 8] + offset), 2);
    a[s] = _mm512_insertf32x4(a[s], _mm_loadu_ps(from[s + 12] + offset), 3);
  }
  __m512d p = _mm512_castps_pd(_mm512_unpacklo_ps(a[0], a[1])), q = _mm512_castps_pd(_mm512_unpackhi_ps(a[0], a[1]));
  __m512d r = _mm512_castps_pd(_mm512_unpacklo_ps(a[2], a[3])), s = _mm512_castps_pd(_mm512_unpackhi_ps(a[2], a[3]));
  out[0] = (vf)_mm512_unpacklo_pd(p, r);
  out[1] = (vf)_mm512_unpackhi_pd(p, r);
  out[2] = (vf)_mm512_unpacklo_pd(q, s);
  out[3] = (vf)_mm512_unpackhi_pd(q, s);
#else
  float m[4][W];
  for (int lane = 0; lane < W; lane++)
    for (int c = 0; c < 4; c++) m[c][lane] = from[lane][offset + c];
  memcpy(out, m, sizeof m);
#endif
}

// The way back: to[lane][offset + c] = in[c][lane].
INLINE void scatter4(const vf* in, float* const* to, int offset) {
#if defined(__AVX512F__)
  __m512d p = _mm512_castps_pd(_mm512_unpacklo_ps((__m512)in[0], (__m512)in[1])), q = _mm512_castps_pd(_mm512_unpackhi_ps((__m512)in[0], (__m512)in[1]));
  __m512d r = _mm512_castps_pd(_mm512_unpacklo_ps((__m512)in[2], (__m512)in[3])), s = _mm512_castps_pd(_mm512_unpackhi_ps((__m512)in[2], (__m512)in[3]));
  __m512 a[4] = {_mm512_castpd_ps(_mm512_unpacklo_pd(p, r)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, r)), _mm512_castpd_ps(_mm512_unpacklo_pd(q, s)), _mm512_castpd_ps(_mm512_unpackhi_pd(q, s))};
  UNROLL for (int s = 0; s < 4; s++) {
    _mm_storeu_ps(to[s] + offset, _mm512_castps512_ps128(a[s]));
    _mm_storeu_ps(to[s + 4] + offset, _mm512_extractf32x4_ps(a[s], 1));
    _mm_storeu_ps(to[s + 8] + offset, _mm512_extractf32x4_ps(a[s], 2));
    _mm_storeu_ps(to[s + 12] + offset, _mm512_extractf32x4_ps(a[s], 3));
  }
#else
  float m[4][W];
  memcpy(m, in, sizeof m);
  for (int lane = 0; lane < W; lane++)
    for (int c = 0; c < 4; c++) to[lane][offset + c] = m[c][lane];
#endif
}

// Subnormal numbers cost a hundred times more than others and are worth nothing here: off while one of these lives.
struct FlushSubnormals {
#if defined(__x86_64__) || defined(__i386__)
  unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  FlushSubnormals() { asm volatile("mrs %0, fpcr" : "=r"(before)); asm volatile("msr fpcr, %0" ::"r"(before | (1u << 24))); }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#endif
};
