/* The step on streams of fp32 and bf16 that are read and written in place, two elements of each to a lane-wide word.
 * Included by loop_adamw.h. */
#ifndef TX_CPU_STEP_PLAIN_H
#define TX_CPU_STEP_PLAIN_H

#include "csrc/cpu/step_streams.h"
#include "csrc/cpu/stream_store.h"

/* Loops written for AVX-512 beside the plain ones. */
#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define TX_HAS_AVX512 1
#include "csrc/cpu/avx512_block.h"
#else
#define TX_HAS_AVX512 0
/* Other loops have nothing to keep from one block to the next. */
typedef struct tx_measured_blocks {
  char none;
} tx_measured_blocks;
TX_FN void tx_measured_begin(tx_measured_blocks *m) {
  (void)m;
}
TX_FN void tx_measured_end(tx_measured_blocks *m, int64_t *row) {
  (void)m, (void)row;
}
#endif

/* The step goes over a tile twice: a loop for the moments up to the square root, one for the weights from the division
 * on. With both in one loop the many instructions that wait for a result of the divider fill the processor's scheduler,
 * and it runs at half its speed. Tiles are small against the first-level cache. */
#define TX_STEP_TILE 256
_Static_assert(TX_STEP_TILE <= TX_FOUND_BLOCKS * TX_BLOCK, "what is found has room for a tile's blocks");

/* Unrounded results of the first loop; element 2 * i + k at [k][i]. */
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

/* What is a number's size of its 16-bit halves; of fp32 the upper one alone. */
#define TX_HALVES (2 * TX_GROUP)
#define TX_SIZE_(upper_only) upper_only ? 0 : 0x7fff, 0x7fff
#define TX_SIZE_4_(u) TX_SIZE_(u), TX_SIZE_(u), TX_SIZE_(u), TX_SIZE_(u)
#define TX_SIZE_16_(u) TX_SIZE_4_(u), TX_SIZE_4_(u), TX_SIZE_4_(u), TX_SIZE_4_(u)
static const int16_t tx_size_halves[2][TX_HALVES] = {{TX_SIZE_16_(0)}, {TX_SIZE_16_(1)}};
#undef TX_SIZE_
#undef TX_SIZE_4_
#undef TX_SIZE_16_

/* Whether no size among the n numbers from `from` on has an upper half of `most` or more. n: a multiple of
 * 2 * TX_GROUP. */
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

/* A tile, mostly of the one length. By itself: in the loops' function it would take registers from them. */
static __attribute__((noinline)) int tx_tile_is_within_F32(const void *from, int32_t n, int16_t most) {
  if (n == TX_STEP_TILE) return tx_halves_are_within(from, TX_STEP_TILE, most, TX_F32);
  return tx_halves_are_within(from, n, most, TX_F32);
}
static __attribute__((noinline)) int tx_tile_is_within_BF16(const void *from, int32_t n, int16_t most) {
  if (n == TX_STEP_TILE) return tx_halves_are_within(from, TX_STEP_TILE, most, TX_BF16);
  return tx_halves_are_within(from, n, most, TX_BF16);
}

/* Whether n numbers of fp32 or bf16, from element `at` on, are below `most` in size; of some a little below it, and of
 * NaN, it says that they are not. In 16 bits, of which every instruction set has a vector maximum. */
TX_FN int tx_are_within(const void *numbers, int64_t at, int32_t n, float most, const tx_dtype dtype) {
  const char *from = (const char *)numbers + at * tx_lane_bytes(dtype);
  const int16_t half = (int16_t)(tx_bits_from_f32(most) >> 16);
  return dtype == TX_F32 ? tx_tile_is_within_F32(from, n, half) : tx_tile_is_within_BF16(from, n, half);
}

/* Whether one of these words has all the bits. */
TX_FN int tx_any_has(const uint32_t words[TX_GROUP], uint32_t bits) {
#if TX_HAS_AVX512 /* else gcc takes the vector apart, word by word: a thirtieth of the step */
  const __m512i wanted = _mm512_set1_epi32((int32_t)bits), all = _mm512_loadu_si512(words);
  return _mm512_cmpeq_epi32_mask(_mm512_and_si512(all, wanted), wanted) != 0;
#else
  uint32_t all = 0;
  for (int32_t j = 0; j < TX_GROUP; j++)
    all |= words[j];
  return (all & bits) == bits;
#endif
}

