/* Steps bf16 weights with 16-bit remainders from the moments of a tile. Included by step_plain.h. */
#ifndef TX_CPU_STEP_REMAINDERS_H
#define TX_CPU_STEP_REMAINDERS_H

#include "csrc/cpu/step_weights.h"

/* The patterns that need special treatment with remainders are rare: the tie -32768, and a negative remainder of a zero
 * weight. The fast path steps as if there were none (and no NaN), keeps copies of the words it read, and records in a
 * watch whether it met one. If so, the words are restored and the tile takes the ordinary path.
 *
 * The watch has a vector's lanes. Only TX_GROUP of them are used: gcc splits loops of 16 before it could vectorise
 * them. */
#define TX_WATCHED (2 * TX_GROUP)
typedef struct tx_watch {
  uint32_t flipped[TX_WATCHED]; /* bit 31: a master's sign differs from its weight's */
  uint32_t tied[TX_WATCHED];    /* bits 15 and 31: a remainder was -32768, as read or as written */
  float sum[TX_WATCHED];        /* NaN if a master was */
} tx_watch;

/* Bit 15 is set if the lower half is 0x8000, and bit 31 if the upper half is (or, needlessly, if the upper half is
 * 0x8001 and the lower one 0x8000). */
TX_FN uint32_t tx_ties(uint32_t word) {
  const uint32_t zero = word ^ 0x80008000u;
  return (zero - 0x00010001u) & ~zero;
}

/* Steps the pair of words *param and *remainder, and copies the old words to *kept_param and *kept_remainder. */
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

/* The words of a tile as the fast path read them. */
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

/* The fast path. Returns whether it met nothing rare. */
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

#endif
