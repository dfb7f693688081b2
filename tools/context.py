"""One GPU against several, for long prompts: torchrun --nproc-per-node N -m tools.context [--tokens N …] [--json] [NAME …]

Every process has the whole prompt and times it on its own GPU. Then the group has the prompt, a piece on each GPU. Each time is the median
over rounds, and the time of a round is the longest of all ranks; `graph` is the same call, captured and replayed. Inputs of short prompts
rotate, so that they come from memory and not from the cache. Outputs and final states of the pieces are first compared
with one GPU's: an error above the bound ends the program. One process measures the times of one GPU only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ssmgen
from ssmgen import distributed

BF16 = torch.bfloat16
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072, 262144)
COLD_BYTES = 3e8  # of inputs that rotate, six times an H100's cache
SETS = 8  # at most, of them: each captured call keeps a workspace


class Prompt(NamedTuple):
    """A call over a prompt, which several ranks may divide."""

    function: str
    call: dict[str, Any]
    axes: dict[str, int]  # of the operands that have tokens, which axis these are
    bound: float  # relative L2 error against one GPU, of outputs and states: two roundings to bf16, or none

    def piece(self, rank: int, ranks: int) -> dict[str, Any]:
        """A rank's arguments. The number of tokens is a multiple of ranks."""
        return {n: self.of(t, self.axes[n], rank, ranks) if n in self.axes else t for n, t in self.call.items()}

    @staticmethod
    def of(t: torch.Tensor, axis: int, rank: int, ranks: int) -> torch.Tensor:
        each = t.shape[axis] // ranks
        return t.narrow(axis, rank * each, each)

    @property
    def tokens_axis(self) -> int:
        """The axis of tokens in the output."""
        return self.axes["x" if "x" in self.axes else "v"]


class Errors(NamedTuple):
    """The largest relative L2 error of all ranks, against one GPU."""

    outputs: float
    states: float


def mamba2(tokens: int, device: str = "cuda", slow: bool = False, heads: int = 128, groups: int = 8) -> Prompt:
    """Heads of 64, d_state 128. slow: decays as at the start of Mamba-2's training, where the slowest heads remember thousands of
    tokens and none remembers 16 384; otherwise steps of about 0.7, which leave little of a token after 100 more."""
    step = torch.empty(heads, device=device).uniform_(-6.9, -2.3).exp()
    call = {
        "x": torch.randn(1, tokens, heads, 64, device=device, dtype=BF16),
        "dt": torch.randn(1, tokens, heads, device=device, dtype=BF16) * (0.3 if slow else 1),
        "A": -torch.empty(heads, device=device).uniform_(1, 16),
        "B": torch.randn(1, tokens, groups, 128, device=device, dtype=BF16),
        "C": torch.randn(1, tokens, groups, 128, device=device, dtype=BF16),
        "D": torch.randn(heads, device=device, dtype=BF16),
        "dt_bias": (step + torch.log(-torch.expm1(-step)) if slow else torch.zeros_like(step)).to(BF16),
        "dt_softplus": True,
    }
    return Prompt("chunk_scan", call, dict.fromkeys(("x", "dt", "B", "C"), 1), 1e-2)


def gdn(tokens: int, device: str = "cuda", keys: int = 16, heads: int = 64) -> Prompt:
    call = {
        "q": torch.randn(1, tokens, keys, 128, device=device, dtype=BF16),
        "k": torch.randn(1, tokens, keys, 128, device=device, dtype=BF16),
        "v": torch.randn(1, tokens, heads, 128, device=device, dtype=BF16),
        "g": -torch.rand(1, tokens, heads, device=device) * 0.01,
        "beta": torch.rand(1, tokens, heads, device=device, dtype=BF16),
        "use_qk_l2norm": True,
    }
    return Prompt("chunk_gated_delta_rule", call, dict.fromkeys(("q", "k", "v", "g", "beta"), 1), 1e-2)


def kda(tokens: int, device: str = "cuda", heads: int = 32) -> Prompt:
    found = gdn(tokens, device, heads, heads)
    gates = (-torch.rand(1, tokens, heads, 128, device=device) * 0.01).to(BF16)
    return found._replace(function="chunk_kda", call=found.call | {"g": gates})


def convolution(tokens: int, device: str = "cuda", channels: int = 10240) -> Prompt:
    """The channels of `mamba2`, tokens first as projections leave them. No product is rounded, so each output has the bits of one GPU."""
    call = {
        "x": torch.randn(1, tokens, channels, device=device, dtype=BF16).transpose(1, 2),
        "weight": torch.randn(channels, 4, device=device, dtype=BF16),
        "bias": torch.randn(channels, device=device, dtype=BF16),
        "activation": "silu",
    }
    return Prompt("causal_conv1d", call, {"x": 2}, 0.0)


CASES: dict[str, Callable[..., Prompt]] = {
    "mamba2": mamba2,
    "mamba2-slow": lambda tokens, device="cuda", **sizes: mamba2(tokens, device, slow=True, **sizes),
    "gdn-16-64": gdn,
    "gdn-4-16": lambda tokens, device="cuda", keys=4, heads=16: gdn(tokens, device, keys, heads),
    "kda-32": kda,
    "conv": convolution,
}


