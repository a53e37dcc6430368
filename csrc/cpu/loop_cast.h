/* Converts every form of forms.def to and from fp32, a tile at a time. A cast is a load and a store around a tile that
 * stays in the L1 cache, so the number of loops grows with the sum of forms, not with their product. */
#ifndef TX_CPU_LOOP_CAST_H
#define TX_CPU_LOOP_CAST_H

#include <math.h>

#include "csrc/core/forms.h"
#include "csrc/cpu/element.h"
#include "csrc/cpu/round_bf16.h"
#include "csrc/math/block_scale.h"
#include "csrc/math/noise.h"

TX_FN int64_t tx_block_count(int64_t n, int64_t at) {
  return n - at < TX_BLOCK ? n - at : TX_BLOCK;
}

TX_FN void tx_load_plain(const void *from, int64_t n, float *restrict to, const tx_dtype dtype) {
  for (int64_t i = 0; i < n; i++)
    to[i] = tx_load(from, i, dtype);
}

TX_FN void tx_load_scaled(const void *from, const uint8_t *scales, int64_t n, float *restrict to, const tx_dtype dtype,
                          const tx_format format) {
  const tx_block_format f = tx_block_format_of(dtype, format);
  for (int64_t at = 0; at < n; at += TX_BLOCK) {
    const int64_t count = tx_block_count(n, at);
    const tx_block_scale scale = tx_scale_decode(f, scales[at / TX_BLOCK]);
    for (int64_t i = at; i < at + count; i++) {
      const uint32_t code = dtype == TX_U8 ? ((const uint8_t *)from)[i] : ((const tx_mem_u16 *)from)[i];
      const float value = tx_block_value(f, code, scale);
      to[i] = tx_one_nan(format == TX_FORMAT_SQRT ? value * value : value);
    }
  }
}

/* from: may be masters, which may be at any address. */
TX_FN void tx_store_plain_rounded(const void *from, int32_t n, void *to, tx_noise noise, uint32_t at,
                                  const int32_t rounding, const tx_dtype dtype) {
  uint32_t ramp = 0;
  for (int32_t i = 0; i < n; i++, ramp += TX_LATTICE_ELEMENT) {
    if (rounding == TX_NEAREST) {
      tx_store(to, i, dtype, tx_load(from, i, TX_F32));
    } else {
      tx_store_threshold(to, i, dtype, tx_load(from, i, TX_F32), tx_threshold(noise, at, (uint32_t)i, ramp, rounding));
    }
  }
}

TX_FN void tx_store_plain(const void *from, int64_t n, void *to, tx_noise noise, int64_t at, int32_t rounding,
                          const tx_dtype dtype) {
  if (dtype == TX_BF16 && rounding == TX_NEAREST) {
    tx_nearest_bf16(from, n, to);
  } else if (dtype == TX_F32 || rounding == TX_NEAREST) {
    tx_store_plain_rounded(from, (int32_t)n, to, noise, (uint32_t)at, TX_NEAREST, dtype);
  } else if (rounding == TX_DITHERED) {
    tx_store_plain_rounded(from, (int32_t)n, to, noise, (uint32_t)at, TX_DITHERED, dtype);
  } else {
    tx_store_plain_rounded(from, (int32_t)n, to, noise, (uint32_t)at, TX_STOCHASTIC, dtype);
  }
}

/* One pass over a block's codes; returns the largest magnitude code. */
TX_FN int32_t tx_store_codes(const float *x, int32_t n, void *to, tx_noise noise, uint32_t at, tx_block_plan plan,
                             uint32_t doubling, const int32_t rounding, const tx_dtype dtype, const tx_format format) {
  const tx_block_format f = tx_block_format_of(dtype, format);
  int32_t largest = 0;
  uint32_t ramp = 0;
  for (int32_t i = 0; i < n; i++, ramp += TX_LATTICE_ELEMENT) {
    const uint32_t u = tx_threshold(noise, at, (uint32_t)i, ramp, rounding);
    const uint32_t code = tx_block_code(f, plan, x[i], rounding != TX_NEAREST, u);
    const uint32_t finished = tx_block_finish(f, plan, x[i], code, doubling);
    largest = (int32_t)code > largest ? (int32_t)code : largest;
    if (dtype == TX_U8) {
      ((uint8_t *)to)[i] = (uint8_t)finished;
    } else {
      ((tx_mem_u16 *)to)[i] = (uint16_t)finished;
    }
  }
  return largest;
}

