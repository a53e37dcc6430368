/* Number formats: bf16, fp16 and the small floats of 8-bit states, to and from fp32.
 *
 * Everything is branch-free integer and fp32 arithmetic that vectorises from SSE2 on, so every instruction set and CUDA
 * produce the same bits. Assumed: round to nearest, no contraction; callers clear any flush-to-zero flag of the MXCSR.
 *
 * Two ways to round. `..._from_f32` rounds to nearest, ties to even. `..._round(x, u)` compares with a 32-bit threshold
 * u (from csrc/math/dither.h): the magnitude goes up when its discarded fraction plus u reaches one unit. So uniform u
 * give the right mean, and a representable value never changes, whatever u.
 *
 * NaN rule: any NaN becomes the one positive quiet NaN of the target (bf16 0x7fc0, fp16 0x7e00), which is c10's scalar
 * rule for bf16. Sign and payload are dropped because they depend on the operand order that a compiler picked. */
#ifndef TX_MATH_NUMERIC_H
#define TX_MATH_NUMERIC_H

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define TX_FN static __host__ __device__ __forceinline__
#else
#define TX_FN static inline __attribute__((always_inline))
#endif

TX_FN uint32_t tx_bits_from_f32(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

TX_FN float tx_f32_from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* The bits of |x| as a signed number, since signed comparisons exist in every vector instruction set. NaNs are above
 * TX_F32_INF. */
#define TX_F32_INF 0x7f800000
TX_FN int32_t tx_magnitude_bits(float x) {
  return (int32_t)(tx_bits_from_f32(x) & 0x7fffffffu);
}

/* 2^k for k in [-127, 127]; 2^-127 is subnormal. */
TX_FN float tx_exp2i(int32_t k) {
  return tx_f32_from_bits(k > -127 ? (uint32_t)(k + 127) << 23 : 0x00400000u);
}

/* -- bf16 --------------------------------------------------------------------------------------------------------- */

/* Exact. NaN payloads are kept. */
TX_FN float tx_f32_from_bf16(uint16_t h) {
  return tx_f32_from_bits((uint32_t)h << 16);
}

/* x; for any NaN, the quiet NaN 0x7fc00000. */
TX_FN float tx_one_nan(float x) {
  return x == x ? x : tx_f32_from_bits(0x7fc00000u);
}

/* The bf16 of x in the upper half of the result; the lower half is undefined. Nearest even; overflow gives Inf; Inf
 * stays; NaN gives 0x7fc0. */
TX_FN uint32_t tx_bf16_nearest_upper(float x) {
  const uint32_t bits = tx_bits_from_f32(tx_one_nan(x));
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}
TX_FN uint16_t tx_bf16_from_f32(float x) {
  return (uint16_t)(tx_bf16_nearest_upper(x) >> 16);
}

/* The fp32 pattern of the largest finite bf16. */
#define TX_BF16_LARGEST 0x7f7f0000

/* x rounded by threshold u to a bf16 in the upper half of the result; the lower half is undefined. A finite value never
 * becomes Inf but at most the largest finite bf16; Inf stays; NaN gives 0x7fc0. Nothing is added to magnitudes above
 * the largest finite bf16, which gives all three. */
TX_FN uint32_t tx_bf16_round_upper(float x, uint32_t u) {
  const uint32_t bits = tx_bits_from_f32(tx_one_nan(x));
  const uint32_t up = tx_magnitude_bits(x) > TX_BF16_LARGEST ? 0u : u >> 16;
  return bits + up;
}
TX_FN uint16_t tx_bf16_round(float x, uint32_t u) {
  return (uint16_t)(tx_bf16_round_upper(x, u) >> 16);
}

/* -- small floats ------------------------------------------------------------------------------------------------- */

/* A binary float narrower than fp32, magnitude only: code = exponent field << mantissa_bits | mantissa. Field 0 is
 * subnormal; other values are (1 + mantissa / 2^mantissa_bits) * 2^(field - bias). Codes ascend with values, so
 * rounding up adds 1. No code means Inf or NaN here. */
typedef struct tx_small_float {
  int32_t mantissa_bits;
  int32_t bias;
  uint32_t max_code; /* MAX, the largest code used */
} tx_small_float;

/* e4m3: MAX 448 (0x7e; OCP's NaN, 0x7f, is never written). e3m4: MAX 31. Unsigned e4m4: MAX 496. fp16: MAX 65504. */
TX_FN tx_small_float tx_small_e4m3(void) {
  const tx_small_float f = {3, 7, 0x7eu};
  return f;
}
TX_FN tx_small_float tx_small_e3m4(void) {
  const tx_small_float f = {4, 3, 0x7fu};
  return f;
}
TX_FN tx_small_float tx_small_e4m4(void) {
  const tx_small_float f = {4, 7, 0xffu};
  return f;
}
TX_FN tx_small_float tx_small_f16(void) {
  const tx_small_float f = {10, 15, 0x7bffu};
  return f;
}

/* The code of x to nearest, ties to even. x >= 0. Above MAX the codes continue; NaN gives an undefined code. */
TX_FN uint32_t tx_small_nearest(tx_small_float f, float x) {
  const int32_t s = 23 - f.mantissa_bits;
  const float least_normal = tx_exp2i(1 - f.bias);
  /* Below the normals: adding `unit`, whose ulp is the subnormal unit, does the rounding. */
  const float unit = tx_exp2i(24 - f.bias - f.mantissa_bits);
  const uint32_t fixed = tx_bits_from_f32(x + unit) - tx_bits_from_f32(unit);
  const uint32_t bits = tx_bits_from_f32(x);
  const uint32_t rebased = bits - ((uint32_t)(127 - f.bias) << 23);
  const uint32_t floating = (rebased + ((1u << (s - 1)) - 1u) + ((bits >> s) & 1u)) >> s;
  return x < least_normal ? fixed : floating;
}

/* The fp32 patterns of the codes of f times 2^k. From least_normal on, a value's pattern is
 * (code << (23 - mantissa_bits)) + rebase. Legal: 1 - f.bias + k in [-126, 127]. */
typedef struct tx_small_place {
  uint32_t rebase;
  float least_normal;
} tx_small_place;

TX_FN tx_small_place tx_small_at(tx_small_float f, int32_t k) {
  const uint32_t rebase = (uint32_t)(127 - f.bias + k) << 23;
  const tx_small_place place = {rebase, tx_f32_from_bits(rebase + (1u << 23))};
  return place;
}

/* The code of x by threshold u, in units of 1 << (23 - mantissa_bits): its lower bits are to be cut off. Only the upper
 * 23 - mantissa_bits bits of u count. 0 <= x < 2^127. The sum is 2 x for normals and x + least_normal below them, which
 * brings the fraction to fixed point: either has the pattern of its code one exponent up. */
TX_FN uint32_t tx_small_sum(tx_small_float f, tx_small_place at, float x, uint32_t u) {
  const int32_t bits = (int32_t)tx_bits_from_f32(x), least = (int32_t)tx_bits_from_f32(at.least_normal);
  const float sum = x + tx_f32_from_bits((uint32_t)(bits > least ? bits : least));
  return tx_bits_from_f32(sum) + (u >> (9 + f.mantissa_bits)) - (at.rebase + (1u << 23));
}
TX_FN uint32_t tx_small_round(tx_small_float f, tx_small_place at, float x, uint32_t u) {
  return tx_small_sum(f, at, x, u) >> (23 - f.mantissa_bits);
}

/* The value of `bits` = code << (23 - mantissa_bits). Exact, for any code. Two readings: one exponent up, minus
 * least_normal, which is right for subnormals and too large for normals; and as a normal, which is right for normals
 * and too large for subnormals. The smaller one is the value. */
TX_FN float tx_small_read(tx_small_place at, uint32_t bits) {
  const float normal = tx_f32_from_bits(bits + at.rebase);
  const int32_t subnormal = (int32_t)tx_bits_from_f32((normal + normal) - at.least_normal);
  const int32_t read = (int32_t)tx_bits_from_f32(normal);
  return tx_f32_from_bits((uint32_t)(subnormal < read ? subnormal : read));
}
TX_FN float tx_small_decode(tx_small_float f, tx_small_place at, uint32_t code) {
  return tx_small_read(at, code << (23 - f.mantissa_bits));
}

/* -- fp16 --------------------------------------------------------------------------------------------------------- */

/* Exact. NaN payloads are kept (the hardware's conversion would make signalling NaNs quiet). */
TX_FN float tx_f32_from_f16(uint16_t h) {
  const uint32_t sign = ((uint32_t)h & 0x8000u) << 16;
  const uint32_t code = (uint32_t)h & 0x7fffu;
  const uint32_t bits = tx_bits_from_f32(tx_small_decode(tx_small_f16(), tx_small_at(tx_small_f16(), 0), code));
  return tx_f32_from_bits(sign | ((int32_t)code >= 0x7c00 ? bits | (uint32_t)TX_F32_INF : bits));
}

/* Nearest even; magnitudes from 65520 on give Inf; Inf stays; NaN gives 0x7e00. */
TX_FN uint16_t tx_f16_from_f32(float x) {
  const uint32_t sign = (tx_bits_from_f32(x) >> 16) & 0x8000u;
  const int32_t magnitude = tx_magnitude_bits(x);
  const uint32_t rounded = tx_small_nearest(tx_small_f16(), tx_f32_from_bits((uint32_t)magnitude));
  const uint32_t code = sign | (magnitude >= 0x477ff000 ? 0x7c00u : rounded);
  return (uint16_t)(magnitude > TX_F32_INF ? 0x7e00u : code);
}

/* x rounded by threshold u. A finite value never becomes Inf but at most 65504; Inf stays; NaN gives 0x7e00. */
TX_FN uint16_t tx_f16_round(float x, uint32_t u) {
  const uint32_t sign = (tx_bits_from_f32(x) >> 16) & 0x8000u;
  const int32_t magnitude = tx_magnitude_bits(x);
  const int32_t finite = magnitude > 0x477fe000 ? 0x477fe000 : magnitude;
  const uint32_t rounded =
      tx_small_round(tx_small_f16(), tx_small_at(tx_small_f16(), 0), tx_f32_from_bits((uint32_t)finite), u);
  const uint32_t code = sign | (magnitude >= TX_F32_INF ? 0x7c00u : rounded);
  return (uint16_t)(magnitude > TX_F32_INF ? 0x7e00u : code);
}

#endif
