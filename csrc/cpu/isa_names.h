/* Of the files that are compiled once per instruction set, with -DTX_ISA=<name>: the name, and names that end in it. */
#ifndef TX_CPU_ISA_NAMES_H
#define TX_CPU_ISA_NAMES_H

#define TX_JOIN_(a, b) a##b
#define TX_JOIN(a, b) TX_JOIN_(a, b)
#define TX_OF_ISA(name) TX_JOIN(name, TX_ISA)

#endif