def checked(prompt: Prompt) -> Errors:
    """The errors of a prompt over all ranks, and of the same without final states. Raises AssertionError on all ranks above the bound."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    want, final = getattr(ssmgen, prompt.function)(**prompt.call, return_final_states=True)
    run, mine = getattr(distributed, prompt.function), prompt.piece(rank, ranks)
    (got, ends), alone = run(**mine, return_final_states=True), run(**mine)
    own = prompt.of(want, prompt.tokens_axis, rank, ranks)
    worst = torch.tensor([max(error(got, own), error(alone, own)), error(ends, final)], device=want.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    found = Errors(*worst.tolist())
    assert max(found) <= prompt.bound, f"{prompt.function} over {ranks} ranks: {found}; the bound is {prompt.bound}"
    return found


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, in the L2 norm; infinite where it is not a number, which a maximum over ranks would lose."""
    found = float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30))
    return math.inf if math.isnan(found) else found


def milliseconds(calls: Sequence[Callable[[], Any]], rounds: int) -> float:
    """The median over rounds of the longest time of all ranks. Rounds take the calls in turn."""
    samples = []
    for i in range(-2, rounds):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        longest = torch.tensor(start.elapsed_time(end), device="cuda")
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        samples.append(float(longest))
    return statistics.median(samples[2:])


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads may call what a capture forbids
        call()
    return graph.replay


def both_ways(calls: Sequence[Callable[[], Any]], rounds: int) -> tuple[float, float]:
    """(eager, captured)"""
    return milliseconds(calls, rounds), milliseconds([captured(call) for call in calls], rounds)


def measured(name: str, tokens: int, rounds: int) -> dict[str, Any]:
    """A row of the table: milliseconds, and errors."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = CASES[name](tokens)
    size = sum(t.nbytes for t in first.call.values() if isinstance(t, torch.Tensor))
    prompts = [first, *[CASES[name](tokens) for _ in range(min(SETS, math.ceil(COLD_BYTES / size)) - 1)]]
    run, over = getattr(ssmgen, first.function), getattr(distributed, first.function)
    row: dict[str, Any] = {"case": name, "tokens": tokens, "sets": len(prompts)}
    errors = checked(first) if ranks > 1 else None
    row["one_ms"], row["one_graph_ms"] = both_ways([lambda p=p: run(**p.call) for p in prompts], rounds)  # type: ignore[misc]
    if errors is not None:
        pieces = [p.piece(rank, ranks) for p in prompts]
        row["ranks_ms"], row["ranks_graph_ms"] = both_ways([lambda mine=mine: over(**mine) for mine in pieces], rounds)  # type: ignore[misc]
        row |= {"error_outputs": errors.outputs, "error_states": errors.states, "bound": first.bound}
    return row


def wins_from(rows: Iterable[dict[str, Any]], how: str) -> int | None:
    """The length from which on several ranks take less time than one, of one case's rows in the order of their tokens; None if never."""
    found = None
    for row in rows:
        wins = row[f"ranks_{how}ms"] < row[f"one_{how}ms"]
        found = (found or row["tokens"]) if wins else None
    return found


def told(row: dict[str, Any], ranks: int) -> str:
    line = f"{row['case']:12s} {row['tokens']:7d} tokens: 1 GPU {row['one_ms']:8.3f} ms, graph {row['one_graph_ms']:8.3f}"
    if ranks == 1:
        return line
    eager, graph = row["one_ms"] / row["ranks_ms"], row["one_graph_ms"] / row["ranks_graph_ms"]
    times = f"{ranks} GPUs {row['ranks_ms']:8.3f} ms ({eager:.2f} x), graph {row['ranks_graph_ms']:8.3f} ({graph:.2f} x)"
    return f"{line}; {times}; error of outputs {row['error_outputs']:.1e}, of states {row['error_states']:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.context", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; all of them if there is none")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="Tokens of all ranks together. Default: 4096 … 262144.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="Also print one JSON document, as the last line.")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in CASES]:
        parser.error(f"{', '.join(unknown)} is not a case; expected {', '.join(CASES)}")
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        parser.exit(2, f"{', '.join(missing)} is not set. Run `torchrun --nproc-per-node N -m tools.context`, N = 1 for one GPU.\n")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks, rows = dist.get_world_size(), []
    if wrong := [n for n in chosen.tokens if n < ranks or n % ranks]:
        parser.error(f"--tokens is {wrong[0]}; expected a multiple of {ranks} processes")
    for name in chosen.names or CASES:
        own = []
        for tokens in sorted(chosen.tokens):
            own.append(measured(name, tokens, chosen.rounds))
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(told(own[-1], ranks), flush=True)
        if ranks > 1 and dist.get_rank() == 0:
            eager, graph = (wins_from(own, how) for how in ("", "graph_"))
            print(f"{name:12s} {ranks} GPUs take less time from {eager} tokens on, captured from {graph} on", flush=True)
        rows += own
    if chosen.json and dist.get_rank() == 0:
        card = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "nccl": list(torch.cuda.nccl.version())}
        print(json.dumps(card | {"ranks": ranks, "rounds": chosen.rounds, "rows": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
