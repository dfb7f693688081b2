"""The variants of a family's chain of chunks, and the rules that choose among them. A family's chain.py makes one `Variants`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ...spec.kernel import SM90, Arch, Pdl
from ...spec.variants import spec_of, trials
from . import warpgroups
from .chain import TILES, Chain
from .kernels import edge_of
from .problem import AttentionStates
from .segments import FEWEST, why_not

Rule = tuple[str, "Chain | None", str]  # (rule, spec or None, why it does not apply)
# Up to this number of blocks of 32 rows of one sequence, each block has an SM alone, and its shared memory serves two warps. Four would
# wait for it.
FEW = 128


@dataclass(frozen=True, kw_only=True)
class Variants:
    """chain: the family's class.

    fetchers: the numbers of warps that load, worth a trial. by_copy: {bytes of a copy: their number by the rule}; narrower copies have 4.
    wide: stages of blocks of 128 rows by warpgroups, best first. fewest: least segments after the first, by the rule.
    """

    chain: type[Chain]
    fetchers: tuple[int, ...]
    by_copy: Mapping[int, int]
    wide: tuple[int, ...] = (3, 2)
    fewest: int = FEWEST

    def warpgroup_space(self, problem: AttentionStates, arch: Arch) -> Iterator[Chain]:
        """Every legal variant with warpgroups, within the axes that are worth a trial."""
        return warpgroups.variants(partial(spec_of, self.chain.by_warpgroups, problem), arch)

    def space(self, problem: AttentionStates, arch: Arch) -> Iterator[Chain]:
        """Every legal variant of a problem, within the axes that are worth a trial."""
        yield from self.warpgroup_space(problem, arch)
        inner = Pdl.TRIGGER_LOADED if arch >= SM90 else Pdl.OFF
        axes = {"tile": TILES, "stages": (1, 2, 3), "fetchers": self.fetchers, "ahead_pdl": Pdl}
        yield from trials(self.chain, problem, arch, axes, pdl=inner)

    def candidates(self, problem: AttentionStates, size: int, arch: Arch, pdl: bool) -> Iterator[Rule]:
        """(rule, spec or None, why it does not apply), best first. The last one needs the least shared memory."""
        if problem.divided:  # the parts of a sequence are scanned at once
            rules = self._rules(problem, size * problem.segments, arch, pdl)
            yield from ((f"up to {problem.segments} segments, {rule}", spec, why) for rule, spec, why in rules)
        else:
            if problem.cuts:
                yield "segments", None, why_not(problem.head_v, size, self.fewest)
            yield from self._rules(problem, size, arch, pdl)

    def _rules(self, problem: AttentionStates, heads: int, arch: Arch, pdl: bool) -> Iterator[Rule]:
        edge, head_v = edge_of(arch, pdl), problem.head_v
        yield from warpgroups.rules(partial(spec_of, self.chain.by_warpgroups, problem, **edge), head_v, heads, self.wide)
        yield from _by_warps(partial(spec_of, self.chain, problem, **edge, fetchers=self.by_copy.get(problem.copy, 4)), head_v, heads)


def _by_warps(make: Callable[..., Chain], head_v: int, heads: int) -> Iterator[Rule]:
    """Chains whose warps compute their own products. make: (tile=, stages=) -> spec."""
    tiles = [t for t in TILES if head_v % t == 0]
    few = [t for t in tiles if t <= 32]
    tile = few[-1] if heads * head_v // 32 <= FEW else tiles[-1]
    # Loads of a chunk may take the time of two chunks with three stages, of one with two stages. With one stage nothing overlaps.
    yield "three stages", make(tile=tile, stages=3), ""
    yield "two stages", make(tile=tile, stages=2), ""
    yield "narrow", make(tile=few[-1], stages=2), ""
    yield "one stage", make(tile=tile, stages=1), ""
    yield "generic", make(tile=16, stages=1), ""
