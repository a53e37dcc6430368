/* The floating-point mode that everything is computed under: round to nearest, subnormals kept, exceptions masked.
 * torch.set_flush_denormal, fesetround and other libraries change the mode per thread; bits, plans and texts must not
 * depend on that. */
#ifndef TX_CORE_FP_MODE_H
#define TX_CORE_FP_MODE_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned tx_fp_mode;
static inline tx_fp_mode tx_fp_enter(void) {
  const tx_fp_mode saved = _mm_getcsr();
  _mm_setcsr(0x1f80u); /* the power-on value */
  return saved;
}
static inline void tx_fp_leave(tx_fp_mode saved) {
  _mm_setcsr(saved);
}
#elif defined(__aarch64__)
typedef uint64_t tx_fp_mode;
static inline tx_fp_mode tx_fp_enter(void) {
  tx_fp_mode saved;
  const tx_fp_mode plain = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
  __asm__ volatile("msr fpcr, %0" : : "r"(plain));
  return saved;
}
static inline void tx_fp_leave(tx_fp_mode saved) {
  __asm__ volatile("msr fpcr, %0" : : "r"(saved));
}
#else
#error "say here how this processor sets its floating-point mode"
#endif

/* Returns what a call returns that runs under it. The result is kept in a volatile until the mode is left, so that it
 * is not computed after that; a number that the caller's function was given goes in from a volatile, so that nothing is
 * computed of it before. */
#define TX_RETURN_UNDER_FP_MODE(type, call)  \
  do {                                       \
    const tx_fp_mode saved_ = tx_fp_enter(); \
    const volatile type result_ = (call);    \
    tx_fp_leave(saved_);                     \
    return result_;                          \
  } while (0)

#endif
