"""Tests the machine code of the step for sm_90 against limits: registers, stack, spills, instructions. A change of the
sources must not exceed them unnoticed.

cuobjdump and nvdisasm, of a CUDA toolkit or of the Python packages, read the code; no GPU is needed."""

from typing import Any, NamedTuple

import pytest
import sass


class Limits(NamedTuple):
    """The limits of one kernel. With up to 128 registers, two blocks of 256 threads run on a multiprocessor at a
    time."""

    registers: int  # per thread
    stack: int  # bytes, mostly for spilled registers
    spills: int  # instructions that load or store spilled registers
    instructions: int  # of the whole kernel, its slow paths included
    copies: int  # instructions that read ahead into shared memory, for the first round and for later ones; exact


# (row of TX_FOR_EACH_WEIGHT, kind of moments) of each configuration of the benchmark
KERNELS = {"fp32": (0, 0), "bf16": (2, 1), "bf16_remainder": (3, 1), "8bit": (3, 2)}
LIMITS = {
    "fp32": Limits(106, 0, 0, 5200, 0),
    "bf16": Limits(128, 0, 0, 9200, 0),
    "bf16_remainder": Limits(124, 0, 0, 7200, 2 * 5),
    "8bit": Limits(128, 72, 61, 8000, 2 * 5),
}


class Kernel(NamedTuple):
    """The resources and the code of one kernel."""

    registers: int
    stack: int
    code: list[sass.Instruction]


def _read(names: dict[Any, str]) -> dict[Any, Kernel]:
    usage, code = sass.usage(), sass.code_of(list(names.values()))
    return {key: Kernel(usage[name]["REG"], usage[name]["STACK"], code[name]) for key, name in names.items()}


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Returns the mangled names of all kernels."""
    if why := sass.why_not():
        pytest.skip(why)
    return list(sass.usage())


@pytest.fixture(scope="module")
def kernels(names: list[str]) -> dict[str, Kernel]:
    """Returns the kernels of the step, by configuration."""
    return _read(
        {
            name: next(f for f in names if f"4stepILi{weight}ELi{moments}E" in f and "tx_plain_entry" in f)
            for name, (weight, moments) in KERNELS.items()
        }
    )


@pytest.fixture(scope="module")
def stats(names: list[str]) -> Kernel:
    """Returns the kernel of the gradient statistics, which a clip needs."""
    return _read({"": next(f for f in names if "10grad_stats" in f)})[""]


def _count(kernel: Kernel, *names: str) -> int:
    return sum(one.name in names for one in kernel.code)


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_keeps_within_its_registers_and_instructions(name: str, kernels: dict[str, Kernel]) -> None:
    kernel, limits = kernels[name], LIMITS[name]
    measured = Limits(
        kernel.registers,
        kernel.stack,
        _count(kernel, "LDL", "STL"),
        len(kernel.code),
        _count(kernel, "LDGSTS"),
    )
    assert all(is_ <= limit for is_, limit in zip(measured, limits, strict=True)), f"{measured}, limits {limits}"
    assert measured.copies == limits.copies, "every stream that is read, and no other"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_can_be_launched(architecture: str, names: list[str]) -> None:
    """A device, unlike the emulator, rejects a kernel without code for its architecture, or one that needs more
    registers or shared memory than a block of 256 threads can have. Two blocks of each kernel have to fit on a
    multiprocessor."""
    usage = sass.usage(architecture)
    assert sorted(usage) == sorted(names)
    for name, kernel in usage.items():
        assert kernel["REG"] * 256 * 2 <= 65536 and kernel["SHARED"] <= 48 << 10, (name, kernel)


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])  # sm_80 has no such instruction
def test_no_clamp_has_the_predicate_that_the_assembler_takes_for_its_opposite(
    architecture: str, names: list[str]
) -> None:
    """See Note [clamped counts] in cuda/grid.h."""
    code = sass.code_of(names, architecture)
    assert sorted(code) == sorted(names) and all(code.values())
    found = {name: [one for one in of if sass.is_misread_clamp(one)] for name, of in code.items()}
    assert {name: clamps for name, clamps in found.items() if clamps} == {}


def test_a_misread_clamp_is_recognized() -> None:
    """The first is nvcc 13.0's code of `c = left < 0 ? 0 : left < 8 ? left : 8; c == 8`."""
    cases = {
        ("VIMNMX.RELU", "R7, P0, P0, R2, 0x8, PT"): True,
        ("VIMNMX.RELU", "R7, PT, P1, R2, 0x8, PT"): True,
        ("VIMNMX.RELU", "R0, R2, 0x8, PT"): False,
        ("VIMNMX.RELU", "R0, PT, PT, R2, 0x8, PT"): False,
        ("VIMNMX.RELU", "R0, R2, 0x8, !P0"): False,
        ("VIMNMX", "R0, RZ, R2, !PT"): False,
    }
    for (operation, operands), expected in cases.items():
        assert sass.is_misread_clamp(sass.Instruction(0, False, operation, operands)) is expected, operands


@pytest.mark.parametrize("name", LIMITS)
def test_whole_vectors_move_in_16_bytes(name: str, kernels: dict[str, Kernel]) -> None:
    """A round of the loop reads each stream by the widest instructions that its number of bytes allows."""
    wide = {"fp32": 8, "bf16": 4, "bf16_remainder": 4, "8bit": 3}  # of 16 bytes per lane; two for fp32
    for operation in ("LDG", "STG"):
        found = sum(one.name == operation and ".128" in one.operation for one in kernels[name].code)
        assert found >= wide[name] - (operation == "STG"), operation


