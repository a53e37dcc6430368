/* Sums that a step with health measurement (opt.measure_health) collects for a parameter. They are integers, so that
 * no bit depends on how elements are divided into threads, chunks and ranks.
 *
 * A row has TX_HEALTH_LEN integers: the sum of squares of updates and that of weights, each in TX_HEALTH_BINS bins;
 * counts; the largest weight. A block's sum of squares is an fp32 with a 24-bit mantissa. It is added to the bin of its
 * exponent (8 exponents to a bin) as an integer below 2^31, so that 2^32 blocks fit. */
#ifndef TX_MATH_HEALTH_H
#define TX_MATH_HEALTH_H

#include <math.h>

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

#define TX_HEALTH_BINS 32
enum {
  TX_HEALTH_UPDATES = 0,
  TX_HEALTH_WEIGHTS = TX_HEALTH_BINS,
  TX_HEALTH_MOVED = 2 * TX_HEALTH_BINS, /* weights whose bits changed */
  TX_HEALTH_BELOW,                      /* updates below half an ulp of their weight */
  TX_HEALTH_ELEMENTS,
  TX_HEALTH_NOT_FINITE, /* blocks whose sums are not finite; they are in no bin */
  TX_HEALTH_LARGEST     /* the fp32 pattern of the largest weight: combined by maximum, not by sum */
};

/* sum + x * x, rounded once; sum >= 0. */
TX_FN float tx_square_added(float sum, float x) {
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
  return fmaf(x, x, sum);
#else
  /* The product is exact. The rounding error of the sum in double is computed exactly and makes the sum's last bit odd
   * (round to odd), so that rounding to fp32 then gives the bits of the exact sum (Boldo & Melquiond 2008). */
  const double square = (double)x * (double)x, from = (double)sum, to = square + from;
  const double of_from = to - square, off = (square - (to - of_from)) + (from - of_from);
  uint64_t bits;
  memcpy(&bits, &to, sizeof bits);
  const uint64_t odd = bits & 1u, up = off > 0.0 ? 1u : 0u, down = off < 0.0 ? 1u : 0u;
  bits = odd ? bits : bits + up - down;
  double rounded;
  memcpy(&rounded, &bits, sizeof rounded);
  return (float)rounded;
#endif
}

/* What a block's sum of squares, >= 0, adds to which bin. bin -1: the sum is not finite. */
typedef struct tx_health_share {
  int64_t amount;
  int32_t bin;
} tx_health_share;
TX_FN tx_health_share tx_health_share_of(float sum) {
  const uint32_t bits = tx_bits_from_f32(sum), exponent = bits >> 23;
  const uint32_t mantissa = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u), field = exponent ? exponent : 1u;
  const tx_health_share share = {(int64_t)mantissa << (field & 7u), exponent >= 255u ? -1 : (int32_t)(field >> 3)};
  return share;
}

/* Adds a block's sum of squares to the bins that begin at row[bins]. */
TX_FN void tx_health_add(int64_t *row, int32_t bins, float sum) {
  const tx_health_share share = tx_health_share_of(sum);
  if (share.bin < 0) {
    row[TX_HEALTH_NOT_FINITE]++;
  } else {
    row[bins + share.bin] += share.amount;
  }
}

/* The sum of the bins as a double. A mantissa of 1 is worth 2^(field - 150), where field is the fp32 exponent field. */
TX_FN double tx_health_sum(const int64_t *bins) {
  double sum = 0.0;
  for (int32_t i = TX_HEALTH_BINS - 1; i >= 0; --i)
    sum += (double)bins[i] * ((double)tx_exp2i(4 * i - 75) * (double)tx_exp2i(4 * i - 75));
  return sum;
}

/* The fp32 pattern of half an ulp of a weight of dtype `param`; bits: the fp32 pattern of its master. */
TX_FN int32_t tx_half_ulp_bits(uint32_t bits, const tx_dtype param) {
  const int32_t digits = param == TX_BF16 ? 8 : param == TX_F16 ? 11 : 24;
  const int32_t least = param == TX_F16 ? 113 : 1 + digits; /* subnormals have the ulp of the least normal */
  const int32_t exponent = (int32_t)((bits >> 23) & 0xffu);
  return ((exponent < least ? least : exponent) - digits) << 23;
}

#endif
