"""Sequences over several ranks, against float64 on whole sequences: processes on the CPU, each with some of the tokens; and the kernels'
results for a rank's tokens before the exchange, in the emulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_calls import needs_emulator
from selection import costly

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from context_cases import cases, inputs
from context_tool_cases import cases as tool_cases
from emulated_calls import launch_emulated
from prompt_cases import BOUNDS, error
from sharded_calls import BF16, F32
from sharded_cases import failures

import ssmgen
from ssmgen import distributed
from ssmgen.calls.context import Asked
from ssmgen.calls.kernels import Kernels
from ssmgen.engine.chunks import context as delta
from ssmgen.engine.chunks.parts import Parts, parts_of
from ssmgen.errors import ArgumentError
from ssmgen.families.chunk_scan import context as scan
from ssmgen.spec.kernel import Arch, Pdl
from tools import context as context_tool


@pytest.mark.matrix
@pytest.mark.processes
def test_four_ranks_agree_with_one(tmp_path):
    wrong = failures(4, "cpu", tmp_path, cases, least=47)
    assert not wrong, wrong


def test_two_ranks_run_what_the_tool_measures(tmp_path):
    wrong = failures(2, "cpu", tmp_path, tool_cases, least=7)
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set. Run `torchrun --nproc-per-node N -m tools.context`"),
        (["mamba"], "mamba is not a case; expected mamba2, mamba2-slow, "),
    ],
)
def test_the_tool_says_what_it_needs(words, said, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["context", *words])
    with pytest.raises(SystemExit) as ended:
        context_tool.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_two_cards_win_from_the_length_on_behind_which_they_lose_no_more():
    rows = [{"tokens": n, "one_ms": 1.0, "ranks_ms": ms} for n, ms in ((1, 0.5), (2, 1.0), (4, 0.9), (8, 0.6))]
    assert context_tool.wins_from(rows, "") == 4 and context_tool.wins_from(rows[:2], "") is None


def test_without_processes_it_says_what_to_do():
    call = inputs("chunk_scan", "cpu", F32)
    with pytest.raises(ArgumentError, match=r"there is no process group; expected one"):
        distributed.chunk_scan(**call)
    with pytest.raises(AttributeError, match="has no attribute 'kda'; it has causal_conv1d, "):
        distributed.kda  # noqa: B018


# Mamba-2: tokens that have decayed to nothing are left out.


@pytest.mark.parametrize(("rate", "seen"), [(1e-3, 5), (1.0, 4), (50.0, 1)])
def test_of_a_rank_only_tokens_that_are_seen_behind_it_are_gone_over(rate, seen):
    """Each token of a chunk of 64 keeps e^-rate of the state. Tokens that have no effect may hold anything, and so may the state before
    them."""
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


def test_what_may_have_grown_is_seen():
    """A decay above 1 counts as the growth of all tokens; values that cannot be bounded count as seen."""
    sums = torch.tensor([[-100.0, -100.0, torch.nan], [-100.0, -100.0, 0.0], [-300.0, -300.0, 0.0]]).double()
    assert scan.seen_from(scan.to_end(sums), torch.tensor([[0.0, 100.0, 0.0]]).double()).tolist() == [2, 1, 0]
    call = {"x": torch.zeros(1, 70, 1, 16), "dt": torch.tensor([-3.0] * 2 + [1.0] * 68).view(1, 70, 1), "A": torch.tensor([-2.0])}
    sums, growth = scan.sums_of(call, "x")
    assert sums.flatten().tolist() == [12.0 - 124.0, -12.0] and growth.flatten().tolist() == [70 * 6.0]
    for A, most in ((-2.0, 0.0), (2.0, 2.0 * (2 * 3 + 68))):  # steps of one sign grow by their sum, at most
        steps = {"dt": call["dt"].abs() - 1, "dt_bias": torch.ones(1), "dt_limit": (0.0, 9.0), "A": torch.tensor([A])}
        sums, growth = scan.sums_of(call | steps, "x")
        assert growth.flatten().tolist() == [most]


# Kernels, in the emulator.


class Emulated(Kernels):
    """A call's kernels in the emulator."""

    arch = Arch.parse("sm_90a")

    def chosen(self) -> Any:
        return self.choose(self.arch, None)

    def launch(self, kernel: Any) -> None:
        call = SimpleNamespace(caller=self.call.caller, options=self.call.options, operands=self.operands)
        launch_emulated(kernel, call.caller.family, self.views, call.options, call.operands, self.arch)


