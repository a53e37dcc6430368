"""The machine code of the step for sm_90: what the compiler made of it, within limits that a change must not pass
unnoticed. Read by cuobjdump and nvdisasm, of a CUDA toolkit or of the packages of their names; no GPU is needed."""

from typing import Any, NamedTuple

import pytest
import sass


class Limits(NamedTuple):
    """Of one kernel. Two blocks of 256 threads run on a processor with up to 128 registers."""

    registers: int
    stack: int  # bytes; what is spilled lies there
    spills: int  # instructions that move it
    instructions: int  # of the whole kernel, its slow paths included
    asked: int  # streams that are asked for ahead


# (row of TX_FOR_EACH_WEIGHT, kind of moments) of each configuration of the benchmark
KERNELS = {"fp32": (0, 0), "bf16": (2, 1), "bf16_remainder": (3, 1), "8bit": (3, 2)}
LIMITS = {
    "fp32": Limits(106, 0, 0, 5400, 4),
    "bf16": Limits(126, 0, 0, 9200, 4),
    "bf16_remainder": Limits(122, 0, 0, 7200, 5),
    "8bit": Limits(128, 40, 28, 8000, 5),
}


class Kernel(NamedTuple):
    registers: int
    stack: int
    code: list[sass.Instruction]


def _read(names: dict[Any, str]) -> dict[Any, Kernel]:
    usage, code = sass.usage(), sass.code_of(list(names.values()))
    return {key: Kernel(usage[name]["REG"], usage[name]["STACK"], code[name]) for key, name in names.items()}


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Of all kernels."""
    if why := sass.why_not():
        pytest.skip(why)
    return list(sass.usage())


@pytest.fixture(scope="module")
def kernels(names: list[str]) -> dict[str, Kernel]:
    """Steps, by configuration."""
    return _read(
        {
            name: next(f for f in names if f"4stepILi{weight}ELi{moments}E" in f and "tx_plain_entry" in f)
            for name, (weight, moments) in KERNELS.items()
        }
    )


@pytest.fixture(scope="module")
def stats(names: list[str]) -> Kernel:
    """The pass that a clip needs."""
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
        _count(kernel, "UBLKPF"),
    )
    assert all(is_ <= limit for is_, limit in zip(measured, limits, strict=True)), f"{measured}, limits {limits}"
    assert measured.asked == limits.asked, "every stream that is read, and no other"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_can_be_launched(architecture: str, names: list[str]) -> None:
    """What the emulator takes and a device refuses: no code for it, or more registers or shared memory than a block of
    256 threads gets, of which every kernel's two run on a processor."""
    usage = sass.usage(architecture)
    assert sorted(usage) == sorted(names)
    for name, kernel in usage.items():
        assert kernel["REG"] * 256 * 2 <= 65536 and kernel["SHARED"] <= 48 << 10, (name, kernel)


@pytest.mark.parametrize("name", LIMITS)
def test_whole_vectors_move_in_16_bytes(name: str, kernels: dict[str, Kernel]) -> None:
    """A round reads all of its streams at once, the widest way that their bytes allow."""
    wide = {"fp32": 8, "bf16": 4, "bf16_remainder": 4, "8bit": 3}  # streams of 16 bytes a lane, fp32 twice
    for operation in ("LDG", "STG"):
        found = sum(one.name == operation and ".128" in one.operation for one in kernels[name].code)
        assert found >= wide[name] - (operation == "STG"), operation


# -- instructions per element --------------------------------------------------------------------------------------

# In a cycle each of a multiprocessor's 4 schedulers issues an instruction of a warp of 32 lanes: so many of one lane in
# the time that memory takes for an element's bytes. Where a kernel needs fewer, memory is its wall.
LANES, SCHEDULERS, MULTIPROCESSORS, HERTZ = 32, 4, 132, 1.755e9
BYTES_PER_SECOND = {"H100": 3.35e12, "H200": 4.8e12}
_DITHER = "0xc13fa9a9"  # TX_LATTICE_ELEMENT of csrc/math/dither.h


