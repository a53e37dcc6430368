/* Every form of forms.def to and from fp32, a tile at a time. A cast is a load and a store around a tile that stays in
 * the first-level cache, so forms add up instead of multiplying. */
#ifndef TX_CPU_LOOP_CAST_H
#define TX_CPU_LOOP_CAST_H

#include <math.h>

#include "csrc/cpu/element.h"
#include "csrc/cpu/forms.h"
#include "csrc/cpu/noise.h"
#include "csrc/math/block_scale.h"

TX_FN int64_t tx_block_count(int64_t n, int64_t at) {
  return n - at < TX_BLOCK ? n - at : TX_BLOCK;
}

TX_FN tx_block_format tx_block_format_of(const tx_dtype dtype, const tx_format format) {
  if (dtype == TX_U8) return format == TX_FORMAT_SQRT ? tx_block_root_e4m4() : tx_block_e4m3();
  return format == TX_FORMAT_SQRT ? tx_block_root_f16() : tx_block_f16();
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
    const float scale = tx_scale_decode(scales[at / TX_BLOCK]);
    for (int64_t i = at; i < at + count; i++) {
      const uint32_t code = dtype == TX_U8 ? ((const uint8_t *)from)[i] : ((const tx_mem_u16 *)from)[i];
      const float value = tx_block_value(f, code, scale);
      to[i] = tx_one_nan(format == TX_FORMAT_SQRT ? value * value : value);
    }
  }
}

/* Thresholds of the block that begins `at` elements into the noise's stream. */
TX_FN void tx_thresholds_fill(tx_noise noise, int64_t at, int32_t rounding, uint32_t u[TX_BLOCK]) {
  uint32_t ramp[TX_BLOCK], hashed[TX_BLOCK];
  tx_lattice_ramp(ramp);
  const tx_thresholds t = tx_noise_block(noise, at, rounding, ramp, hashed);
  for (int64_t i = 0; i < TX_BLOCK; i++)
    u[i] = t.base + t.ramp[i];
}

TX_FN void tx_store_plain(const float *from, int64_t n, void *to, tx_noise noise, int64_t at, int32_t rounding,
                          const tx_dtype dtype) {
  if (dtype == TX_F32 || rounding == TX_NEAREST) {
    for (int64_t i = 0; i < n; i++)
      tx_store(to, i, dtype, from[i]);
    return;
  }
  for (int64_t b = 0; b < n; b += TX_BLOCK) {
    const int64_t count = tx_block_count(n, b);
    uint32_t u[TX_BLOCK];
    tx_thresholds_fill(noise, at + b, rounding, u);
    for (int64_t i = 0; i < count; i++)
      tx_store_threshold(to, b + i, dtype, from[b + i], u[i]);
  }
}

TX_FN void tx_store_scaled(const float *from, int64_t n, void *to, uint8_t *scales, tx_noise noise, int64_t at,
                           int32_t rounding, const tx_dtype dtype, const tx_format format) {
  const tx_block_format f = tx_block_format_of(dtype, format);
  for (int64_t b = 0; b < n; b += TX_BLOCK) {
    const int64_t count = tx_block_count(n, b);
    float x[TX_BLOCK];
    uint32_t u[TX_BLOCK], codes[TX_BLOCK];
    for (int64_t i = 0; i < count; i++)
      x[i] = format == TX_FORMAT_SQRT ? sqrtf(from[b + i]) : from[b + i];
    if (rounding == TX_NEAREST) {
      scales[b / TX_BLOCK] = tx_block_encode(f, x, (int32_t)count, NULL, codes);
    } else {
      tx_thresholds_fill(noise, at + b, rounding, u);
      scales[b / TX_BLOCK] = tx_block_encode(f, x, (int32_t)count, u, codes);
    }
    for (int64_t i = 0; i < count; i++) {
      if (dtype == TX_U8) {
        ((uint8_t *)to)[b + i] = (uint8_t)codes[i];
      } else {
        ((tx_mem_u16 *)to)[b + i] = (uint16_t)codes[i];
      }
    }
  }
}

/* The loops themselves, one pair per form. A plain form is named after its dtype, a scaled one after its format too. */
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
    tx_store_scaled(from, n, to, scales, noise, at, rounding, TX_##name, TX_FORMAT_##format);                     \
  }
TX_FOR_EACH_PLAIN(TX_PLAIN_LOOPS_)
TX_FOR_EACH_SCALED(TX_SCALED_LOOPS_)
#undef TX_PLAIN_LOOPS_
#undef TX_SCALED_LOOPS_

/* Initialisers of tx_kernels.load and .store. */
#define TX_LOAD_ENTRY_(index, name, format, ...) [index] = tx_load_##name##_##format,
#define TX_STORE_ENTRY_(index, name, format, ...) [index] = tx_store_##name##_##format,
#define TX_LOAD_LOOPS TX_FOR_EACH_PLAIN(TX_LOAD_ENTRY_) TX_FOR_EACH_SCALED(TX_LOAD_ENTRY_)
#define TX_STORE_LOOPS TX_FOR_EACH_PLAIN(TX_STORE_ENTRY_) TX_FOR_EACH_SCALED(TX_STORE_ENTRY_)

#endif
