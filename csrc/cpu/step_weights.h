/* The second half of a step: weights from the moments of a tile, two elements per 32-bit lane. Included by
 * step_remainders.h and step_fp32.h. */
#ifndef TX_CPU_STEP_WEIGHTS_H
#define TX_CPU_STEP_WEIGHTS_H

#include "csrc/cpu/step_moments.h"

/* Masters (or weights, without masters) of a tile before it is stepped. */
typedef struct tx_step_copy {
  uint32_t words[TX_STEP_TILE];
} __attribute__((aligned(64))) tx_step_copy;

/* Copies the weights of a tile without remainders, if extra outputs need them. The copy is a loop, since the
 * processor's own way of copying a kilobyte does not overlap with the code around it. */
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

/* Steps `pairs` pairs from pair `at` on. */
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
/* Steps whole blocks with masters, and does a task meanwhile. */
TX_FN void tx_avx512_tile(const tx_adamw_constants *c, const tx_step_streams *s, int32_t at, int32_t pairs,
                          const tx_step_tile *tile, const tx_dtype master, const int32_t task) {
  const tx_avx512_constants wide = tx_avx512_constants_of(c);
  const tx_avx512_moment_tile first = {tile->m[0], tile->root[0], TX_STEP_TILE / 2};
  tx_avx512_quotients started = tx_avx512_divide(&wide, first);
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
    tx_avx512_block_weights(c, &wide, block, moments, &started, pair + TX_BLOCK / 2 < pairs ? &further : NULL, master,
                            task);
  }
}

/* One function for each task: inlined, each would take registers from the loops. */
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

#endif
