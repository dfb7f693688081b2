"""A Mamba-2 layer on one GPU and divided by heads: torchrun --nproc-per-node N -m tools.parallel [--batch N …] [--tokens N …] [--json]

The layer is Nemotron-H 8B's, projections included. Each rank has its heads, the columns of the in-projection and the rows of the
out-projection that belong to them; one all-reduce sums the results. Its heads' outputs have the bits of one GPU, which is checked first,
on the same projected inputs. Times are medians of rounds, and the time of a round is the longest of all ranks; weights exceed any cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

import ssmgen
from tools.context import BF16, both_ways, error

HIDDEN, HEADS, HEADDIM, D_STATE, GROUPS, WIDTH = 4096, 128, 64, 128, 8, 4


class Layer:
    """A layer's weights, all of them or a rank's."""

    def __init__(self, device: str, hidden: int = HIDDEN, heads: int = HEADS, headdim: int = HEADDIM, groups: int = GROUPS):
        self.heads, self.headdim, self.groups, self.group_size = heads, headdim, groups, heads * headdim // groups
        kinds = self.kinds

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=BF16)

        self.into = weight(sum(kinds), hidden) / hidden**0.5  # z, x, B, C, dt, as checkpoints have them
        self.out = weight(hidden, heads * headdim) / (heads * headdim) ** 0.5
        self.conv_weight, self.conv_bias = weight(sum(kinds[1:4]), WIDTH) / 2, weight(sum(kinds[1:4]))
        self.A, self.D = -torch.empty(heads, device=device).uniform_(1, 16), torch.ones(heads, device=device)
        self.dt_bias, self.norm = torch.randn(heads, device=device) - 4, torch.ones(heads * headdim, device=device)

    @property
    def kinds(self) -> list[int]:
        """Channels of z, x, B, C and dt."""
        inner, keys = self.heads * self.headdim, self.groups * D_STATE
        return [inner, inner, keys, keys, self.heads]

    def part(self, rank: int, ranks: int) -> Layer:
        """The heads of a rank."""
        found = copy.copy(self)
        found.heads, found.groups = self.heads // ranks, self.groups // ranks

        def own(t: Tensor, kinds: list[int]) -> Tensor:
            return torch.cat([kind.chunk(ranks)[rank] for kind in t.split(kinds)])

        found.into = own(self.into, self.kinds)
        found.conv_weight, found.conv_bias = (own(t, self.kinds[1:4]) for t in (self.conv_weight, self.conv_bias))
        found.out = self.out.chunk(ranks, 1)[rank].contiguous()
        found.A, found.D, found.dt_bias, found.norm = (t.chunk(ranks)[rank] for t in (self.A, self.D, self.dt_bias, self.norm))
        return found

    def own(self, projected: Tensor, rank: int, ranks: int) -> Tensor:
        """The part of the in-projection's output that belongs to a rank's heads."""
        return torch.cat([kind.chunk(ranks, -1)[rank] for kind in projected.split(self.kinds, -1)], -1)

    def states(self, batch: int) -> dict[str, Tensor]:
        device, channels = self.out.device, sum(self.kinds[1:4])
        return {
            "state": torch.zeros(batch, self.heads, self.headdim, D_STATE, device=device),
            "conv_state": torch.zeros(batch, channels, WIDTH - 1, device=device, dtype=BF16),
            "arrivals": torch.zeros(batch, self.groups, device=device, dtype=torch.int32),
        }

    def step(self, projected: Tensor, states: dict[str, Tensor]) -> Tensor:
        """[batch, H P] of one token each; states are updated."""
        z, xBC, dt = projected.split([self.kinds[0], sum(self.kinds[1:4]), self.heads], -1)
        return ssmgen.mamba2_layer(
            xBC, dt=dt, A=self.A, D=self.D, z=z, dt_bias=self.dt_bias, dt_softplus=True, conv_weight=self.conv_weight,
            conv_bias=self.conv_bias, norm_weight=self.norm, norm_group_size=self.group_size, **states,
        )  # fmt: skip

    def prompt(self, projected: Tensor) -> Tensor:
        """[1, tokens, H P] of a prompt."""
        z, xBC, dt = projected.split([self.kinds[0], sum(self.kinds[1:4]), self.heads], -1)
        mixed = ssmgen.causal_conv1d(xBC.transpose(1, 2), self.conv_weight, self.conv_bias, activation="silu").transpose(1, 2)
        x, B, C = mixed.split(self.kinds[1:4], -1)
        x, B, C = (t.unflatten(-1, (count, -1)) for t, count in ((x, self.heads), (B, self.groups), (C, self.groups)))
        y = ssmgen.chunk_scan(x, dt, self.A, B, C, self.D, dt_bias=self.dt_bias, dt_softplus=True)
        return ssmgen.gated_rms_norm(y.flatten(2), z, self.norm, group_size=self.group_size)

    def run(self, x: Tensor, states: dict[str, Tensor] | None = None) -> Tensor:
        """The layer over hidden states: a prompt, or with states a step. A rank's layer returns its part of the sum."""
        projected = linear(x, self.into)
        return linear(self.prompt(projected) if states is None else self.step(projected, states), self.out)


