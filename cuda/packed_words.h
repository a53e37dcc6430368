/* Words that hold several bytes or 16-bit numbers, in instructions that work on all of them at a time. */
#ifndef TX_CUDA_PACKED_WORDS_H
#define TX_CUDA_PACKED_WORDS_H

#include <cuda_runtime.h>
#include <stdint.h>

/* Byte i of the result is byte (digit i of `digits`) of the eight bytes of `low` and `high`: 0 to 3 are low's. digits:
 * four hexadecimal digits below 8, a constant. */
static __device__ __forceinline__ uint32_t tx_pick_bytes(uint32_t low, uint32_t high, const uint32_t digits) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, digits);
#else
  const uint64_t bytes = (uint64_t)high << 32 | low;
  uint32_t picked = 0;
  for (uint32_t i = 0; i < 4; i++)
    picked |= (uint32_t)(bytes >> (8u * (digits >> (4u * i) & 7u)) & 0xffu) << (8u * i);
  return picked;
#endif
}

/* The upper three bytes of `word`, and `byte`, which is below 256, above them. */
static __device__ __forceinline__ uint32_t tx_push_byte(uint32_t word, uint32_t byte) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(word, byte, 8);
#else
  return word >> 8 | byte << 24;
#endif
}

/* The upper halves of two words as one word, and the lower halves. */
static __device__ __forceinline__ uint32_t tx_upper_halves(uint32_t low, uint32_t high) {
  return tx_pick_bytes(low, high, 0x7632u);
}
static __device__ __forceinline__ uint32_t tx_lower_halves(uint32_t low, uint32_t high) {
  return tx_pick_bytes(low, high, 0x5410u);
}

/* Joins one byte of each of four words, the one from bit `from` on, 16 to 24; the first word's byte is the lowest. */
static __device__ __forceinline__ uint32_t tx_join_bytes(const uint32_t (&words)[4], const int from) {
  const uint32_t low = tx_upper_halves(words[0], words[1]), high = tx_upper_halves(words[2], words[3]);
  if (from == 24) return tx_pick_bytes(low, high, 0x7531u);
  return tx_pick_bytes(low >> (from - 16), high >> (from - 16), 0x6420u);
}

/* Whether a byte of two words is 0. */
static __device__ __forceinline__ bool tx_has_zero_byte(uint32_t a, uint32_t b) {
  const uint32_t zeros = ((a - 0x01010101u) & ~a) | ((b - 0x01010101u) & ~b);
  return (zeros & 0x80808080u) != 0u;
}

/* -- halves of 0x8000 --------------------------------------------------------------------------------------------- */

/* The least of three, for the lower and for the upper halves, as signed numbers. One instruction from sm_90 on. */
static __device__ __forceinline__ uint32_t tx_least_halves(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  return __vimin3_s16x2(a, b, c);
#else
  uint32_t least = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const int16_t x = (int16_t)(a >> shift), y = (int16_t)(b >> shift), z = (int16_t)(c >> shift);
    const int16_t xy = x < y ? x : y;
    least |= (uint32_t)(uint16_t)(xy < z ? xy : z) << shift;
  }
  return least;
#endif
}

/* What is known of the halves of words that were seen: whether one of them is 0x8000. It takes half an instruction per
 * word from sm_90 on, where TX_TIES_ARE_LEAST is 1, and two before. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define TX_TIES_ARE_LEAST 0
#else
#define TX_TIES_ARE_LEAST 1
#endif

/* Bits 15 and 31 of the result are set where a half of `word` is 0x8000; also, perhaps, where the upper half is
 * 0x8001. */
static __device__ __forceinline__ uint32_t tx_tie_bits(uint32_t word) {
  return (word - 0x80018001u) & word;
}

/* No words were seen yet. */
#define TX_NO_TIES (TX_TIES_ARE_LEAST ? 0x7fff7fffu : 0u)

static __device__ __forceinline__ uint32_t tx_see_ties(uint32_t seen, uint32_t a, uint32_t b) {
  return TX_TIES_ARE_LEAST ? tx_least_halves(seen, a, b) : seen | tx_tie_bits(a) | tx_tie_bits(b);
}

/* Whether a half was 0x8000; perhaps also if an upper half was 0x8001. */
static __device__ __forceinline__ bool tx_has_tie(uint32_t seen) {
  return ((TX_TIES_ARE_LEAST ? tx_tie_bits(seen) : seen) & 0x80008000u) != 0u;
}

#endif
