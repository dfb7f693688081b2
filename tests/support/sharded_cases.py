"""Calls of the operators on tensors that lie on several ranks, compared with the same calls on whole ones, bit for bit.

Every case is a function of a mesh of all ranks and runs on each of them; which device that is makes no difference to it.
"""

from __future__ import annotations

import copy
import datetime
import json
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_calls import BATCH, BF16, STEPS, H, N, P, Tensors, calls, linear, mamba, normal, pool

import ssmgen
from ssmgen.calls.sharding import Axis
from ssmgen.spec.family import parts


def distribute(mesh: Any, function: str, call: Tensors, over: str | None, placed: str) -> Tensors:
    """The call's tensors on the mesh: all that is written sharded `over` "head" or "batch", the others too ("sharded") or "replicated"."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rule = parts("sharding")[function].of(call)
    dims = {n: t.dim() for n, t in call.items() if isinstance(t, torch.Tensor)}
    anchor = next(n for n in rule.anchors if n in dims)

    def placement(name: str) -> Any:
        words = [Axis.of(word).word for word in rule.axes_of(name, dims, dims[name])]
        ours = placed == "sharded" or name in rule.written or name == anchor
        word = "group" if over == "head" and "group" in words and call[name].shape[words.index("group")] % mesh.size() == 0 else over
        return Shard(words.index(word)) if ours and word in words else Replicate()

    def one(name: str, t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not (t.is_floating_point() or name in rule.written):
            return t
        return distribute_tensor(t.clone(), mesh, [placement(name)])

    return {name: one(name, t) for name, t in call.items()}


def piece(t: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    """This rank's part."""
    from torch.distributed.tensor import Shard

    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            pieces = t.chunk(mesh.size(axis), p.dim)
            mine = mesh.get_coordinate()[axis]
            t = pieces[mine] if mine < len(pieces) else t.narrow(p.dim, 0, 0)
    return t.clone()


def on(mesh: Any, t: torch.Tensor, *placements: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(piece(t, mesh, placements), mesh, placements, run_check=False, shape=t.shape, stride=t.stride())


def everywhere(mesh: Any, call: Tensors) -> Tensors:
    from torch.distributed.tensor import Replicate

    return {n: on(mesh, t, *[Replicate()] * mesh.ndim) if isinstance(t, torch.Tensor) else t for n, t in call.items()}


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


LOOSE = {"skinny_linear": 1e-5}  # torch's products on a CPU have other bits for other numbers of columns


def same(got: Any, want: Any, within: float = 0.0) -> None:
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True):
        a = whole(a)
        assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape)
        assert torch.equal(a, b) or (within and torch.allclose(a, b, 0, within)), (a.float() - b.float()).abs().max()


def agrees(mesh: Any, function: str, call: Tensors, over: str, placed: str) -> None:
    """Several steps: their results and all that they write."""
    from torch.distributed.tensor import DTensor, Shard

    run, mine = getattr(ssmgen, function), copy.deepcopy(call)
    theirs = distribute(mesh, function, call, over, placed)
    for _ in range(STEPS):
        want, got = run(**mine), run(**theirs)
        first = got[0] if isinstance(got, tuple) else got
        assert isinstance(first, DTensor) and isinstance(first.placements[0], Shard)
        assert first.stride() == whole(first).stride()
        same(got, want, LOOSE.get(function, 0.0))
    for name in parts("sharding")[function].written:
        if name in call:
            same(theirs[name], mine[name], LOOSE.get(function, 0.0))


def local_shards_agree(mesh: Any, function: str, call: Tensors) -> None:
    """Each rank's plain tensors give its part of the DTensors' result."""
    run = getattr(ssmgen, function)
    theirs, mine = (distribute(mesh, function, call, "head", "sharded") for _ in range(2))
    local = {n: t.to_local() if hasattr(t, "to_local") else t for n, t in mine.items()}
    for _ in range(STEPS):
        want, got = run(**theirs), run(**local)
        for a, b in zip(*[r if isinstance(r, tuple) else (r,) for r in (got, want)], strict=True):
            assert torch.equal(a, b.to_local())
    for name in parts("sharding")[function].written:
        if name in call:
            assert torch.equal(mine[name].to_local(), theirs[name].to_local())


