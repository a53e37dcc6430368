/* The first half of a step on fp32 and bf16 streams: the moments of a tile, unrounded for the second half and rounded
 * to what is stored. Included by step_weights.h. */
#ifndef TX_CPU_STEP_MOMENTS_H
#define TX_CPU_STEP_MOMENTS_H

#include "csrc/cpu/step_avx512.h"
#include "csrc/cpu/step_streams.h"

/* The step walks over a tile twice: one loop for the moments up to the square root, one for the weights from the
 * division on. In a single loop, the many instructions that wait for a result of the divider would fill the processor's
 * scheduler, and it would run at half its speed. A tile is small compared with the L1 cache. */
#define TX_STEP_TILE 256
_Static_assert(TX_STEP_TILE <= TX_FOUND_BLOCKS * TX_BLOCK, "what is found has room for a tile's blocks");

/* Unrounded results of the first loop; element 2 * i + k is at [k][i]. */
typedef struct tx_step_tile {
  float m[2][TX_STEP_TILE / 2];
  float v[2][TX_STEP_TILE / 2];
  float root[2][TX_STEP_TILE / 2];
} __attribute__((aligned(64))) tx_step_tile;

/* Whether no moment of a tile is NaN, Inf or beyond bf16's largest number. */
static __attribute__((noinline)) int tx_tile_is_ordinary(const tx_step_tile *tile, int32_t pairs) {
  int32_t largest = 0;
  for (int k = 0; k < 2; k++) {
    for (int32_t i = 0; i < pairs; i++) {
      const int32_t m = tx_magnitude_bits(tile->m[k][i]), v = tx_magnitude_bits(tile->v[k][i]);
      largest = m > largest ? m : largest;
      largest = v > largest ? v : largest;
    }
  }
  return largest <= TX_BF16_LARGEST;
}

/* Masks that leave a number's magnitude in its 16-bit halves, for bf16 [0] and for fp32 [1], where only the upper half
 * counts. */
#define TX_HALVES (2 * TX_GROUP)
#define TX_SIZE_(upper_only) upper_only ? 0 : 0x7fff, 0x7fff
#define TX_SIZE_4_(u) TX_SIZE_(u), TX_SIZE_(u), TX_SIZE_(u), TX_SIZE_(u)
#define TX_SIZE_16_(u) TX_SIZE_4_(u), TX_SIZE_4_(u), TX_SIZE_4_(u), TX_SIZE_4_(u)
static const int16_t tx_size_halves[2][TX_HALVES] = {{TX_SIZE_16_(0)}, {TX_SIZE_16_(1)}};
#undef TX_SIZE_
#undef TX_SIZE_4_
#undef TX_SIZE_16_

/* Whether every upper half of the n magnitudes from `from` on is below `most`. n: a multiple of 2 * TX_GROUP. */
TX_FN int tx_halves_are_within(const void *from, const int32_t n, int16_t most, const tx_dtype dtype) {
  const int16_t *const sizes = tx_size_halves[dtype == TX_F32];
  const int32_t end = n * (dtype == TX_F32 ? 2 : 1);
  int16_t seen[TX_HALVES] = {0}, over = 0;
  for (int32_t i = 0; i < end; i += TX_HALVES) {
    for (int32_t j = 0; j < TX_HALVES; j++) {
      const int16_t size = (int16_t)(((const tx_mem_u16 *)from)[i + j] & sizes[j]);
      seen[j] = size > seen[j] ? size : seen[j];
    }
  }
  for (int32_t j = 0; j < TX_HALVES; j++)
    over |= seen[j] >= most ? 1 : 0;
  return !over;
}

/* For a tile, which mostly has the same length. Separate functions: inlined, they would take registers from the
 * loops. */
static __attribute__((noinline)) int tx_tile_is_within_F32(const void *from, int32_t n, int16_t most) {
  if (n == TX_STEP_TILE) return tx_halves_are_within(from, TX_STEP_TILE, most, TX_F32);
  return tx_halves_are_within(from, n, most, TX_F32);
}
static __attribute__((noinline)) int tx_tile_is_within_BF16(const void *from, int32_t n, int16_t most) {
  if (n == TX_STEP_TILE) return tx_halves_are_within(from, TX_STEP_TILE, most, TX_BF16);
  return tx_halves_are_within(from, n, most, TX_BF16);
}

/* Whether the magnitudes of n fp32 or bf16 numbers from element `at` on are below `most`. May be false for numbers
 * slightly below it; false if there is a NaN. It compares 16-bit integers, since every instruction set has a vector
 * maximum of these. */
TX_FN int tx_are_within(const void *numbers, int64_t at, int32_t n, float most, const tx_dtype dtype) {
  const char *from = (const char *)numbers + at * tx_lane_bytes(dtype);
  const int16_t half = (int16_t)(tx_bits_from_f32(most) >> 16);
  return dtype == TX_F32 ? tx_tile_is_within_F32(from, n, half) : tx_tile_is_within_BF16(from, n, half);
}

