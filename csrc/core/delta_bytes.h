/* The bytes of delta messages: numbers, little-endian or as varints (7 bits per byte, the lowest first), and the
 * checksum of parts, which is XXH64 (Collet 2014) with seed 0. */
#ifndef TX_CORE_DELTA_BYTES_H
#define TX_CORE_DELTA_BYTES_H

#include <stdint.h>
#include <string.h>

static inline uint64_t tx_get_u64(const uint8_t *from) {
  uint64_t value;
  memcpy(&value, from, sizeof value);
  return value;
}
static inline uint32_t tx_get_u32(const uint8_t *from) {
  uint32_t value;
  memcpy(&value, from, sizeof value);
  return value;
}
static inline uint8_t *tx_put_u64(uint8_t *to, uint64_t value) {
  memcpy(to, &value, sizeof value);
  return to + sizeof value;
}
static inline uint8_t *tx_put_u32(uint8_t *to, uint32_t value) {
  memcpy(to, &value, sizeof value);
  return to + sizeof value;
}

#define TX_VARINT_MOST 9 /* bytes of the largest number, < 2^63 */
static inline uint8_t *tx_put_varint(uint8_t *to, int64_t value) {
  for (; value >= 0x80; value >>= 7)
    *to++ = (uint8_t)(value & 0x7f) | 0x80;
  *to++ = (uint8_t)value;
  return to;
}

/* A cursor over bytes of a message. Once a read goes past the end, `failed` is set and all further reads give 0. */
typedef struct tx_bytes {
  const uint8_t *at, *end;
  int failed;
} tx_bytes;

static inline const uint8_t *tx_take_bytes(tx_bytes *b, int64_t n) {
  if (b->failed || n < 0 || n > b->end - b->at) {
    b->failed = 1;
    return NULL;
  }
  b->at += n;
  return b->at - n;
}
static inline int64_t tx_take_varint(tx_bytes *b) {
  uint64_t value = 0;
  for (int32_t i = 0; i < TX_VARINT_MOST; i++) {
    const uint8_t *byte = tx_take_bytes(b, 1);
    if (!byte) return 0;
    value |= (uint64_t)(*byte & 0x7f) << (7 * i);
    if (*byte < 0x80) return (int64_t)value;
  }
  b->failed = 1;
  return 0;
}
static inline uint32_t tx_take_u32(tx_bytes *b) {
  const uint8_t *from = tx_take_bytes(b, 4);
  return from ? tx_get_u32(from) : 0;
}

#define TX_XXH_1 UINT64_C(0x9E3779B185EBCA87)
#define TX_XXH_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define TX_XXH_3 UINT64_C(0x165667B19E3779F9)
#define TX_XXH_4 UINT64_C(0x85EBCA77C2B2AE63)
#define TX_XXH_5 UINT64_C(0x27D4EB2F165667C5)

static inline uint64_t tx_rotate64(uint64_t x, int r) {
  return x << r | x >> (64 - r);
}
static inline uint64_t tx_xxh_round(uint64_t lane, uint64_t word) {
  return tx_rotate64(lane + word * TX_XXH_2, 31) * TX_XXH_1;
}
static inline uint64_t tx_xxh64(const uint8_t *p, int64_t n) {
  const uint8_t *const end = p + n;
  uint64_t h = TX_XXH_5;
  if (n >= 32) {
    uint64_t lanes[4] = {TX_XXH_1 + TX_XXH_2, TX_XXH_2, 0, 0u - TX_XXH_1};
    for (; end - p >= 32; p += 32) {
      for (int32_t i = 0; i < 4; i++)
        lanes[i] = tx_xxh_round(lanes[i], tx_get_u64(p + 8 * i));
    }
    h = tx_rotate64(lanes[0], 1) + tx_rotate64(lanes[1], 7) + tx_rotate64(lanes[2], 12) + tx_rotate64(lanes[3], 18);
    for (int32_t i = 0; i < 4; i++)
      h = (h ^ tx_xxh_round(0, lanes[i])) * TX_XXH_1 + TX_XXH_4;
  }
  h += (uint64_t)n;
  for (; end - p >= 8; p += 8)
    h = tx_rotate64(h ^ tx_xxh_round(0, tx_get_u64(p)), 27) * TX_XXH_1 + TX_XXH_4;
  if (end - p >= 4) {
    h = tx_rotate64(h ^ tx_get_u32(p) * TX_XXH_1, 23) * TX_XXH_2 + TX_XXH_3;
    p += 4;
  }
  for (; p < end; p++)
    h = tx_rotate64(h ^ *p * TX_XXH_5, 11) * TX_XXH_1;
  h = (h ^ h >> 33) * TX_XXH_2;
  h = (h ^ h >> 29) * TX_XXH_3;
  return h ^ h >> 32;
}

#endif
