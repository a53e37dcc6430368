/* Reads a segment of a delta. */
#include "csrc/core/delta_segment.h"

#include <string.h>

#include "csrc/core/delta_bytes.h"

int64_t tx_delta_dense_numel(uint32_t dense, int64_t numel) {
  int64_t found = 0;
  for (int64_t b = 0; b * TX_DELTA_BLOCK < numel; b++) {
    const int64_t left = numel - b * TX_DELTA_BLOCK;
    if (dense >> b & 1u) found += left < TX_DELTA_BLOCK ? left : TX_DELTA_BLOCK;
  }
  return found;
}

static int are_flags(uint32_t flags, tx_dtype dtype) {
  const uint32_t log = flags & TX_DELTA_CLASSES_LOG;
  const int bounded = (flags & TX_DELTA_BOUNDED) != 0;
  if (flags > TX_DELTA_ALL_FLAGS || log > 2 || (flags & TX_DELTA_GRAIN) >> 2 > 2) return 0;
  if (flags >> 9 >> (1u << log)) return 0; /* flags of classes that do not exist */
  if (log > 0 && (!bounded || flags & TX_DELTA_SLICEABLE || dtype == TX_F32)) return 0;
  return bounded || flags & TX_DELTA_EXACT;
}

int tx_delta_segment_read(const uint8_t *bytes, int64_t n, int64_t numel, tx_dtype dtype, tx_delta_segment *segment) {
  tx_bytes b = {bytes, bytes + n, 0};
  memset(segment, 0, sizeof *segment);
  const uint8_t *flags = tx_take_bytes(&b, 2);
  if (!flags) return 0;
  segment->flags = (uint32_t)flags[0] | (uint32_t)flags[1] << 8;
  if (!are_flags(segment->flags, dtype)) return 0;
  segment->changed = tx_take_varint(&b);
  if (segment->changed < 0 || segment->changed > numel) return 0;
  int64_t dense_bytes = 0;
  if (segment->flags & TX_DELTA_DENSE) {
    const uint8_t *dense = tx_take_bytes(&b, 2);
    dense_bytes = tx_take_varint(&b);
    if (!dense) return 0;
    segment->dense = (uint32_t)dense[0] | (uint32_t)dense[1] << 8;
    const int64_t blocks = (numel + TX_DELTA_BLOCK - 1) / TX_DELTA_BLOCK;
    if (segment->dense == 0 || segment->dense >> blocks) return 0;
  }
  if (segment->flags & TX_DELTA_BOUNDED) {
    const uint8_t *bound = tx_take_bytes(&b, 2);
    if (!bound) return 0;
    segment->bound = bound[0] | bound[1] << 8;
    if (segment->bound >= 255 << 4) return 0;
  }
  int has[TX_DELTA_STREAMS];
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++) {
    has[s] = s == TX_DELTA_BOUNDS   ? (segment->flags & TX_DELTA_BOUNDED) != 0
             : s == TX_DELTA_VALUES ? 1
                                    : tx_delta_has_stream(segment->flags, s);
  }
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++) {
    if (has[s]) segment->streams[s].bytes = tx_take_varint(&b);
  }
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++)
    segment->streams[s].data = tx_take_bytes(&b, segment->streams[s].bytes);
  segment->weights.bytes = dense_bytes;
  segment->weights.data = tx_take_bytes(&b, dense_bytes);
  return !b.failed && b.at == b.end;
}
