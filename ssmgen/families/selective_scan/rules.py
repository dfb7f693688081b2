"""The variants of selective_scan for a problem, and the choice for a call."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.kernel import Arch, Pdl
from ...spec.variants import spec_of, trials
from .problem import SelectiveProblem
from .roles import by_roles, roles_space
from .spec import MOST_STATES, POLYNOMIAL, SelectiveSpec, parts_of

SIZE, MAX_SIZE = "channels of all sequences", 2**31 - 1  # the rules compare this size


def space(problem: SelectiveProblem, arch: Arch) -> Iterator[SelectiveSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    shares = (0, 1, 2, 3, 4) if problem.x.size == 2 else (POLYNOMIAL[problem.x],)
    axes = {"lanes": (1, 2, 4, 8), "warps": (2, 4), "tile": (16, 32, 64), "polynomial": shares, "pdl": Pdl}
    yield from trials(SelectiveSpec, problem, arch, axes, parts=parts_of(problem, arch))
    yield from roles_space(problem, arch)


# Fewer lanes share more of a token's work, but need enough threads: at least 2 warps for each scheduler of 132 SMs. One lane for 16 states
# would save 5 % of the instructions, but leaves ptxas no spare register at the necessary number of threads.
TWO_LANES = 24576
RESIDENT, RESIDENT_PARTS = {2: 4, 4: 1}, 3  # blocks per SM, by lanes of 16 states; and of sequences that are cut
# By lanes too: larger tiles have less overhead, and leave room for fewer blocks.
TILES = {2: (16, 8), 4: (32, 16, 8)}


def candidates(problem: SelectiveProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, SelectiveSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one needs the least shared memory."""
    wait = Pdl.TRIGGER_LOADED if pdl else Pdl.OFF
    quads = problem.padded // 4  # of a channel
    least = max(1, 4 * quads // MOST_STATES)
    parts = parts_of(problem, arch)
    yield from by_roles(problem, size, wait, parts)
    for lanes, above in ((2, TWO_LANES), (4, 0)):
        scaled = min(quads, 8, max(least, lanes * quads // 4))
        if parts > 1 and lanes == 2:
            yield f"{scaled} lanes", None, "sequences may be cut: the rule is for whole sequences"
            continue
        if size < above:
            yield f"{scaled} lanes", None, f"all sequences have {size} channels; the rule is for {above} or more"
            continue
        for tile in TILES[lanes]:
            how = {"warps": 4, "tile": tile, "polynomial": POLYNOMIAL[problem.x]}
            how["min_blocks"] = RESIDENT[lanes] if parts == 1 else RESIDENT_PARTS
            spec = spec_of(SelectiveSpec, problem, lanes=scaled, **how, pdl=wait, parts=parts)
            words = [*([f"up to {parts} parts"] if parts > 1 else []), f"{scaled} lane{'s' * (scaled > 1)}", f"tile {tile}"]
            yield ", ".join(words), spec, ""
