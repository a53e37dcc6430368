/* Rounds runs of fp32 to bf16, nearest even, with the processor's instruction if it has one.
 *
 * vcvtne2ps2bf16 rounds like tx_bf16_from_f32 with two exceptions: it treats subnormals as zeros (16 711 678 of the
 * 2^32 patterns differ), and it keeps a NaN's sign and payload. Groups with either take the ordinary path. A test
 * replaces TX_CONVERT_GROUP and TX_GROUP_IS_SPECIAL by models of the two instructions, so that this path is tested on
 * any machine. */
#ifndef TX_CPU_ROUND_BF16_H
#define TX_CPU_ROUND_BF16_H

#include "csrc/cpu/element.h"

#if defined(__AVX512BF16__) && !defined(TX_CONVERT_GROUP)
#include <immintrin.h>

static inline void tx_convert_group(const void *from, void *to) {
  const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps((const char *)from + 64);
  const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
  memcpy(to, &both, sizeof both);
}
/* Mask of classes: subnormal (0x20), quiet NaN (0x01), signalling NaN (0x80). */
static inline int tx_group_is_special(const void *from) {
  const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps((const char *)from + 64);
  return (_mm512_fpclass_ps_mask(low, 0xa1) | _mm512_fpclass_ps_mask(high, 0xa1)) != 0;
}
#define TX_CONVERT_GROUP tx_convert_group
#define TX_GROUP_IS_SPECIAL tx_group_is_special
#endif

/* Elements that the instruction converts at once. */
#define TX_CONVERT_GROUP_SIZE 32

TX_FN void tx_nearest_bf16_ordinary(const void *from, int64_t n, void *to) {
  for (int64_t i = 0; i < n; i++)
    ((tx_mem_u16 *)to)[i] = tx_bf16_from_f32(((const tx_mem_f32 *)from)[i]);
}

/* n elements; `from` and `to` do not overlap and may have any address. */
TX_FN void tx_nearest_bf16(const void *from, int64_t n, void *to) {
  int64_t at = 0;
#if defined(TX_CONVERT_GROUP)
  for (; at + TX_CONVERT_GROUP_SIZE <= n; at += TX_CONVERT_GROUP_SIZE) {
    const char *group = (const char *)from + 4 * at;
    char *converted = (char *)to + 2 * at;
    if (__builtin_expect(TX_GROUP_IS_SPECIAL(group), 0)) {
      tx_nearest_bf16_ordinary(group, TX_CONVERT_GROUP_SIZE, converted);
    } else {
      TX_CONVERT_GROUP(group, converted);
    }
  }
#endif
  tx_nearest_bf16_ordinary((const char *)from + 4 * at, n - at, (char *)to + 2 * at);
}

#endif
