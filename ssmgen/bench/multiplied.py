"""What a row says of operators whose ceiling is torch's multiplication of as many bytes: convolutions, and scans of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import runtime
from ..spec import SM90
from . import report as reports
from . import timing
from .progress import Watch

PROMPT = 2048  # tokens of a model's prompts


def keeping(function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> reports.Peer:
    """Calls a function that returns new tensors, each of which is kept until the same call is made again."""
    kept: dict[int, Any] = {}

    def call(i: int) -> None:
        kept[i] = function(**calls[i])

    return call


def measure(case: Any, peers: Mapping[str, Callable[[Any], reports.Peer | None]], rounds: int, host: bool, watch: Watch) -> dict[str, Any]:
    """What a row says beside its case: `function`, `arguments`, `sets`, `gate`, `ceiling` and `bytes_moved` are asked of that."""
    arch = runtime.device_arch(case.out[0].device.index)
    pdls = (True, False) if arch >= SM90 else (False,)
    error = max(reports.gates(case.gate, pdls))
    others = reports.usable({name: make(case) for name, make in peers.items()})
    contenders = {"ssmgen_pdl" if pdl else "ssmgen": reports.bound(case, pdl) for pdl in pdls} | {"mul": case.ceiling} | others
    watch.timing(len(contenders))
    us = timing.device_us(contenders, case.sets, rounds)
    served = us.get("ssmgen_pdl", us["ssmgen"])  # pdl=None is pdl=True where the device can
    return {
        "us": us,
        "sm_mhz": timing.sm_mhz(),
        "served_us": served,
        "bytes": case.bytes_moved,
        "tbs": case.bytes_moved / served / 1e6,
        "mul_ratio": served / us["mul"],
        "peer_ratio": {name: served / us[name] for name in others},
        "host_us": reports.host_us(case.function, (), case.arguments(0), others) if host else {},
        "out_error": error,
        **reports.served(case.function, (), case.arguments(0), arch),
    }
