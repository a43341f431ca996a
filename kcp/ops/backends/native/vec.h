// Vector type, elementary functions, transposes. GCC vector extensions only: the same text is built for AVX-512, AVX2,
// SSE2 and NEON. KCP_ISA is the namespace of the build, KCP_LANES the floats in a vector.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "problem.h"

#define KCP_INLINE static inline __attribute__((always_inline))
#define KCP_NOINLINE static __attribute__((noinline))
#define KCP_UNROLL _Pragma("GCC unroll 64")

namespace KCP_ISA {

enum { kLanes = KCP_LANES, kLaneVecs = kLane / kLanes };  // kLaneVecs: vectors in a strip of 32 columns

typedef float Vec __attribute__((vector_size(KCP_LANES * 4)));
typedef int32_t IVec __attribute__((vector_size(KCP_LANES * 4)));
typedef uint32_t UVec __attribute__((vector_size(KCP_LANES * 4)));
typedef uint16_t HVec __attribute__((vector_size(KCP_LANES * 2)));
typedef float VecAny __attribute__((vector_size(KCP_LANES * 4), aligned(4), may_alias));

KCP_INLINE Vec load(const float* p) { return *(const VecAny*)p; }
KCP_INLINE void store(float* p, Vec x) { *(VecAny*)p = x; }
// Store of a whole vector at an aligned address that is not read again soon: on x86 it goes around the caches.
KCP_INLINE void stream(float* p, Vec x) {
#if KCP_LANES == 16
  _mm512_stream_ps(p, (__m512)x);
#elif KCP_LANES == 8
  _mm256_stream_ps(p, (__m256)x);
#elif defined(__SSE2__)
  _mm_stream_ps(p, (__m128)x);
#else
  store(p, x);
#endif
}
KCP_INLINE Vec splat(float s) { return s - (Vec){}; }
KCP_INLINE Vec select(IVec mask, Vec a, Vec b) { return (Vec)(((IVec)a & mask) | ((IVec)b & ~mask)); }
KCP_INLINE Vec absolute(Vec x) { return (Vec)((IVec)x & 0x7fffffff); }

// 2^x for x <= 126, relative error below 1e-7; exactly 0 from -127 down (AVX-512: below -126); NaN stays NaN.
// x = n + f, |f| <= 1/2: the integer n comes from the low bits of x + 1.5*2^23, 2^f from a degree-6 fit, and n is added
// to the exponent bits (n = -127 with 2^f = 1 gives a true zero).
KCP_INLINE Vec exp2v(Vec x) {
#if KCP_LANES == 16
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = x - n;
#else
  const Vec lowest = splat(-127.f);
  x = lowest > x ? lowest : x;
  const Vec shifted = x + 12582912.f;
  const Vec f = x - (shifted - 12582912.f);
#endif
  Vec p = f * 1.5353362e-04f + 1.3398875e-03f;
  p = p * f + 9.6184369e-03f;
  p = p * f + 5.5503324e-02f;
  p = p * f + 2.4022648e-01f;
  p = p * f + 6.9314718e-01f;
  p = p * f + 1.f;
#if KCP_LANES == 16
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  return (Vec)((IVec)p + ((IVec)shifted << 23));
#endif
}

// log(1+t) for 0 <= t <= 1, small relative error also for tiny t: 2 atanh(t / (2+t)).
KCP_INLINE Vec log1p_unit(Vec t) {
  const Vec s = t / (t + 2.f), z = s * s;
  Vec p = z * (2.f / 15) + 2.f / 13;
  p = p * z + 2.f / 11;
  p = p * z + 2.f / 9;
  p = p * z + 2.f / 7;
  p = p * z + 2.f / 5;
  p = p * z + 2.f / 3;
  p = p * z + 2.f;
  return p * s;
}

// 1/x for 1 <= x <= 2^126, to rounding: Newton steps from the processor's 14-bit estimate or from one by integer
// arithmetic, several times the throughput of a division
KCP_INLINE Vec reciprocal(Vec x) {
#if KCP_LANES == 16
  const Vec r = (Vec)_mm512_rcp14_ps((__m512)x);
#else
  Vec r = (Vec)(0x7ef311c3 - (IVec)x);
  r = r + r * (1.f - x * r);
  r = r + r * (1.f - x * r);
  r = r + r * (1.f - x * r);
#endif
  return r + r * (1.f - x * r);
}

// sigmoid(z) = 1/(1+t) with t = e^-z (kept below 2^126); t gives 1 - sigmoid = t * sigmoid without cancellation.
KCP_INLINE Vec sigmoid(Vec z, Vec& t) {
  const Vec y = z * -1.4426950408889634f, highest = splat(126.f);
  t = exp2v(y > highest ? highest : y);
  return reciprocal(1.f + t);
}

// ---- transposition by interleaving at distances kLanes/2, ..., 1
#define KCP_4(f) f(0), f(1), f(2), f(3)
#define KCP_8(f) KCP_4(f), f(4), f(5), f(6), f(7)
#define KCP_16(f) KCP_8(f), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#if KCP_LANES == 16
#define KCP_EACH_LANE KCP_16
#elif KCP_LANES == 8
#define KCP_EACH_LANE KCP_8
#else
#define KCP_EACH_LANE KCP_4
#endif
#if defined(__clang__)
#define KCP_SHUFFLE(a, b, f) __builtin_shufflevector(a, b, KCP_EACH_LANE(f))
#else
#define KCP_SHUFFLE(a, b, f) __builtin_shuffle(a, b, (IVec){KCP_EACH_LANE(f)})
#endif
#define KCP_LOW(lane) (((lane) & D) ? (lane) - D + KCP_LANES : (lane))
#define KCP_HIGH(lane) (((lane) & D) ? (lane) + KCP_LANES : (lane) + D)

template <int D>
struct Interleave {
  static inline __attribute__((always_inline)) Vec low(Vec a, Vec b) {
    return KCP_SHUFFLE(a, b, KCP_LOW);
  }
  static inline __attribute__((always_inline)) Vec high(Vec a, Vec b) {
    return KCP_SHUFFLE(a, b, KCP_HIGH);
  }
};
template <int D>
KCP_INLINE void transpose_step(Vec* r) {
  KCP_UNROLL for (int i = 0; i < kLanes; i++) {
    if (i & D) continue;
    const Vec a = r[i], b = r[i + D];
    r[i] = Interleave<D>::low(a, b);
    r[i + D] = Interleave<D>::high(a, b);
  }
  if constexpr (D > 1) transpose_step<D / 2>(r);
}
template <int D>
KCP_INLINE void sum_step(Vec* r) {
  KCP_UNROLL for (int i = 0; i < D; i++) r[i] =
      Interleave<D>::low(r[i], r[i + D]) + Interleave<D>::high(r[i], r[i + D]);
  if constexpr (D > 1) sum_step<D / 2>(r);
}
// to[c][r] = from[r][c]; rows and cols are multiples of kLanes
KCP_NOINLINE void transpose(const float* from, long ld_from, float* to, long ld_to, int rows, int cols) {
  for (int c = 0; c < cols; c += kLanes)
    for (int r = 0; r < rows; r += kLanes) {
      Vec t[kLanes];
      KCP_UNROLL for (int i = 0; i < kLanes; i++) t[i] = load(from + (r + i) * ld_from + c);
      transpose_step<kLanes / 2>(t);
      KCP_UNROLL for (int i = 0; i < kLanes; i++) store(to + (c + i) * ld_to + r, t[i]);
    }
}
// sums[i] = the sum of the lanes of partial[i], i < count; count is a multiple of kLanes
KCP_INLINE void lane_sums(const float (*partial)[KCP_LANES], int count, float* sums) {
  for (int i = 0; i < count; i += kLanes) {
    Vec t[kLanes];
    KCP_UNROLL for (int j = 0; j < kLanes; j++) t[j] = load(partial[i + j]);
    sum_step<kLanes / 2>(t);
    store(sums + i, t[0]);
  }
}
KCP_INLINE float lane_sum(Vec x) {
  float s[kLanes];
  store(s, x);
  KCP_UNROLL for (int w = kLanes / 2; w; w >>= 1) KCP_UNROLL for (int i = 0; i < w; i++) s[i] += s[i + w];
  return s[0];
}

KCP_INLINE void fill_zero(float* p, long count) {
  for (long i = 0; i < count; i += kLanes) store(p + i, (Vec){});
}
// rows x cols of zeros; cols is a multiple of kLanes
KCP_INLINE void zero_rows(float* p, long ld, long rows, long cols) {
  for (long i = 0; i < rows; i++) fill_zero(p + i * ld, cols);
}
KCP_INLINE void copy_rows(const float* from, long ld_from, float* to, long ld_to, long rows, long cols) {
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < cols; j += kLanes) store(to + i * ld_to + j, load(from + i * ld_from + j));
}

}  // namespace KCP_ISA
