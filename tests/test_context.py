"""Sequences over several ranks: processes on the CPU, each with some of the tokens, against float64 on whole sequences; and what kernels make
of a rank's tokens ahead of the exchange, in the emulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from context_cases import cases, inputs
from delta_cases import BOUNDS, error, launch_emulated
from sharded_calls import BF16, F32
from sharded_cases import failures

import ssmgen
from ssmgen import distributed, emulator, registry
from ssmgen.calls.context import Asked
from ssmgen.errors import ArgumentError
from ssmgen.families.chunk_delta_rule import context as delta
from ssmgen.families.chunk_delta_rule.parts import Parts, parts_of
from ssmgen.families.chunk_scan import context as scan
from ssmgen.spec import Arch, Pdl

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")


def test_four_ranks_agree_with_one(tmp_path):
    wrong = failures(4, "cpu", tmp_path, cases, least=35)
    assert not wrong, wrong


def test_without_processes_it_says_what_to_do():
    call = inputs("chunk_scan", "cpu", F32)
    with pytest.raises(ArgumentError, match=r"call torch\.distributed\.init_process_group on every process first"):
        distributed.chunk_scan(**call)
    with pytest.raises(AttributeError, match="has no attribute 'kda'; it has causal_conv1d, "):
        distributed.kda  # noqa: B018


# Mamba-2: what has decayed to nothing is left out.


@pytest.mark.parametrize(("rate", "seen"), [(1e-3, 5), (1.0, 4), (50.0, 1)])
def test_of_a_rank_only_tokens_that_are_seen_behind_it_are_gone_over(rate, seen):
    """Chunks of 64 tokens, of which each token leaves e^-rate. Others may hold anything, and so may what is ahead of them all."""
    g, tokens, heads = torch.Generator().manual_seed(0), 320, 2
    x, B, C = (torch.randn(1, tokens, *inner, generator=g) for inner in ((heads, 16), (1, 16), (1, 16)))
    call: dict[str, Any] = {"x": x, "dt": torch.ones(1, tokens, heads), "A": torch.tensor([-rate, -2 * rate]), "B": B, "C": C}
    start = torch.randn(1, heads, 16, 16, generator=g)
    _, want = ssmgen.chunk_scan(**call, initial_states=start, return_final_states=True)
    x[:, : tokens - 64 * seen] = torch.nan
    if seen < 5:
        start = torch.full_like(start, torch.nan)
    found = scan.ends(ssmgen.chunk_scan, call, start, Asked(True, True))
    assert torch.equal(found.N, want)
    torch.testing.assert_close(found.M, torch.exp(-tokens * torch.tensor([[rate, 2 * rate]])))


def test_where_states_grow_all_tokens_are_gone_over():
    call = {"x": torch.zeros(1, 256, 1, 16), "dt": torch.full((1, 256, 1), 5.0), "A": torch.tensor([-1.0])}
    call |= {"B": torch.zeros(1, 256, 1, 16), "C": torch.zeros(1, 256, 1, 16)}
    call["dt"][:, 10:12] = -150.0  # by e^300, 1200 have decayed
    call["x"][:, 0], call["B"][:, 0] = 1.0, 1.0
    sums, growth = scan.sums_of(call, "x")
    assert float(growth) == 300 and sums.shape == (1, 4, 1)
    call["dt"][:, 12:] = 0.5
    found = scan.ends(ssmgen.chunk_scan, call, None, Asked(True, False))
    assert float(found.N.min()) > 1e30 and found.M is None


# Delta rules: kernels.


class Emulated(Parts):
    """A call's kernels in the emulator."""

    arch = Arch.parse("sm_90a")

    def kernels(self) -> Any:
        call = self.call
        views = call.caller.checked(call.operands, call.options, None)
        problem = call.caller.family.problem_of(views, {n: t.data_ptr() for n, t in call.operands.items()}, call.options)
        size = call.caller.family.size_of(views)
        chain = registry.select(call.caller.family.operator, problem, size, self.arch, self.arch >= Arch(90))
        return chain.ahead[0], chain

    def launch(self, kernel: Any) -> None:
        views = self.call.caller.checked(self.call.operands, self.call.options, None)
        call = SimpleNamespace(caller=self.call.caller, options=self.call.options, operands=self.operands)
        launch_emulated(kernel, views, call, self.arch)


class EmulatedByWarps(Emulated):
    arch = Arch(80)


