/* The hash of parameter ids and layout fingerprints: FNV-1a over bytes, then MurmurHash3's 64-bit finaliser, because
 * FNV gives short inputs similar high bits. Numbers are hashed as little-endian bytes, so that the hash is equal on
 * every machine. */
#ifndef TX_CORE_HASH_H
#define TX_CORE_HASH_H

#include <stdint.h>
#include <string.h>

static inline uint64_t tx_hash_begin(void) {
  return UINT64_C(0xcbf29ce484222325);
}

static inline uint64_t tx_hash_bytes(uint64_t hash, const char *bytes, size_t n) {
  for (size_t i = 0; i < n; i++)
    hash = (hash ^ (uint8_t)bytes[i]) * UINT64_C(0x100000001b3);
  return hash;
}

static inline uint64_t tx_hash_int(uint64_t hash, int64_t number) {
  for (int i = 0; i < 8; i++) {
    hash = (hash ^ (uint8_t)((uint64_t)number >> (8 * i))) * UINT64_C(0x100000001b3);
  }
  return hash;
}

/* Hashes the length too, so that ("ab", "c") and ("a", "bc") differ; NULL differs from "". */
static inline uint64_t tx_hash_text(uint64_t hash, const char *text) {
  if (!text) return tx_hash_int(hash, -1);
  const size_t n = strlen(text);
  return tx_hash_bytes(tx_hash_int(hash, (int64_t)n), text, n);
}

static inline uint64_t tx_hash_end(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * UINT64_C(0xff51afd7ed558ccd);
  hash = (hash ^ (hash >> 33)) * UINT64_C(0xc4ceb9fe1a85ec53);
  return hash ^ (hash >> 33);
}

#endif
