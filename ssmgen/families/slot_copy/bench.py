"""The ceiling that benchmarks measure updates against: copies of the same number of slots."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...bench.timing import Launch
from ...launch import runtime
from ...spec.kernel import Pdl
from .spec import SlotCopySpec


def copy(state: Tensor, slots: Tensor, pdl: bool) -> Launch:
    """A generated kernel that reads and writes back the slots of a set, a row of `slots` [sets, batch]."""
    spec = SlotCopySpec(slot_bytes=state[0].numel() * state.element_size(), pdl=Pdl.TRIGGER_LOADED if pdl else Pdl.OFF)
    device = state.device.index
    kernel = runtime.load(spec, device, "slot_copy")
    words = state.stride(0) * state.element_size() // 4
    launch = runtime.Launch(kernel, device, slots.shape[1] * spec.blocks_per_slot, {"state_slot": words})
    plans = [launch.at((state.data_ptr(), row.data_ptr())) for row in slots]

    def run(i: int, owners: object = (state, slots)) -> object:  # plans have their addresses alone
        return plans[i]()

    return run


def copies(state: Tensor, slots: Tensor, pdls: Sequence[bool]) -> dict[str, Launch]:
    """Contenders; none for slots that a copy cannot divide among its blocks."""
    if SlotCopySpec(slot_bytes=state[0].numel() * state.element_size()).violations(runtime.device_arch(state.device.index)):
        return {}
    return {"copy_pdl" if pdl else "copy": copy(state, slots, pdl) for pdl in pdls}
