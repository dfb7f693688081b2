"""Small cases of every operator on CPU tensors, for the tests of the benchmarks: no device and no clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from family_cases import cases

from ssmgen import cli
from ssmgen.bench import bench_of, benchmarks, case, engine, report, timing
from ssmgen.bench.progress import Watch
from ssmgen.families.linear_attention import TIMED
from ssmgen.launch import runtime
from ssmgen.spec.kernel import Arch, DType

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
assert SMALL.keys() == benchmarks().keys(), "each benchmark has a small run: here, or in BENCH of tests/support/cases/<family>.py"

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HEAD = {"device": "a GPU", "torch": "2", "compiler": "CL-1", "ceilings_tbs": {"in_place": 4.0, "out_of_place": 4.5}, "method": "Patience."}


def small_run(op: str, watch: Watch = SILENT, **options: Any) -> dict[str, Any]:
    return bench_of(op).run(**SMALL[op] | options, watch=watch, device="cpu")


def small_case(op: str, most: int = 2**17, **fields: Any) -> case.Case:
    """A case on the CPU, whose inputs take up to `most` bytes where they are not more by themselves."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(case, "MOST", most)
        return bench_of(op).case("cpu", **fields)


def broken(one: case.Case, change: Callable[[dict[str, Any]], object], given: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> None:
    """Replaces a case's function: `given` changes the arguments before the call, `change` after it."""
    right: Any = one.function

    def wrong(**call: Any) -> None:
        right(**given(call))
        change(call)

    wrong.build = right.build  # type: ignore[attr-defined]  # as an Operator has it
    one.function = wrong


def usage_error(op: str, args: list[str]) -> str:
    """The command's message for options that do not apply."""
    result = CliRunner().invoke(cli.main, ["bench", op, *args])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def options_of(op: str, *args: str) -> dict[str, Any]:
    """The options that the command gives `run`."""
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(bench_of(op), "run", lambda **options: seen.update(options) or {"rows": [], "failed": []})
        result = CliRunner().invoke(cli.main, ["bench", op, *args, "--json", "--no-peers", "--rounds", "3"])
    assert result.exit_code == 0, result.output
    assert seen.pop("watch") and (seen.pop("peers"), seen.pop("rounds")) == (False, 3)
    return seen


def recorded(monkeypatch) -> dict[str, dict[str, Any]]:
    """The keywords of calls of peers' functions, by module and name."""
    calls: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(
        report, "imported", lambda module, name: lambda *args, **call: calls.update({f"{module}.{name}": call}) or torch.zeros(3)
    )
    return calls


def on_the_cpu(monkeypatch, peer_us: float = 8.0) -> None:
    """All except the device and the clock: ours take 2 us, a copy 3, a multiplication 4. Contenders make their first and last call."""
    monkeypatch.setattr(report, "begin", lambda method="": HEAD | {"rows": [], "failed": []})
    monkeypatch.setattr("ssmgen.families.slot_copy.bench.copy", lambda state, slots, pdl: lambda i: slots[i])
    monkeypatch.setattr(report, "usable", lambda peers: {name: call for name, call in peers.items() if call})
    monkeypatch.setattr(runtime, "device_arch", lambda index: Arch.parse("sm_90a"))
    monkeypatch.setattr(case, "MOST", 2**17)
    known = {"copy": 3.0, "copy_pdl": 3.0, "mul": 4.0, "sum": 1.0}

    def device_us(contenders, sets, rounds):
        for launch in contenders.values():
            launch(0)
            launch(sets - 1)
        return {name: 2.0 if "ssmgen" in name else known.get(name, peer_us) for name in contenders}

    monkeypatch.setattr(timing, "device_us", device_us)
    monkeypatch.setattr(timing, "host_us", lambda call: call() is not call and 1.0)
    monkeypatch.setattr(timing, "sm_mhz", lambda: 1980)


def without_a_gpu(monkeypatch) -> None:
    """All except the device, the clock and the peers; each peer takes 4 us where we take 2 us."""
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
