"""States in fewer bits on the card: within a step of float64, and all variants of the rules with the same bits."""

from __future__ import annotations

import pytest
import torch
from narrow_cases import WRITTEN, Call, assert_matches, assert_rounded_once, bits, caught_up, matrix, ringed, ringed_tokens

import ssmgen
from ssmgen.calls.checks import NARROW
from ssmgen.compat.flashinfer import checkpointing_ssu
from ssmgen.engine.narrow_reference import narrowed, widened
from ssmgen.launch import runtime
from ssmgen.select import registry
from ssmgen.spec.kernel import Arch

pytestmark = pytest.mark.gpu


def served(case) -> bool:
    return torch.float8_e4m3fn not in (case.state, case.kept) or runtime.device_arch(0) >= Arch(89)


@pytest.mark.parametrize("case", matrix(), ids=lambda c: c.id)
def test_kernels_are_within_a_step_of_float64(case):
    if not served(case):
        pytest.skip("fp8 needs sm_89")
    call = Call(case, "cuda")
    call.run()
    assert_matches(call)


@pytest.mark.parametrize("case", [c for c in matrix() if c.id.startswith(("one", "noise")) and c.state in NARROW], ids=lambda c: c.id)
def test_batch_sizes_that_the_rules_tell_apart_give_the_same_bits(case):
    if not served(case):
        pytest.skip("fp8 needs sm_89")
    arch, results = runtime.device_arch(0), []
    problem = Call(case).public.problem()[0]
    for spec in registry.variants("selective_state_update", problem, arch, arch >= Arch(90)):
        call = Call(case, "cuda")
        made = call.public
        made.launch_with(spec).at(made.pointers)()
        torch.cuda.synchronize()
        results.append([bits(call.named[n]) for n in WRITTEN if n in call.named])
    assert all(torch.equal(a, b) for other in results for a, b in zip(other, results[0], strict=True))


def assert_near(state: torch.Tensor, scale: torch.Tensor, want: torch.Tensor, want_scale: torch.Tensor) -> None:
    """Within a step of the reference's states."""
    near = widened(want, want_scale, torch.float64)
    most = near.abs().amax(-1, keepdim=True)
    step = near.abs() / 8 + most / 2**14 if state.dtype == torch.float8_e4m3fn else most / NARROW[state.dtype].largest
    assert ((widened(state.cpu(), scale.cpu(), torch.float64) - near).abs() <= 1.01 * step).all()


@pytest.mark.parametrize("dtype", list(NARROW))
def test_replay_leaves_what_the_reference_does(dtype):
    if dtype == torch.float8_e4m3fn and runtime.device_arch(0) < Arch(89):
        pytest.skip("fp8 needs sm_89")
    call = ringed(dtype)
    for i, counts in enumerate((2, 3, 5)):  # of which the last two leave no room: the state is written
        call |= ringed_tokens(20 + i)
        call["prev_num_accepted_tokens"].fill_(counts)
        card = {n: t.cuda() for n, t in call.items()}
        card["dt"] = call["dt"][..., :1].cuda().expand(call["dt"].shape)
        exact = caught_up(call)
        checkpointing_ssu(**call)
        checkpointing_ssu(**card)
        assert torch.allclose(card["out"].cpu(), call["out"], rtol=1e-4, atol=1e-4)
        if i:
            assert_rounded_once(card, exact)
        else:
            assert torch.equal(bits(card["state"].cpu()), bits(call["state"]))


@pytest.mark.parametrize("tokens", [(), (4,)], ids=["one", "several"])
@pytest.mark.parametrize("dtype", list(NARROW))
def test_delta_rules_leave_what_the_reference_does(dtype, tokens):
    if dtype == torch.float8_e4m3fn and runtime.device_arch(0) < Arch(89):
        pytest.skip("fp8 needs sm_89")
    g = torch.Generator().manual_seed(1)
    call = {n: torch.randn(3, *tokens, 4, 128, generator=g) for n in ("q", "k", "v")} | {"state_indices": torch.tensor([4, -1, 2])}
    call |= {"g": -torch.rand(3, *tokens, 4, generator=g), "beta": torch.rand(3, *tokens, 4, generator=g)}
    call["state"], call["state_scale"] = narrowed(torch.randn(6, 4, 128, 128, generator=g), dtype)
    card = {n: t.cuda() for n, t in call.items()}
    want = ssmgen.gated_delta_rule(**call, use_qk_l2norm=True)
    out = ssmgen.gated_delta_rule(**card, use_qk_l2norm=True)
    assert torch.allclose(out.cpu(), want, rtol=1e-4, atol=1e-4)
    assert_near(card["state"], card["state_scale"], call["state"], call["state_scale"])