/* If the largest code turns out to be half of the format's largest, codes are doubled and the pass is repeated. */
TX_FN void tx_store_blocks(const float *from, int64_t n, void *to, uint8_t *scales, tx_noise noise, int64_t at,
                           const int32_t rounding, const tx_dtype dtype, const tx_format format, const int roots) {
  const tx_block_format f = tx_block_format_of(dtype, format);
  for (int64_t b = 0; b < n; b += TX_BLOCK) {
    const int32_t count = (int32_t)tx_block_count(n, b);
    char *codes = (char *)to + b * (dtype == TX_U8 ? 1 : 2);
    float buffer[TX_BLOCK];
    const float *x = from + b;
    if (!roots && format == TX_FORMAT_SQRT) {
      for (int32_t i = 0; i < count; i++)
        buffer[i] = sqrtf(x[i]);
      x = buffer;
    }
    const tx_block_plan plan = tx_block_plan_from(f, tx_block_amax_bits(x, count));
    const uint32_t first = (uint32_t)(at + b);
    const int32_t largest = tx_store_codes(x, count, codes, noise, first, plan, 0, rounding, dtype, format);
    const uint32_t doubling = tx_block_doubling(f, plan, (uint32_t)largest);
    if (__builtin_expect(doubling != 0, 0)) {
      (void)tx_store_codes(x, count, codes, noise, first, plan, doubling, rounding, dtype, format);
    }
    scales[b / TX_BLOCK] = tx_block_scale_byte(plan, doubling);
  }
}

/* roots: whether `from` already has sqrt(v), for a sqrt format. */
TX_FN void tx_store_scaled(const float *from, int64_t n, void *to, uint8_t *scales, tx_noise noise, int64_t at,
                           int32_t rounding, const tx_dtype dtype, const tx_format format, const int roots) {
  if (rounding == TX_NEAREST) {
    tx_store_blocks(from, n, to, scales, noise, at, TX_NEAREST, dtype, format, roots);
  } else if (rounding == TX_DITHERED) {
    tx_store_blocks(from, n, to, scales, noise, at, TX_DITHERED, dtype, format, roots);
  } else {
    tx_store_blocks(from, n, to, scales, noise, at, TX_STOCHASTIC, dtype, format, roots);
  }
}

/* A load and a store loop for each form. A plain form is named after its dtype, a scaled one after its format, too. */
#define TX_PLAIN_LOOPS_(index, name, ...)                                                                             \
  static void tx_load_##name##_(const void *from, const uint8_t *scales, int64_t n, float *to) {                      \
    (void)scales;                                                                                                     \
    tx_load_plain(from, n, to, TX_##name);                                                                            \
  }                                                                                                                   \
  static void tx_store_##name##_(const float *from, int64_t n, void *to, uint8_t *scales, tx_noise noise, int64_t at, \
                                 int32_t rounding) {                                                                  \
    (void)scales;                                                                                                     \
    tx_store_plain(from, n, to, noise, at, rounding, TX_##name);                                                      \
  }
#define TX_SCALED_LOOPS_(index, name, format, ...)                                                                \
  static void tx_load_##name##_##format(const void *from, const uint8_t *scales, int64_t n, float *to) {          \
    tx_load_scaled(from, scales, n, to, TX_##name, TX_FORMAT_##format);                                           \
  }                                                                                                               \
  static void tx_store_##name##_##format(const float *from, int64_t n, void *to, uint8_t *scales, tx_noise noise, \
                                         int64_t at, int32_t rounding) {                                          \
    tx_store_scaled(from, n, to, scales, noise, at, rounding, TX_##name, TX_FORMAT_##format, 0);                  \
  }
TX_FOR_EACH_PLAIN(TX_PLAIN_LOOPS_)
TX_FOR_EACH_SCALED(TX_SCALED_LOOPS_)
#undef TX_PLAIN_LOOPS_
#undef TX_SCALED_LOOPS_

/* Stores of a sqrt format from sqrt(v), which the step has already computed. */
#define TX_ROOT_LOOPS_(name)                                                                                 \
  static void tx_store_roots_##name(const float *from, int64_t n, void *to, uint8_t *scales, tx_noise noise, \
                                    int64_t at, int32_t rounding) {                                          \
    tx_store_scaled(from, n, to, scales, noise, at, rounding, TX_##name, TX_FORMAT_SQRT, 1);                 \
  }
TX_ROOT_LOOPS_(U8)
TX_ROOT_LOOPS_(F16)
#undef TX_ROOT_LOOPS_

/* Initialisers of tx_kernels.load and .store. */
#define TX_LOAD_ENTRY_(index, name, format, ...) [index] = tx_load_##name##_##format,
#define TX_STORE_ENTRY_(index, name, format, ...) [index] = tx_store_##name##_##format,
#define TX_LOAD_LOOPS TX_FOR_EACH_PLAIN(TX_LOAD_ENTRY_) TX_FOR_EACH_SCALED(TX_LOAD_ENTRY_)
#define TX_STORE_LOOPS TX_FOR_EACH_PLAIN(TX_STORE_ENTRY_) TX_FOR_EACH_SCALED(TX_STORE_ENTRY_)

#endif
