/* fp32 masters of 16-bit weights: conversion to remainders and back, and resync with weights that were written
 * externally. */
#ifndef TX_CPU_LOOP_MASTER_H
#define TX_CPU_LOOP_MASTER_H

#include "csrc/core/combos.h"
#include "csrc/cpu/element.h"
#include "csrc/cpu/kernels.h"
#include "csrc/math/remainder.h"
#include "csrc/math/stale.h"

static void tx_encode_loop(const void *restrict master, void *restrict param, void *restrict remainder, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const tx_remainder_halves halves = tx_remainder_split(tx_load(master, i, TX_F32));
    ((tx_mem_u16 *)param)[i] = (uint16_t)(halves.upper >> 16);
    ((tx_mem_u16 *)remainder)[i] = (uint16_t)halves.lower;
  }
}

static void tx_decode_loop(const void *restrict param, const void *restrict remainder, void *restrict master,
                           int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int16_t missing = (int16_t)((const tx_mem_u16 *)remainder)[i];
    ((tx_mem_f32 *)master)[i] = tx_remainder_decode(((const tx_mem_u16 *)param)[i], missing);
  }
}

/* The new bits of a master: its weight's value if the master is stale or `force` is set, else its own. */
TX_FN uint32_t tx_master_resynced(const void *params, const void *masters, int64_t i, const tx_dtype param,
                                  const int force) {
  const float master = tx_load(masters, i, TX_F32);
  const uint32_t becomes = tx_bits_from_f32(tx_load(params, i, param)), is = tx_bits_from_f32(master);
  return force || tx_master_stale(master, ((const tx_mem_u16 *)params)[i], param) ? becomes : is;
}

/* Elements between two prefetches, and how many elements ahead these are. */
#define TX_AGREE_GROUP 128
#define TX_AGREE_AHEAD 512

/* Whether every weight is exactly what its master rounds to and none is NaN. That is the usual case, tested in a third
 * of the instructions of the complete test. */
TX_FN int tx_group_agrees(const char *params, const char *masters, int64_t n) {
  uint32_t differ = 0, largest = 0;
  for (int64_t byte = 0; byte < 4 * n; byte += 64)
    __builtin_prefetch(masters + 4 * TX_AGREE_AHEAD + byte);
  for (int64_t byte = 0; byte < 2 * n; byte += 64)
    __builtin_prefetch(params + 2 * TX_AGREE_AHEAD + byte);
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = ((const tx_mem_u32 *)masters)[i], magnitude = bits & 0x7fffffffu;
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; /* tx_bf16_from_f32, but for NaN */
    differ |= nearest ^ ((const tx_mem_u16 *)params)[i];
    largest = magnitude > largest ? magnitude : largest;
  }
  return (differ == 0) & (largest <= (uint32_t)TX_F32_INF);
}

TX_FN int tx_masters_agree(const void *params, const void *masters, int64_t n) {
  int agree = 1;
  for (int64_t at = 0; at < n; at += TX_AGREE_GROUP) {
    const int64_t count = n - at < TX_AGREE_GROUP ? n - at : TX_AGREE_GROUP;
    agree &= tx_group_agrees((const char *)params + 2 * at, (const char *)masters + 4 * at, count);
  }
  return agree;
}

/* Masters mostly agree, and a pass that only reads has half the traffic; so a tile is written only if it has to
 * change. */
TX_FN int64_t tx_resync_f32(const void *restrict params, void *restrict masters, int64_t n, const tx_dtype param,
                            const int force, const int writes) {
  int64_t changed = 0;
  for (int64_t at = 0; at < n; at += TX_TILE) {
    const int64_t end = n - at < TX_TILE ? n : at + TX_TILE;
    if (param == TX_BF16 && !force &&
        tx_masters_agree((const char *)params + 2 * at, (const char *)masters + 4 * at, end - at))
      continue;
    int32_t differ = 0;
    for (int64_t i = at; i < end; i++)
      differ += tx_master_resynced(params, masters, i, param, force) != ((const tx_mem_u32 *)masters)[i];
    for (int64_t i = at; writes && differ && i < end; i++)
      ((tx_mem_u32 *)masters)[i] = tx_master_resynced(params, masters, i, param, force);
    changed += differ;
  }
  return changed;
}

/* A weight with a remainder of 0 is its own master. Any remainder is legal with any weight, so only TX_RESYNC_ALL
 * changes them. */
TX_FN int64_t tx_resync_i16(void *remainders, int64_t n, int32_t mode) {
  int64_t changed = 0;
  for (int64_t i = 0; mode == TX_RESYNC_ALL && i < n; i++) {
    changed += ((const tx_mem_u16 *)remainders)[i] != 0;
    ((tx_mem_u16 *)remainders)[i] = 0;
  }
  return changed;
}

/* A loop for each row of weights with a master; returns how many elements changed. */
#define TX_RESYNC_WITH_NONE_(param)
#define TX_RESYNC_WITH_F32_(param)                                                                     \
  static int64_t tx_resync_##param##_F32(const void *params, void *masters, int64_t n, int32_t mode) { \
    if (mode == TX_RESYNC_ALL) return tx_resync_f32(params, masters, n, TX_##param, 1, 1);             \
    if (mode == TX_RESYNC_COUNT) return tx_resync_f32(params, masters, n, TX_##param, 0, 0);           \
    return tx_resync_f32(params, masters, n, TX_##param, 0, 1);                                        \
  }
#define TX_RESYNC_WITH_I16_(param)                                                                     \
  static int64_t tx_resync_##param##_I16(const void *params, void *masters, int64_t n, int32_t mode) { \
    (void)params;                                                                                      \
    return tx_resync_i16(masters, n, mode);                                                            \
  }
#define TX_RESYNC_LOOP_(index, param, master, ...) TX_RESYNC_WITH_##master##_(param)
TX_FOR_EACH_WEIGHT(TX_RESYNC_LOOP_)
#undef TX_RESYNC_WITH_F32_
#undef TX_RESYNC_WITH_I16_

/* Initialiser of tx_kernels.resync: NULL in the rows without a master. */
#define TX_RESYNC_ENTRY_NONE_(index, param)
#define TX_RESYNC_ENTRY_F32_(index, param) [index] = tx_resync_##param##_F32,
#define TX_RESYNC_ENTRY_I16_(index, param) [index] = tx_resync_##param##_I16,
#define TX_RESYNC_ENTRY_(index, param, master, ...) TX_RESYNC_ENTRY_##master##_(index, param)
#define TX_RESYNC_LOOPS TX_FOR_EACH_WEIGHT(TX_RESYNC_ENTRY_)

#endif
