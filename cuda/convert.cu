#include <math.h>

#include "cuda/conversions.h"

namespace {

/* The number of rounds that are read before the first one is converted. */
constexpr int kRounds = 2;

/* Stored elements as floats. */
__device__ __forceinline__ void decode(float (&x)[TX_VECTOR], const tx_raw &raw, uint8_t scale, int form) {
  switch (form) {
#define TX_DECODE_PLAIN_(index, name, ...) \
  case index:                              \
    return tx_plain_floats(x, raw, TX_##name);
#define TX_DECODE_SCALED_(index, name, format, ...) \
  case index:                                       \
    return tx_scaled_floats(x, raw, scale, TX_##name, TX_FORMAT_##format);
    TX_FOR_EACH_PLAIN(TX_DECODE_PLAIN_)
    TX_FOR_EACH_SCALED(TX_DECODE_SCALED_)
#undef TX_DECODE_PLAIN_
#undef TX_DECODE_SCALED_
  }
}

template <tx_dtype DTYPE, tx_format FORMAT>
__device__ __forceinline__ uint8_t encode_scaled(tx_raw &raw, float (&x)[TX_VECTOR], const uint32_t (&u)[TX_VECTOR],
                                                 int rounded) {
#pragma unroll
  for (int i = 0; FORMAT == TX_FORMAT_SQRT && i < TX_VECTOR; i++)
    x[i] = sqrtf(x[i]);
  return tx_encode_block(raw, x, u, rounded, DTYPE, FORMAT);
}

/* Floats as stored elements. Returns the block's scale byte if the form has scales. Every lane of the warp has to call
 * it. */
__device__ __forceinline__ uint8_t encode(tx_raw &raw, float (&x)[TX_VECTOR], const uint32_t (&u)[TX_VECTOR],
                                          int rounded, int form) {
  switch (form) {
#define TX_ENCODE_PLAIN_(index, name, ...)       \
  case index:                                    \
    tx_plain_raw(raw, x, u, rounded, TX_##name); \
    break;
#define TX_ENCODE_SCALED_(index, name, format, ...) \
  case index:                                       \
    return encode_scaled<TX_##name, TX_FORMAT_##format>(raw, x, u, rounded);
    TX_FOR_EACH_PLAIN(TX_ENCODE_PLAIN_)
    TX_FOR_EACH_SCALED(TX_ENCODE_SCALED_)
#undef TX_ENCODE_PLAIN_
#undef TX_ENCODE_SCALED_
  }
  return 0;
}

__device__ __forceinline__ uint8_t read(tx_raw &raw, const tx_conversion &run, int64_t first, int32_t count) {
  const int64_t given = run.given - first;
  const int32_t there = given < 0 ? 0 : given < count ? (int32_t)given : count;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    raw[i] = 0;
  if (run.from_form == TX_FORM_ZEROS || there == 0) return 0;
  tx_read_raw(raw, run.from, tx_form_bytes(run.from_form), run.from_alignment, first, there);
  return run.from_scales ? run.from_scales[first / TX_BLOCK] : (uint8_t)0;
}

template <class Table>
__global__ void __launch_bounds__(TX_BLOCK_THREADS) convert(const __grid_constant__ Table t) {
  const int64_t tiles = tx_table_tiles(t);
  const int32_t rounding = t.common.rounding;
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    const tx_conversion &run = t.entries[tile.tensor];
    const bool copies = run.from_form == run.to_form || run.from_form == TX_FORM_ZEROS;
    for (int32_t round = 0; round < tx_rounds(tile.count); round += kRounds) {
      tx_raw raw[kRounds];
      uint8_t scale[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; i++) {
        const tx_share share = tx_share_of_tile(tile.count, round + i, tx_lane_id());
        scale[i] = read(raw[i], run, tile.begin + share.first, share.count);
      }
#pragma unroll
      for (int i = 0; i < kRounds; i++) {
        const tx_share share = tx_share_of_tile(tile.count, round + i, tx_lane_id());
        const int64_t first = tile.begin + share.first;
        if (round + i >= tx_rounds(tile.count)) break;
        if (!copies) {
          float x[TX_VECTOR];
          uint32_t u[TX_VECTOR] = {};
          decode(x, raw[i], scale[i], run.from_form);
          if (rounding != TX_NEAREST) tx_thresholds(u, run.noise, (uint32_t)first, 0, rounding);
          scale[i] = encode(raw[i], x, u, rounding != TX_NEAREST, run.to_form);
        }
        if (share.count == 0) continue;
        tx_write_raw(raw[i], run.to, tx_form_bytes(run.to_form), run.to_alignment, first, share.count);
        if (run.to_scales) tx_write_scale(run.to_scales, scale[i], first, share.count);
      }
    }
  }
}

}  // namespace

void tx_convert_begin(tx_convert_table *table, int32_t rounding) {
  table->common.rounding = rounding;
  tx_table_begin(table, 4 * TX_ROUND);
}

tx_status tx_convert_add(const tx_cuda_scope *scope, tx_convert_table *table, tx_conversion run, const char *name,
                         tx_error *error) {
  run.from_alignment = (uint8_t)tx_alignment_of(run.from);
  run.to_alignment = (uint8_t)tx_alignment_of(run.to);
  if (tx_table_add(table, run)) return TX_OK;
  TX_FORWARD(tx_convert_end(scope, table, name, error));
  tx_convert_begin(table, table->common.rounding);
  (void)tx_table_add(table, run);
  return TX_OK;
}

tx_status tx_convert_end(const tx_cuda_scope *scope, const tx_convert_table *table, const char *name, tx_error *error) {
  return tx_cuda_launch_sized(scope, convert<tx_convert_table>,
                              convert<tx_small_table<tx_convert_common, tx_conversion>>, *table, name, error);
}
