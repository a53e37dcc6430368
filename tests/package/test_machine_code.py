"""Tests the machine code of the step for sm_90 against limits: registers, stack, spills, instructions. A change of the
sources must not exceed them unnoticed.

cuobjdump and nvdisasm, of a CUDA toolkit or of the Python packages, read the code; no GPU is needed."""

import functools
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
    copies: int  # instructions that copy into shared memory; exact


# (row of TX_FOR_EACH_WEIGHT, kind of moments) of each configuration of the benchmark
KERNELS = {"fp32": (0, 0), "bf16": (2, 1), "bf16_remainder": (3, 1), "8bit": (3, 2)}

CELLS = 512  # TX_CELLS, the bytes of one access of a warp

# What a warp needs to know of its next tensor (cuda/adamw_tensor.h): of its first one, and of those after it
WORDS = 2


def copies_of(ahead: int) -> int:
    """Returns the copies of a kernel that reads so many rounds ahead (cuda/adamw_usual.h): a usual tile's stored
    checksum, its weights, and its first rounds, for a warp's first tile and after one that is not usual; a later round,
    and a round's weights of the next tile; the next tile's stored checksum."""
    return 2 * (1 + 4 + 4 * ahead) + (4 + 1) + 1 + WORDS


LIMITS = {
    "fp32": Limits(100, 0, 0, 5450, WORDS),
    "bf16": Limits(110, 0, 0, 8650, 2 * WORDS),
    "bf16_remainder": Limits(120, 0, 0, 8100, copies_of(1)),
    "8bit": Limits(128, 0, 0, 9350, copies_of(2)),
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


@functools.cache
def _of_all(names: tuple[str, ...], architecture: str) -> dict[str, list[sass.Instruction]]:
    """Returns the copies, the minima and the ends of all kernels, by mangled name."""
    code = sass.code_of(names, architecture, only=["LDGSTS", "VIMNMX", "EXIT"])
    assert sorted(code) == sorted(names) and all(code.values())
    return code


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


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_copies_into_shared_memory_read_every_sector_once(architecture: str, names: list[str]) -> None:
    """See Note [aligned cells] in cuda/async_copy.h. Shared memory has the alignment of what is aligned most in it;
    nothing but cells is aligned to CELLS. The kernels that copy are the same for every architecture."""

    def copies(one: sass.Instruction) -> bool:
        return one.name == "LDGSTS" and ".128" in one.operation

    copying = {name for name, code in _of_all(tuple(names), "sm_90").items() if any(map(copies, code))}
    alignments = sass.shared_alignments(architecture)
    assert copying and {name: alignments[name] for name in copying if alignments[name] % CELLS != 0} == {}


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_no_clamp_has_the_predicate_that_the_assembler_takes_for_its_opposite(
    architecture: str, names: list[str]
) -> None:
    """See Note [clamped counts] in cuda/grid.h. sm_80 has no such instruction."""
    code = _of_all(tuple(names), architecture)
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
# number of instructions per lane that can be issued while a copy moves the bytes of one element. The H200's figures are
# measured: its clock during a step, and what a copy on the device moved, 0.89 of what its memory could. The H100's are
# from its data sheet, with that share.
LANES, SCHEDULERS, MULTIPROCESSORS = 32, 4, 132
HERTZ = {"H100": 1.755e9, "H200": 1.96e9}
BYTES_PER_SECOND = {"H100": 0.89 * 3.35e12, "H200": 4.25e12}
AT_LEAST = 0.85  # of a copy's bandwidth, which a step is to reach
ISSUED = 0.7  # of the instructions that can be issued; a kernel with 16 warps per multiprocessor reached 0.76


class Round(NamedTuple):
    """The costs of the loop's round, which steps 8 elements of a lane, dithered, with bf16 gradients."""

    bytes: float  # read and written per element
    limit: float  # instructions per element, with a quarter of what is needed once per tile of four rounds
    is_usual: bool = False  # whether usual tiles have a path of their own


ROUNDS = {
    "fp32": Round(26, 42.5),
    "bf16": Round(20, 49.5),
    "bf16_remainder": Round(18, 61.5, is_usual=True),
    "8bit": Round(14 + 4 / 32, 84, is_usual=True),
}
STATS = {"fp32": Round(4, 9.6), "bf16": Round(2, 10.8), "fp16": Round(2, 10.8)}


def slots(bytes_per_element: float, gpu: str) -> float:
    """Returns how many instructions per lane can be issued while a copy moves the bytes of one element."""
    return LANES * SCHEDULERS * MULTIPROCESSORS * HERTZ[gpu] / BYTES_PER_SECOND[gpu] * bytes_per_element


def _is_dither(one: sass.Instruction) -> bool:
    """Whether it adds TX_LATTICE_ELEMENT (csrc/math/dither.h)."""
    return "0xc13fa9a9" in one.operands


def _reduces(one: sass.Instruction) -> bool:
    """Whether it adds a checksum's sums up over the warp."""
    return one.operation == "SHFL.BFLY" and "0x10, 0x1f" in one.operands


def _cell_of(offset: int, name: str) -> sass.Passes:
    """Returns whether an instruction reads (LDS) or copies to (LDGSTS) that offset from a lane's cells."""
    return lambda one: one.name == name and f"{offset:#x}]" in one.operands


def _usual_tile(code: list[sass.Instruction], begin: int) -> float:
    """Returns the instructions of a usual tile, divided by its four rounds: a round that copies the next one, what is
    done between two tiles (the new checksum is stored, the next tile's compared), and what a tile's last round does in
    addition: it starts to read the next tile's first one."""

    def way(*passes: sass.Passes) -> int:
        return len(sass.shortest_cycle(code, begin, passes=[_is_dither, *passes]))

    def copies(one: sass.Instruction) -> bool:
        return one.name == "LDGSTS"

    def stores(one: sass.Instruction) -> bool:
        return one.operation == "STG.E.64"

    last_weights, stored = 3 * CELLS, 4 * CELLS  # copy_ops of cuda/adamw_copies.h
    one = way(copies)
    between = way(_reduces, stores, _cell_of(last_weights, "LDS"), _reduces) - way()
    last = way(_cell_of(stored, "LDGSTS")) - one
    assert min(one, between) > 0 and last >= 0  # 0: the next checksum's copy is a predicated instruction
    return one + (between + last) / 4


def _instructions_per_element(name: str, code: list[sass.Instruction]) -> float:
    """Returns the instructions per element where all square roots take the fast path. There the square roots of a
    round's 8 elements are close together in the code; the path of usual tiles comes first."""
    roots = [i for i, one in enumerate(code) if one.operation == "MUFU.RSQ"]
    begin = next(first for first, last in zip(roots, roots[7:], strict=False) if last - first < 320)
    if ROUNDS[name].is_usual:
        return _usual_tile(code, begin) / 8
    dithered = name != "fp32"  # fp32 states are not rounded
    return len(sass.shortest_cycle(code, begin, passes=[_is_dither] if dithered else [])) / 8


@pytest.mark.parametrize("name", ROUNDS)
def test_a_step_needs_fewer_instructions_than_memory_leaves_time_for(name: str, kernels: dict[str, Kernel]) -> None:
    found = _instructions_per_element(name, kernels[name].code)
    assert 30 < found <= ROUNDS[name].limit
    for gpu in BYTES_PER_SECOND:
        assert found < ISSUED * slots(ROUNDS[name].bytes, gpu) / AT_LEAST, gpu


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
    assert found < ISSUED * slots(STATS[name].bytes, "H200") / AT_LEAST


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
