/* Stores that bypass the caches. An ordinary store to a line that was not read makes the processor read that line
 * first; a whole line stored this way is not read. Meant for data that would have left the caches anyway before it is
 * read again. */
#ifndef TX_CPU_STREAM_STORE_H
#define TX_CPU_STREAM_STORE_H

#include <stdint.h>
#include <string.h>

#include "csrc/math/numeric.h"

#define TX_CACHE_LINE 64

#if defined(__SSE2__)
#include <immintrin.h>

#define TX_HAS_NONTEMPORAL 1

/* bytes: a multiple of a line; to: at the start of a line. */
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

/* Has to be called before another thread may read the data: these stores are not ordered with later ones. */
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
