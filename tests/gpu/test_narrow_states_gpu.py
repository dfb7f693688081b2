"""States in fewer bits on the card: within a step of float64, and all variants of the rules with the same bits."""

from __future__ import annotations

import pytest
import torch
from narrow_cases import WRITTEN, Call, assert_matches, bits, matrix

from ssmgen import registry, runtime
from ssmgen.calls.checks import NARROW
from ssmgen.spec import Arch

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
