/* The instruction set whose loops run. Tables of loops have one row for each in isa.def, in its order; each table is in
 * a file of its own, so that a library links those that it uses (libtorch_ext_delta.so: coding_kernels.c alone). */
#ifndef TX_CPU_ISA_H
#define TX_CPU_ISA_H

#include <stdint.h>

/* The row of isa.def in use. */
int32_t tx_isa_row_selected(void);

#endif
