"""The cases: the default variants, and forms that rules choose for calls without a default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssmgen.errors import SpecError
from ssmgen.spec.family import parts
from ssmgen.spec.kernel import Arch, Index, KernelSpec, Narrow, changed, text_of
from ssmgen.variants.defaults import Default, named

from .edits import EDITS

SM90A = Arch(90, "a")
PROMPTS = ("chunk_scan", "chunk_delta_rule", "chunk_linear_attention", "selective_scan", "mamba3_chunk_scan")
# 12 chunks of 64 tokens, or 24 of 32, and a rest: each of at most 4 stages is used again and again, and of segments of 256 there are 4.
TOKENS = 12 * 64 + 5
LONG = 6 * 8 * 64 + 5  # of which each of 6 blocks has a part

# (family, name of a default, changed fields of its problem, changed fields of the variant)
MORE: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("chunk_scan", "Mamba-2, a batch from zeros, few heads", {"seq_idx": True}, {}),
    ("chunk_scan", "Mamba-2, packed, with a pool, many short sequences", {"checkpoints": Index.I32}, {}),
    ("chunk_scan", "Mamba-2, a batch of several sequences in each row", {"short": True}, {}),
    ("chunk_scan", "Mamba-2, packed, with a pool", {}, {"parts": 3, "ends": True}),
    ("chunk_scan", "Mamba-2, rows of 256, packed, with a pool", {"short": True}, {}),
    ("chunk_scan", "Mamba-2, rows of 256, packed, with a pool", {"headdim": 80, "checkpoints": Index.I32}, {"parts": 2, "ends": True}),
    ("chunk_delta_rule", "Gated DeltaNet, packed, with a pool", {}, {"tile": 128}),
    ("chunk_delta_rule", "Gated DeltaNet, a batch from zeros", {}, {"tile": 128}),
    ("chunk_delta_rule", "Gated DeltaNet of few heads, packed, in segments", {"checkpoints": Index.I32}, {}),
    ("chunk_linear_attention", "GLA, a batch from zeros", {}, {"tile": 128}),
    ("chunk_linear_attention", "KDA of few heads, packed, in segments", {"checkpoints": Index.I32}, {}),
    ("selective_scan", "Mamba-1, a long sequence of few channels", {"initial": True}, {}),
    ("decode_attention", "a rotation of whole heads", {"group": 16}, {}),
    *(("replay_selective_state_update", "the last step's history, of many heads, rounded", {"state": s}, {}) for s in Narrow),
    *(("replay_selective_state_update", "a ring, int8 state, rounded", {"state": s}, {}) for s in (Narrow.I16, Narrow.E4M3)),
    *(("linear_attention", "gated delta rule, bf16 state", {"state": s}, {}) for s in Narrow),
)


@dataclass(frozen=True)
class Case:
    """A call's kernels, and how many tokens its longest sequence has at least; None: a decode step's.

    call: the call in words. edit: one of `edits.EDITS`.
    """

    spec: KernelSpec
    arch: Arch
    call: str
    batch: int = 3
    tokens: int | None = None
    edit: str = ""

    @property
    def name(self) -> str:
        longer = f" of {self.tokens}" if self.tokens not in (None, TOKENS) else ""
        return f"{self.spec.name}{longer}{f' ({self.edit})' if self.edit else ''}"


def _specs(arch: Arch) -> Iterator[tuple[str, KernelSpec]]:
    """(call, variant) of the defaults. For prompts also the variants of sm_80, whose warps compute their own products."""
    for family, name, default in named():
        yield from ((f"{family}: {name}", spec) for spec in default.specs(arch))
        if family in PROMPTS:
            yield from ((f"{family}: {name}", spec) for spec in default.specs(Arch(80)))
        for of_family, of_name, asked, how in MORE:
            if (of_family, of_name) == (family, name) and isinstance(default, Default):
                *_, spec = Default(changed(default.problem, **asked), default.size).specs(arch)
                said = ", ".join(f"{field}={text_of(value)}" for field, value in {**asked, **how}.items())
                yield f"{family}: {name}, {said}", changed(spec, **how) if how else spec


def every(arch: Arch) -> list[Case]:
    """Prompts' kernels by warpgroups and by roles ahead, then the others of prompts; the longest prompts at the end."""
    known, cases, found = parts("trials"), {}, [*_specs(arch)]
    ahead = {part for _, spec in found for part in spec.ahead}  # which run with theirs
    for call, spec in found:
        if type(spec) in known and not spec.violations(arch) and spec not in {*cases, *ahead}:
            tokens = TOKENS if spec.kind.startswith(PROMPTS) else None
            cases[spec] = [Case(spec, arch, call, 5 if spec.stays else 3, tokens)]
            if getattr(spec, "ends", False):
                cases[spec].append(Case(spec, arch, call, 1, LONG))
    return sorted((case for of_spec in cases.values() for case in of_spec), key=_turn)


def _turn(case: Case) -> tuple[bool, bool, bool]:
    wanted = any(word in case.spec.kind for word in ("warpgroups", "roles"))
    return case.tokens == LONG, case.tokens is None, not wanted


def edited(cases: Sequence[Case], edits: Sequence[str]) -> list[Case]:
    """One case per edit, and kernel that it changes."""
    return [replace(case, edit=edit) for edit in edits for case in cases if EDITS[edit].changes(case.spec, case.arch)]


def chosen(words: Sequence[str], arch: Arch = SM90A) -> list[Case]:
    """Those that have one of these words in their name, call or spec, in the order of the words; all, if there are none.

    Raises SpecError where a word is of none.
    """
    cases = every(arch)
    if not words:
        return cases
    found = [[c for c in cases if any(word in text for text in (c.name, c.call, str(c.spec)))] for word in words]
    if unknown := [word for word, of_word in zip(words, found, strict=True) if not of_word]:
        raise SpecError(", ".join(unknown), ["no variant has that in its name, its call or its text"])
    return list(dict.fromkeys(case for of_word in found for case in of_word))
