/* The step on 8-bit moments in place, a few blocks of 128 elements at a time: first their moments, which stay in L1 as
 * fp32; then the weights; and then the codes, once the largest values are known. Included by loop_adamw.h. */
#ifndef TX_CPU_STEP_8BIT_H
#define TX_CPU_STEP_8BIT_H

#include "csrc/cpu/block_moments.h"
#include "csrc/cpu/step_plain.h"

/* Steps elements k and k + 1 of word w. */
TX_FN void tx_step_quad_weight(tx_adamw_constants c, tx_step_streams s, int32_t w, const int k, const tx_quads *m,
                               const tx_quads *root, uint32_t u, const tx_dtype param, const tx_dtype master) {
  const int32_t pair = 2 * w + k / 2;
  const float p[2] = {
      tx_adamw_update(c, tx_weight_lane(s, pair, 0, param, master), m->x[k][w], root->x[k][w]),
      tx_adamw_update(c, tx_weight_lane(s, pair, 1, param, master), m->x[k + 1][w], root->x[k + 1][w]),
  };
  tx_store_weights(s, pair, param, master, p, u + (uint32_t)k * TX_LATTICE_ELEMENT);
}

TX_FN void tx_step_quad_weights(tx_adamw_constants c, tx_step_streams s, const tx_quads *m, const tx_quads *root,
                                const tx_dtype param, const tx_dtype master) {
  uint32_t u = s.param_u;
  TX_NO_ALIASES
  for (int32_t w = 0; w < TX_QUADS; w++, u += 4 * TX_LATTICE_ELEMENT) {
    tx_step_quad_weight(c, s, w, 0, m, root, u, param, master);
    tx_step_quad_weight(c, s, w, 2, m, root, u, param, master);
  }
}

/* How many blocks go through each loop before the next loop. A loop's start-up then costs little, and a block's plan,
 * which depends on its last results with a long latency, is ready when its codes are computed. */
#define TX_BLOCKS_AT_ONCE 4
_Static_assert(TX_BLOCKS_AT_ONCE <= TX_FOUND_BLOCKS, "what is found has room for them");

/* A block's moments, and the words of weights and remainders that the fast path read (step_remainders.h). */
typedef struct tx_step_block {
  tx_quads m, root;
  uint32_t param[2][TX_QUADS], remainder[2][TX_QUADS];
} tx_step_block;

#define TX_QUAD_LANES (TX_HEALTH_LANES / 4)

TX_FN void tx_step_quad_remainder(tx_adamw_constants c, tx_step_streams s, int32_t run, int32_t j, const int h,
                                  tx_step_block *b, tx_watch *watch, tx_finding *finding, const int32_t finds) {
  const int32_t w = run + j;
  const float m[2] = {b->m.x[2 * h][w], b->m.x[2 * h + 1][w]};
  const float root[2] = {b->root.x[2 * h][w], b->root.x[2 * h + 1][w]};
  const tx_stepped_pair pair =
      tx_step_remainders(c, (tx_mem_u32 *)s.param + 2 * w + h, (tx_mem_u32 *)s.master + 2 * w + h, m, root, watch, w,
                         &b->param[h][w], &b->remainder[h][w]);
  tx_find_pair(finding, pair, 2 * w + h, j, 2 * h, 4, finds);
}

static __attribute__((noinline)) void tx_step_quad_weights_again(const tx_adamw_constants *c, const tx_step_streams *s,
                                                                 const tx_step_block *b) {
  for (int32_t pair = 0; pair < 2 * TX_QUADS; pair++) {
    tx_put_word(s->param, pair, b->param[pair % 2][pair / 2]);
    tx_put_word(s->master, pair, b->remainder[pair % 2][pair / 2]);
  }
  tx_step_quad_weights(*c, *s, &b->m, &b->root, TX_BF16, TX_I16);
}

TX_FN void tx_step_block_remainders(tx_adamw_constants c, tx_step_streams s, int32_t count, tx_step_block *blocks,
                                    tx_tile_found *found, const tx_dtype grad, const int32_t finds) {
  const int32_t lanes = finds == TX_FIND_NOTHING ? TX_QUADS : TX_QUAD_LANES;
  tx_watch watch = {{0}, {0}, {0}};
  int all = 1;
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, TX_BF16, TX_I16, grad);
    tx_finding finding;
    tx_find_begin(&finding, finds);
    tx_prefetch(at.param, TX_CHECKSUM, TX_BLOCK, TX_BF16);
    tx_prefetch(at.master, 0, TX_BLOCK, TX_I16);
    for (int32_t run = 0; run < TX_QUADS; run += lanes) {
      TX_NO_ALIASES
      for (int32_t j = 0; j < lanes; j++) {
        tx_step_quad_remainder(c, at, run, j, 0, &blocks[i], &watch, &finding, finds);
        tx_step_quad_remainder(c, at, run, j, 1, &blocks[i], &watch, &finding, finds);
      }
    }
    if (finds != TX_FIND_NOTHING) all &= tx_find_end(&finding, &found->blocks[i], 4, finds);
  }
  const int quiet = tx_watch_is_quiet(&watch);
  found->all = finds != TX_FIND_NOTHING && quiet && all;
  if (__builtin_expect(quiet, 1)) return;
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, TX_BF16, TX_I16, grad);
    tx_step_quad_weights_again(&c, &at, &blocks[i]);
  }
}

/* In a function of its own: inlined, it would take registers from the loops. Returns the weights before the step, in
 * the copy, unless everything was found. */