def summed(t: Tensor) -> Tensor:
    dist.all_reduce(t)
    return t


def checked(layer: Layer, x: Tensor, states: Callable[[Layer], dict[str, Tensor]] | None = None) -> float:
    """The relative error of the sum over ranks. Raises AssertionError where a rank's heads have other bits than on one GPU."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, projected = layer.part(rank, ranks), linear(x, layer.into)
    theirs = layer.own(projected, rank, ranks)
    if states is None:
        got, want = mine.prompt(theirs), layer.prompt(projected)
    else:
        own, all_states = states(mine), states(layer)
        for _ in range(3):
            got, want = mine.step(theirs, own), layer.step(projected, all_states)
        assert torch.equal(own["state"], all_states["state"].chunk(ranks, 1)[rank])
    assert torch.equal(got, want.chunk(ranks, -1)[rank])
    whole = layer.run(x, states and states(layer))
    found = error(summed(mine.run(x, states and states(mine))), whole)
    assert found <= 1e-2, found  # of bf16 sums that are rounded by each rank
    return found


def measured(layer: Layer, kind: str, size: int, rounds: int) -> dict[str, Any]:
    """A row of the table: milliseconds on one GPU, on all, and on all without the sum."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    shape, make = ((size,), lambda one: one.states(size)) if kind == "step" else ((1, size), None)
    x = torch.randn(*shape, layer.out.shape[0], device="cuda", dtype=BF16)
    row: dict[str, Any] = {"kind": kind, "size": size, "error": checked(layer, x, make)}
    mine = layer.part(rank, ranks)
    states, own = make and make(layer), make and make(mine)
    row["one_ms"], row["one_graph_ms"] = both_ways([lambda: layer.run(x, states)], rounds)
    row["ranks_ms"], row["ranks_graph_ms"] = both_ways([lambda: summed(mine.run(x, own))], rounds)
    row["unsummed_ms"], row["unsummed_graph_ms"] = both_ways([lambda: mine.run(x, own)], rounds)
    return row


def told(row: dict[str, Any], ranks: int) -> str:
    what = f"{row['kind']} of {row['size']} {'sequences' if row['kind'] == 'step' else 'tokens'}"
    eager, graph = row["one_ms"] / row["ranks_ms"], row["one_graph_ms"] / row["ranks_graph_ms"]
    return (
        f"{what:24s}: 1 GPU {row['one_ms']:8.3f} ms, graph {row['one_graph_ms']:8.3f}; {ranks} GPUs {row['ranks_ms']:8.3f} "
        f"({eager:.2f} x), graph {row['ranks_graph_ms']:8.3f} ({graph:.2f} x), "
        f"without the sum {row['unsummed_graph_ms']:8.3f}; error {row['error']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.parallel", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, nargs="*", default=(1, 8, 64, 256), help="Sequences of a step.")
    parser.add_argument("--tokens", type=int, nargs="*", default=(512, 4096, 32768), help="Tokens of a prompt.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="Also print one JSON document, as the last line.")
    chosen = parser.parse_args()
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        parser.exit(2, f"{', '.join(missing)} is not set. Run `torchrun --nproc-per-node N -m tools.parallel`.\n")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    layer, ranks = Layer("cuda"), dist.get_world_size()
    rows = []
    for kind, sizes in (("step", chosen.batch), ("prompt", chosen.tokens)):
        for size in sizes:
            rows.append(measured(layer, kind, size, chosen.rounds))
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(told(rows[-1], ranks), flush=True)
    if chosen.json and dist.get_rank() == 0:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": ranks, "rows": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
