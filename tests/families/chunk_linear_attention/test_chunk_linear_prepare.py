"""The images of chunks, which the first kernel of chunk_linear_attention leaves: in the emulator, against float64; and its mistakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from compiled import compiled
from emulated_calls import SM80, needs_emulator
from linear_images import Images, images_are_right, images_of, unpack
from scan_cases import NAN, SM90, starts_of
from selection import costly
from ssu_cases import BF16, F16, F32
from torch import Tensor

from ssmgen.calls.checks import DTYPES, INDEX
from ssmgen.compile.render import render
from ssmgen.emulator import EmulatorError, run_source
from ssmgen.engine.chunks.kernels import Counts, of_problem
from ssmgen.engine.chunks.problem import chunks_of
from ssmgen.engine.recurrences.attention.problem import Beta, Gate
from ssmgen.families.chunk_linear_attention.prepare import PrepareSpec
from ssmgen.families.chunk_linear_attention.problem import ImageProblem, Rule, workspace_bytes
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl

SCALE, LOWER_BOUND = 0.3, -5.0


@dataclass(frozen=True)
class Sizes:
    rule: Rule = Rule.DELTA
    key_heads: int = 1
    group: int = 1  # heads of v for each of them
    head_k: int = 32
    x: torch.dtype = BF16
    gate: Gate | None = Gate.LOG  # None: no decay
    per_head: bool = False  # a decay per head
    a_log: bool = True  # of a gate that has one
    bias: bool = False
    gates: torch.dtype = F32  # dtype of gates and their weights
    form: Beta = Beta.PLAIN
    beta: bool = True
    read: bool = False
    erase: torch.dtype | None = None
    write: bool = False
    alpha: torch.dtype | None = None
    l2norm: bool = False


def make(sizes: Sizes, *lead: int, seed: int = 0, decay: float = 0.3, near: float = 0.0) -> dict[str, Tensor]:
    """Operands by their roles. decay: factor of log decays; near: keys are one key and this much noise (0: all noise)."""
    g = torch.Generator().manual_seed(seed)
    HK, HV, K = sizes.key_heads, sizes.key_heads * sizes.group, sizes.head_k

    def keys() -> Tensor:
        t = torch.randn(*lead, HK, K, generator=g)
        t = torch.randn(HK, K, generator=g) + near * t if near else t
        return (t if sizes.l2norm else t / t.norm(dim=-1, keepdim=True)).to(sizes.x)

    views = {"q": torch.randn(*lead, HK, K, generator=g).to(sizes.x), "k": keys()}
    shape, inner = ((*lead, HV), (HV,)) if sizes.per_head else ((*lead, HV, K), (HV, K))
    raw = sizes.gate in (Gate.SOFTPLUS, Gate.BOUNDED)
    if sizes.gate is not None:
        values = torch.randn(*shape, generator=g) if raw else -decay * torch.rand(*shape, generator=g)
        views["g" if sizes.per_head else "gk"] = (-values if sizes.gate is Gate.SLOPE else values).to(sizes.gates)
    if raw and sizes.a_log:
        views["A_log"] = (decay * torch.rand(HV, generator=g)).log().to(sizes.gates)
    if sizes.bias:
        views["dt_bias"] = torch.randn(*inner, generator=g).to(sizes.gates)
    if sizes.beta and sizes.rule in (Rule.DELTA, Rule.OLD):
        beta = torch.rand(*lead, HV, generator=g)
        views["beta"] = (beta if sizes.form is Beta.PLAIN else 6 * beta - 1).to(sizes.gates)
    views |= {name: keys() for name in ("read", "write") if getattr(sizes, name)}
    if sizes.erase:
        views["erase"] = torch.rand(*lead, HV, K, generator=g).to(sizes.erase)
    if sizes.alpha:
        views["alpha"] = torch.rand(*lead, HK, K, generator=g).to(sizes.alpha)
    return views


def problem_of(sizes: Sizes, views: Mapping[str, Tensor], **more: Any) -> ImageProblem:
    dtypes = {n: DTYPES[views[n].dtype] for n in ("g", "gk", "beta", "A_log", "dt_bias", "erase", "alpha") if n in views}
    return ImageProblem(
        head_k=sizes.head_k, rule=sizes.rule, x=DTYPES[sizes.x], gate=sizes.gate or Gate.LOG, beta_form=sizes.form, read=sizes.read,
        write=sizes.write, l2norm=sizes.l2norm, cu_seqlens=INDEX[views["cu_seqlens"].dtype if "cu_seqlens" in views else None],
        **dtypes, **more,
    )  # fmt: skip


def run(
    sizes: Sizes, views: dict[str, Tensor], *, arch: Arch = SM90, change: Callable[[str], str] = str, **more: Any
) -> tuple[Tensor, Images, ImageProblem]:
    """([numbers, HV, image] bytes from the kernel in the emulator, NaN where it writes nothing; the expected images). `change` edits its
    text; more: fields of the problem."""
    packed = "cu_seqlens" in views
    views = {n: t[None] if packed and n not in ("A_log", "dt_bias", "cu_seqlens") else t for n, t in views.items()}
    problem = problem_of(sizes, views, **more)
    batch, tokens = views["q"].shape[:2]
    sequences, heads = len(views["cu_seqlens"]) - 1 if packed else batch, sizes.key_heads * sizes.group
    spec = PrepareSpec(**of_problem(problem, ImageProblem), pdl=Pdl.TRIGGER_LOADED if arch >= Arch(90) else Pdl.OFF)
    spec.check(arch)
    workspace = torch.full((workspace_bytes(batch * tokens, sequences, heads, sizes.head_k, sizes.rule),), 0xFF, dtype=torch.uint8)
    named = {("workspace" if role == "images" else role): workspace if role == "images" else views[role] for role in spec.roles()}
    counts = Counts(chunks_of(batch * tokens, sequences, sizes.rule.tokens), sequences, heads, sizes.group)
    axes = {"batch": 0, "token": 1, "head": 2, "sequence": 0}
    values = {"tokens": tokens, "sequences": sequences, "heads": heads, "group_heads": sizes.group, "scale": SCALE}
    values |= {"lower_bound": LOWER_BOUND, **spec.counted(counts)}
    strides = spec.table.strides(spec)
    values |= {f"{op}_{axis}": views[op].stride(0 if op in ("A_log", "dt_bias") else axes[axis]) for op, axis, _ in strides}
    taken = {p.name: values[p.name] for p in spec.parameters() if p.code != "Q"}
    at = Arguments(spec, taken).at([t.data_ptr() for t in named.values()])
    launch = spec.blocks(counts), spec.threads_per_block, at, named, ("workspace",), spec.dynamic_bytes
    run_source(change(render(spec, arch)), spec.name, *launch)
    return workspace.view(counts.chunks, heads, -1), images_of(views, problem, SCALE, LOWER_BOUND), problem


def prepared(sizes: Sizes, views: dict[str, Tensor], **more: Any) -> Tensor:
    """The same bytes, checked against the bounds of matrices, of operands that are rounded, and of decays."""
    found, wanted, problem = run(sizes, views, **more)
    images_are_right(unpack(found.flatten(), wanted, problem), wanted, problem)
    assert (found[wanted.served == 0] == 0xFF).all()
    return found


RULES = {
    "kda": Sizes(l2norm=True, group=2),
    "kda-raw": Sizes(gate=Gate.SOFTPLUS, bias=True, gates=BF16, form=Beta.TWICE_SIGMOID, l2norm=True, x=F16),
    "kda-bounded": Sizes(gate=Gate.BOUNDED, bias=True, form=Beta.SIGMOID),
    "kda-bounded-plain": Sizes(gate=Gate.BOUNDED, a_log=False, beta=False),
    "delta-without-decay": Sizes(gate=None),
    "gla": Sizes(rule=Rule.PLAIN, key_heads=2, gates=BF16),
    "gla-slope": Sizes(rule=Rule.PLAIN, gate=Gate.SLOPE, x=F16),
    "linear": Sizes(rule=Rule.PLAIN, gate=None),
    "gdn2": Sizes(erase=F32, beta=False, l2norm=True),
    "read-and-erased": Sizes(erase=BF16, read=True, l2norm=True),
    "comba": Sizes(rule=Rule.OLD, read=True, per_head=True, l2norm=True, group=2),
    "comba-raw": Sizes(rule=Rule.OLD, read=True, per_head=True, gate=Gate.SOFTPLUS, bias=True, gates=BF16, x=F16, form=Beta.SIGMOID),
    "old-keys": Sizes(rule=Rule.OLD),
    "rwkv7": Sizes(rule=Rule.LOW_RANK, read=True, alpha=BF16),
    "dplr": Sizes(rule=Rule.LOW_RANK, read=True, write=True, group=2, x=F16),
    "dplr-without-decay": Sizes(rule=Rule.LOW_RANK, read=True, write=True, gate=None),
}


SIZES = {  # of heads and channels, and from multiples of 16 bytes
    "k16-8-bytes": (Sizes(head_k=16, key_heads=2, erase=F32, l2norm=True), 4),
    "k80-4-bytes": (Sizes(head_k=80, group=3, gate=Gate.SOFTPLUS, bias=True, gates=BF16, l2norm=True), 2),
    "k128": (Sizes(rule=Rule.LOW_RANK, head_k=128, read=True, alpha=F32), 0),
    "k144": (Sizes(head_k=144, l2norm=True, read=True, rule=Rule.OLD, per_head=True), 0),
    "k256": (Sizes(head_k=256, l2norm=True, x=F16), 0),
    "k192-4-bytes": (Sizes(rule=Rule.PLAIN, head_k=192), 2),
}


@costly(6)
@needs_emulator
@pytest.mark.parametrize("sizes", RULES.values(), ids=RULES)
def test_images_are_those_of_float64(sizes):
    prepared(sizes, make(sizes, 1, 70))


@costly(1)
@needs_emulator
@pytest.mark.parametrize(("sizes", "offset"), SIZES.values(), ids=SIZES)
def test_sizes_and_strides(sizes, offset):
    """Operands are slices of wider ones, `offset` elements from multiples of 16 bytes, with NaN around."""
    views = make(sizes, 1, 70)
    for name, t in views.items():
        if t.dim() > 2:
            wide = torch.full((*t.shape[:-1], t.shape[-1] + 8 + offset), NAN, dtype=t.dtype)
            views[name] = wide[..., offset : offset + t.shape[-1]].copy_(t)
    loads = Loads.ELEMENT if offset else Loads.VECTOR
    prepared(sizes, views, arch=SM80, copy={0: 16, 2: 4, 4: 8}[offset], loads=loads)


CHANNELS = torch.arange(32) % 8
HARD: dict[str, tuple[Sizes, dict[str, float], Callable[[Tensor], Tensor]]] = {
    "strong": (Sizes(), {"decay": 0.0}, lambda g: g - 40),
    "five": (Sizes(rule=Rule.LOW_RANK, read=True, write=True), {"decay": 0.0}, lambda g: g - 5),
    "none": (Sizes(l2norm=True), {"decay": 0.0, "near": 0.05}, lambda g: g),
    "near keys": (Sizes(l2norm=True, form=Beta.TWICE_SIGMOID), {"decay": 0.01, "near": 0.1}, lambda g: g),
    "one channel never": (Sizes(rule=Rule.OLD), {"decay": 5.0}, lambda g: torch.where(CHANNELS == 3, 0.0, g)),
    "all is forgotten": (Sizes(), {}, lambda g: torch.where(torch.arange(64)[:, None, None] % 7 == 3, -torch.inf, g)),
}


@needs_emulator
@pytest.mark.parametrize(("sizes", "kind", "change"), HARD.values(), ids=HARD)
def test_what_is_hard(sizes, kind, change):
    views = make(sizes, 1, 64, **kind)
    prepared(sizes, views | {"gk": change(views["gk"])})


@needs_emulator
def test_blocks_on_the_diagonal_have_two_terms():
    """Their error is less than half of the error of one term. Without decay only E is rounded before them, which averages out. W is exact:
    keys times powers of two."""
    sizes = Sizes(gate=None, l2norm=True, form=Beta.SIGMOID)
    found, wanted, problem = run(sizes, make(sizes, 1, 64, near=0.05))
    images = unpack(found.flatten(), wanted, problem)
    for c in range(0, 64, 16):
        ours, theirs = (t.T[0, :, c : c + 16, c : c + 16] for t in (images, wanted))
        assert (ours - theirs).norm() <= 0.5 * (theirs.to(BF16).double() - theirs).norm()
    assert torch.equal(images.W[0], wanted.W[0])


@needs_emulator
def test_what_never_decays_is_kept():
    """Roundings of decays of one, or nearly one, do not add up token by token: a chunk's decay is within 2^-22 of its exact value."""
    sizes = Sizes()
    views = make(sizes, 1, 64, decay=1e-4)
    views["gk"][..., 5] = 0
    found, wanted, problem = run(sizes, views)
    decay = unpack(found.flatten(), wanted, problem).decay[0]
    assert ((decay - wanted.decay[0]).abs() <= 2.0**-22).all() and (decay[:, 5] == 1).all()


