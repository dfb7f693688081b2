"""The images of chunks, which the first kernel of chunk_delta_rule leaves: in the emulator, against float64, and the mistakes that show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scan_cases import same, starts_of
from ssu_cases import BF16, F16, F32, Memory
from torch import Tensor

import ssmgen
from ssmgen import emulator
from ssmgen.arguments import Arguments
from ssmgen.emulator import EmulatorError, run_source
from ssmgen.families.chunk_delta_rule.planning import FAMILY, counts_of
from ssmgen.families.chunk_delta_rule.prepare import PrepareSpec
from ssmgen.families.chunk_delta_rule.problem import CHUNK, COEFFICIENTS_AT, IMAGE, P_AT, PANEL, PANEL_BYTES, PANELS, ChunkProblem
from ssmgen.families.chunk_delta_rule.reference import beta_of, decays_of
from ssmgen.families.chunk_delta_rule.spec import of_problem
from ssmgen.nvrtc import compile_cubin
from ssmgen.render import render
from ssmgen.spec import SM90, Arch, Pdl

NAN = float("nan")
SM80, SM90A = Arch.parse("sm_80"), Arch.parse("sm_90a")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")


@dataclass(frozen=True)
class Sizes:
    key_heads: int = 1
    group: int = 2  # heads of v for each of them
    head_k: int = 32
    x: torch.dtype = BF16
    gate: str = "log"
    form: str = "plain"  # of beta
    bias: bool = False
    gates: torch.dtype = F32  # dtype of g, beta, A_log and dt_bias
    l2norm: bool = True


def make(sizes: Sizes, *lead: int, seed: int = 0, decay: float = 1.0, alike: float = 0.0) -> dict[str, Any]:
    """A call. decay: factor of log decays; alike: how much of each key is the same one."""
    g = torch.Generator().manual_seed(seed)
    heads = sizes.key_heads * sizes.group

    def randn(*shape: int, dtype: torch.dtype = sizes.x) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    k = (1 - alike) * randn(*lead, sizes.key_heads, sizes.head_k, dtype=F32) + alike * randn(sizes.head_k, dtype=F32)
    if not sizes.l2norm:
        k = k / k.norm(dim=-1, keepdim=True)
    call: dict[str, Any] = {"q": randn(*lead, sizes.key_heads, sizes.head_k), "k": k.to(sizes.x), "v": randn(*lead, heads, 16)}
    log = -decay * torch.rand(*lead, heads, generator=g)
    if sizes.gate != "none":
        values = {"log": log, "linear": log.exp(), "raw": 3 * torch.randn(*lead, heads, generator=g)}[sizes.gate]
        call["g"] = values.to(sizes.gates)
    beta = torch.rand(*lead, heads, generator=g)
    call["beta"] = (beta if sizes.form == "plain" else 6 * beta - 1).to(sizes.gates)
    if sizes.gate == "raw":
        call["A_log"] = (decay * torch.rand(heads, generator=g)).log().to(sizes.gates)
        call["dt_bias"] = randn(heads, dtype=sizes.gates) if sizes.bias else None
    return call | {
        "use_qk_l2norm": sizes.l2norm,
        "beta_sigmoid": sizes.form != "plain",
        "allow_neg_eigval": sizes.form == "twice_sigmoid",
        **({"linear_gate": sizes.gate == "linear"} if sizes.gate != "none" else {}),
    }


def function_of(sizes: Sizes) -> Any:
    return ssmgen.chunk_delta_rule if sizes.gate == "none" else ssmgen.chunk_gated_delta_rule


def prepared(sizes: Sizes, *, arch: Arch = SM90A, change: Callable[[str], str] = str, pdl: Pdl = Pdl.TRIGGER_LOADED, **kwargs: Any) -> Tensor:
    """[numbers, HV, IMAGE] bytes, as the kernel makes them in the emulator; 255 where it writes nothing. `change` edits its text."""
    call = function_of(sizes).build(**kwargs)
    views = call.caller.checked(call.operands, call.options, None)
    views["workspace"].fill_(255)
    where = {n: t.data_ptr() for n, t in call.operands.items()}
    spec = PrepareSpec(**of_problem(FAMILY.problem_of(views, where, call.options), ChunkProblem), pdl=pdl if arch >= SM90 else Pdl.OFF)
    packed = Arguments(spec, FAMILY.values_of(spec, views, call.options)).at([where[n] for n in spec.operands()])
    named, counts = {n: call.operands[n] for n in spec.operands()}, counts_of(views)
    launch = spec.name, spec.blocks(counts), spec.threads_per_block, packed, named, ("workspace",), spec.dynamic_bytes
    run_source(change(render(spec, arch)), *launch)
    return views["workspace"][: counts.chunks * counts.heads * IMAGE].view(counts.chunks, counts.heads, IMAGE)


def read(image: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What an image [IMAGE] holds, in float64."""
    found = {}
    for name, at in (("T", 0), ("P", P_AT)):
        found[name] = torch.zeros(CHUNK, CHUNK, dtype=torch.float64)
        for c in range(PANELS):
            panel = image[at : at + PANEL_BYTES[c]].view(dtype).view(-1, 2, PANEL // 2).double()
            row = torch.arange(PANEL * c, CHUNK)
            turned = (row // 4 % 2 == 1)[:, None, None]
            found[name][row, PANEL * c : PANEL * (c + 1)] = torch.where(turned, panel.flip(1), panel).flatten(1)
            at += PANEL_BYTES[c]
    numbers = image[COEFFICIENTS_AT : COEFFICIENTS_AT + 4 * (3 * CHUNK + 4)].view(torch.float32).double()
    return found | dict(zip(("c_x", "c_u", "c_o", "decay"), numbers.split([CHUNK] * 3 + [4]), strict=True))


def exact(sizes: Sizes, call: dict[str, Any], rows: slice, batch: int, head: int) -> dict[str, Tensor]:
    """The same of tokens of a batch's row, up to 64 of them, from float64."""
    lead = (lambda t: t[batch, rows]) if call["q"].dim() == 4 else (lambda t: t[rows])
    q, k = (lead(call[n])[:, head // sizes.group].double() for n in ("q", "k"))
    beta = beta_of(lead(call["beta"])[:, head], sizes.form, torch.float64)
    weights = {n: call[n][head] for n in ("A_log", "dt_bias") if call.get(n) is not None}
    g = lead(call["g"])[:, head] if "g" in call else None
    decays = decays_of(g, sizes.gate, weights.get("A_log"), weights.get("dt_bias"), beta, torch.float64)
    gamma = decays.log2().clamp(min=-300).cumsum(0)
    rk, rq = ((t.square().sum(1) + 1e-6).rsqrt() if sizes.l2norm else torch.ones(len(t)) for t in (k, q))
    rq = rq * sizes.head_k**-0.5
    between = (gamma[:, None] - gamma).tril().exp2()
    A = (beta[:, None] * rk[:, None] * rk * between * (k @ k.T)).tril(-1)
    T = torch.linalg.solve_triangular(torch.eye(len(k)) + A, beta.diag(), upper=False)
    P = (rq[:, None] * rk * between * (q @ k.T)).tril()
    rest = CHUNK - len(k)
    found = {"T": torch.nn.functional.pad(T, (0, rest, 0, rest)), "P": torch.nn.functional.pad(P, (0, rest, 0, rest))}
    c_u = torch.nn.functional.pad((gamma[-1] - gamma).exp2() * rk, (0, rest))
    return found | {"c_x": -gamma.exp2() * rk, "c_u": c_u, "c_o": gamma.exp2() * rq, "decay": gamma[-1:].exp2().expand(4)}


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative L2; of what is nowhere to be seen, absolute."""
    return float((found[: len(wanted)] - wanted).norm() / max(float(wanted.norm()), 1e-30))


ROUNDING = {BF16: 2.4e-3, F16: 5e-4}  # relative L2 of numbers rounded once, and of the inverse's tf32


def assert_images(sizes: Sizes, images: Tensor, call: dict[str, Any], spans: list[tuple[int, int, int, int]], bound: float = 1.0) -> None:
    """spans: (number, row of the batch, first token, tokens) of each chunk that there is; of others, nothing is written."""
    heads = images.shape[1]
    for number, batch, first, count in spans:
        for head in range(heads):
            found, wanted = read(images[number, head], sizes.x), exact(sizes, call, slice(first, first + count), batch, head)
            assert all(t.isfinite().all() for t in found.values())
            assert not found["T"][count:].any() and not found["T"][:, count:].any() and not found["c_u"][count:].any()
            assert not found["P"][count:].any() and not found["P"][:, count:].any()
            assert not found["T"].triu(1).any() and not found["P"].triu(1).any()
            errors = {n: error(found[n], wanted[n]) for n in wanted}
            assert errors["T"] <= bound * ROUNDING[sizes.x] and errors["P"] <= ROUNDING[sizes.x], (number, head, errors)
            assert all(errors[n] <= 1e-5 for n in ("c_x", "c_u", "c_o", "decay")), (number, head, errors)
    others = [n for n in range(len(images)) if n not in {span[0] for span in spans}]
    assert (images[others] == 255).all()


GATES = {
    "log": Sizes(),
    "none": Sizes(gate="none"),
    "none-unnormalised": Sizes(gate="none", l2norm=False, form="sigmoid"),
    "unnormalised": Sizes(l2norm=False, gates=F16, x=F16),
    "linear": Sizes(gate="linear", form="sigmoid"),
    "raw": Sizes(gate="raw", gates=BF16, form="twice_sigmoid"),
    "raw-bias": Sizes(gate="raw", bias=True),
}


@needs_emulator
@pytest.mark.parametrize("sizes", GATES.values(), ids=GATES)
def test_images_are_those_of_float64(sizes):
    call = make(sizes, 2, 100, decay=0.3)
    assert_images(sizes, prepared(sizes, **call), call, [(0, 0, 0, 64), (1, 0, 64, 36), (2, 1, 0, 64), (3, 1, 64, 36)])
