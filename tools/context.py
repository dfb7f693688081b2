"""One GPU against several, for a long prompt: torchrun --nproc-per-node N -m tools.context [--tokens 262144] [NAME …]

Every process has all of the prompt and times it whole, on its own GPU; then the group has it, a piece on each. A time is the median of
rounds, of a round the longest of all ranks; `graph` is the same call captured and replayed. Outputs of the pieces are compared with those
of the whole first: their relative error, and that of the final states, is in the table. Inputs are not rotated: those of one call exceed
any cache. With one process, the times of the whole only.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ssmgen
from ssmgen import distributed

Call = tuple[str, dict[str, Any], dict[str, int]]  # function, its arguments, and by name the axis of tokens


def mamba2(tokens: int, slow: bool) -> Call:
    """128 heads of 64, d_state 128, 8 groups. slow: decays as Mamba-2 begins its training with, of which some heads keep all; otherwise
    steps of 0.7 or so, of which little is left after 100 tokens."""
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    heads = 128
    step = torch.empty(heads, device="cuda").uniform_(-6.9, -2.3).exp()
    call = {
        "x": torch.randn(1, tokens, heads, 64, **bf16),
        "dt": torch.randn(1, tokens, heads, **bf16) * (0.3 if slow else 1),
        "A": -torch.empty(heads, device="cuda").uniform_(1, 16),
        "B": torch.randn(1, tokens, 8, 128, **bf16),
        "C": torch.randn(1, tokens, 8, 128, **bf16),
        "D": torch.randn(heads, **bf16),
        "dt_bias": (step + torch.log(-torch.expm1(-step)) if slow else torch.zeros_like(step)).bfloat16(),
        "dt_softplus": True,
    }
    return "chunk_scan", call, dict.fromkeys(("x", "dt", "B", "C"), 1)


def gdn(tokens: int, keys: int = 16, heads: int = 64) -> Call:
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    call = {
        "q": torch.randn(1, tokens, keys, 128, **bf16),
        "k": torch.randn(1, tokens, keys, 128, **bf16),
        "v": torch.randn(1, tokens, heads, 128, **bf16),
        "g": -torch.rand(1, tokens, heads, device="cuda") * 0.01,
        "beta": torch.rand(1, tokens, heads, **bf16),
        "use_qk_l2norm": True,
    }
    return "chunk_gated_delta_rule", call, dict.fromkeys(("q", "k", "v", "g", "beta"), 1)


def kda(tokens: int, heads: int = 32) -> Call:
    _, call, axes = gdn(tokens, heads, heads)
    return "chunk_kda", call | {"g": (-torch.rand(1, tokens, heads, 128, device="cuda") * 0.01).bfloat16()}, axes


CASES: dict[str, Callable[[int], Call]] = {
    "mamba2": lambda tokens: mamba2(tokens, False),
    "mamba2-slow": lambda tokens: mamba2(tokens, True),
    "gdn-16-64": gdn,
    "gdn-4-16": lambda tokens: gdn(tokens, 4, 16),
    "kda-32": kda,
}


def milliseconds(call: Callable[[], Any], rounds: int) -> float:
    """The median over rounds of the longest time of all ranks."""
    samples = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
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


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30))


def timed(name: str, tokens: int, rounds: int) -> str:
    torch.manual_seed(0)
    function, call, axes = CASES[name](tokens)
    run, rank, ranks = getattr(ssmgen, function), dist.get_rank(), dist.get_world_size()
    one = milliseconds(lambda: run(**call), rounds)
    said = f"{name:12s} {tokens:7d} tokens: 1 GPU {one:7.3f} ms"
    if ranks == 1:
        return said
    want, final = run(**call, return_final_states=True)
    piece = tokens // ranks
    mine = {n: t.narrow(axes[n], rank * piece, piece) if n in axes else t for n, t in call.items()}
    over = getattr(distributed, function)
    got, ends = over(**mine, return_final_states=True)
    errors = torch.tensor([error(got, want.narrow(1, rank * piece, piece)), error(ends, final)], device="cuda")
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    del want, got
    several = milliseconds(lambda: over(**mine), rounds)
    in_graph = milliseconds(captured(lambda: over(**mine)), rounds)
    times = f"{ranks} GPUs {several:7.3f} ms ({one / several:.2f} x), graph {in_graph:7.3f} ms ({one / in_graph:.2f} x)"
    return f"{said}, {times}; error of outputs {float(errors[0]):.1e}, of states {float(errors[1]):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; all of them if there is none")
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for name in chosen.names or CASES:
        said = timed(name, chosen.tokens, chosen.rounds)
        if dist.get_rank() == 0:
            print(said, flush=True)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