/* Whether one of the words has all these bits set. */
TX_FN int tx_any_has(const uint32_t words[TX_GROUP], uint32_t bits) {
#if TX_HAS_AVX512 /* without it gcc takes the vector apart, word by word, which costs a thirtieth of the step */
  const __m512i wanted = _mm512_set1_epi32((int32_t)bits), all = _mm512_loadu_si512(words);
  return _mm512_cmpeq_epi32_mask(_mm512_and_si512(all, wanted), wanted) != 0;
#else
  uint32_t all = 0;
  for (int32_t j = 0; j < TX_GROUP; j++)
    all |= words[j];
  return (all & bits) == bits;
#endif
}

/* Unrounded moments of `pairs` pairs from pair `at` on. bf16 moments are rounded as if none were NaN, Inf or beyond
 * bf16's largest number. Returns whether that holds: comparing once for a tile costs less than selecting for each
 * element. within: see tx_adamw_average_within. */
TX_FN int tx_step_pair_moments(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs, tx_step_tile *tile,
                               const tx_dtype grad, const tx_dtype moment, const int within) {
  uint32_t set[TX_GROUP] = {0}; /* the bits of all moments, or-ed */
  for (int32_t group = 0; group < pairs; group += TX_GROUP) {
    const uint32_t ramp = tx_dithered(0, 2 * (uint32_t)(at + group));
    tx_prefetch(s.grad, 2 * (at + group), 2 * TX_GROUP, grad);
    tx_prefetch(s.exp_avg, 2 * (at + group), 2 * TX_GROUP, moment);
    tx_prefetch(s.exp_avg_sq, 2 * (at + group), 2 * TX_GROUP, moment);
    TX_NO_ALIASES
    for (int32_t j = 0; j < TX_GROUP; j++) {
      const int32_t i = group + j;
      uint32_t m[2], v[2];
      for (int k = 0; k < 2; k++) {
        const uint32_t u = (2 * (uint32_t)j + (uint32_t)k) * TX_LATTICE_ELEMENT;
        const float g = tx_load_lane(s.grad, at + i, k, grad), old_m = tx_load_lane(s.exp_avg, at + i, k, moment);
        const float old_v = tx_load_lane(s.exp_avg_sq, at + i, k, moment);
        const tx_adamw_moments r =
            within ? tx_adamw_average_within(c, 1, g, 0.0f, old_m, old_v) : tx_adamw_average(c, g, 0.0f, old_m, old_v);
        tile->m[k][i] = r.m;
        tile->root[k][i] = r.root;
        m[k] = tx_bits_from_f32(r.m);
        v[k] = tx_bits_from_f32(r.v);
        if (moment == TX_BF16) {
          tile->v[k][i] = r.v;
          set[j] |= m[k] | v[k];
          m[k] += (s.exp_avg_u + ramp + u) >> 16;
          v[k] += (s.exp_avg_sq_u + ramp + u) >> 16;
        }
      }
      tx_store_lanes(s.exp_avg, at + i, moment, m);
      tx_store_lanes(s.exp_avg_sq, at + i, moment, v);
    }
  }
  /* A number that is too large has all the upper bits of the exponent set. In nearly every tile some of these bits are
   * not set in any number, so none is too large. */
  if (moment != TX_BF16 || __builtin_expect(!tx_any_has(set, 0x7f000000u), 1)) return 1;
  return tx_tile_is_ordinary(tile, pairs);
}

/* The same for any gradients. */
static __attribute__((noinline)) int tx_step_pair_moments_any(const tx_adamw_constants *c, const tx_step_streams *s,
                                                              int32_t at, int32_t pairs, tx_step_tile *tile,
                                                              tx_dtype grad, tx_dtype moment) {
  if (grad == TX_F32 && moment == TX_F32) return tx_step_pair_moments(*c, *s, at, pairs, tile, TX_F32, TX_F32, 0);
  if (grad == TX_F32) return tx_step_pair_moments(*c, *s, at, pairs, tile, TX_F32, TX_BF16, 0);
  if (moment == TX_F32) return tx_step_pair_moments(*c, *s, at, pairs, tile, TX_BF16, TX_F32, 0);
  return tx_step_pair_moments(*c, *s, at, pairs, tile, TX_BF16, TX_BF16, 0);
}

/* Rounds a tile's moments to bf16 again, whatever their values are. */
static __attribute__((noinline)) void tx_round_moments(tx_step_streams s, int32_t at, int32_t pairs,
                                                       const tx_step_tile *tile) {
  for (int32_t i = 0; i < pairs; i++) {
    for (int k = 0; k < 2; k++) {
      const int32_t element = 2 * (at + i) + k;
      const uint32_t u = tx_dithered(0, (uint32_t)element);
      tx_store_threshold(s.exp_avg, element, TX_BF16, tile->m[k][i], s.exp_avg_u + u);
      tx_store_threshold(s.exp_avg_sq, element, TX_BF16, tile->v[k][i], s.exp_avg_sq_u + u);
    }
  }
}

#endif