LENGTHS = (0, 1, 15, 64, 0, 65, 63, 130)
PACKED = {"delta": Sizes(), "low rank": Sizes(rule=Rule.LOW_RANK, read=True, write=True)}


@costly(1)
@needs_emulator
@pytest.mark.parametrize("sizes", PACKED.values(), ids=PACKED)
def test_sequences_have_numbers_of_their_own(sizes):
    """The bits are the same alone, and with any NaN in the other sequences and in tokens outside every sequence."""
    views = make(sizes, sum(LENGTHS) + 9)
    starts = starts_of((4, *LENGTHS), "cpu", torch.int64)[1:]
    images = prepared(sizes, views | {"cu_seqlens": starts})
    for s in (1, 5, 6):
        step = sizes.rule.tokens
        first, chunks = int(starts[s]), -(-LENGTHS[s] // step)
        span, numbers = slice(first, first + LENGTHS[s]), slice(first // step + s, first // step + s + chunks)
        alone = prepared(sizes, {n: t[span][None].contiguous() for n, t in views.items()})
        assert torch.equal(alone[:chunks], images[numbers])
    others = {n: torch.full_like(t, NAN) for n, t in views.items()}
    for name, t in others.items():
        t[span] = views[name][span]
    among, _, _ = run(sizes, others | {"cu_seqlens": starts})
    assert torch.equal(among[numbers], images[numbers])


@needs_emulator
@pytest.mark.parametrize("sizes", PACKED.values(), ids=PACKED)
def test_a_cut_changes_no_bit(sizes):
    views, step = make(sizes, 2, 3 * sizes.rule.tokens + 9), sizes.rule.tokens
    whole = prepared(sizes, views)
    rest = prepared(sizes, {n: t[1:, 2 * step :] for n, t in views.items()})
    first = views["q"].shape[1] // step + 1
    assert torch.equal(rest[:2], whole[first + 2 : first + 4])


SPEC = PrepareSpec(head_k=128, gk=DType.F32, beta=DType.BF16, l2norm=True)
LOW = {"rule": Rule.LOW_RANK, "read": True, "beta": None, "l2norm": False}
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "kda": ({}, "sm_90a"),
    "kda-raw": ({"gk": DType.BF16, "gate": Gate.SOFTPLUS, "A_log": DType.F32, "dt_bias": DType.F32, "cu_seqlens": Index.I32}, "sm_120"),
    "rwkv7": (LOW | {"head_k": 64, "alpha": DType.BF16}, "sm_80"),
    "gdn2": ({"beta": None, "erase": DType.BF16, "x": DType.F16}, "sm_90"),
    "k256": ({"head_k": 256}, "sm_90a"),
}


@pytest.mark.matrix  # `ssmgen generate --check` checks the default variants
@pytest.mark.parametrize(("fields", "arch"), VARIANTS.values(), ids=VARIANTS)
def test_no_variant_spills(fields, arch):
    spec, arch = replace(SPEC, **fields), Arch.parse(arch)
    resources = compiled(spec, arch).resources
    assert not resources.spills and not resources.stack, f"{spec}: {resources}"


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("head_k", [16, 128, 144, 256])
def test_every_card_has_the_shared_memory(rule, head_k):
    low = rule is Rule.LOW_RANK
    fields = {"read": rule in (Rule.OLD, Rule.LOW_RANK), "write": low, "beta": DType.F32 if rule is Rule.DELTA else None}
    assert not replace(SPEC, head_k=head_k, rule=rule, l2norm=False, **fields).violations(Arch(86))


MISTAKES = {
    "copies are not waited for": ("    wait_all_copies();\n", "", "copy"),
    "nor by all": ("    wait_all_copies();\n    __syncwarp();\n", "    wait_all_copies();\n", "shared memory"),
    "decays are overwritten early": ("    __syncthreads();  // the sums of all", "    // the sums of all", "shared memory"),
    "blocks are multiplied early": (
        "    __syncthreads();\n\n    {\n      const u32 which",
        "    {\n      const u32 which",
        "shared memory",
    ),
    "sums take the place of what is read": ("  __syncthreads();  // the memory of q is free\n", "", "shared memory"),
    "sums are read early": (
        "  __syncthreads();\n\n  // Each warp computes a column",
        "\n  // Each warp computes a column",
        "shared memory",
    ),
    "upstream is not waited for": ("\n  wait_for_upstream();", "\n", "wait"),
    "rows behind the end": ("first + row < rows && ", "true && ", "beyond|outside|operand"),
    "gates behind the end": ("min(first_token + row + n, rows - 1)", "first_token + row + n", "beyond|outside|operand"),
}


@costly(1)
@needs_emulator
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    old, new, words = MISTAKES[mistake]
    sizes = Sizes(head_k=16)

    def change(text: str) -> str:
        assert text.count(old) == 1
        return text.replace(old, new)

    views = make(sizes, 40) | {"cu_seqlens": torch.tensor([0, 40], dtype=torch.int32)}
    with pytest.raises(EmulatorError, match=words):
        run(sizes, views, change=change)
