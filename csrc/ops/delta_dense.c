/* Decodes the dense blocks of a segment. */
#include "csrc/ops/delta_dense.h"

int tx_delta_dense_open(const tx_delta_segment *segment, int64_t numel, tx_dtype dtype, tx_planes_message *message) {
  const tx_tensor bytes = {(void *)(uintptr_t)segment->weights.data, segment->weights.bytes, TX_U8, 0};
  return tx_planes_open(bytes, message, NULL) == TX_OK && message->numel == numel && message->dtype == (int32_t)dtype;
}

const void *tx_delta_dense_at(tx_delta_dense_room *room, const tx_planes_message *message, int64_t at, int64_t n) {
  int rotate;
  const int64_t width = tx_planes_width(message->dtype, &rotate);
  const int64_t b = at / TX_PLANES_BLOCK, from = at % TX_PLANES_BLOCK;
  const int64_t numel = tx_planes_block_numel(message->numel, b);
  if (from + n > numel) return NULL;
  const uint8_t *block = message->bytes + tx_planes_head_bytes(message->numel);
  for (int64_t before = 0; before < b; before++)
    block += tx_planes_row_at(message->bytes, before).bytes;
  if (room->block != block) {
    room->block = NULL;
    const int64_t bytes = tx_planes_row_at(message->bytes, b).bytes;
    if (!tx_planes_get(&room->work, block, bytes, numel, width, rotate, room->work.values)) return NULL;
    room->block = block;
  }
  return room->work.values + from * width;
}
