"""What the benchmarks' tests share: small cases of every operator on CPU tensors, without a device and without a clock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from family_cases import cases

from ssmgen import runtime
from ssmgen.bench import bench_of, benchmarks, layers, report, timing, told
from ssmgen.bench.progress import Watch
from ssmgen.families.combine_splits import bench as combine_splits
from ssmgen.families.gated_rms_norm import bench as gated_rms_norm
from ssmgen.families.linear_attention import TIMED
from ssmgen.spec import Arch, DType

SILENT = Watch(lambda line: None)
MEASURED = Path(__file__).parent / "data" / "bench.json"  # on an H200, some rows of five reports

# Two cases or more of each.
LAYER: dict[str, Any] = {"states": (DType.BF16,), "batches": (1, 3), "tp": 8, "device": "cpu"}
SMALL: dict[str, dict[str, Any]] = {
    "selective_state_update": {"names": ("mamba-130m", "mamba2-130m"), "batches": (2,)},
    **dict.fromkeys(TIMED, {"heads": 4, "dim": 16, "batches": (1, 9)}),
    "gated_delta_rule": {"heads": 4, "key_heads": 2, "dim": 16, "batches": (1, 9)},  # by default it has more key heads than that
    "replay_selective_state_update": {"shape": (4, 16, 32, 2), "batches": (1,), "two_kernels": False, "device": "cpu"},
    "causal_conv1d": {"shapes": ((2, 24, 40),), "device": "cpu"},
    "chunk_scan": {
        "shapes": ((2, 1, 1, 70),),
        "forms": ("batch", "pool", "simple_gla", "lightning"),
        "headdim": 16,
        "d_state": 16,
        "device": "cpu",
    },
    "causal_conv1d_update": {"dim": 16, "batches": (1, 9), "device": "cpu"},
    "combine_splits": {"shapes": ((12, 2), (12, 5)), "widths": (64,), "dtypes": (DType.BF16,), "hot": False, "device": "cpu"},
    "gated_rms_norm": {"shapes": ((2, 64),), "rows": (3,), "hot": False, "device": "cpu"},
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
BYTES = {"POOL_BYTES", "STATE_BYTES", "SET_BYTES"}  # how benchmarks say what their inputs take


def small_run(op: str, watch: Watch = SILENT, **options: Any) -> dict[str, Any]:
    return bench_of(op).run(**told(op), **SMALL[op] | options, watch=watch)


def without_a_gpu(monkeypatch) -> None:
    """Everything but the device, the clock and the peers, of which each takes 4 us where we take 2."""
    torch.manual_seed(0)
    monkeypatch.setattr(report, "need_device", lambda: None)
    monkeypatch.setattr(report, "begin", lambda method="": HEAD | {"rows": [], "failed": []})
    monkeypatch.setattr(report, "normal_pool", lambda *args, make=report.normal_pool: make(*args[:-1], torch.device("cpu")))
    monkeypatch.setattr(report, "slot_copies", lambda state, slots, pdls: {"copy": lambda i: slots[i]})
    monkeypatch.setattr(report, "usable", lambda peers: {name: lambda i: None for name in peers})
    monkeypatch.setattr(combine_splits, "peers_of", lambda case: {"flashinfer.merge_states": lambda i: None})
    monkeypatch.setattr(layers, "peers_of", lambda case: {"flashinfer": lambda i: None})
    monkeypatch.setattr(gated_rms_norm, "peers_of", lambda case: {"fla.rms_norm_gated": lambda i: None})
    monkeypatch.setattr(runtime, "device_arch", lambda index: Arch.parse("sm_90a"))
    monkeypatch.setattr(timing, "device_us", lambda contenders, sets, rounds: {n: 2.0 if "ssmgen" in n else 4.0 for n in contenders})
    monkeypatch.setattr(timing, "sm_mhz", lambda: 1980)
    monkeypatch.setattr(timing, "host_us", lambda call: 1.0)
    for module in (layers, *{sys.modules[bench_of(op).Case.__module__] for op in benchmarks()}):
        for budget in BYTES & vars(module).keys():
            monkeypatch.setattr(module, budget, 2**17)