def tokens_of(name: str, tokens: int, dim: int = 64) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, dim, generator=g).bfloat16() for heads in (1, 1, 2))
    gate = -0.05 * torch.rand(1, tokens, 2, *((dim,) if name == "chunk_kda" else ()), generator=g)
    out = torch.full_like(v, torch.nan)
    return {"q": q, "k": k, "v": v, "g": gate, "beta": torch.rand(1, tokens, 2, generator=g), "use_qk_l2norm": True, "out": out}


@needs_emulator
@pytest.mark.parametrize(
    ("name", "kind", "tokens", "parts", "layout"),
    [
        ("chunk_gated_delta_rule", Emulated, 330, 3, "vk"),
        ("chunk_kda", Emulated, 200, 3, "kv"),  # of 2, 2 and no chunks
        ("chunk_gated_delta_rule", EmulatedByWarps, 200, 2, "kv"),
        ("chunk_kda", EmulatedByWarps, 130, 1, "vk"),
    ],
)
def test_kernels_make_ends_and_go_on_from_a_state_that_comes_later(name, kind, tokens, parts, layout):
    function, call = getattr(ssmgen, name), tokens_of(name, tokens) | {"state_layout": layout}
    plain = {n: t for n, t in call.items() if n != "out"}
    S = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(1))
    _, N = function(**plain, return_final_states=True)
    M = delta.transitions(("v",), function, plain)
    want, final = function(**plain, initial_states=S, return_final_states=True)
    found = kind(function, call | {"segments": parts}).ends(None, Asked(True, True))
    assert error(found.N, N) <= BOUNDS[BF16] and error(found.M, M) <= BOUNDS[BF16]
    assert error(delta.passed(S.double(), found.N, found.M, call), final) <= BOUNDS[BF16]
    states = found.finish(S, True)
    assert error(call["out"], want) <= BOUNDS[BF16] and error(states, final) <= BOUNDS[BF16]


@needs_emulator
def test_what_nobody_asks_for_is_not_made():
    """The first rank knows what its tokens begin in, and nobody waits for the last one's; and of packed sequences the last one counts."""
    name, tokens = "chunk_gated_delta_rule", 200
    call = tokens_of(name, tokens) | {"segments": 1}
    plain = {n: t for n, t in call.items() if n != "out"}
    S = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(1))
    want, final = ssmgen.chunk_gated_delta_rule(**plain, initial_states=S, return_final_states=True)
    _, N = ssmgen.chunk_gated_delta_rule(**plain, return_final_states=True)
    first = Emulated(ssmgen.chunk_gated_delta_rule, call)
    first.made.fill_(torch.nan)
    found = first.ends(None, Asked(True, False))
    assert error(found.N, N) <= BOUNDS[BF16] and found.M is None and first.made[:, :, 64:].isnan().all()
    assert error(Emulated(ssmgen.chunk_gated_delta_rule, call).ends(S, Asked(True, False)).N, final) <= BOUNDS[BF16]
    last = Emulated(ssmgen.chunk_gated_delta_rule, call)
    last.made.fill_(torch.nan)
    found = last.ends(None, Asked(False, False))
    assert found.N is None and found.finish(S, False) is None and last.made.isnan().all()
    assert error(call["out"], want) <= BOUNDS[BF16]
    tail = {n: t[0, 70:].unsqueeze(0) if n in ("q", "k", "v", "g", "beta") else t for n, t in plain.items()}
    _, N = ssmgen.chunk_gated_delta_rule(**tail, return_final_states=True)
    packed = Emulated(ssmgen.chunk_gated_delta_rule, call | {"segments": 2, "cu_seqlens": torch.tensor([70, 200]).int()})
    assert packed.call.operands["cu_seqlens"].tolist() == [70, 198, 200]
    assert error(packed.ends(None, Asked(True, False)).N, N) <= BOUNDS[BF16]


def test_the_last_kernel_reads_nothing_early():
    """What it begins in is written by kernels that are not ours, and do not say when that may be read."""
    launched: list[Any] = []

    class Listed(Emulated):
        def launch(self, kernel: Any) -> None:
            launched.append(kernel)

    Listed(ssmgen.chunk_kda, tokens_of("chunk_kda", 130)).ends(None, Asked(True, True)).finish(None, False)
    assert [kernel.family.rpartition("_")[2] for kernel in launched] == ["prepare", "ends", "warpgroups"]
    assert launched[-1].pdl is Pdl.OFF and not launched[-1].early_operands()


def test_parts_fill_a_card():
    assert [parts_of(131072, heads, 128, None) for heads in (4, 8, 16, 32, 64, 128)] == [16, 8, 4, 2, 1, 1]
    assert parts_of(3000, 8, 128, None) == 2 and parts_of(1, 8, 128, None) == 1 and parts_of(200, 64, 128, 7) == 4