class EmulatedByWarps(Emulated):
    arch = Arch(80)


def parts(function: Any, call: dict[str, Any], launcher: Any = Emulated) -> Parts:
    return type("Parts", (Parts,), {"launcher": launcher})(function, call)


def tokens_of(name: str, tokens: int, dim: int = 64) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, dim, generator=g).bfloat16() for heads in (1, 1, 2))
    gate = -0.05 * torch.rand(1, tokens, 2, *((dim,) if name == "chunk_kda" else ()), generator=g)
    out = torch.full_like(v, torch.nan)
    return {"q": q, "k": k, "v": v, "g": gate, "beta": torch.rand(1, tokens, 2, generator=g), "use_qk_l2norm": True, "out": out}


@costly(1)
@needs_emulator
@pytest.mark.parametrize(
    ("name", "kind", "tokens", "count", "layout"),
    [
        ("chunk_gated_delta_rule", Emulated, 330, 3, "vk"),
        ("chunk_kda", Emulated, 200, 3, "kv"),  # of 2, 2 and no chunks
        ("chunk_gated_delta_rule", EmulatedByWarps, 200, 2, "kv"),
        ("chunk_kda", EmulatedByWarps, 130, 1, "vk"),
    ],
)
def test_kernels_make_ends_and_go_on_from_a_state_that_comes_later(name, kind, tokens, count, layout):
    function, call = getattr(ssmgen, name), tokens_of(name, tokens) | {"state_layout": layout}
    plain = {n: t for n, t in call.items() if n != "out"}
    S = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(1))
    _, N = function(**plain, return_final_states=True)
    M = delta.transitions(("v",), function, plain)
    want, final = function(**plain, initial_states=S, return_final_states=True)
    found = parts(function, call | {"segments": count}, kind).ends(None, Asked(True, True))
    assert error(found.N, N) <= BOUNDS[BF16] and error(found.M, M) <= BOUNDS[BF16]
    assert error(delta.passed(S.double(), found.N, found.M, call), final) <= BOUNDS[BF16]
    states = found.finish(S, True)
    assert error(call["out"], want) <= BOUNDS[BF16] and error(states, final) <= BOUNDS[BF16]


@needs_emulator
@pytest.mark.parametrize(("name", "begin"), [("chunk_scan", None), ("chunk_scan", 70), ("chunk_simple_gla", None)])
def test_a_kernel_makes_what_tokens_add_to_a_state(name, begin, monkeypatch):
    """In parts of 3, 3 and 2 chunks, the last one of which is short; of the first head all of them count, of the second one some. Nothing
    else is read."""
    monkeypatch.setattr(scan, "LEAST", 2)
    monkeypatch.setattr(scan, "MOST", 3)
    g, tokens, heads = torch.Generator().manual_seed(0), 500, 2
    x, B, C = (torch.randn(1, tokens, *inner, generator=g).bfloat16() for inner in ((heads, 64), (1, 64), (1, 64)))
    rates = torch.tensor([0.001, 1.0])
    if name == "chunk_scan":
        call = {"x": x, "dt": torch.full((1, tokens, heads), 0.5).bfloat16(), "A": -2 * rates, "B": B, "C": C}
    else:
        call = {"q": C, "k": B, "v": x, "g": -rates}
    function, operand = getattr(ssmgen, name), "x" if name == "chunk_scan" else "v"
    more = {} if begin is None else {"cu_seqlens": torch.tensor([begin, tokens]).int()}
    _, N = function(**call, **more, return_final_states=True)
    x[:, : 512 - 4 * 64, 1] = torch.nan  # 4 chunks and a short one are seen, of 1 in 64 tokens
    if begin:
        x[:, :begin] = torch.nan
    parts = type("Parts", (scan.Parts,), {"launcher": Emulated})(function, call | more, operand)
    sums, growth = scan.sums_of(call | more, operand)
    remaining = scan.to_end(sums[0])
    first = scan.seen_from(remaining, growth[0])
    assert parts.count == 3 and first.tolist() == [0, 4]
    found = parts.added(parts.served(), remaining, first)
    assert error(found[:, 0], N[:, 0]) <= BOUNDS[BF16] and error(found[:, 1], N[:, 1]) <= BOUNDS[BF16]


