/* Square roots, quotients and roundings of operands in the middle of fp32's range, in the fewest instructions.
 *
 * For sqrtf and a division nvcc emits the sequences below, and with each of them a test and a call for operands outside
 * that range. A caller that knows the range of a whole vector needs one test, and the sequences can overlap. Results
 * are rounded to nearest, as those of sqrtf and of a division (tests/cuda/fast_path_math_sweep_test.cc: from every
 * estimate within the error that PTX documents). On the host the estimates are accurate to half an ulp. */
#ifndef TX_CUDA_FAST_PATH_MATH_H
#define TX_CUDA_FAST_PATH_MATH_H

#include <cuda_runtime.h>
#include <math.h>

#include "csrc/math/numeric.h"

/* The fp32 pattern of 2^k. */
#define TX_POWER_BITS(k) ((uint32_t)(127 + (k)) << 23)

static __device__ __forceinline__ float tx_reciprocal_root_estimate(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return (float)(1.0 / sqrt((double)x));
#endif
}
static __device__ __forceinline__ float tx_reciprocal_estimate(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

/* sqrtf(x) for x in [2^-100, 2^127]. y: about 1 / sqrt(x). For smaller x >= 0 the result is below 2^-50 or NaN; for
 * Inf, NaN and negative x it is NaN. */
static __device__ __forceinline__ float tx_root_from(float x, float y) {
  const float root = x * y, half = 0.5f * y;
  return fmaf(fmaf(-root, root, x), half, root);
}
static __device__ __forceinline__ float tx_quick_root(float x) {
  return tx_root_from(x, tx_reciprocal_root_estimate(x));
}

/* a / b for b in [2^-50, 2^62] and |a| in [2^-60, 2^60] or a = +-0. y: about 1 / b. */
static __device__ __forceinline__ float tx_quotient_from(float a, float b, float y) {
  const float reciprocal = fmaf(y, fmaf(-b, y, 1.0f), y), quotient = a * reciprocal;
  /* This order of signs keeps the sign of a zero. */
  return fmaf(-fmaf(b, quotient, -a), reciprocal, quotient);
}
static __device__ __forceinline__ float tx_quick_quotient(float a, float b) {
  return tx_quotient_from(a, b, tx_reciprocal_estimate(b));
}

/* Two numbers, not NaN, rounded to bf16, nearest even; `low` goes into the lower half. */
static __device__ __forceinline__ uint32_t tx_quick_bf16_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return tx_bf16_from_f32(low) | (uint32_t)tx_bf16_from_f32(high) << 16;
#endif
}

/* The least and the largest of a vector, so that one test covers all of it. */
template <int N>
static __device__ __forceinline__ uint32_t tx_least_of(const uint32_t (&x)[N]) {
  uint32_t least = x[0];
#pragma unroll
  for (int i = 1; i < N; i++)
    least = x[i] < least ? x[i] : least;
  return least;
}
template <int N>
static __device__ __forceinline__ uint32_t tx_largest_of(const uint32_t (&x)[N]) {
  uint32_t largest = x[0];
#pragma unroll
  for (int i = 1; i < N; i++)
    largest = x[i] > largest ? x[i] : largest;
  return largest;
}

#endif