/* Unrounded moments of `pairs` pairs from pair `at` on. Those in bf16 are rounded as if none were NaN, Inf or beyond
 * bf16's largest number. Returns whether that was so: the comparisons for a tile cost less than the selections for an
 * element. within: tx_adamw_average_within's. */
TX_FN int tx_step_pair_moments(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs, tx_step_tile *tile,
                               const tx_dtype grad, const tx_dtype moment, const int within) {
  uint32_t set[TX_GROUP] = {0}; /* bits of any */
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
  /* Upper bits of an exponent: whatever is too large has them all, and few tiles have them together. */
  if (moment != TX_BF16 || __builtin_expect(!tx_any_has(set, 0x7f000000u), 1)) return 1;
  return tx_tile_is_ordinary(tile, pairs);
}

/* The same of any gradients. */
static __attribute__((noinline)) int tx_step_pair_moments_any(const tx_adamw_constants *c, const tx_step_streams *s,
                                                              int32_t at, int32_t pairs, tx_step_tile *tile,
                                                              tx_dtype grad, tx_dtype moment) {
  if (grad == TX_F32 && moment == TX_F32) return tx_step_pair_moments(*c, *s, at, pairs, tile, TX_F32, TX_F32, 0);
  if (grad == TX_F32) return tx_step_pair_moments(*c, *s, at, pairs, tile, TX_F32, TX_BF16, 0);
  if (moment == TX_F32) return tx_step_pair_moments(*c, *s, at, pairs, tile, TX_BF16, TX_F32, 0);
  return tx_step_pair_moments(*c, *s, at, pairs, tile, TX_BF16, TX_BF16, 0);
}

/* bf16 moments of a tile again, whatever they are. */
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

TX_FN void tx_step_pair_weights(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs,
                                const tx_step_tile *tile, const tx_dtype param, const tx_dtype master) {
  for (int32_t group = 0; group < pairs; group += TX_GROUP) {
    const uint32_t u = tx_dithered(s.param_u, 2 * (uint32_t)(at + group));
    if (master != TX_F32 || !s.stream_store) tx_prefetch(s.param, 2 * (at + group), 2 * TX_GROUP, param);
    if (master != TX_NONE) tx_prefetch(s.master, 2 * (at + group), 2 * TX_GROUP, master);
    TX_NO_ALIASES
    for (int32_t j = 0; j < TX_GROUP; j++) {
      const int32_t i = group + j;
      float p[2];
      for (int k = 0; k < 2; k++)
        p[k] = tx_adamw_update(c, tx_weight_lane(s, at + i, k, param, master), tile->m[k][i], tile->root[k][i]);
      tx_store_weights(s, at + i, param, master, p, u + 2 * (uint32_t)j * TX_LATTICE_ELEMENT);
    }
  }
}

#if TX_HAS_AVX512
/* Whole blocks beside masters, and a task beside stepping them. */
TX_FN void tx_avx512_tile(const tx_adamw_constants *c, const tx_step_streams *s, int32_t at, int32_t pairs,
                          const tx_step_tile *tile, const tx_dtype master, const int32_t task) {
  const tx_avx512_constants wide = tx_avx512_constants_of(c);
  const tx_avx512_moment_tile first = {tile->m[0], tile->root[0], TX_STEP_TILE / 2};
  tx_avx512_quotients asked = tx_avx512_divide(&wide, first);
  for (int32_t pair = 0; pair < pairs; pair += TX_BLOCK / 2) {
    const tx_avx512_moment_tile moments = tx_avx512_moments_on(first, pair);
    const tx_avx512_moment_tile further = tx_avx512_moments_on(moments, TX_BLOCK / 2);
    const int64_t element = 2 * (int64_t)(at + pair);
    tx_step_streams block = *s;
    block.param = (char *)s->param + 2 * element;
    block.master = (char *)s->master + (master == TX_F32 ? 4 : 2) * element;
    block.begin += element;
    if (master != TX_F32 || !s->stream_store)
      tx_prefetch(block.param, master == TX_F32 ? 0 : TX_CHECKSUM, TX_BLOCK, TX_BF16);
    if (master != TX_F32) tx_prefetch(block.master, 0, TX_BLOCK, master);
    tx_avx512_block_weights(c, &wide, block, moments, &asked, pair + TX_BLOCK / 2 < pairs ? &further : NULL, master,
                            task);
  }
}

