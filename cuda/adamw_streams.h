/* Reads and writes the step's streams. All streams of a round are read before any of them is used. Also rounds values
 * to what is stored. */
#ifndef TX_CUDA_ADAMW_STREAMS_H
#define TX_CUDA_ADAMW_STREAMS_H

#include "cuda/adamw_fast_path.h"
#include "cuda/quick_blocks.h"
#include "cuda/vector_forms.h"

/* Where a lane's elements of a round are: consecutive from `first` on, but with a gap of `gap` elements before the
 * upper half. whole: whether every lane of the warp has TX_VECTOR elements, aligned. */
struct tx_lane_elements {
  int64_t first;
  int32_t count, gap;
  bool whole;
};

/* How the elements of a round are distributed over the lanes.
 *
 * The problem: eight consecutive fp32 of a lane are two accesses of 16 bytes. With the first one, the warp writes half
 * of each 32-byte sector, with the second one the other half. So with TX_ACCESS_HALVES a lane has four elements of the
 * round's first half and four of its second half: every access of the warp covers whole sectors. 16-bit streams are
 * then accessed 8 bytes per lane, which covers whole sectors, too. */
enum tx_access {
  TX_ACCESS_ANY,   /* any count, any address */
  TX_ACCESS_WHOLE, /* TX_VECTOR consecutive elements per lane, aligned */
  TX_ACCESS_HALVES /* TX_VECTOR per lane, aligned, with TX_HALVES_GAP elements between the two halves */
};
#define TX_HALVES_GAP (TX_ROUND / 2 - TX_VECTOR / 2)

static __device__ __forceinline__ constexpr int tx_bytes_of(const tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : dtype == TX_U8 ? 1 : 2;
}

/* Forces later reads to load from memory again; values read before are not kept in registers for them. */
static __device__ __forceinline__ void tx_read_again() {
  asm volatile("" ::: "memory");
}

/* Reads or writes half a vector of elements of `bytes` bytes, 4 or 2. */
static __device__ __forceinline__ void tx_get_half(uint32_t *words, const char *from, const int bytes) {
  if (bytes == 4) {
    const uint4 wide = *(const uint4 *)from;
    memcpy(words, &wide, sizeof wide);
  } else {
    const uint2 wide = *(const uint2 *)from;
    memcpy(words, &wide, sizeof wide);
  }
}
static __device__ __forceinline__ void tx_put_half(char *to, const uint32_t *words, const int bytes) {
  if (bytes == 4) {
    uint4 wide;
    memcpy(&wide, words, sizeof wide);
    *(uint4 *)to = wide;
  } else {
    uint2 wide;
    memcpy(&wide, words, sizeof wide);
    *(uint2 *)to = wide;
  }
}

/* dtype and access: mostly compile-time constants. With TX_ACCESS_HALVES elements have 4 or 2 bytes. */
static __device__ __forceinline__ void tx_get(tx_raw &raw, const void *data, const tx_dtype dtype,
                                              const tx_access access, uint32_t alignment,
                                              const tx_lane_elements &here) {
  const int bytes = tx_bytes_of(dtype);
  if (access == TX_ACCESS_HALVES) {
    const char *const from = (const char *)data + bytes * here.first;
    tx_get_half(&raw[0], from, bytes);
    tx_get_half(&raw[bytes], from + bytes * (TX_ROUND / 2), bytes);
  } else {
    const bool whole = access == TX_ACCESS_WHOLE;
    tx_read_raw(raw, data, bytes, whole ? 16u : alignment, here.first, whole ? TX_VECTOR : here.count);
  }
}

static __device__ __forceinline__ void tx_put(const tx_raw &raw, void *data, const tx_dtype dtype,
                                              const tx_access access, uint32_t alignment,
                                              const tx_lane_elements &here) {
  const int bytes = tx_bytes_of(dtype);
  if (access == TX_ACCESS_HALVES) {
    char *const to = (char *)data + bytes * here.first;
    tx_put_half(to, &raw[0], bytes);
    tx_put_half(to + bytes * (TX_ROUND / 2), &raw[bytes], bytes);
  } else {
    const bool whole = access == TX_ACCESS_WHOLE;
    tx_write_raw(raw, data, bytes, whole ? 16u : alignment, here.first, whole ? TX_VECTOR : here.count);
  }
}

/* The index of the block that a lane's elements are in. */
static __device__ __forceinline__ int64_t tx_block_at(const tx_lane_elements &here) {
  return (int64_t)((uint64_t)here.first / TX_BLOCK);
}

/* tx_plain_floats for a dtype that is known at run time only. */
static __device__ __forceinline__ void tx_floats_of(float (&x)[TX_VECTOR], const tx_raw &raw, const tx_dtype dtype) {
  if (dtype == TX_F32) {
    tx_plain_floats(x, raw, TX_F32);
  } else if (dtype == TX_BF16) {
    tx_plain_floats(x, raw, TX_BF16);
  } else {
    tx_plain_floats(x, raw, TX_F16);
  }
}

static __device__ __forceinline__ void tx_round_plain_to(tx_raw &raw, const float (&x)[TX_VECTOR], const tx_dtype dtype,
                                                         int32_t rounding, const bool quick,
                                                         const tx_lane_elements &here, const tx_noise &noise) {
  uint32_t u[TX_VECTOR] = {};
  if (dtype == TX_F32 || rounding == TX_NEAREST) {
    if (quick && dtype == TX_BF16) {
      tx_quick_bf16_nearest(raw, x);
    } else {
      tx_plain_raw(raw, x, u, 0, dtype);
    }
    return;
  }
  tx_thresholds(u, noise, (uint32_t)here.first, (uint32_t)here.gap, rounding);
  if (quick && dtype == TX_BF16) {
    tx_quick_bf16_round(raw, x, u);
  } else {
    tx_plain_raw(raw, x, u, 1, dtype);
  }
}

/* Rounds x to what is stored: F32, BF16 or F16. quick: no x is NaN or reaches 2^127 in magnitude. */
static __device__ __forceinline__ void tx_round_plain(tx_raw &raw, const float (&x)[TX_VECTOR], const tx_dtype dtype,
                                                      int32_t rounding, const bool quick, const tx_lane_elements &here,
                                                      const tx_noise &noise) {
  if (dtype == TX_F32) {
    tx_round_plain_to(raw, x, TX_F32, rounding, quick, here, noise);
  } else if (dtype == TX_BF16) {
    tx_round_plain_to(raw, x, TX_BF16, rounding, quick, here, noise);
  } else {
    tx_round_plain_to(raw, x, TX_F16, rounding, quick, here, noise);
  }
}

/* Encodes x into blocks with scales, U8 or F16; returns the scale byte. quick, amax: the block is one of U8 that
 * tx_quick_encode encodes, in all lanes of the warp. Every lane of the warp has to call it. */
static __device__ __forceinline__ uint32_t tx_round_scaled(tx_raw &raw, const float (&x)[TX_VECTOR],
                                                           const tx_dtype dtype, const tx_format format,
                                                           int32_t rounding, bool quick, int32_t amax,
                                                           const tx_lane_elements &here, const tx_noise &noise) {
  uint32_t u[TX_VECTOR];
  tx_thresholds(u, noise, (uint32_t)here.first, (uint32_t)here.gap, rounding);
  if (rounding == TX_NEAREST) return tx_encode_block(raw, x, u, 0, dtype, format);
  if (dtype == TX_U8 && quick) return tx_quick_encode(raw, x, amax, u, format);
  return tx_encode_block(raw, x, u, 1, dtype, format);
}

#endif
