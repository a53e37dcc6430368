"""The instruction sets for which csrc/cpu/*kernels_isa.c are compiled, for each processor, slowest first: name ->
compiler flags.

The names are the rows of csrc/cpu/isa.def. If a row's name is missing here, the library does not link.
"""

ISAS = {
    "x86_64": {
        "base": [],
        "avx2": ["-mavx2", "-mf16c", "-mfma"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mbmi2", "-mprefer-vector-width=512"],
        "avx512bf16": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mbmi2", "-mavx512bf16", "-mprefer-vector-width=512"],
    },
    "aarch64": {
        # Every aarch64 processor has NEON; base is there to compare NEON's loops with.
        "base": ["-fno-tree-vectorize"],
        "neon": [],
    },
}
