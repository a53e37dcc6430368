"""The instruction sets that csrc/cpu/kernels_isa.c is compiled for, slowest first: name -> the compiler's flags.

The names are the rows of csrc/cpu/isa.def; a row whose name is not here does not link.
"""

ISAS = {
    "base": [],
    "avx2": ["-mavx2", "-mf16c", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
    "avx512bf16": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mprefer-vector-width=512"],
}

# Those that every processor has; the others are x86-64's.
PORTABLE = ["base"]
