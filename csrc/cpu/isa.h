/* The instruction set whose loops run. Tables of loops have one row for each in isa.def, in its order; each table is in
 * a file of its own, so that a library links those that it uses (libtorch_ext_delta.so: coding_kernels.c alone). */
#ifndef TX_CPU_ISA_H
#define TX_CPU_ISA_H

#include <stdint.h>

/* In files that are compiled once per instruction set, with -DTX_ISA=<name>: a name that ends in it. */
#define TX_JOIN_(a, b) a##b
#define TX_JOIN(a, b) TX_JOIN_(a, b)
#define TX_OF_ISA(name) TX_JOIN(name, TX_ISA)

/* The row of isa.def in use. */
int32_t tx_isa_row_selected(void);

#endif
