/* The selected instruction set. A table of loops has one row for each row of isa.def, in its order. Each table is in a
 * file of its own, so that a library links only those that it uses (libtorch_ext_delta.so: coding_kernels.c). */
#ifndef TX_CPU_ISA_H
#define TX_CPU_ISA_H

#include <stdint.h>

/* For files compiled once per instruction set, with -DTX_ISA=<name>: a name that ends in it. */
#define TX_JOIN_(a, b) a##b
#define TX_JOIN(a, b) TX_JOIN_(a, b)
#define TX_OF_ISA(name) TX_JOIN(name, TX_ISA)

/* The selected row of isa.def. */
int32_t tx_isa_row_selected(void);

#endif
