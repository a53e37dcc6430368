"""Compiler options of the C sources, and of the tests that include their inline functions."""

# Arithmetic has the same bits on every machine: no contraction into fused multiply-adds and no reassociation. The math
# library's errno and traps are disabled: this changes no result, and loops with sqrt can be vectorised.
ARITHMETIC = [
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]

C_OPTS = ARITHMETIC + [
    "-std=c11",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wredundant-decls",
    "-Werror",
    # aoti_torch_check throws a C++ exception through our C frames.
    "-fexceptions",
    "-fvisibility=hidden",
]

# Jump threading (gcc) splits one select into several masked moves before the loops are vectorised, so it is off. The
# remainder of a vector loop is processed element by element: a second, narrower vector loop after each, for runs that
# are not whole blocks, made up a sixth of the library's size and made no loop faster.
KERNEL_OPTS = C_OPTS + [
    "-O3",
    "-fno-thread-jumps",
    "--param=vect-epilogues-nomask=0",
]

# Tests include the library's inline arithmetic, so they are compiled with the same rules.
TEST_OPTS = ARITHMETIC + [
    "-std=c++20",
    "-Wall",
    "-Wextra",
    # C++ compilers warn that TX_..._INIT does not name every field; in C the other fields are zero, as intended.
    "-Wno-missing-field-initializers",
    "-Werror",
]
