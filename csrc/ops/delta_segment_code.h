/* Encodes one segment of a delta's run, and makes the decoder for one. */
#ifndef TX_OPS_DELTA_SEGMENT_CODE_H
#define TX_OPS_DELTA_SEGMENT_CODE_H

#include "csrc/core/delta_bytes.h"
#include "csrc/cpu/coding_kernels.h"
#include "csrc/torch_ext_delta.h"

/* Workspace of a task that encodes. */
typedef struct tx_delta_scratch {
  tx_delta_encoder encoder;
  tx_delta_block block;
  tx_delta_rungs rungs[2];
  uint8_t *streams[TX_DELTA_STREAMS];
  uint8_t *dense; /* weights of dense blocks */
  uint8_t *out;   /* the segment */
  int64_t out_bytes;
  uint8_t *memory;
  int64_t ahead; /* distance in weights to the task's next segment, approximately */
} tx_delta_scratch;

/* Allocates the workspace; returns 0 if out of memory. numel: of the longest segment. */
int tx_delta_scratch_make(tx_delta_scratch *scratch, int64_t numel);
void tx_delta_scratch_free(tx_delta_scratch *scratch);

typedef struct tx_delta_segment_done {
  int64_t bytes;   /* in scratch->out; 0: nothing changed */
  int64_t changed; /* changed weights; a dense block counts in full */
  uint64_t touched;
} tx_delta_segment_done;

/* How a run is to be encoded. */
typedef struct tx_delta_way {
  int sliceable, returns;
} tx_delta_way;

/* Encodes weights [begin, begin + numel) of a run. written: bit b says that block b of the segment was written from
 * outside. */
tx_status tx_delta_segment_encode(tx_delta_scratch *scratch, const tx_delta_run *run, int64_t begin, int64_t numel,
                                  uint32_t written, tx_delta_way way, tx_delta_segment_done *done, tx_error *error);

/* Whether n bytes are 0. */
static inline int tx_delta_is_zero(const uint8_t *bytes, int64_t n) {
  int64_t at = 0;
  for (; at + 8 <= n; at += 8) {
    if (tx_get_u64(bytes + at)) return 0;
  }
  for (; at < n; at++) {
    if (bytes[at]) return 0;
  }
  return 1;
}

/* Whether one of n bounds (bf16) may be unknown: infinity, NaN and others for which tx_delta_bound_code has no code. */
static inline int tx_delta_any_unknown(const void *moved, int64_t n) {
  const uint64_t each = UINT64_C(0x0001000100010001), sizes = each * 0x7fff, past = each * (0x8000 - 0x7f79);
  uint64_t any = 0;
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    any |= (tx_get_u64((const uint8_t *)moved + 2 * i) & sizes) + past;
  for (; i < n; i++) {
    uint16_t bound;
    memcpy(&bound, (const uint8_t *)moved + 2 * i, sizeof bound);
    any |= (bound & 0x7fffu) + (0x8000u - 0x7f79u);
  }
  return (any & each * 0x8000) != 0;
}

/* The decoder of a segment that was read. block: workspace for it. */
tx_delta_decoder tx_delta_decoder_of(const tx_delta_segment *segment, int64_t numel, tx_dtype dtype,
                                     tx_delta_rungs rungs[2], tx_delta_block *block);

/* Computes checksums of TX_CHECKSUM weights each, into ceil(numel / TX_CHECKSUM) entries. */
void tx_delta_sums(const void *weights, int64_t numel, tx_dtype dtype, uint64_t *sums);

/* The part that checksums contribute to the sum over all weights. first: the index of the first of them in the run. */
uint64_t tx_delta_sum_of(const uint64_t *sums, int64_t n, int64_t first);

#endif
