"""skinny_linear on DTensors: weights whose rows are divided among ranks, one and several."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("torch.distributed.tensor")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ssmgen
from ssmgen.errors import ArgumentError


@contextmanager
def rank_of(rank, size):
    """The mesh as one rank of it sees it, without communication."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        torch.distributed.destroy_process_group()


def on(mesh, t, axis=None):
    """A tensor that all ranks have, or of which each has its part of an axis."""
    part = t if axis is None else t.chunk(mesh.size(), axis)[mesh.get_local_rank()]
    return DTensor.from_local(part, mesh, [Replicate() if axis is None else Shard(axis)], run_check=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_weights_are_divided(rank):
    torch.manual_seed(0)
    x, weights, biases = torch.randn(2, 1, 24), [torch.randn(n, 24) for n in (32, 16)], [torch.randn(n) for n in (32, 16)]
    want = ssmgen.skinny_linear(x, weights, biases)
    with rank_of(rank, 2) as mesh:
        one = ssmgen.skinny_linear(on(mesh, x), on(mesh, weights[0], 0), on(mesh, biases[0], 0))
        two = ssmgen.skinny_linear(on(mesh, x), [on(mesh, w, 0) for w in weights], [on(mesh, b, 0) for b in biases])
        assert one.shape == (2, 1, 32) and one.placements == (Shard(2),) and len(two) == 2
        for got, whole in zip((one, *two), (want[0], *want), strict=True):
            assert got.shape == whole.shape and torch.equal(got.to_local(), whole.chunk(2, -1)[rank])


def test_more_weights_than_a_call_takes_are_refused():
    with rank_of(0, 2) as mesh, pytest.raises(ArgumentError, match="expected a tensor"):
        ssmgen.skinny_linear(on(mesh, torch.randn(1, 24)), [on(mesh, torch.randn(16, 24), 0)] * 5)


@pytest.mark.parametrize("rank", [0, 1])
def test_scales_are_divided_as_their_weights(rank):
    torch.manual_seed(0)
    x, scales = torch.randn(2, 1, 32).bfloat16(), [torch.rand(n) for n in (32, 16)]
    weights = [torch.randint(-128, 128, (n, 32)).to(torch.int8) for n in (32, 16)]
    want = ssmgen.skinny_linear(x, weights, scale=scales)
    with rank_of(rank, 2) as mesh:
        one = ssmgen.skinny_linear(on(mesh, x), on(mesh, weights[0], 0), scale=on(mesh, scales[0], 0))
        two = ssmgen.skinny_linear(on(mesh, x), [on(mesh, w, 0) for w in weights], scale=[on(mesh, s, 0) for s in scales])
        for got, whole in zip((one, *two), (want[0], *want), strict=True):
            assert got.shape == whole.shape and torch.equal(got.to_local(), whole.chunk(2, -1)[rank])


@pytest.mark.parametrize("rank", [0, 1])
def test_gates_and_residuals_are_divided_and_the_norm_is_not(rank):
    torch.manual_seed(0)
    x, weights, norm, residual = torch.randn(3, 24), [torch.randn(32, 24) for _ in range(2)], torch.rand(24), torch.randn(3, 32)
    how = {"activation": "silu_and_mul", "eps": 1e-5}
    want = ssmgen.skinny_linear(x, weights, norm_weight=norm, residual=residual, **how)
    with rank_of(rank, 2) as mesh:
        two = [on(mesh, w, 0) for w in weights]
        got = ssmgen.skinny_linear(on(mesh, x), two, norm_weight=on(mesh, norm), residual=on(mesh, residual, 1), **how)
        assert got.shape == want.shape and torch.allclose(got.to_local(), want.chunk(2, -1)[rank], atol=1e-5)
