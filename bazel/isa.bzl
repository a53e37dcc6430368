"""The instruction sets that csrc/cpu/kernels_isa.c is compiled for: name -> the compiler flags, slowest first.

The names are the rows of csrc/cpu/isa.def; a row without a name here does not link.
"""

ISAS = {
    "base": [],
}
