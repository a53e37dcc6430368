/* Segments of deltas, by the dtype of their weights. Included by kernels_isa.c only. */
#ifndef TX_CPU_LOOP_DELTA_H
#define TX_CPU_LOOP_DELTA_H

#include "csrc/cpu/delta_decode.h"
#include "csrc/cpu/delta_encode.h"

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
                                   tx_delta_changes *out) {
  switch (d->dtype) {
    case TX_F32:
      return tx_delta_decode_as(d, old, held, n, out, TX_F32);
    case TX_F16:
      return tx_delta_decode_as(d, old, held, n, out, TX_F16);
    default:
      return tx_delta_decode_as(d, old, held, n, out, TX_BF16);
  }
}

#endif
