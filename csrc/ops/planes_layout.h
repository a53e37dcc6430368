/* The layout of a message of planes: a header, one row per block, the blocks (planes_block.h). */
#ifndef TX_OPS_PLANES_LAYOUT_H
#define TX_OPS_PLANES_LAYOUT_H

#include "csrc/torch_ext_advanced.h"

#define TX_PLANES_MOST 4 /* planes: bytes of a value */

/* All numbers of a message are little-endian. */
typedef struct tx_planes_header {
  char magic[8];
  int64_t numel;
  uint32_t dtype;
  uint32_t version;
  uint32_t zero;
  uint32_t checksum; /* of the fields before it and the rows */
} tx_planes_header;

typedef struct tx_planes_row {
  uint32_t bytes; /* of the block */
  uint32_t checksum;
} tx_planes_row;

static inline int64_t tx_planes_blocks(int64_t numel) {
  return numel / TX_PLANES_BLOCK + (numel % TX_PLANES_BLOCK != 0);
}

/* Elements of block b. */
static inline int64_t tx_planes_block_numel(int64_t numel, int64_t b) {
  const int64_t left = numel - b * TX_PLANES_BLOCK;
  return left < TX_PLANES_BLOCK ? left : TX_PLANES_BLOCK;
}

/* Bytes of a value; 0 for a dtype that messages cannot have. *rotate: whether its sign bit is moved to the end. */
int64_t tx_planes_width(int32_t dtype, int *rotate);

/* Bytes before the first block. */
int64_t tx_planes_head_bytes(int64_t numel);

/* Writes the header; the rows must have been written. */
void tx_planes_seal(uint8_t *message, int32_t dtype, int64_t numel);

/* A message whose header is right and which is as long as its rows say. */
typedef struct tx_planes_message {
  const uint8_t *bytes;
  int64_t numel;
  int64_t length;
  int32_t dtype;
} tx_planes_message;

tx_status tx_planes_open(tx_tensor message, tx_planes_message *opened, tx_error *error);

tx_planes_row tx_planes_row_at(const uint8_t *message, int64_t b);

#endif
