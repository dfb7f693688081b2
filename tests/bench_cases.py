"""What the benchmarks' tests share: small cases of every operator on CPU tensors, without a device and without a clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from family_cases import cases

from ssmgen import runtime
from ssmgen.bench import bench_of, benchmarks, case, engine, report, timing
from ssmgen.bench.progress import Watch
from ssmgen.families.linear_attention import TIMED
from ssmgen.spec import Arch, DType

SILENT = Watch(lambda line: None)
MEASURED = Path(__file__).parent / "data" / "bench.json"  # on an H200, some rows of five reports

# Two cases or more of each.
LAYER: dict[str, Any] = {"states": (DType.BF16,), "batches": (1, 3), "tp": 8}
SMALL: dict[str, dict[str, Any]] = {
    "selective_state_update": {"names": ("mamba-130m", "mamba2-130m"), "batches": (2,)},
    **dict.fromkeys(TIMED, {"heads": 4, "dim": 16, "batches": (1, 9)}),
    "gated_delta_rule": {"heads": 4, "key_heads": 2, "dim": 16, "batches": (1, 9)},  # by default it has more key heads than that
    "replay_selective_state_update": {"shape": (4, 16, 32, 2), "batches": (1,), "two_kernels": False},
    "causal_conv1d": {"shapes": ((2, 24, 40),)},
    "chunk_scan": {
        "shapes": ((2, 1, 1, 70),),
        "forms": ("batch", "pool", "simple_gla", "lightning"),
        "headdim": 16,
        "d_state": 16,
    },
    "causal_conv1d_update": {"dim": 16, "batches": (1, 9)},
    "combine_splits": {"shapes": ((12, 2), (12, 5)), "widths": (64,), "dtypes": (DType.BF16,), "hot": False},
    "gated_rms_norm": {"shapes": ((2, 64),), "rows": (3,), "hot": False},
    **{
        op: {"names": (name,), **LAYER}
        for op, name in (
            ("mamba2_layer", "nemotron-h-8b"),
            ("gdn_layer", "qwen3.5-35b-a3b"),
            ("kda_layer", "kimi-linear-48b-a3b"),
        )
    },
    **cases("BENCH"),
}
assert SMALL.keys() == benchmarks().keys(), "each benchmark has a small run: here, or in BENCH of tests/cases/<family>.py"

HEAD = {"device": "a GPU", "torch": "2", "compiler": "CL-1", "ceilings_tbs": {"in_place": 4.0, "out_of_place": 4.5}, "method": "Patience."}


def small_run(op: str, watch: Watch = SILENT, **options: Any) -> dict[str, Any]:
    return bench_of(op).run(**SMALL[op] | options, watch=watch, device="cpu")


def without_a_gpu(monkeypatch) -> None:
    """Everything but the device, the clock and the peers, of which each takes 4 us where we take 2."""
    torch.manual_seed(0)
    monkeypatch.setattr(report, "need_device", lambda: None)
    monkeypatch.setattr(report, "begin", lambda method="": HEAD | {"rows": [], "failed": []})
    monkeypatch.setattr(report, "slot_copies", lambda state, slots, pdls: {"copy": lambda i: slots[i]})
    monkeypatch.setattr(engine, "peers_of", lambda case, peers: {name: lambda i: None for name in peers or ("torch.chain",)})
    monkeypatch.setattr(runtime, "device_arch", lambda index: Arch.parse("sm_90a"))
    monkeypatch.setattr(timing, "device_us", lambda contenders, sets, rounds: {n: 2.0 if "ssmgen" in n else 4.0 for n in contenders})
    monkeypatch.setattr(timing, "sm_mhz", lambda: 1980)
    monkeypatch.setattr(timing, "host_us", lambda call: 1.0)
    monkeypatch.setattr(case, "MOST", 2**17)
