/* Block-scaled states and wire data: up to 128 elements share one power-of-two scale (e8m0, one byte).
 *
 * An element is (its code, read as a small float) * 2^k. The scale byte is k + 127 as in OCP's e8m0; 255 is NaN. MAX is
 * the largest value of a code.
 *   - k is the least with amax <= MAX * 2^k. If the largest code after rounding is MAX/2's, k is lowered by one and the
 *     codes are doubled, which is exact. So the largest code is above MAX/2 unless k is at its minimum, and encoding a
 *     decoded block again gives the same bytes, with any rounding.
 *   - With min_exponent, a code's least normal value is a normal fp32; so is its square, in formats that store sqrt(v).
 *   - A block with a NaN, an Inf or a value above MAX * 2^max_exponent has scale 255 and codes 0. All of it decodes to
 *     NaN, so that the failure is not silent. That limit is above 0.43 of the largest fp32 (0.87 of its root in a sqrt
 *     format).
 *   - A block of zeros has scale 0 and codes 0. So has a signed block in which no magnitude reaches the least code at
 *     min_exponent (2^-128 for e4m3, 2^-129 for e3m4, 2^-135 for fp16).
 *   - A positive sqrt(v) gets at least the least code, never 0: a v flushed to 0 would make the step huge. A signed
 *     value may round to zero and keeps its sign.
 *
 * Encoding takes four steps: a plan from the block's amax (tx_block_plan_from); the codes and the largest of them
 * (tx_block_code); whether the codes are doubled (tx_block_doubling); the final codes with sign (tx_block_finish). */
#ifndef TX_MATH_BLOCK_SCALE_H
#define TX_MATH_BLOCK_SCALE_H

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

#define TX_BLOCK_SCALE_NAN 255u

typedef struct tx_block_format {
  tx_small_float element;
  uint32_t sign_bit; /* the sign's place in a code; 0: unsigned, and a positive value never gets code 0 */
  int32_t min_exponent;
  int32_t max_exponent;
} tx_block_format;

/* exp_avg and wire data in 8 bits */
TX_FN tx_block_format tx_block_e4m3(void) {
  const tx_block_format f = {tx_small_e4m3(), 0x80u, -119, 118};
  return f;
}
/* Muon's momentum in 8 bits, with half of e4m3's error. e2m5 has half of that again for blocks whose elements have
 * similar magnitudes. In other blocks e2m5 loses a matrix's small columns, which are as large as any after
 * orthogonalisation. */
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

/* The block format of a dtype (TX_U8 or TX_F16) in a tx_format. */
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

/* The least k in the format's range with amax <= MAX * 2^k. amax_bits: tx_magnitude_bits of a finite amax. */
TX_FN int32_t tx_scale_exponent(tx_block_format f, int32_t amax_bits) {
  const int32_t max_bits = tx_block_max_bits(f, 0);
  /* If amax's mantissa is above MAX's, the addition carries into the exponent. */
  const int32_t k = ((amax_bits + (0x7fffff - (max_bits & 0x7fffff))) >> 23) - (max_bits >> 23);
  const int32_t raised = k < f.min_exponent ? f.min_exponent : k;
  return raised > f.max_exponent ? f.max_exponent : raised;
}

/* The fp32 bits of the least amax that does not encode as a block of zeros. For signed formats: the least code's value
 * at min_exponent, so that every other block has a code that is not 0. For unsigned ones: any positive number. */
TX_FN int32_t tx_block_least_bits(tx_block_format f) {
  const int32_t place = 150 - f.element.bias - f.element.mantissa_bits + f.min_exponent;
  return f.sign_bit != 0u ? 1 << place : 1;
}

/* A block's decoded scale byte. A byte that no encoder writes is read as the nearest one that an encoder does write. */
typedef struct tx_block_scale {
  tx_small_place at;
  uint32_t keep; /* mask of the codes: 0 if the block is NaN, else all ones */
} tx_block_scale;

TX_FN tx_block_scale tx_scale_decode(tx_block_format f, uint8_t byte) {
  const int32_t k = (int32_t)byte - 127;
  const int32_t raised = k < f.min_exponent ? f.min_exponent : k;
  tx_block_scale scale = {tx_small_at(f.element, raised > f.max_exponent ? f.max_exponent : raised), 0xffffffffu};
  if (byte == TX_BLOCK_SCALE_NAN) {
    scale.at.rebase = 0x7fc00000u; /* what code 0 decodes to */
    scale.keep = 0u;
  }
  return scale;
}