@needs_emulator
def test_what_nobody_asks_for_is_not_made():
    """The first rank knows its initial state, and no rank waits for the last one's end. Only the last of packed sequences counts."""
    name, tokens = "chunk_gated_delta_rule", 200
    call = tokens_of(name, tokens) | {"segments": 1}
    plain = {n: t for n, t in call.items() if n != "out"}
    S = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(1))
    want, final = ssmgen.chunk_gated_delta_rule(**plain, initial_states=S, return_final_states=True)
    _, N = ssmgen.chunk_gated_delta_rule(**plain, return_final_states=True)
    first = parts(ssmgen.chunk_gated_delta_rule, call)
    first.made.fill_(torch.nan)
    found = first.ends(None, Asked(True, False))
    assert error(found.N, N) <= BOUNDS[BF16] and found.M is None and first.made[:, :, 64:].isnan().all()
    assert error(parts(ssmgen.chunk_gated_delta_rule, call).ends(S, Asked(True, False)).N, final) <= BOUNDS[BF16]
    last = parts(ssmgen.chunk_gated_delta_rule, call)
    last.made.fill_(torch.nan)
    found = last.ends(None, Asked(False, False))
    assert found.N is None and found.finish(S, False) is None and last.made.isnan().all()
    assert error(call["out"], want) <= BOUNDS[BF16]
    tail = {n: t[0, 70:].unsqueeze(0) if n in ("q", "k", "v", "g", "beta") else t for n, t in plain.items()}
    _, N = ssmgen.chunk_gated_delta_rule(**tail, return_final_states=True)
    packed = parts(ssmgen.chunk_gated_delta_rule, call | {"segments": 2, "cu_seqlens": torch.tensor([70, 200]).int()})
    assert packed.call.operands["cu_seqlens"].tolist() == [70, 198, 200]
    assert error(packed.ends(None, Asked(True, False)).N, N) <= BOUNDS[BF16]


def test_the_last_kernel_reads_nothing_early():
    """Other packages' kernels write its initial state, and do not signal when it may be read."""
    launched: list[Any] = []

    class Listed(Emulated):
        def launch(self, kernel: Any) -> None:
            launched.append(kernel)

    parts(ssmgen.chunk_kda, tokens_of("chunk_kda", 130), Listed).ends(None, Asked(True, True)).finish(None, False)
    assert [kernel.kind.rpartition("_")[2] for kernel in launched] == ["prepare", "ends", "warpgroups"]
    assert launched[-1].pdl is Pdl.OFF and not launched[-1].early_operands()


def test_parts_fill_a_card():
    assert [parts_of(131072, heads, 128, None) for heads in (4, 8, 16, 32, 64, 128)] == [16, 8, 4, 2, 1, 1]
    assert parts_of(3000, 8, 128, None) == 2 and parts_of(1, 8, 128, None) == 1 and parts_of(200, 64, 128, 7) == 4
