// A floating-point mode that a caller may have set (torch.set_flush_denormal): flush to zero, subnormal inputs as zero,
// and here round down as well. No operator may compute in it, and each must leave it as it was.
#ifndef TX_TESTS_CORE_FLUSH_MODE_H
#define TX_TESTS_CORE_FLUSH_MODE_H

#include <gtest/gtest.h>

#include "csrc/core/fp_mode.h"

#if defined(__x86_64__)
// Sets the mode, calls, and expects the mode to be as it was set.
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
  call(); /* the mode is not set here: the calls still count as plain ones */
}
#endif

#endif
