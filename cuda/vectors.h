/* Copies vectors of TX_VECTOR consecutive elements of a stream (a tensor that a kernel reads or writes) between memory
 * and a thread's registers.
 *
 * Whole vectors are copied in the widest words that the stream's alignment allows, nearly always 16 bytes; a tensor's
 * last elements one by one. A stream's alignment (tx_alignment_of) is passed along with it and holds for all its
 * vectors. */
#ifndef TX_CUDA_VECTORS_H
#define TX_CUDA_VECTORS_H

#include <cuda_runtime.h>

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"
#include "cuda/grid.h"

/* The number of 32-bit words that a vector of elements of `bytes` bytes takes. */
#define TX_VECTOR_WORDS(bytes) (TX_VECTOR * (bytes) / 4)

/* The largest power of two, at most 16, that divides `address`. */
TX_FN uint32_t tx_alignment_of(const void *address) {
  const uint32_t low = (uint32_t)((uintptr_t)address & 15u);
  return low == 0u ? 16u : low & (0u - low);
}

template <class Word>
static __device__ __forceinline__ void tx_move_words(void *to, const void *from, int bytes) {
#pragma unroll
  for (int i = 0; i < bytes / (int)sizeof(Word); i++)
    ((Word *)to)[i] = ((const Word *)from)[i];
}

/* Reads the vector of elements of BYTES bytes at `from`. Only the first `count` elements exist; the others become
 * zeros. */
template <int BYTES>
static __device__ __forceinline__ void tx_read_vector(uint32_t (&words)[TX_VECTOR_WORDS(BYTES)], const void *from,
                                                      uint32_t alignment, int32_t count) {
  constexpr int kAll = TX_VECTOR * BYTES;
  if (count == TX_VECTOR) {
    if (alignment >= (kAll < 16 ? kAll : 16)) {
      if constexpr (kAll >= 16) {
        uint4 wide[kAll / 16];
        tx_move_words<uint4>(wide, from, kAll);
        memcpy(words, wide, kAll);
      } else {
        uint2 wide;
        tx_move_words<uint2>(&wide, from, kAll);
        memcpy(words, &wide, kAll);
      }
    } else if (alignment >= 8) {
      uint2 wide[kAll / 8];
      tx_move_words<uint2>(wide, from, kAll);
      memcpy(words, wide, kAll);
    } else if (alignment >= 4) {
      tx_move_words<uint32_t>(words, from, kAll);
    } else if (alignment >= 2) {
      uint16_t narrow[kAll / 2];
      tx_move_words<uint16_t>(narrow, from, kAll);
      memcpy(words, narrow, kAll);
    } else {
      uint8_t narrow[kAll];
      tx_move_words<uint8_t>(narrow, from, kAll);
      memcpy(words, narrow, kAll);
    }
    return;
  }
  uint8_t narrow[kAll];
#pragma unroll
  for (int i = 0; i < kAll; i++)
    narrow[i] = i < count * BYTES ? ((const uint8_t *)from)[i] : (uint8_t)0;
  memcpy(words, narrow, kAll);
}

/* Writes the first `count` elements of the vector. */
template <int BYTES>
static __device__ __forceinline__ void tx_write_vector(const uint32_t (&words)[TX_VECTOR_WORDS(BYTES)], void *to,
                                                       uint32_t alignment, int32_t count) {
  constexpr int kAll = TX_VECTOR * BYTES;
  if (count == TX_VECTOR) {
    if (alignment >= (kAll < 16 ? kAll : 16)) {
      if constexpr (kAll >= 16) {
        uint4 wide[kAll / 16];
        memcpy(wide, words, kAll);
        tx_move_words<uint4>(to, wide, kAll);
      } else {
        uint2 wide;
        memcpy(&wide, words, kAll);
        tx_move_words<uint2>(to, &wide, kAll);
      }
    } else if (alignment >= 8) {
      uint2 wide[kAll / 8];
      memcpy(wide, words, kAll);
      tx_move_words<uint2>(to, wide, kAll);
    } else if (alignment >= 4) {
      tx_move_words<uint32_t>(to, words, kAll);
    } else if (alignment >= 2) {
      uint16_t narrow[kAll / 2];
      memcpy(narrow, words, kAll);
      tx_move_words<uint16_t>(to, narrow, kAll);
    } else {
      uint8_t narrow[kAll];
      memcpy(narrow, words, kAll);
      tx_move_words<uint8_t>(to, narrow, kAll);
    }
    return;
  }
  uint8_t narrow[kAll];
  memcpy(narrow, words, kAll);
#pragma unroll
  for (int i = 0; i < kAll; i++)
    if (i < count * BYTES) ((uint8_t *)to)[i] = narrow[i];
}

/* Half h of a word: of word w of a vector, that is the 16-bit element 2 * w + h. */
static __device__ __forceinline__ uint32_t tx_half(uint32_t word, int h) {
  return h ? word >> 16 : word & 0xffffu;
}

/* Reads elements [first, first + count) of a stream as fp32; the rest of x becomes zeros. dtype: TX_F32, TX_BF16 or
 * TX_F16, mostly a compile-time constant. */
static __device__ __forceinline__ void tx_read_floats(float (&x)[TX_VECTOR], const void *data, const tx_dtype dtype,
                                                      uint32_t alignment, int64_t first, int32_t count) {
  if (dtype == TX_F32) {
    uint32_t words[TX_VECTOR_WORDS(4)];
    tx_read_vector<4>(words, (const char *)data + 4 * first, alignment, count);
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      x[i] = tx_f32_from_bits(words[i]);
    return;
  }
  uint32_t words[TX_VECTOR_WORDS(2)];
  tx_read_vector<2>(words, (const char *)data + 2 * first, alignment, count);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const uint16_t half = (uint16_t)tx_half(words[i / 2], i % 2);
    x[i] = dtype == TX_BF16 ? tx_f32_from_bf16(half) : tx_f32_from_f16(half);
  }
}

/* Writes 16-bit elements. */
static __device__ __forceinline__ void tx_write_halves(const uint16_t (&halves)[TX_VECTOR], void *data,
                                                       uint32_t alignment, int64_t first, int32_t count) {
  uint32_t words[TX_VECTOR_WORDS(2)];
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++)
    words[i] = (uint32_t)halves[2 * i] | (uint32_t)halves[2 * i + 1] << 16;
  tx_write_vector<2>(words, (char *)data + 2 * first, alignment, count);
}

/* Writes x, rounded to nearest. */
static __device__ __forceinline__ void tx_write_floats(const float (&x)[TX_VECTOR], void *data, const tx_dtype dtype,
                                                       uint32_t alignment, int64_t first, int32_t count) {
  if (dtype == TX_F32) {
    uint32_t words[TX_VECTOR_WORDS(4)];
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      words[i] = tx_bits_from_f32(x[i]);
    tx_write_vector<4>(words, (char *)data + 4 * first, alignment, count);
    return;
  }
  uint16_t halves[TX_VECTOR];
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    halves[i] = dtype == TX_BF16 ? tx_bf16_from_f32(x[i]) : tx_f16_from_f32(x[i]);
  tx_write_halves(halves, data, alignment, first, count);
}

#endif