class Round(NamedTuple):
    """Of 8 elements of a lane, dithered, with bf16 gradients."""

    bytes: float  # read and written for an element
    limit: float  # instructions for an element


ROUNDS = {
    "fp32": Round(26, 42.5),
    "bf16": Round(20, 49),
    "bf16_remainder": Round(18, 54),
    "8bit": Round(14 + 4 / 32, 72),
}
STATS = {"fp32": Round(4, 9.6), "bf16": Round(2, 10.8), "fp16": Round(2, 10.8)}


def slots(bytes_per_element: float, gpu: str) -> float:
    """Instructions of a lane in the time that memory takes for an element."""
    return LANES * SCHEDULERS * MULTIPROCESSORS * HERTZ / BYTES_PER_SECOND[gpu] * bytes_per_element


def _round_of(code: list[sass.Instruction], dithered: bool) -> float:
    """Per element of a round in which all roots are quick ones: those of its 8 elements lie close together."""
    roots = [i for i, one in enumerate(code) if one.operation == "MUFU.RSQ"]
    begin = next(first for first, last in zip(roots, roots[7:], strict=False) if last - first < 320)
    return len(sass.way_round(code, begin, passes=(lambda one: _DITHER in one.operands) if dithered else None)) / 8


@pytest.mark.parametrize("name", ROUNDS)
def test_a_step_needs_fewer_instructions_than_memory_leaves_time_for(name: str, kernels: dict[str, Kernel]) -> None:
    dithered = name != "fp32"  # which has nothing to round
    found = _round_of(kernels[name].code, dithered)
    assert 30 < found <= ROUNDS[name].limit
    for gpu in BYTES_PER_SECOND:
        assert found < 0.9 * slots(ROUNDS[name].bytes, gpu), gpu


@pytest.mark.parametrize("name", STATS)
def test_a_clip_s_statistics_stay_within_their_instructions(name: str, stats: Kernel) -> None:
    """Four rounds at a time, for each dtype of gradients in a loop of its own: a way that reads as many bytes, has each
    of its loads once, and shifts a sum's bits to their limbs, which it need not where a sum is zero. Of the two of 16
    bits, whose conversions differ, the longer one counts for both. Memory is the wall of all. Three blocks of 256
    threads run on a processor with up to 80 registers."""
    assert stats.registers <= 80 and stats.stack == 0
    code, reads = stats.code, 32 * (4 if name == "fp32" else 2)
    ways = {}
    for begin in (i for i, one in enumerate(code) if one.operation.startswith("LDG.E.128")):
        way = sass.way_round(code, begin, reads=reads, passes=lambda one: one.operation == "SHF.L.U32")
        loads = [i for i in way if code[i].name == "LDG"]
        if loads and 16 * len(set(loads)) == reads:
            ways[min(loads)] = len(way) / 32
    found = min(ways.values()) if name == "fp32" else max(ways.values())
    assert len(ways) >= (1 if name == "fp32" else 2) and 8 < found <= STATS[name].limit
    assert found < 0.9 * slots(STATS[name].bytes, "H200")


def test_the_shortest_way_round_a_loop() -> None:
    """Of a loop with a slow path behind a barrier, a load of 8 bytes or two of 4, and a mark on one of two ways."""
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
        return [f"{code[i].address:x}" for i in sass.way_round(code, start, **options)]

    assert way(0) == ["0", "10", "40", "50", "60", "90", "a0", "d0"]
    assert way(0, reads=8) == way(0) and way(0, reads=12) == way(0)
    assert way(2) == ["20", "30", "50", "60", "90", "a0", "d0", "0", "10"], "through an instruction of another way"
    assert way(7)[:3] == ["70", "80", "a0"], "a barrier's lanes meet where it says"
    assert "b0" in way(0, passes=lambda one: "0xc13fa9a9" in one.operands)
    assert way(len(code) - 1) == []
