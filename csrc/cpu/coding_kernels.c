/* The loops that encode and decode, for the selected instruction set. */
#include "csrc/cpu/coding_kernels.h"

#include "csrc/cpu/isa.h"

#define X(name, present) extern const tx_coding_kernels tx_coding_kernels_##name;
#include "csrc/cpu/isa.def"
#undef X

static const tx_coding_kernels *const rows[] = {
#define X(name, present) &tx_coding_kernels_##name,
#include "csrc/cpu/isa.def"
#undef X
};

const tx_coding_kernels *tx_coding_kernels_selected(void) {
  return rows[tx_isa_row_selected()];
}
