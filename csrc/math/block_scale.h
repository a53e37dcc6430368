/* Block-scaled states and wire data: up to 128 elements share one power-of-two scale (e8m0, one byte).
 *
 * To encode: a plan from the block's amax; codes and the largest of them; whether codes are doubled; codes with sign.
 *
 * An element is (its code as a small float) * 2^k, the scale byte is k + 127 as in OCP's e8m0, 255 is NaN.
 *   - k is the least with amax <= MAX * 2^k; where rounding then leaves MAX/2 as the largest code, k is one less and
 *     the codes are doubled, which is exact. So the largest code is above MAX/2 unless k is at its minimum, and
 *     encoding a decoded block again gives the same bytes, whatever the rounding.
 *   - min_exponent keeps a code's least normal value a normal fp32; for formats that store sqrt(v) its square too.
 *   - A block with a NaN, an Inf or a value above MAX * 2^max_exponent (which is above 0.43 of what fp32 can hold;
 *     0.87 of its root in a sqrt format) has scale 255 and codes 0 and decodes to NaN throughout: the loss is loud.
 *   - A block of zeros has scale 0 and codes 0; so has a signed one of which nothing reaches the least code at
 *     min_exponent (for e4m3 2^-128, for e3m4 2^-129, for fp16 2^-135).
 *   - A positive sqrt(v) never gets code 0 but the least code: a v flushed to 0 would make the step huge. A signed
 *     value may round to zero and keeps its sign. */
#ifndef TX_MATH_BLOCK_SCALE_H
#define TX_MATH_BLOCK_SCALE_H

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

#define TX_BLOCK_SCALE_NAN 255u

typedef struct tx_block_format {
  tx_small_float element;
  uint32_t sign_bit; /* the sign's place in a code; 0: unsigned, and never 0 for a positive value */
  int32_t min_exponent;
  int32_t max_exponent;
} tx_block_format;

/* exp_avg and wire data in 8 bits */
TX_FN tx_block_format tx_block_e4m3(void) {
  const tx_block_format f = {tx_small_e4m3(), 0x80u, -119, 118};
  return f;
}
/* Muon's momentum in 8 bits. Half of e4m3's error; e2m5 has half of that again where a block's elements are of one
 * size, and loses the small columns of a matrix, which the orthogonalised one has as large as any, where they are not.
 */
TX_FN tx_block_format tx_block_e3m4(void) {
  const tx_block_format f = {tx_small_e3m4(), 0x80u, -123, 122};
  return f;
}
/* sqrt(exp_avg_sq) in 8 bits */
TX_FN tx_block_format tx_block_root_e4m4(void) {
  const tx_block_format f = {tx_small_e4m4(), 0u, -64, 55};
  return f;
}
/* exp_avg in fp16: codes are ordinary fp16 numbers */
TX_FN tx_block_format tx_block_f16(void) {
  const tx_block_format f = {tx_small_f16(), 0x8000u, -111, 111};
  return f;
}
/* sqrt(exp_avg_sq) in fp16 */
TX_FN tx_block_format tx_block_root_f16(void) {
  const tx_block_format f = {tx_small_f16(), 0u, -50, 48};
  return f;
}

/* The format of a tensor with block scales; dtype: U8 or F16. */
TX_FN tx_block_format tx_block_format_of(const tx_dtype dtype, const tx_format format) {
  if (dtype == TX_U8 && format == TX_FORMAT_MOMENTUM) return tx_block_e3m4();
  if (dtype == TX_U8) return format == TX_FORMAT_SQRT ? tx_block_root_e4m4() : tx_block_e4m3();
  return format == TX_FORMAT_SQRT ? tx_block_root_f16() : tx_block_f16();
}

/* The fp32 bits of MAX * 2^k. */
TX_FN int32_t tx_block_max_bits(tx_block_format f, int32_t k) {
  return (int32_t)((f.element.max_code << (23 - f.element.mantissa_bits)) +
                   ((uint32_t)(127 - f.element.bias + k) << 23));
}