/* How one block is encoded, decided from amax alone. */
typedef struct tx_block_plan {
  int32_t exponent; /* k before the codes are doubled */
  float inverse;    /* 2^-k */
  tx_small_place at;
  uint32_t keep;    /* mask of the codes: 0 if all of them are 0 (a block of zeros or not finite), else all ones */
  uint32_t special; /* the scale byte if keep is 0 */
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

/* The least code of x >= 0 in a sqrt format, in units of 1 << (23 - mantissa_bits): 1 for a positive x, 0 for 0.
 * sqrt(v) of a positive fp32 v is above 2^-75, so its pattern is above that unit. */
TX_FN uint32_t tx_block_least(tx_block_format f, float x) {
  const int32_t bits = (int32_t)tx_bits_from_f32(x), one = 1 << (23 - f.element.mantissa_bits);
  return (uint32_t)(bits < one ? bits : one);
}

/* The magnitude code of x at 2^k by threshold u, in units of 1 << (23 - mantissa_bits): its lower bits are to be cut
 * off. Before doubling; not masked by plan.keep. */
TX_FN uint32_t tx_block_round(tx_block_format f, tx_block_plan plan, float x, uint32_t u) {
  const uint32_t sum = tx_small_sum(f.element, plan.at, tx_f32_from_bits((uint32_t)tx_magnitude_bits(x)), u);
  const uint32_t least = tx_block_least(f, x);
  return f.sign_bit == 0u && (int32_t)sum < (int32_t)least ? least : sum;
}

/* The magnitude code of x at 2^k, before doubling. rounded: by threshold u, else to nearest. */
TX_FN uint32_t tx_block_code(tx_block_format f, tx_block_plan plan, float x, int rounded, uint32_t u) {
  const int s = 23 - f.element.mantissa_bits;
  if (rounded) return tx_block_round(f, plan, x, u) >> s & plan.keep;
  const float size = tx_f32_from_bits((uint32_t)tx_magnitude_bits(x));
  const uint32_t code = tx_small_nearest(f.element, size * plan.inverse), least = tx_block_least(f, x) >> s;
  return (f.sign_bit == 0u && (int32_t)code < (int32_t)least ? least : code) & plan.keep;
}

/* 2^mantissa_bits (the exponent's unit) if the block's codes are to be doubled because the largest is MAX/2's; 0 if
 * not. */
TX_FN uint32_t tx_block_doubling(tx_block_format f, tx_block_plan plan, uint32_t largest_code) {
  const uint32_t one = 1u << f.element.mantissa_bits;
  return largest_code == f.element.max_code - one && plan.exponent > f.min_exponent ? one : 0u;
}

/* Whether the block's largest code can be MAX/2's: whether amax, rounded down, has at most that code. False for nearly
 * all blocks, which then need no search for the largest code. */
TX_FN int tx_block_may_double(tx_block_format f, tx_block_plan plan, int32_t amax_bits) {
  const uint32_t one = 1u << f.element.mantissa_bits;
  return tx_small_round(f.element, plan.at, tx_f32_from_bits((uint32_t)amax_bits), 0) <= f.element.max_code - one &&
         plan.exponent > f.min_exponent;
}

/* The code as stored: doubled if the block's are, with x's sign. */
TX_FN uint32_t tx_block_finish(tx_block_format f, tx_block_plan plan, float x, uint32_t code, uint32_t doubling) {
  const uint32_t doubled = code + ((int32_t)code < (int32_t)doubling ? code : doubling);
  const uint32_t negative = tx_bits_from_f32(x) >> 31;
  return doubled | (negative * f.sign_bit & plan.keep);
}

TX_FN uint8_t tx_block_scale_byte(tx_block_plan plan, uint32_t doubling) {
  const uint32_t byte = (uint32_t)(plan.exponent + 127 - (doubling != 0u ? 1 : 0));
  return (uint8_t)(plan.keep != 0u ? byte : plan.special);
}

/* bits << n; bits >> -n for a negative n. */
TX_FN uint32_t tx_shifted(uint32_t bits, const int n) {
  return n >= 0 ? bits << n : bits >> -n;
}

/* The value of the stored code that begins at bit `low` of `word`; sqrt(v) in a sqrt format. Exact. */
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

/* tx_magnitude_bits of the largest |x[i]|; above TX_F32_INF if there is a NaN. */
TX_FN int32_t tx_block_amax_bits(const float *x, int32_t n) {
  int32_t amax = 0;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t bits = tx_magnitude_bits(x[i]);
    amax = bits > amax ? bits : amax;
  }
  return amax;
}

#endif