static __attribute__((noinline)) tx_weights tx_step_blocks_finding(const tx_adamw_constants *c,
                                                                   const tx_step_streams *s, int32_t count,
                                                                   tx_step_block *blocks, tx_tile_found *found,
                                                                   tx_weights_copy *copy, tx_dtype grad,
                                                                   int32_t finds) {
  if (finds == TX_FIND_CHANGED) {
    tx_step_block_remainders(*c, *s, count, blocks, found, grad, TX_FIND_CHANGED);
  } else {
    tx_step_block_remainders(*c, *s, count, blocks, found, grad, TX_FIND_BOTH);
  }
  for (int32_t word = 0; !found->all && word < count * TX_BLOCK / 2; word++) {
    const tx_step_block *const b = &blocks[word / (2 * TX_QUADS)];
    const int32_t in_block = word % (2 * TX_QUADS);
    tx_put_word(copy->weight, word, b->param[in_block % 2][in_block / 2]);
    tx_put_word(copy->master, word, b->remainder[in_block % 2][in_block / 2]);
  }
  return (tx_weights){copy->weight, copy->master};
}

TX_FN void tx_step_block_weights(tx_adamw_constants c, tx_step_streams s, int32_t count, const tx_step_block *blocks,
                                 const tx_dtype param, const tx_dtype master, const tx_dtype grad) {
  for (int32_t i = 0; i < count; i++) {
    tx_step_streams at = tx_blocks_on(s, i, param, master, grad);
    const int stream_store = master == TX_F32 && s.stream_store;
    uint32_t rounded[TX_BLOCK / 2] __attribute__((aligned(TX_CACHE_LINE)));
    void *const weights = at.param;
    if (!stream_store) tx_prefetch(at.param, 0, TX_BLOCK, param);
    if (master != TX_NONE) tx_prefetch(at.master, 0, TX_BLOCK, master);
    if (stream_store) at.param = rounded;
    tx_step_quad_weights(c, at, &blocks[i].m, &blocks[i].root, param, master);
    tx_round_weights(at, 0, TX_BLOCK, master);
    if (stream_store) tx_store_nontemporal(rounded, weights, sizeof rounded);
  }
}

/* count <= TX_BLOCKS_AT_ONCE blocks. */
TX_FN void tx_step_some_blocks(tx_adamw_constants c, tx_step_streams s, int32_t count, const tx_dtype param,
                               const tx_dtype master, const tx_dtype grad) {
  const tx_block_format mf = tx_block_e4m3(), vf = tx_block_root_e4m4();
  tx_step_block blocks[TX_BLOCKS_AT_ONCE];
  int32_t m_amax[TX_BLOCKS_AT_ONCE], root_amax[TX_BLOCKS_AT_ONCE];
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, param, master, grad);
    tx_prefetch(at.grad, 0, TX_BLOCK, grad);
    tx_prefetch(at.exp_avg, 0, TX_BLOCK, TX_U8);
    tx_prefetch(at.exp_avg_sq, 0, TX_BLOCK, TX_U8);
    tx_step_quad_first(c, at, &blocks[i].m, &blocks[i].root, grad, &m_amax[i], &root_amax[i]);
  }
  tx_weights_copy copy;
  tx_weights before = {NULL, NULL};
  tx_tile_found found;
  found.all = 0;
  const int32_t finds = tx_finds(s.extras);
  if (s.extras && (master != TX_I16 || finds == TX_FIND_NOTHING))
    before = tx_copy_weights(tx_stream_weights(s, 0, param, master), count * TX_BLOCK, param, master, &copy);
  if (master != TX_I16) {
    tx_step_block_weights(c, s, count, blocks, param, master, grad);
  } else if (finds == TX_FIND_NOTHING) {
    tx_step_block_remainders(c, s, count, blocks, &found, grad, TX_FIND_NOTHING);
  } else {
    before = tx_step_blocks_finding(&c, &s, count, blocks, &found, &copy, grad, finds);
  }
  if (s.extras) tx_note_tile(s, &found, before, 0, count * TX_BLOCK, param, master);
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, param, master, grad);
    *at.exp_avg_scale = tx_store_quads(mf, m_amax[i], &blocks[i].m, at.exp_avg_u, at.exp_avg);
  }
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, param, master, grad);
    *at.exp_avg_sq_scale = tx_store_quads(vf, root_amax[i], &blocks[i].root, at.exp_avg_sq_u, at.exp_avg_sq);
  }
}

_Static_assert(TX_CHECKSUM % (TX_BLOCKS_AT_ONCE * TX_BLOCK) == 0, "a checksum is of whole turns of the loop");

/* n: a multiple of TX_BLOCK, and of TX_CHECKSUM if there are checksums. */
TX_FN void tx_step_8bit(tx_adamw_constants c, tx_step_streams s, int32_t n, const tx_dtype param, const tx_dtype master,
                        const tx_dtype grad) {
  const int checksumed = master == TX_I16 && s.checksums;
  const tx_step_streams all = s;
  for (int32_t at = 0; at < n; at += TX_BLOCKS_AT_ONCE * TX_BLOCK) {
    const int32_t left = (n - at) / TX_BLOCK, count = left < TX_BLOCKS_AT_ONCE ? left : TX_BLOCKS_AT_ONCE;
    if (checksumed && at % TX_CHECKSUM == 0) tx_compare_checksum(all, at);
    tx_step_some_blocks(c, s, count, param, master, grad);
    s = tx_blocks_on(s, count, param, master, grad);
    const int32_t end = at + count * TX_BLOCK;
    if (checksumed && end % TX_CHECKSUM == 0) tx_renew_checksum(all, end - TX_CHECKSUM);
  }
}

#endif