/* The least k in the format's range with amax <= MAX * 2^k; amax_bits: tx_magnitude_bits of a finite amax. */
TX_FN int32_t tx_scale_exponent(tx_block_format f, int32_t amax_bits) {
  const int32_t max_bits = tx_block_max_bits(f, 0);
  /* A mantissa above MAX's carries into the exponent. */
  const int32_t k = ((amax_bits + (0x7fffff - (max_bits & 0x7fffff))) >> 23) - (max_bits >> 23);
  const int32_t raised = k < f.min_exponent ? f.min_exponent : k;
  return raised > f.max_exponent ? f.max_exponent : raised;
}

/* The fp32 bits of the least amax that does not make a block of zeros: of a signed format the least code's value at
 * min_exponent (so that some code of every other block is not 0), of an unsigned one any positive number. */
TX_FN int32_t tx_block_least_bits(tx_block_format f) {
  const int32_t place = 150 - f.element.bias - f.element.mantissa_bits + f.min_exponent;
  return f.sign_bit != 0u ? 1 << place : 1;
}

/* What a block's scale byte says of its codes, once per block. Bytes that no encoder writes are read as the nearest
 * that one does. */
typedef struct tx_block_scale {
  tx_small_place at;
  uint32_t keep; /* of the codes: nothing where the block is NaN */
} tx_block_scale;

TX_FN tx_block_scale tx_scale_decode(tx_block_format f, uint8_t byte) {
  const int32_t k = (int32_t)byte - 127;
  const int32_t raised = k < f.min_exponent ? f.min_exponent : k;
  tx_block_scale scale = {tx_small_at(f.element, raised > f.max_exponent ? f.max_exponent : raised), 0xffffffffu};
  if (byte == TX_BLOCK_SCALE_NAN) {
    scale.at.rebase = 0x7fc00000u; /* of code 0 this is the value */
    scale.keep = 0u;
  }
  return scale;
}

/* How one block is encoded, decided from amax alone. */
typedef struct tx_block_plan {
  int32_t exponent; /* k before a possible doubling */
  float inverse;    /* 2^-k */
  tx_small_place at;
  uint32_t keep;    /* 0 where all codes are 0 (zeros, not finite), else all ones */
  uint32_t special; /* the scale byte where keep is 0 */
} tx_block_plan;

TX_FN tx_block_plan tx_block_plan_from(tx_block_format f, int32_t amax_bits) {
  tx_block_plan plan;
  const int32_t largest = tx_block_max_bits(f, f.max_exponent);
  plan.exponent = tx_scale_exponent(f, amax_bits < largest ? amax_bits : largest);
  plan.inverse = tx_exp2i(-plan.exponent);
  plan.at = tx_small_at(f.element, plan.exponent);
  plan.special = amax_bits > largest ? TX_BLOCK_SCALE_NAN : 0u;
  plan.keep = plan.special != 0u || amax_bits < tx_block_least_bits(f) ? 0u : 0xffffffffu;
  return plan;
}

/* sqrt(v) of a positive fp32 v is above 2^-75: its pattern is above 1 << s. What is 0 stays 0. */
TX_FN uint32_t tx_block_least(tx_block_format f, float x) {
  const int32_t bits = (int32_t)tx_bits_from_f32(x), one = 1 << (23 - f.element.mantissa_bits);
  return (uint32_t)(bits < one ? bits : one);
}

/* The code of x at 2^k by threshold, in units of 1 << (23 - mantissa_bits), rounded by cutting off what is below them;
 * before the block's largest code is known. The plan keeps its codes. */
TX_FN uint32_t tx_block_round(tx_block_format f, tx_block_plan plan, float x, uint32_t u) {
  const uint32_t sum = tx_small_sum(f.element, plan.at, tx_f32_from_bits((uint32_t)tx_magnitude_bits(x)), u);
  const uint32_t least = tx_block_least(f, x);
  return f.sign_bit == 0u && (int32_t)sum < (int32_t)least ? least : sum;
}