class Layer:
    """A decode step of Mamba-2 or of a gated delta rule from the convolution to the output projection, on whole or distributed tensors."""

    def __init__(self, device: str, kind: str):
        torch.manual_seed(1)
        self.kind = kind
        self.conv_state, self.weight = normal(device, BATCH, H * P, 3, dtype=BF16), normal(device, H * P, 4, dtype=BF16)
        self.call = mamba(device, 2) if kind == "mamba2" else linear(device, "gated_delta_rule", 2)
        self.project = normal(device, H * P, 24)

    @property
    def function(self) -> str:
        return "selective_state_update" if self.kind == "mamba2" else "gated_delta_rule"

    @property
    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv_state, self.call["state"]

    def on(self, mesh: Any) -> Layer:
        """Its heads and channels over the mesh."""
        from torch.distributed.tensor import Shard, distribute_tensor

        other = copy.copy(self)
        other.conv_state, other.weight = (
            distribute_tensor(t.clone(), mesh, [Shard(d)]) for t, d in ((self.conv_state, 1), (self.weight, 0))
        )
        other.project = distribute_tensor(self.project, mesh, [Shard(0)])
        other.call = distribute(mesh, self.function, self.call, "head", "sharded")
        return other

    def local(self) -> Layer:
        """This rank's part of one that is on a mesh."""
        other = copy.copy(self)
        other.conv_state, other.weight, other.project = (t.to_local() for t in (self.conv_state, self.weight, self.project))
        other.call = {n: t.to_local() if isinstance(t, torch.Tensor) else t for n, t in self.call.items()}
        return other

    def step(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs of the heads [batch, H, P], their projection [batch, 24])"""
        x = ssmgen.causal_conv1d_update(x, self.conv_state, self.weight, activation="silu")
        heads = x.unflatten(1, (-1, P))
        y = getattr(ssmgen, self.function)(**self.call | {"x" if self.kind == "mamba2" else "v": heads})
        return y, y.flatten(1).float() @ self.project


def layer(mesh: Any, device: str, kind: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    one = Layer(device, kind)
    spread, mine = one.on(mesh), one.on(mesh).local()
    with torch.no_grad():
        for _ in range(5):
            x = normal(device, BATCH, H * P, dtype=BF16)
            on_mesh = distribute_tensor(x, mesh, [Shard(1)])
            want, projected = one.step(x)
            y, summed = spread.step(on_mesh)
            same(y, want)
            torch.testing.assert_close(whole(summed), projected, rtol=1e-4, atol=1e-4)
            local, part = mine.step(on_mesh.to_local())
            assert torch.equal(local, y.to_local())
            dist.all_reduce(part)
            torch.testing.assert_close(part, projected, rtol=1e-4, atol=1e-4)
    for got, want in zip(spread.states, one.states, strict=True):
        same(got, want)
    for got, want in zip(mine.states, spread.states, strict=True):
        assert torch.equal(got, want.to_local())


def other_placements_are_redistributed(mesh: Any, device: str) -> None:
    """A sum that is still in parts, a shard along the wrong axis, a rank's slice of a replicated tensor."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    torch.manual_seed(0)
    call = mamba(device, 2)
    part = call["x"] * (mesh.get_local_rank() == 0)  # the others add zeros
    theirs = distribute(mesh, "selective_state_update", call, "head", "replicated")
    theirs |= {"x": DTensor.from_local(part, mesh, [Partial()]), "B": theirs["B"].redistribute(placements=[Shard(2)])}
    theirs |= {"z": theirs["z"].redistribute(placements=[Shard(0)])}
    want = ssmgen.selective_state_update(**call)
    same(ssmgen.selective_state_update(**theirs), want)
    same(theirs["state"], call["state"])


def sequences_in_unequal_parts(mesh: Any, device: str) -> None:
    torch.manual_seed(0)
    for batch in (3, 1):
        call = {n: t[:batch] if isinstance(t, torch.Tensor) and t.shape[0] == BATCH and n not in ("A", "D", "dt_bias") else t
                for n, t in mamba(device, 2).items()}  # fmt: skip
        agrees(mesh, "selective_state_update", call, "batch", "sharded")