/* A function for each task: in the loops' function, each would take registers from it. */
typedef void (*tx_avx512_tile_loop)(const tx_adamw_constants *c, const tx_step_streams *s, int32_t at, int32_t pairs,
                                    const tx_step_tile *tile);
#define TX_TILE_LOOP_OF_(master, task)                                                                              \
  static __attribute__((noinline)) void tx_avx512_tile_##master##_##task(                                           \
      const tx_adamw_constants *c, const tx_step_streams *s, int32_t at, int32_t pairs, const tx_step_tile *tile) { \
    tx_avx512_tile(c, s, at, pairs, tile, TX_##master, TX_##task);                                                  \
  }
#define TX_TILE_LOOP_(task) TX_TILE_LOOP_OF_(I16, task) TX_TILE_LOOP_OF_(F32, task)
TX_FOR_EACH_AVX512_TASK(TX_TILE_LOOP_)
#undef TX_TILE_LOOP_
#undef TX_TILE_LOOP_OF_
#define TX_TILE_I16_(task) [TX_##task] = tx_avx512_tile_I16_##task,
#define TX_TILE_F32_(task) [TX_##task] = tx_avx512_tile_F32_##task,
static const tx_avx512_tile_loop tx_avx512_tile_loops[2][TX_AVX512_TASKS] = {{TX_FOR_EACH_AVX512_TASK(TX_TILE_I16_)},
                                                                             {TX_FOR_EACH_AVX512_TASK(TX_TILE_F32_)}};
#undef TX_TILE_I16_
#undef TX_TILE_F32_
#endif

/* -- weights beside remainders ------------------------------------------------------------------------------------ */

/* The patterns that make remainders special are rare: a tie, -32768, beside anything, and a negative one beside zero.
 * The fast way steps as if there were none (nor a NaN), keeps the words it read, and is watched; where one was met the
 * words are put back and the tile goes the ordinary way. Lanes of a vector at a time.
 * Only TX_GROUP lanes are used: gcc takes loops of 16 apart before it could vectorise them. */
#define TX_WATCHED (2 * TX_GROUP)
typedef struct tx_watch {
  uint32_t flipped[TX_WATCHED]; /* bit 31: the sign of a master is not its weight's */
  uint32_t tied[TX_WATCHED];    /* bits 15 and 31: a remainder was -32768, as read or as written */
  float sum[TX_WATCHED];        /* NaN: some master was */
} tx_watch;

/* Bit 15 where the lower half is 0x8000, bit 31 where the upper half is (or, needlessly, where it is 0x8001 above
 * that). */
TX_FN uint32_t tx_ties(uint32_t word) {
  const uint32_t zero = word ^ 0x80008000u;
  return (zero - 0x00010001u) & ~zero;
}

/* The pair of words *param and *remainder, of which `kept` becomes a copy. */
TX_FN tx_stepped_pair tx_step_remainders(tx_adamw_constants c, tx_mem_u32 *param, tx_mem_u32 *remainder,
                                         const float m[2], const float root[2], tx_watch *watch, int32_t lane,
                                         uint32_t *kept_param, uint32_t *kept_remainder) {
  const uint32_t weights = *param, read = *remainder;
  *kept_param = weights;
  *kept_remainder = read;
  const uint32_t first = (weights << 16) + (uint32_t)((int32_t)(read << 16) >> 16);
  const uint32_t second = (weights & 0xffff0000u) + (uint32_t)((int32_t)read >> 16);
  const float before0 = tx_f32_from_bits(first), before1 = tx_f32_from_bits(second);
  const float p0 = tx_adamw_update(c, before0, m[0], root[0]), p1 = tx_adamw_update(c, before1, m[1], root[1]);
  const uint32_t bits0 = tx_bits_from_f32(p0), bits1 = tx_bits_from_f32(p1);
  const uint32_t written = tx_join_lower(bits0, bits1);
  const uint32_t stored = tx_join_upper(bits0 + 0x8000u, bits1 + 0x8000u);
  *param = stored;
  *remainder = written;
  watch->flipped[lane] |= (first ^ (weights << 16)) | (second ^ weights);
  watch->tied[lane] |= tx_ties(read) | tx_ties(written);
  watch->sum[lane] += p0 + p1;
  return (tx_stepped_pair){{before0, before1}, {p0, p1}, weights ^ stored};
}

TX_FN int tx_watch_is_quiet(const tx_watch *watch) {
  uint32_t odd = 0;
  for (int32_t i = 0; i < TX_WATCHED; i++)
    odd |= (watch->flipped[i] & 0x80000000u) | (watch->tied[i] & 0x80008000u) |
           (watch->sum[i] - watch->sum[i] == 0.0f ? 0u : 1u);
  return odd == 0;
}

/* The words of a tile that the fast way read. */
typedef struct tx_kept {
  uint32_t param[TX_STEP_TILE / 2];
  uint32_t remainder[TX_STEP_TILE / 2];
} __attribute__((aligned(64))) tx_kept;

static __attribute__((noinline)) void tx_step_pair_weights_again(const tx_adamw_constants *c, const tx_step_streams *s,
                                                                 int32_t at, int32_t pairs, const tx_step_tile *tile,
                                                                 const tx_kept *kept) {
  memcpy((char *)s->param + 4 * (int64_t)at, kept->param, 4 * (size_t)pairs);
  memcpy((char *)s->master + 4 * (int64_t)at, kept->remainder, 4 * (size_t)pairs);
  tx_step_pair_weights(*c, *s, at, pairs, tile, TX_BF16, TX_I16);
}

TX_FN void tx_prefetch_remainders(tx_step_streams s, int32_t pair) {
  tx_prefetch(s.param, 2 * pair + TX_CHECKSUM, 2 * TX_GROUP, TX_BF16);
  tx_prefetch(s.master, 2 * pair, 2 * TX_GROUP, TX_I16);
}

/* The fast way. Returns whether nothing rare was met. */
#if TX_HAS_AVX512
TX_FN int tx_step_tile_remainders(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs,
                                  const tx_step_tile *tile, tx_kept *kept) {
  const tx_avx512_constants wide = tx_avx512_constants_of(&c);
  tx_avx512_watch watch = tx_avx512_watch_begin();
  for (int32_t group = 0; group < pairs; group += TX_GROUP) {
    const tx_avx512_moment_tile moments = {&tile->m[0][group], &tile->root[0][group], TX_STEP_TILE / 2};
    tx_prefetch_remainders(s, at + group);
    const tx_avx512_stepped stepped =
        tx_avx512_weights(&wide, (tx_mem_u32 *)s.param + at + group, (tx_mem_u32 *)s.master + at + group,
                          tx_avx512_divide(&wide, moments), &watch, &kept->param[group], &kept->remainder[group]);
    tx_avx512_watch_numbers(&watch, stepped.now);
  }
  return tx_avx512_watch_is_quiet(watch);
}

TX_FN void tx_step_pair_remainders(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs,
                                   const tx_step_tile *tile) {
  const int32_t task = tx_avx512_task(s.extras);
  tx_kept kept;
  if (task != TX_FIND_NOTHING) {
    tx_avx512_tile_loops[0][task](&c, &s, at, pairs, tile);
    return;
  }
  if (__builtin_expect(!tx_step_tile_remainders(c, s, at, pairs, tile, &kept), 0))
    tx_step_pair_weights_again(&c, &s, at, pairs, tile, &kept);
  if (s.extras)
    tx_note_stepped(s, (tx_weights){kept.param, kept.remainder}, 2 * (int64_t)at, 2 * pairs, TX_BF16, TX_I16);
}
#else
TX_FN int tx_step_tile_finding(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs,
                               const tx_step_tile *tile, tx_kept *kept, tx_tile_found *found, const int32_t finds) {
  tx_watch watch = {{0}, {0}, {0}};
  tx_mem_u32 *param = (tx_mem_u32 *)s.param + at, *remainder = (tx_mem_u32 *)s.master + at;
  tx_finding finding;
  int all = 1;
  for (int32_t group = 0; group < pairs; group += TX_GROUP) {
    const int32_t in_block = group % (TX_BLOCK / 2);
    if (in_block == 0) tx_find_begin(&finding, finds);
    tx_prefetch_remainders(s, at + group);
    TX_NO_ALIASES
    for (int32_t j = 0; j < TX_GROUP; j++) {
      const int32_t i = group + j;
      const float m[2] = {tile->m[0][i], tile->m[1][i]}, root[2] = {tile->root[0][i], tile->root[1][i]};
      const tx_stepped_pair pair =
          tx_step_remainders(c, &param[i], &remainder[i], m, root, &watch, j, &kept->param[i], &kept->remainder[i]);
      tx_find_pair(&finding, pair, in_block + j, j, 0, 2, finds);
    }
    if (finds != TX_FIND_NOTHING && in_block + TX_GROUP == TX_BLOCK / 2)
      all &= tx_find_end(&finding, &found->blocks[2 * group / TX_BLOCK], 2, finds);
  }
  const int quiet = tx_watch_is_quiet(&watch);
  if (finds != TX_FIND_NOTHING) found->all = quiet & all;
  return quiet;
}
TX_FN int tx_step_tile_remainders(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs,
                                  const tx_step_tile *tile, tx_kept *kept) {
  return tx_step_tile_finding(c, s, at, pairs, tile, kept, NULL, TX_FIND_NOTHING);
}

static __attribute__((noinline)) int tx_step_tile_changed(const tx_adamw_constants *c, const tx_step_streams *s,
                                                          int32_t at, int32_t pairs, const tx_step_tile *tile,
                                                          tx_kept *kept, tx_tile_found *found) {
  return tx_step_tile_finding(*c, *s, at, pairs, tile, kept, found, TX_FIND_CHANGED);
}
static __attribute__((noinline)) int tx_step_tile_measured(const tx_adamw_constants *c, const tx_step_streams *s,
                                                           int32_t at, int32_t pairs, const tx_step_tile *tile,
                                                           tx_kept *kept, tx_tile_found *found) {
  return tx_step_tile_finding(*c, *s, at, pairs, tile, kept, found, TX_FIND_BOTH);
}

TX_FN void tx_step_pair_remainders(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs,
                                   const tx_step_tile *tile) {
  const int32_t finds = tx_finds(s.extras);
  tx_tile_found found;
  tx_kept kept;
  found.all = 0;
  const int quiet = finds == TX_FIND_NOTHING   ? tx_step_tile_remainders(c, s, at, pairs, tile, &kept)
                    : finds == TX_FIND_CHANGED ? tx_step_tile_changed(&c, &s, at, pairs, tile, &kept, &found)
                                               : tx_step_tile_measured(&c, &s, at, pairs, tile, &kept, &found);
  if (__builtin_expect(!quiet, 0)) tx_step_pair_weights_again(&c, &s, at, pairs, tile, &kept);
  if (s.extras)
    tx_note_tile(s, &found, (tx_weights){kept.param, kept.remainder}, 2 * (int64_t)at, 2 * pairs, TX_BF16, TX_I16);
}
#endif

/* What is weights and masters of a tile before it is stepped. */
typedef struct tx_step_copy {
  uint32_t words[TX_STEP_TILE];
} __attribute__((aligned(64))) tx_step_copy;

/* Of weights without remainders, where somebody asks what becomes of them. The copy is a loop, since a processor's own
 * way of copying a kilobyte does not overlap with what is around it. */
TX_FN tx_weights tx_keep_weights(tx_step_streams s, int64_t at, int32_t n, tx_step_copy *copy, const tx_dtype param,
                                 const tx_dtype master) {
  const tx_weights kept = {copy, copy}, from = tx_stream_weights(s, at, param, master);
  if (!s.extras || master == TX_I16) return kept;
  const tx_mem_u32 *words = master == TX_F32 ? from.master : from.weight;
  const int32_t count = master == TX_F32 || param == TX_F32 ? n : n / 2;
  TX_NO_ALIASES
  for (int32_t i = 0; i < count; i++)
    copy->words[i] = words[i];
  return kept;
}

/* Weights and masters of a tile at s, and what is asked for beside them. */
TX_FN void tx_step_masters(tx_adamw_constants c, tx_step_streams s, int32_t pairs, const tx_step_tile *tile,
                           const tx_dtype param) {
#if TX_HAS_AVX512
  const int32_t task = tx_avx512_task(s.extras);
  if (task != TX_FIND_NOTHING) {
    tx_avx512_tile_loops[1][task](&c, &s, 0, pairs, tile);
    return;
  }
#endif
  tx_step_copy copy;
  const tx_weights before = tx_keep_weights(s, 0, 2 * pairs, &copy, param, TX_F32);
  tx_step_pair_weights(c, s, 0, pairs, tile, param, TX_F32);
  tx_round_weights(s, 0, 2 * pairs, TX_F32);
  if (s.extras) tx_note_stepped(s, before, 0, 2 * pairs, param, TX_F32);
}

/* Weights that are not read: they may go past the caches, by way of the first level. */
TX_FN void tx_step_master_tile(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs,
                               const tx_step_tile *tile, const tx_dtype param) {
  uint32_t rounded[TX_STEP_TILE / 2] __attribute__((aligned(TX_CACHE_LINE)));
  void *const weights = (char *)s.param + 4 * (int64_t)at;
  s.param = s.stream_store ? rounded : weights;
  s.master = (char *)s.master + 8 * (int64_t)at;
  s.begin += 2 * (int64_t)at;
  tx_step_masters(c, s, pairs, tile, param);
  if (s.stream_store) tx_store_nontemporal(rounded, weights, 4 * (int64_t)pairs);
}

/* n: a multiple of 2 * TX_GROUP, and of TX_CHECKSUM where there are checksums. */
TX_FN void tx_step_pairs(tx_adamw_constants c, tx_step_streams s, int32_t n, const tx_dtype param,
                         const tx_dtype master, const tx_dtype grad, const tx_dtype moment) {
  const float most = tx_adamw_within_of(&c).grad;
  tx_step_tile tile;
  for (int32_t at = 0; at < n / 2; at += TX_STEP_TILE / 2) {
    const int32_t pairs = n / 2 - at < TX_STEP_TILE / 2 ? n / 2 - at : TX_STEP_TILE / 2;
    const int checksumed = master == TX_I16 && s.checksums;
    if (checksumed && 2 * at % TX_CHECKSUM == 0) tx_compare_checksum(s, 2 * at);
    const int within = tx_are_within(s.grad, 2 * at, 2 * pairs, most, grad);
    const int ordinary = __builtin_expect(within, 1) ? tx_step_pair_moments(c, s, at, pairs, &tile, grad, moment, 1)
                                                     : tx_step_pair_moments_any(&c, &s, at, pairs, &tile, grad, moment);
    if (moment == TX_BF16 && __builtin_expect(!ordinary, 0)) tx_round_moments(s, at, pairs, &tile);
    if (master == TX_I16) {
      tx_step_pair_remainders(c, s, at, pairs, &tile);
    } else if (master == TX_F32) {
      tx_step_master_tile(c, s, at, pairs, &tile, param);
    } else {
      tx_step_copy copy;
      const tx_weights before = tx_keep_weights(s, 2 * at, 2 * pairs, &copy, param, master);
      tx_step_pair_weights(c, s, at, pairs, &tile, param, master);
      if (s.extras) tx_note_stepped(s, before, 2 * (int64_t)at, 2 * pairs, param, master);
    }
    if (checksumed && 2 * (at + pairs) % TX_CHECKSUM == 0) tx_renew_checksum(s, 2 * (at + pairs) - TX_CHECKSUM);
  }
}

/* Whether no g of elements at ... end - 1 need be limited. */
TX_FN int tx_step_fp32_is_within(tx_adamw_within within, tx_step_streams s, int32_t at, int32_t end, const int l2) {
  return tx_are_within(s.grad, at, end - at, within.grad, TX_F32) &&
         (!l2 || tx_are_within(s.param, at, end - at, within.p, TX_F32));
}

/* Moments of elements at ... end - 1, all in fp32, and their roots. usual, root: as below. within: whether no g need be
 * limited. */
TX_FN void tx_step_fp32_moments(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t end, float *roots,
                                const int usual, const int root, const int within) {
  for (int32_t group = at; group < end; group += 2 * TX_GROUP) {
    tx_prefetch(s.grad, group, 2 * TX_GROUP, TX_F32);
    tx_prefetch(s.exp_avg, group, 2 * TX_GROUP, TX_F32);
    tx_prefetch(s.exp_avg_sq, group, 2 * TX_GROUP, TX_F32);
    TX_NO_ALIASES
    for (int32_t j = 0; j < 2 * TX_GROUP; j++) {
      const int32_t i = group + j;
      const float g = tx_load(s.grad, i, TX_F32), p = tx_load(s.param, i, TX_F32);
      const float m = tx_load(s.exp_avg, i, TX_F32), v = tx_load(s.exp_avg_sq, i, TX_F32);
      const tx_adamw_moments r =
          within ? tx_adamw_average_within(c, usual, g, p, m, v) : tx_adamw_average(c, g, p, m, v);
      tx_store(s.exp_avg, i, TX_F32, r.m);
      tx_store(s.exp_avg_sq, i, TX_F32, root ? r.root : r.v);
      roots[i - at] = r.root;
    }
  }
}

/* The same of any gradients and constants. */
static __attribute__((noinline)) void tx_step_fp32_moments_any(const tx_adamw_constants *c, const tx_step_streams *s,
                                                               int32_t at, int32_t end, float *roots, int root) {
  tx_step_fp32_moments(*c, *s, at, end, roots, 0, root, 0);
}

/* Weights of elements at ... end - 1. */
TX_FN void tx_step_fp32_weights(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t end, const float *roots,
                                tx_tile_found *found, const int32_t finds) {
  tx_finding finding;
  int all = 1;
  for (int32_t group = at; group < end; group += 2 * TX_GROUP) {
    const int32_t in_block = (group - at) % TX_BLOCK;
    if (in_block == 0) tx_find_begin(&finding, finds);
    tx_prefetch(s.param, group, 2 * TX_GROUP, TX_F32);
    TX_NO_ALIASES
    for (int32_t j = 0; j < 2 * TX_GROUP; j++) {
      const int32_t i = group + j;
      const float m = tx_load(s.exp_avg, i, TX_F32), before = tx_load(s.param, i, TX_F32);
      const float p = tx_adamw_update(c, before, m, roots[i - at]);
      tx_store(s.param, i, TX_F32, p);
      if (finds != TX_FIND_NOTHING) {
        finding.differ[in_block + j] = tx_bits_from_f32(before) != tx_bits_from_f32(p);
        tx_find(&finding, j, 0, before, p, TX_F32, 1, finds);
      }
    }
    if (finds != TX_FIND_NOTHING && in_block + 2 * TX_GROUP == TX_BLOCK)
      all &= tx_find_end(&finding, &found->blocks[(group - at) / TX_BLOCK], 1, finds);
  }
  if (finds != TX_FIND_NOTHING) found->all = all;
}
#if !TX_HAS_AVX512
static __attribute__((noinline)) void tx_step_fp32_changed(const tx_adamw_constants *c, const tx_step_streams *s,
                                                           int32_t at, int32_t end, const float *roots,
                                                           tx_tile_found *found) {
  tx_step_fp32_weights(*c, *s, at, end, roots, found, TX_FIND_CHANGED);
}
#endif

#if TX_HAS_AVX512
#include "csrc/cpu/avx512_singles.h"
#endif

/* Weights of elements at ... end - 1, and what is asked for beside them. */
TX_FN void tx_step_fp32_tile(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t end, const float *roots) {
  const int32_t finds = tx_finds(s.extras);
#if TX_HAS_AVX512
  if (finds != TX_FIND_NOTHING) {
    tx_avx512_singles_loops[finds](&c, &s, at, end, roots);
    return;
  }
#endif
  tx_step_copy before;
  const tx_weights kept = tx_keep_weights(s, at, end - at, &before, TX_F32, TX_NONE);
#if !TX_HAS_AVX512
  if (finds == TX_FIND_CHANGED) { /* finding what is measured here gained nothing */
    tx_tile_found found;
    tx_step_fp32_changed(&c, &s, at, end, roots, &found);
    tx_note_tile(s, &found, kept, at, end - at, TX_F32, TX_NONE);
    return;
  }
#endif
  tx_step_fp32_weights(c, s, at, end, roots, NULL, TX_FIND_NOTHING);
  if (s.extras) tx_note_stepped(s, kept, at, end - at, TX_F32, TX_NONE);
}

/* Everything in fp32. usual: tx_adamw_is_usual, or 0; it changes no bit. root: exp_avg_sq leaves as its square root. n:
 * a multiple of 2 * TX_GROUP. */
TX_FN void tx_step_fp32(tx_adamw_constants c, tx_step_streams s, int32_t n, const int usual, const int root) {
  const tx_adamw_within within = tx_adamw_within_of(&c);
  float roots[TX_STEP_TILE];
  for (int32_t at = 0; at < n; at += TX_STEP_TILE) {
    const int32_t end = n - at < TX_STEP_TILE ? n : at + TX_STEP_TILE;
    if (__builtin_expect(tx_step_fp32_is_within(within, s, at, end, !usual && c.l2 != 0.0f), 1)) {
      tx_step_fp32_moments(c, s, at, end, roots, usual, root, 1);
    } else {
      tx_step_fp32_moments_any(&c, &s, at, end, roots, root);
    }
    tx_step_fp32_tile(c, s, at, end, roots);
  }
}

#endif