/* The magnitude code of x at 2^k, before the block's largest code is known. rounded: by threshold u, else nearest. */
TX_FN uint32_t tx_block_code(tx_block_format f, tx_block_plan plan, float x, int rounded, uint32_t u) {
  const int s = 23 - f.element.mantissa_bits;
  if (rounded) return tx_block_round(f, plan, x, u) >> s & plan.keep;
  const float size = tx_f32_from_bits((uint32_t)tx_magnitude_bits(x));
  const uint32_t code = tx_small_nearest(f.element, size * plan.inverse), least = tx_block_least(f, x) >> s;
  return (f.sign_bit == 0u && (int32_t)code < (int32_t)least ? least : code) & plan.keep;
}

/* 2^mantissa_bits where the block's codes are to be doubled (its largest code is MAX/2's), else 0. */
TX_FN uint32_t tx_block_doubling(tx_block_format f, tx_block_plan plan, uint32_t largest_code) {
  const uint32_t one = 1u << f.element.mantissa_bits;
  return largest_code == f.element.max_code - one && plan.exponent > f.min_exponent ? one : 0u;
}

/* Whether the block's largest code can be MAX/2's at all: amax, rounded down, is that code. Few blocks need a look. */
TX_FN int tx_block_may_double(tx_block_format f, tx_block_plan plan, int32_t amax_bits) {
  const uint32_t one = 1u << f.element.mantissa_bits;
  return tx_small_round(f.element, plan.at, tx_f32_from_bits((uint32_t)amax_bits), 0) <= f.element.max_code - one &&
         plan.exponent > f.min_exponent;
}

/* The code as stored: doubled if need be, with x's sign. */
TX_FN uint32_t tx_block_finish(tx_block_format f, tx_block_plan plan, float x, uint32_t code, uint32_t doubling) {
  const uint32_t doubled = code + ((int32_t)code < (int32_t)doubling ? code : doubling);
  const uint32_t negative = tx_bits_from_f32(x) >> 31;
  return doubled | (negative * f.sign_bit & plan.keep);
}

TX_FN uint8_t tx_block_scale_byte(tx_block_plan plan, uint32_t doubling) {
  const uint32_t byte = (uint32_t)(plan.exponent + 127 - (doubling != 0u ? 1 : 0));
  return (uint8_t)(plan.keep != 0u ? byte : plan.special);
}

/* bits << n, to the right where n is negative. */
TX_FN uint32_t tx_shifted(uint32_t bits, const int n) {
  return n >= 0 ? bits << n : bits >> -n;
}

/* The value of the stored code that begins at bit `low` of word. A sqrt format yields sqrt(v). Exact. */
TX_FN float tx_block_value_in(tx_block_format f, uint32_t word, const int low, tx_block_scale scale) {
  const int s = 23 - f.element.mantissa_bits;
  const uint32_t kept = word & scale.keep;
  const uint32_t sizes = (f.sign_bit != 0u ? f.sign_bit : f.element.max_code > 0xffu ? 0x8000u : 0x100u) - 1u;
  const uint32_t size = tx_bits_from_f32(tx_small_read(scale.at, tx_shifted(kept, s - low) & (sizes << s)));
  const int sign_place = f.sign_bit == 0x80u ? 7 : 15;
  return tx_f32_from_bits(f.sign_bit != 0u ? size | (tx_shifted(kept, 31 - sign_place - low) & 0x80000000u) : size);
}
TX_FN float tx_block_value(tx_block_format f, uint32_t code, tx_block_scale scale) {
  return tx_block_value_in(f, code, 0, scale);
}

/* tx_magnitude_bits of the largest of n values, a NaN's where there is one. */
TX_FN int32_t tx_block_amax_bits(const float *x, int32_t n) {
  int32_t amax = 0;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t bits = tx_magnitude_bits(x[i]);
    amax = bits > amax ? bits : amax;
  }
  return amax;
}

#endif
