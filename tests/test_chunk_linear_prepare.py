"""The images of chunks, which the first kernel of chunk_linear_attention leaves: in the emulator, against float64, and the mistakes that show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from linear_images import Images, images_are_right, images_of, unpack
from scan_cases import NAN, SM90, starts_of
from ssu_cases import BF16, F16, F32
from torch import Tensor

from ssmgen import emulator
from ssmgen.arguments import Arguments
from ssmgen.calls.checks import DTYPES, INDEX
from ssmgen.emulator import EmulatorError, run_source
from ssmgen.families.chunk_linear_attention.prepare import PrepareSpec
from ssmgen.families.chunk_linear_attention.problem import ImageProblem, Rule, chunks_of, workspace_bytes
from ssmgen.families.chunk_linear_attention.spec import Counts, of_problem
from ssmgen.families.linear_attention.problem import Beta, Gate
from ssmgen.render import render
from ssmgen.spec import Arch, Loads, Pdl

SM80 = Arch.parse("sm_80")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")
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
    """([numbers, HV, image] bytes, as the kernel makes them in the emulator, NaN where it writes nothing; what they should say). `change`
    edits its text; more: fields of the problem."""
    packed = "cu_seqlens" in views
    views = {n: t[None] if packed and n not in ("A_log", "dt_bias", "cu_seqlens") else t for n, t in views.items()}
    problem = problem_of(sizes, views, **more)
    batch, tokens = views["q"].shape[:2]
    sequences, heads = len(views["cu_seqlens"]) - 1 if packed else batch, sizes.key_heads * sizes.group
    spec = PrepareSpec(**of_problem(problem, ImageProblem), pdl=Pdl.TRIGGER_LOADED if arch >= Arch(90) else Pdl.OFF)
    spec.check(arch)
    workspace = torch.full((workspace_bytes(batch * tokens, sequences, heads, sizes.head_k, sizes.rule),), 0xFF, dtype=torch.uint8)
    named = {("workspace" if role == "images" else role): workspace if role == "images" else views[role] for role in spec.roles()}
    counts = Counts(chunks_of(batch * tokens, sequences, sizes.rule), sequences, heads, sizes.group)
    axes = {"batch": 0, "token": 1, "head": 2, "sequence": 0}
    values = {"tokens": tokens, "sequences": sequences, "heads": heads, "group_heads": sizes.group, "scale": SCALE}
    values |= {"lower_bound": LOWER_BOUND, **spec.counted(counts)}
    values |= {f"{op}_{axis}": views[op].stride(0 if op in ("A_log", "dt_bias") else axes[axis]) for op, axis in spec.strides()}
    taken = {p.name: values[p.name] for p in spec.parameters() if p.code != "Q"}
    at = Arguments(spec, taken).at([t.data_ptr() for t in named.values()])
    launch = spec.blocks(counts), spec.threads_per_block, at, named, ("workspace",), spec.dynamic_bytes
    run_source(change(render(spec, arch)), spec.name, *launch)
    return workspace.view(counts.chunks, heads, -1), images_of(views, problem, SCALE, LOWER_BOUND), problem


ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11}  # of a number, relative to it


def prepared(sizes: Sizes, views: dict[str, Tensor], *, bound: float = 2.0**-10, decay: float = 1e-5, **more: Any) -> Tensor:
    """The same bytes, within what is allowed of matrices beside their rounding, and of decays."""
    found, wanted, problem = run(sizes, views, **more)
    images_are_right(unpack(found.flatten(), wanted, problem), wanted, problem, ROUNDING[sizes.x] + bound, decay)
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


@needs_emulator
@pytest.mark.parametrize("sizes", RULES.values(), ids=RULES)
def test_images_are_those_of_float64(sizes):
    prepared(sizes, make(sizes, 1, 100))