def a_ring_and_its_commit(mesh: Any, device: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    call = pool(device, linear(device, "gated_delta_rule", 2, (3,)), "state", "state_indices")
    gate = {n: call[n] for n in ("A_log", "dt_bias", "use_qk_l2norm")}
    ring = [torch.zeros(BATCH + 2, 3, *call[n].shape[2:], dtype=call[n].dtype, device=device) for n in ("k", "v", "g", "beta")]
    theirs = distribute(mesh, "gated_delta_rule", call, "head", "sharded")
    their_ring = ssmgen.Ring(*[distribute_tensor(t.clone(), mesh, [Shard(2)]) for t in ring])
    accepted = torch.tensor([2, 3, 0, 1], device=device)
    indices = call["state_indices"]
    for _ in range(2):
        want = ssmgen.gated_delta_rule(**call, update_state=False, ring=ring)
        same(ssmgen.gated_delta_rule(**theirs, update_state=False, ring=their_ring), want)
        ssmgen.gated_delta_rule_commit(call["state"], ring, accepted, **gate, state_indices=indices)
        kept = ssmgen.gated_delta_rule_commit(
            theirs["state"], their_ring, accepted, **{n: theirs[n] for n in gate}, state_indices=indices
        )  # fmt: skip
        assert kept is theirs["state"]
        same(kept, call["state"])
    same(tuple(their_ring), tuple(ring))


def an_output_that_is_given(mesh: Any, device: str) -> None:
    torch.manual_seed(0)
    call = mamba(device, 2)
    call["out"] = torch.zeros_like(call["x"])
    theirs = distribute(mesh, "selective_state_update", call, "head", "sharded")
    want = ssmgen.selective_state_update(**call)
    assert ssmgen.selective_state_update(**theirs) is theirs["out"]
    same(theirs["out"], want)


def compiled(mesh: Any, device: str) -> None:
    """Compiles a convolution and the operator after it into one graph."""
    from torch.distributed.tensor import Shard, distribute_tensor

    one = Layer(device, "gdn")
    spread = one.on(mesh)
    step = torch.compile(lambda x: spread.step(x)[0], backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            x = normal(device, BATCH, H * P, dtype=BF16)
            same(step(distribute_tensor(x, mesh, [Shard(1)])), one.step(x)[0])
    for got, want in zip(spread.states, one.states, strict=True):
        same(got, want)


def channels_of_a_layer(mesh: Any, device: str) -> None:
    """Each rank has a window of its heads' x, B and C. The projection is a sum that is still in parts, or a shard along a wrong axis."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    rank, parts, G = mesh.get_local_rank(), mesh.size(), mesh.size()
    kinds = [H * P, G * N, G * N]
    call = {name: t for name, t in mamba(device, G).items() if name in ("state", "dt", "A", "D", "dt_bias")}
    call |= {"xBC": normal(device, BATCH, sum(kinds), dtype=BF16), "conv_state": normal(device, BATCH, sum(kinds), 3, dtype=BF16)}
    call |= {"conv_weight": normal(device, sum(kinds), 4), "conv_bias": None, "z": normal(device, BATCH, H * P, dtype=BF16)}
    call |= {"arrivals": torch.zeros(BATCH, G, dtype=torch.int32, device=device)}

    def mine(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([kind.chunk(parts, 1)[rank] for kind in t.split(kinds, 1)], 1)

    theirs = {n: distribute_tensor(t.clone(), mesh, [Replicate()]) for n, t in call.items() if t is not None and n != "arrivals"}
    theirs |= {"arrivals": call["arrivals"].clone(), "conv_bias": None, "z": theirs["z"].redistribute(placements=[Shard(0)])}
    theirs |= {"state": distribute_tensor(call["state"].clone(), mesh, [Shard(1)])}
    theirs |= {"conv_state": DTensor.from_local(mine(call["conv_state"]), mesh, [Shard(1)])}
    for placement, part in ((Partial(), call["xBC"] * (rank == 0)), (Shard(0), call["xBC"].chunk(parts)[rank])):
        theirs["xBC"] = DTensor.from_local(part, mesh, [placement])
        same(ssmgen.mamba2_layer(**theirs), ssmgen.mamba2_layer(**call))
    same(theirs["state"], call["state"])
    assert torch.equal(theirs["conv_state"].to_local(), mine(call["conv_state"]))


def cases(device: str) -> dict[str, Callable[[Any], None]]:
    found: dict[str, Callable[[Any], None]] = {}
    for name, (function, call) in calls(device).items():
        for placed in ("sharded", "replicated"):
            found[f"{name}-over-heads-{placed}"] = lambda mesh, f=function, c=call, p=placed: agrees(mesh, f, c, "head", p)
        if function != "mamba3_layer":  # every rank has whole rows of its in-projection, and a part of the heads
            found[f"{name}-local"] = lambda mesh, f=function, c=call: local_shards_agree(mesh, f, c)
        if not any("indices" in n or "positions" in n for n in call) and function not in ("causal_conv1d", "skinny_linear"):
            found[f"{name}-over-sequences"] = lambda mesh, f=function, c=call: agrees(mesh, f, c, "batch", "replicated")
    return found | {
        "layer-mamba2": lambda mesh: layer(mesh, device, "mamba2"),
        "layer-gdn": lambda mesh: layer(mesh, device, "gdn"),
        "layer-channels": lambda mesh: channels_of_a_layer(mesh, device),
        "redistributed": lambda mesh: other_placements_are_redistributed(mesh, device),
        "unequal": lambda mesh: sequences_in_unequal_parts(mesh, device),
        "ring": lambda mesh: a_ring_and_its_commit(mesh, device),
        "out": lambda mesh: an_output_that_is_given(mesh, device),
        "compiled": lambda mesh: compiled(mesh, device),
    }


def in_a_graph(mesh: Any, device: str, kind: str, plain: bool) -> None:
    """A captured step, replayed, equals steps on whole tensors. It communicates nothing."""
    from torch.distributed.tensor import Shard, distribute_tensor

    one = Layer(device, kind)
    mine = one.on(mesh).local() if plain else one.on(mesh)
    x = distribute_tensor(torch.zeros(BATCH, H * P, dtype=BF16, device=device), mesh, [Shard(1)])
    given, states = x.to_local() if plain else x, [on_rank(t) for t in mine.states]
    before = [t.clone() for t in states]
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # builds and loads what the step needs
            mine.step(given)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads may call what a capture forbids
            y, _ = mine.step(given)
        for state, first in zip(states, before, strict=True):
            state.copy_(first)
        for _ in range(5):
            token = normal(device, BATCH, H * P, dtype=BF16)
            on_rank(x).copy_(token.chunk(mesh.size(), 1)[mesh.get_local_rank()])
            graph.replay()
            want, _ = one.step(token)
            assert torch.equal(on_rank(y), want.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    for state, want in zip(states, one.states, strict=True):
        assert torch.equal(state, want.chunk(mesh.size(), 1)[mesh.get_local_rank()])


def on_rank(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def cases_on_cards(device: str) -> dict[str, Callable[[Any], None]]:
    return cases(device) | {
        f"graph-{kind}-{'shards' if plain else 'dtensors'}": lambda mesh, k=kind, p=plain: in_a_graph(mesh, device, k, p)
        for kind in ("mamba2", "gdn")
        for plain in (False, True)
    }


# Processes.

PATIENCE = datetime.timedelta(seconds=100)  # time to wait for another rank, which may have failed


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


Cases = Callable[[str], dict[str, Callable[[Any], None]]]  # of a device


def rank_main(rank: int, ranks: int, port: int, device_type: str, directory: str, all_cases: Cases) -> None:
    """One rank: runs all cases and writes the failures by case. device_type: "cuda" for one card per rank, over NCCL; "shared" for one card
    that all ranks share, over gloo; "cpu"."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0"}
    torch.set_num_threads(1)
    device = {"cuda": f"cuda:{rank}", "shared": "cuda:0"}.get(device_type, "cpu")
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    how = {"backend": "nccl", "device_id": torch.device(device)} if device_type == "cuda" else {"backend": "gloo"}
    dist.init_process_group(**how, rank=rank, world_size=ranks, timeout=PATIENCE)
    from torch.distributed.device_mesh import init_device_mesh

    mesh, outcomes = init_device_mesh("cpu" if device_type == "shared" else device_type, (ranks,)), {}
    for name, case in all_cases(device).items():
        try:
            case(mesh)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    Path(directory, f"{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


def failures(ranks: int, device_type: str, directory: Path, all_cases: Cases, least: int = 90) -> str:
    """The failures on `ranks` processes, by case and rank, as text. All cases share the processes, which take seconds to start. least: the
    smallest number of cases allowed."""
    arguments = (ranks, free_port(), device_type, str(directory), all_cases)
    # On the CPU ranks are forked from one process that has loaded torch: each would take 4 s for that. CUDA forbids it.
    how = "forkserver" if device_type == "cpu" and "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if how == "forkserver":
        multiprocessing.get_context(how).set_forkserver_preload(["sharded_cases", "context_cases", "torch.distributed.tensor"])
    torch.multiprocessing.start_processes(rank_main, arguments, ranks, start_method=how)
    found = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(len(of_rank) >= least for of_rank in found)
    return "\n".join(f"{case}, rank {rank}:\n{of_rank[case]}" for rank, of_rank in enumerate(found) for case in of_rank if of_rank[case])
