/* Stores that go past the caches. A line that is written without having been read is read by the processor first, to
 * put what is written in it; one that leaves in a whole piece this way is not. For what nobody reads before it would
 * have left the caches anyway. */
#ifndef TX_CPU_STREAM_STORE_H
#define TX_CPU_STREAM_STORE_H

#include <stdint.h>
#include <string.h>

#include "csrc/math/numeric.h"

#define TX_CACHE_LINE 64

#if defined(__SSE2__)
#include <immintrin.h>

#define TX_HAS_NONTEMPORAL 1

/* bytes: of whole lines; to: at the begin of one. */
TX_FN void tx_store_nontemporal(const void *from, void *to, int64_t bytes) {
#if defined(__AVX512F__)
  typedef __m512i tx_widest;
#define TX_STREAM_ _mm512_stream_si512
#elif defined(__AVX__)
  typedef __m256i tx_widest;
#define TX_STREAM_ _mm256_stream_si256
#else
  typedef __m128i tx_widest;
#define TX_STREAM_ _mm_stream_si128
#endif
  for (int64_t at = 0; at < bytes; at += (int64_t)sizeof(tx_widest)) {
    tx_widest x;
    memcpy(&x, (const char *)from + at, sizeof x);
    TX_STREAM_((tx_widest *)(void *)((char *)to + at), x);
  }
#undef TX_STREAM_
}

/* Before another thread may look: such stores keep no order with those after them. */
TX_FN void tx_end_nontemporal(void) {
  _mm_sfence();
}

#else

#define TX_HAS_NONTEMPORAL 0

TX_FN void tx_store_nontemporal(const void *from, void *to, int64_t bytes) {
  memcpy(to, from, (size_t)bytes);
}
TX_FN void tx_end_nontemporal(void) {}

#endif

#endif
