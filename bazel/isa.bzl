"""The instruction sets that csrc/cpu/*kernels_isa.c are compiled for on each processor, slowest first: name -> the
compiler's flags.

The names are the rows of csrc/cpu/isa.def; a row whose name is not here does not link.
"""

ISAS = {
    "x86_64": {
        "base": [],
        "avx2": ["-mavx2", "-mf16c", "-mfma"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mbmi2", "-mprefer-vector-width=512"],
        "avx512bf16": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mbmi2", "-mavx512bf16", "-mprefer-vector-width=512"],
    },
    "aarch64": {
        # Every processor has NEON: base is what its loops are compared with.
        "base": ["-fno-tree-vectorize"],
        "neon": [],
    },
}
