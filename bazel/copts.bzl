"""How our C is compiled, and the tests that share its inline functions."""

# Arithmetic is the same on every machine: no contraction into fused multiply-adds and no reassociation. Errno and traps
# of the math library are given up, which changes no result and lets loops with sqrt be vectorised.
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
    # aoti_torch_check throws a C++ exception through our frames.
    "-fexceptions",
    "-fvisibility=hidden",
]

# Jump threading (gcc) pulls one select apart into several masked moves before the loops are vectorised. What a vector
# loop leaves over is finished element by element: a second, narrower vector loop behind each, for runs that are no whole
# blocks, was a sixth of the library and no loop's time.
KERNEL_OPTS = C_OPTS + [
    "-O3",
    "-fno-thread-jumps",
    "--param=vect-epilogues-nomask=0",
]

# Tests share inline arithmetic with the library, so they are compiled by the same rules.
TEST_OPTS = ARITHMETIC + [
    "-std=c++20",
    "-Wall",
    "-Wextra",
    # C++ would have TX_..._INIT name every field; in C, as the header means it, the rest is zero.
    "-Wno-missing-field-initializers",
    "-Werror",
]
