/* Encodes and decodes segments of deltas, by the dtype of their weights. Included by coding_kernels_isa.c only. */
#ifndef TX_CPU_LOOP_DELTA_H
#define TX_CPU_LOOP_DELTA_H

#include "csrc/cpu/delta_decode.h"
#include "csrc/cpu/delta_encode.h"
#include "csrc/cpu/round_bf16.h"

static void tx_delta_encode_run(tx_delta_encoder *e) {
  switch (e->dtype) {
    case TX_F32:
      tx_delta_encode_blocks(e, TX_F32);
      break;
    case TX_F16:
      tx_delta_encode_blocks(e, TX_F16);
      break;
    default:
      tx_delta_encode_blocks(e, TX_BF16);
      break;
  }
}

static int32_t tx_delta_decode_run(tx_delta_decoder *d, const void *old, const uint8_t *held, int64_t n,
                                   tx_delta_changes out) {
  switch (d->dtype) {
    case TX_F32:
      return tx_delta_decode_as(d, old, held, n, out, TX_F32);
    case TX_F16:
      return tx_delta_decode_as(d, old, held, n, out, TX_F16);
    default:
      return tx_delta_decode_as(d, old, held, n, out, TX_BF16);
  }
}

static int64_t tx_delta_ones_run(const uint8_t *bits, int64_t n) {
  int64_t found = 0, at = 0;
  for (; 64 * at + 64 <= n; at++) {
    uint64_t word;
    memcpy(&word, bits + 8 * at, sizeof word);
    found += __builtin_popcountll(word);
  }
  if (64 * at == n) return found;
  uint64_t rest = 0;
  memcpy(&rest, bits + 8 * at, (size_t)((n - 64 * at + 7) / 8));
  return found + __builtin_popcountll(rest & ((UINT64_C(1) << (n - 64 * at)) - 1u));
}

static void tx_delta_round_run(const void *masters, int64_t n, void *rounded, tx_dtype dtype) {
  if (dtype == TX_F16) {
    for (int64_t i = 0; i < n; i++)
      tx_store(rounded, i, TX_F16, tx_load(masters, i, TX_F32));
  } else {
    tx_nearest_bf16(masters, n, rounded);
  }
}

static uint32_t tx_delta_differ_run(const void *weights, const void *others, int64_t n, tx_dtype dtype) {
  const tx_mem_u16 *a = weights, *b = others;
  const uint16_t infinity = dtype == TX_F16 ? 0x7c00 : 0x7f80;
  uint32_t found = 0;
  for (int64_t at = 0; at < n; at += TX_BLOCK) {
    const int64_t end = n - at < TX_BLOCK ? n : at + TX_BLOCK;
    if (memcmp(a + at, b + at, (size_t)(2 * (end - at))) == 0) continue;
    uint32_t differ = 0;
    for (int64_t i = at; i < end; i++) {
      const uint16_t x = a[i] & 0x7fff, y = b[i] & 0x7fff;
      const int alike = (x > infinity && y > infinity) || (x | y) == 0;
      differ |= a[i] != b[i] && !alike;
    }
    found |= differ << (at / TX_BLOCK);
  }
  return found;
}

#endif
