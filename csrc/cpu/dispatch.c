/* Which instruction set's loops run: the fastest this processor has, unless TORCH_EXT_ISA or tx_isa_select says. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"

#define X(name, present) extern const tx_kernels tx_kernels_##name;
#include "csrc/cpu/isa.def"
#undef X

#if defined(__x86_64__)
/* clang 14's __builtin_cpu_supports does not know it. (That the system saves its registers, AVX2 says.) */
static int has_f16c(void) {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

/* AMX-BF16, which clang 14 does not know, either. */
int32_t tx_isa_has_tiles(void) {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
}
#else
int32_t tx_isa_has_tiles(void) {
  return 0;
}
#endif

/* Row i of those that this processor has; NULL past the end. */
static const tx_kernels *present(int32_t i) {
  int32_t at = 0;
#define X(name, is_present) \
  if ((is_present) && at++ == i) return &tx_kernels_##name;
#include "csrc/cpu/isa.def"
#undef X
  (void)at;
  return NULL;
}

static const tx_kernels *by_name(const char *name) {
  const tx_kernels *found = NULL;
  for (int32_t i = 0; present(i); i++) {
    if (!name || strcmp(name, present(i)->name) == 0) found = present(i);
  }
  return found;
}

/* The library's only global state. NULL until first asked for. */
static _Atomic(const tx_kernels *) selected;

const tx_kernels *tx_kernels_selected(void) {
  const tx_kernels *kernels = atomic_load_explicit(&selected, memory_order_acquire);
  if (kernels) return kernels;
  kernels = by_name(getenv("TORCH_EXT_ISA"));
  if (!kernels) kernels = by_name(NULL); /* tx_isa_select(NULL) reports a name that is unknown */
  atomic_store_explicit(&selected, kernels, memory_order_release);
  return kernels;
}

const char *tx_isa_name(int32_t i) {
  const tx_kernels *kernels = i < 0 ? NULL : present(i);
  return kernels ? kernels->name : NULL;
}

const char *tx_isa_selected(void) {
  return tx_kernels_selected()->name;
}

tx_status tx_isa_select(const char *name, tx_error *error) {
  const char *wanted = name ? name : getenv("TORCH_EXT_ISA");
  const tx_kernels *kernels = by_name(wanted);
  if (!kernels) {
    char legal[128] = "";
    for (int32_t i = 0; present(i); i++) {
      if (i > 0) strcat(legal, ", ");
      strcat(legal, present(i)->name);
    }
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "instruction set \"%s\" is not available; this processor runs %s",
                   wanted, legal);
  }
  atomic_store_explicit(&selected, kernels, memory_order_release);
  return TX_OK;
}
