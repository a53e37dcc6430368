/* The loops of the selected instruction set. */
#include "csrc/cpu/kernels.h"

#include "csrc/cpu/isa.h"

#define X(name, present) extern const tx_kernels tx_kernels_##name;
#include "csrc/cpu/isa.def"
#undef X

static const tx_kernels *const rows[] = {
#define X(name, present) &tx_kernels_##name,
#include "csrc/cpu/isa.def"
#undef X
};

const tx_kernels *tx_kernels_selected(void) {
  return rows[tx_isa_row_selected()];
}
