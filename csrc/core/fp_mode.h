/* The floating-point mode under which everything is computed: round to nearest, subnormals kept, exceptions masked.
 * torch.set_flush_denormal, fesetround and other libraries change the mode of a thread; bits, plans and texts must not
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

/* Returns the result of `call`, made under this mode. The compiler does not know that the mode matters, so volatiles
 * keep the computation inside: the result is stored in one before the mode is left; and a number that the calling
 * function received must be read from one, so that nothing is computed from it before the mode is entered. */
#define TX_RETURN_UNDER_FP_MODE(type, call)  \
  do {                                       \
    const tx_fp_mode saved_ = tx_fp_enter(); \
    const volatile type result_ = (call);    \
    tx_fp_leave(saved_);                     \
    return result_;                          \
  } while (0)

#endif
