"""Theoretical occupancy: the number of blocks of a kernel per SM, from ptxas' report and the number of threads."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnknownArchError
from ..spec.kernel import Arch, must

WARP = 32
MAX_THREADS = 1024  # per block
MAX_REGISTERS = 255  # per thread


@dataclass(frozen=True, slots=True)
class SmLimits:
    """The limits of one SM."""

    warps: int
    blocks: int
    shared: int  # bytes, with the largest share of the L1 cache used as shared memory


# CUDA programming guide 13, "Technical Specifications per Compute Capability": the same for all targets of a number, sm_90 and sm_90a.
LIMITS = {
    80: SmLimits(64, 32, 164 << 10),
    86: SmLimits(48, 16, 100 << 10),
    87: SmLimits(48, 16, 164 << 10),
    89: SmLimits(48, 24, 100 << 10),
    90: SmLimits(64, 32, 228 << 10),
    100: SmLimits(64, 32, 228 << 10),
    103: SmLimits(64, 32, 228 << 10),
    110: SmLimits(48, 24, 228 << 10),
    120: SmLimits(48, 24, 100 << 10),
    121: SmLimits(48, 24, 100 << 10),
}

# The toolkit's cuda_occupancy.h has this value for all architectures above.
PARTITIONS = 4  # of an SM, each with its own registers; a warp stays in one
PARTITION_REGISTERS = 16384
REGISTER_UNIT = 256  # registers are allocated to a warp in units of this size
SHARED_UNIT = 128  # bytes are allocated to a block in units of this size
SHARED_RESERVED = 1024  # bytes per block that the system reserves


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The number of blocks and warps of a kernel per SM; 0 if it cannot be launched."""

    blocks_per_sm: int
    warps_per_sm: int
    limit: str  # blocks, warps, registers or shared memory: the first resource without space for another block


def most_shared(arch: Arch) -> int:
    """Bytes of shared memory that a block may use; on an unknown architecture, the 48 KiB that every one has."""
    return LIMITS[arch.number].shared - SHARED_RESERVED if arch.number in LIMITS else 48 << 10


def shared_violations(arch: Arch, used: int) -> list[str]:
    most = most_shared(arch)
    return must(used <= most, f"a block uses {used} bytes of shared memory; expected at most {most} on {arch}")


def sm_limits(arch: Arch) -> SmLimits:
    """Raises UnknownArchError."""
    if arch.number not in LIMITS:
        raise UnknownArchError(str(arch), [f"sm_{number}" for number in LIMITS])
    return LIMITS[arch.number]


def occupancy(arch: Arch, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """threads: per block; registers: per thread; shared_bytes: per block, static and dynamic. Raises UnknownArchError."""
    most = sm_limits(arch)
    warps = -(-threads // WARP)
    shared = _rounded(shared_bytes + SHARED_RESERVED, SHARED_UNIT)
    room = {
        "blocks": most.blocks,
        "warps": most.warps // warps if threads <= MAX_THREADS else 0,
        "registers": _blocks_by_registers(warps, registers),
        "shared memory": most.shared // shared,
    }
    limit = min(room, key=lambda name: room[name])
    return Occupancy(room[limit], room[limit] * warps, limit)


def _blocks_by_registers(warps: int, registers: int) -> int:
    per_warp = _rounded(registers * WARP, REGISTER_UNIT)
    # The hardware refuses a launch as if every partition had to hold an equal number of the block's warps.
    if registers > MAX_REGISTERS or per_warp * _rounded(warps, PARTITIONS) > PARTITIONS * PARTITION_REGISTERS:
        return 0
    return PARTITION_REGISTERS // per_warp * PARTITIONS // warps


def _rounded(n: int, unit: int) -> int:
    return -(-n // unit) * unit
