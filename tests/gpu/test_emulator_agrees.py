"""The emulator and the card compute the same bits, where the arithmetic is the same."""

from __future__ import annotations

import pytest
import torch
from emulated_calls import needs_emulator
from ssu_cases import BF16, F16, F32, Case, make_call

import ssmgen
from ssmgen import emulator
from ssmgen.families.selective_state_update import planning as op
from ssmgen.launch import runtime
from ssmgen.spec.arguments import Arguments

pytestmark = [pytest.mark.gpu, needs_emulator]

EXACT = {"dt_bias": None, "softplus": False, "out": F32, "z": None}
CASES = [
    Case("m2-f32", heads=4, groups=2, index=torch.int32, **EXACT),
    Case("m2-bf16", heads=4, groups=2, state=BF16, index=torch.int64, split=True, **EXACT),
    Case("m2-f16-d96-p70", heads=3, headdim=70, d_state=96, state=F16, conv_slices=True, **EXACT),
    Case("m1-f32", headdim=256, d_state=16, tied=False, **EXACT),
]


def both(case: Case, decay: float | None):
    """(call on the card, the same call emulated), after one step."""
    card, host = make_call(case, "cuda"), make_call(case, "cpu")
    if decay is not None:
        for call in (card, host):
            A = call.args[3]
            (A[:, 0, 0] if A.stride(-1) == 0 else A).fill_(decay)
    ssmgen.selective_state_update(*card.args, **card.kwargs)
    spec = ssmgen.explain(ssmgen.selective_state_update, *card.args, **card.kwargs).chosen.spec
    named = {n: host.named[n] for n in op.OPERANDS.names if n in host.named}
    views = op.views_of(named, host.options, [])
    packed = Arguments(spec, op.kernel_values(spec, views, host.options)).at([t.data_ptr() for t in named.values()])
    arch = runtime.device_arch(torch.cuda.current_device())
    emulator.run(spec, arch, case.batch * spec.nheads * spec.tiles, packed, named)
    torch.cuda.synchronize()
    slots = card.written
    return [(c.cpu(), h) for c, h in ((card.args[0][slots.cuda()], host.args[0][slots]), (card.kwargs["out"], host.kwargs["out"]))]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_equal_bit_for_bit_without_exponentials(case):
    """A = 0: the decay is 2^0 on both sides, and everything else is sums, products, fused multiply-adds and roundings."""
    for on_card, emulated in both(case, decay=0.0):
        bits = torch.int32 if on_card.dtype is F32 else torch.int16
        assert torch.equal(on_card.contiguous().view(bits), emulated.contiguous().view(bits))


@pytest.mark.parametrize("case", [c for c in CASES if c.state is F32], ids=lambda c: c.id)
def test_close_with_exponentials(case):
    """ex2.approx is within 2 ulp of the exact power that the emulator takes."""
    for on_card, emulated in both(case, decay=None):
        assert torch.allclose(on_card, emulated, rtol=2.0**-18, atol=2.0**-18 * float(emulated.abs().max()))
