/* Selects the instruction set: the fastest that this processor has, unless TORCH_EXT_ISA or tx_isa_select names another
 * one. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "csrc/core/status.h"
#include "csrc/cpu/isa.h"

typedef enum tx_isa_row {
#define X(name, present) ROW_##name,
#include "csrc/cpu/isa.def"
#undef X
  ROWS
} tx_isa_row;

static const char *const names[ROWS] = {
#define X(name, present) #name,
#include "csrc/cpu/isa.def"
#undef X
};

#if defined(__x86_64__)
/* clang 14's __builtin_cpu_supports does not know F16C. (AVX2 implies that the system saves the registers.) */
static int has_f16c(void) {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

/* AMX-BF16, which clang 14 does not know either. */
int32_t tx_isa_has_tiles(void) {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
}
#else
int32_t tx_isa_has_tiles(void) {
  return 0;
}
#endif

/* The i-th row that this processor has; -1 past the end. */
static int32_t present(int32_t i) {
  int32_t at = 0;
#define X(name, is_present) \
  if ((is_present) && at++ == i) return ROW_##name;
#include "csrc/cpu/isa.def"
#undef X
  (void)at;
  return -1;
}

/* The fastest available row with that name, or of all rows if name is NULL; -1: none. */
static int32_t by_name(const char *name) {
  int32_t found = -1;
  for (int32_t i = 0; present(i) >= 0; i++) {
    if (!name || strcmp(name, names[present(i)]) == 0) found = present(i);
  }
  return found;
}

/* The library's only global state: the selected row + 1; 0 before the first use. */
static _Atomic(int32_t) selected;

static void select_row(int32_t row) {
  atomic_store_explicit(&selected, row + 1, memory_order_relaxed);
}

int32_t tx_isa_row_selected(void) {
  int32_t row = atomic_load_explicit(&selected, memory_order_relaxed) - 1;
  if (row >= 0) return row;
  row = by_name(getenv("TORCH_EXT_ISA"));
  if (row < 0) row = by_name(NULL); /* an unknown name is reported by tx_isa_select(NULL) */
  select_row(row);
  return row;
}

const char *tx_isa_name(int32_t i) {
  const int32_t row = i < 0 ? -1 : present(i);
  return row < 0 ? NULL : names[row];
}

const char *tx_isa_selected(void) {
  return names[tx_isa_row_selected()];
}

tx_status tx_isa_select(const char *name, tx_error *error) {
  const char *wanted = name ? name : getenv("TORCH_EXT_ISA");
  const int32_t row = by_name(wanted);
  if (row < 0) {
    char legal[128] = "";
    for (int32_t i = 0; present(i) >= 0; i++) {
      if (i > 0) strcat(legal, ", ");
      strcat(legal, names[present(i)]);
    }
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "instruction set \"%s\" is not available; this processor runs %s",
                   wanted, legal);
  }
  select_row(row);
  return TX_OK;
}