# -- instructions per element --------------------------------------------------------------------------------------

# In a cycle, each of a multiprocessor's 4 schedulers issues an instruction for a warp of 32 lanes. This gives the
# number of instructions per lane that can be issued while memory moves the bytes of one element. A kernel that needs
# fewer is bound by memory.
LANES, SCHEDULERS, MULTIPROCESSORS, HERTZ = 32, 4, 132, 1.755e9
BYTES_PER_SECOND = {"H100": 3.35e12, "H200": 4.8e12}
_DITHER = "0xc13fa9a9"  # TX_LATTICE_ELEMENT of csrc/math/dither.h


class Round(NamedTuple):
    """The costs of the loop's round, which steps 8 elements of a lane, dithered, with bf16 gradients."""

    bytes: float  # read and written per element
    limit: float  # instructions per element


ROUNDS = {
    "fp32": Round(26, 42.5),
    "bf16": Round(20, 49),
    "bf16_remainder": Round(18, 56),
    "8bit": Round(14 + 4 / 32, 72),
}
STATS = {"fp32": Round(4, 9.6), "bf16": Round(2, 10.8), "fp16": Round(2, 10.8)}


def slots(bytes_per_element: float, gpu: str) -> float:
    """Returns how many instructions per lane can be issued while memory moves the bytes of one element."""
    return LANES * SCHEDULERS * MULTIPROCESSORS * HERTZ / BYTES_PER_SECOND[gpu] * bytes_per_element


def _instructions_per_element(code: list[sass.Instruction], dithered: bool) -> float:
    """Returns the instructions per element of a round in which all square roots take the fast path. There the square
    roots of its 8 elements are close together in the code."""
    roots = [i for i, one in enumerate(code) if one.operation == "MUFU.RSQ"]
    begin = next(first for first, last in zip(roots, roots[7:], strict=False) if last - first < 320)
    return len(sass.shortest_cycle(code, begin, passes=[lambda one: _DITHER in one.operands] if dithered else [])) / 8


@pytest.mark.parametrize("name", ROUNDS)
def test_a_step_needs_fewer_instructions_than_memory_leaves_time_for(name: str, kernels: dict[str, Kernel]) -> None:
    dithered = name != "fp32"  # fp32 states are not rounded
    found = _instructions_per_element(kernels[name].code, dithered)
    assert 30 < found <= ROUNDS[name].limit
    for gpu in BYTES_PER_SECOND:
        assert found < 0.9 * slots(ROUNDS[name].bytes, gpu), gpu


@pytest.mark.parametrize("name", STATS)
def test_a_clip_s_statistics_stay_within_their_instructions(name: str, stats: Kernel) -> None:
    """The kernel has a loop for each dtype of gradients, unrolled to four rounds. Its path is the one that reads as
    many bytes, has each of its loads once, and shifts the bits of a sum to their limbs, which is left out only if a sum
    is zero. The loops of the two 16-bit dtypes differ in their conversions; the longer one counts for both. All loops
    are bound by memory. With up to 80 registers, three blocks of 256 threads run on a multiprocessor."""
    assert stats.registers <= 80 and stats.stack == 0
    code, reads = stats.code, 32 * (4 if name == "fp32" else 2)
    ways = {}
    for begin in (i for i, one in enumerate(code) if one.operation.startswith("LDG.E.128")):
        way = sass.shortest_cycle(code, begin, reads=reads, passes=[lambda one: one.operation == "SHF.L.U32"])
        loads = [i for i in way if code[i].name == "LDG"]
        if loads and 16 * len(set(loads)) == reads:
            ways[min(loads)] = len(way) / 32
    found = min(ways.values()) if name == "fp32" else max(ways.values())
    assert len(ways) >= (1 if name == "fp32" else 2) and 8 < found <= STATS[name].limit
    assert found < 0.9 * slots(STATS[name].bytes, "H200")


def test_the_shortest_way_round_a_loop() -> None:
    """Tests sass.shortest_cycle on a loop with a slow path before a barrier, a branch with one load of 8 bytes or two
    of 4, and a branch with a marked instruction."""
    lines = """
        00 LDG.E R0, [R2]; 10 @P0 BRA 0x40; 20 LDG.E R1, [R2]; 30 BRA 0x50; 40 LDG.E.64 R0, [R2];
        50 BSSY B0, 0xa0; 60 @P1 BRA 0x90; 70 MUFU.RSQ R4, R0; 80 BSYNC B0; 90 BSYNC B0;
        a0 @P2 BRA 0xd0; b0 IADD3 R5, R5, 0xc13fa9a9, RZ; c0 NOP; d0 @P3 BRA 0x0; e0 EXIT ;
    """
    code = []
    for text in lines.split(";")[:-1]:
        address, *words = text.split()
        predicated = words[0].startswith("@")
        operation, *operands = words[predicated:]
        code.append(sass.Instruction(int(address, 16), predicated, operation, " ".join(operands)))

    def way(start: int, **options: Any) -> list[str]:
        return [f"{code[i].address:x}" for i in sass.shortest_cycle(code, start, **options)]

    assert way(0) == ["0", "10", "40", "50", "60", "90", "a0", "d0"]
    assert way(0, reads=8) == way(0) and way(0, reads=12) == way(0)
    assert way(2) == ["20", "30", "50", "60", "90", "a0", "d0", "0", "10"], "through an instruction of another way"
    assert way(7)[:3] == ["70", "80", "a0"], "a barrier's lanes meet where it says"
    assert "b0" in way(0, passes=[lambda one: "0xc13fa9a9" in one.operands])
    assert way(len(code) - 1) == []
