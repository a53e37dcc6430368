// A floating-point mode that a caller may have set (by torch.set_flush_denormal): flush to zero, subnormal inputs read
// as zero, and here also rounding towards minus infinity. Operators have to compute as if it were not set, and leave it
// set.
#ifndef TX_TESTS_CORE_FLUSH_MODE_H
#define TX_TESTS_CORE_FLUSH_MODE_H

#include <gtest/gtest.h>

#include "csrc/core/fp_mode.h"

#if defined(__x86_64__)
// Runs `call` with the mode set, and expects the mode to be unchanged afterwards.
template <typename Call>
void CallInFlushMode(Call call) {
  const unsigned flush = 0x1f80u | 0x8000u | 0x0040u | 0x2000u;
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(flush);
  call();
  const unsigned after = _mm_getcsr() & ~0x3fu; /* without the sticky exception flags */
  _mm_setcsr(saved);
  EXPECT_EQ(after, flush);
}
#elif defined(__aarch64__)
template <typename Call>
void CallInFlushMode(Call call) {
  const uint64_t flush = uint64_t{1} << 24 | uint64_t{2} << 22; /* FZ; RMode: towards minus infinity */
  uint64_t saved, after;
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
  __asm__ volatile("msr fpcr, %0" : : "r"(flush));
  call();
  __asm__ volatile("mrs %0, fpcr" : "=r"(after));
  __asm__ volatile("msr fpcr, %0" : : "r"(saved));
  EXPECT_EQ(after, flush);
}
#else
template <typename Call>
void CallInFlushMode(Call call) {
  call(); /* the mode cannot be set on this processor: an ordinary call */
}
#endif

#endif
