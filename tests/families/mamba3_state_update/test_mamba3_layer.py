"""mamba3_layer: mamba3_state_update on views of the projected row, without a copy of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.mamba3_state_update import call, layer
from selection import costly
from test_fast_path import launched  # noqa: F401  # a fixture
from test_mamba3_state_update import emulated, run
from torch import Tensor

import ssmgen
from ssmgen.engine.accuracy import norm_error
from ssmgen.errors import ArgumentError
from ssmgen.families.mamba3_state_update.operands import POOLS
from ssmgen.families.mamba3_state_update.planning import CALLER
from ssmgen.families.mamba3_state_update.row import PARTS
from ssmgen.select import registry
from ssmgen.spec.kernel import SM90

MIMO = ("mimo_x", "mimo_z", "mimo_o")


def pair(*tokens: int, R: int = 2, norm: bool = False, gap: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of mamba3_state_update, of mamba3_layer) with equal values; `gap` elements lie between two rows of `projected`."""
    torch.manual_seed(R)
    given = call()
    batch, (H, P) = given["x"].shape[0], given["x"].shape[1:]
    for name in (*PARTS, "out"):
        given[name] = torch.randn(batch, *tokens, *given[name].shape[1:])
    if R == 1:
        given = {name: t for name, t in given.items() if name not in MIMO}
        given |= {name: given[name][:, :1].clone() for name in ("k_state", "B_bias", "C_bias")}
        given |= {name: given[name].narrow(-3, 0, 1).clone() for name in ("B", "C")}
    if norm:
        given["norm_weight"] = torch.rand(H, P)
    row = torch.cat([given[name].flatten(1 + len(tokens)) for name in PARTS], -1)
    wide = torch.full((*row.shape[:-1], row.shape[-1] + gap), torch.nan)
    wide[..., : row.shape[-1]] = row
    ours = {name: t.clone() if isinstance(t, Tensor) else t for name, t in given.items() if name not in PARTS}
    ours |= {"projected": wide[..., : row.shape[-1]], "out": given["out"].flatten(-2).clone()}
    return given, ours | ({"norm_weight": given["norm_weight"].flatten()} if norm else {})


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize("tokens", [(), (3,)])
def test_it_is_the_state_update_on_views_of_the_row(tokens, R, norm, gap):
    step, ours = pair(*tokens, R=R, norm=norm, gap=gap)
    y, found = ssmgen.mamba3_state_update(**step), ssmgen.mamba3_layer(**ours)
    assert found is ours["out"] and torch.equal(found, y.flatten(-2)) and not found[-1].any() and found[:-1].any()
    assert all(torch.equal(step[name], ours[name]) for name in POOLS)
    del ours["out"]
    assert ssmgen.mamba3_layer(**ours).shape == found.shape


def test_siso_states_may_lack_the_axis_of_ranks():
    _, ours = pair(R=1)
    plain = {name: t.clone() if isinstance(t, Tensor) else t for name, t in ours.items()}
    squeezed = plain | {name: plain[name].squeeze(1) for name in ("k_state", "B_bias", "C_bias")}
    assert torch.equal(ssmgen.mamba3_layer(**squeezed), ssmgen.mamba3_layer(**ours))
    assert torch.equal(squeezed["k_state"], ours["k_state"].squeeze(1))


def test_drafts_start_after_accepted_tokens():
    step, ours = pair(3)
    slots = torch.tensor([[0, 1, 2], [3, 4, 5], [-1, -1, -1], [-1, -1, -1]])
    more = {"state_indices": slots, "dst_state_indices": slots, "num_accepted_tokens": torch.tensor([2, 1, 1, 1])}
    assert torch.equal(ssmgen.mamba3_layer(**ours | more), ssmgen.mamba3_state_update(**step | more).flatten(-2))
    assert all(torch.equal(step[name], ours[name]) for name in POOLS)


@pytest.mark.parametrize("norm", [False, True])
def test_nothing_is_copied(norm):
    """Every operand lies in an argument."""
    step, ours = pair(norm=norm, gap=5)
    made = ssmgen.mamba3_layer.build(**ours)
    start, at = ours["projected"].data_ptr(), 0
    for name in PARTS:
        part = made.operands[name]
        assert part.data_ptr() == start + 4 * at and part.stride(0) == ours["projected"].stride(0) and torch.equal(part, step[name])
        at += part[0].numel()
    assert at == ours["projected"].shape[1] and set(made.within) == {*PARTS, *(["norm_weight"] if norm else [])}
    arguments = {t.data_ptr() for t in ours.values() if isinstance(t, Tensor)}
    assert all(t.data_ptr() in arguments for name, t in made.operands.items() if name not in PARTS)


def test_a_repeated_call_finds_its_parts_in_the_new_row(launched):  # noqa: F811
    """Also if a tensor is given twice."""
    _, ours = pair(norm=True)
    ours["mimo_o"] = ours["mimo_x"]
    rows = [ours["projected"].clone() for _ in range(4)]
    for row in rows:
        out = ssmgen.mamba3_layer(**ours | {"projected": row})
        made = ssmgen.mamba3_layer.build(**ours | {"projected": row, "out": out})
        assert launched[-1] == {name: t.data_ptr() for name, t in made.operands.items()}
    assert launched.made == 1 and len({record["B"] - record["x"] for record in launched}) == 1 and len(launched) == 4
    del ours["out"]
    for row in rows:
        out = ssmgen.mamba3_layer(**ours | {"projected": row})
        assert launched[-1]["out"] == out.data_ptr() and launched[-1]["x"] > launched[-1]["z"] == row.data_ptr()
    assert launched.made == 2


@emulated
@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize("gap", [0, 4, 5])
def test_kernels_take_the_row_s_strides(R, gap):
    """The kernel's text on the emulator, against the reference in float64; with rows that begin at any element, and at multiples of 4."""
    _, ours = pair(R=R, gap=gap)
    made = ssmgen.mamba3_layer.build(**ours)
    problem, size, *_ = made.problem()
    assert problem.operand_loads.name == ("ELEMENT" if gap == 5 else "VECTOR")
    spec = registry.select("mamba3_state_update", problem, size, SM90, True)
    got = run(spec, made.operands, made.options)
    double = {name: t.double() if t.is_floating_point() else t for name, t in made.operands.items()}
    views = CALLER.views_of(made.operands, made.options, [])
    exact = {name: double[name].reshape(view.shape) if name in (*POOLS, "out") else view.double() for name, view in views.items()}
    CALLER.reference(exact, made.options, torch.float64)
    for name in (*POOLS, "out"):
        assert norm_error(got[name].reshape(exact[name].shape), exact[name]) < 2e-6, name


@costly(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_makes_the_same_views(dynamic):
    torch._dynamo.reset()
    _, ours = pair(3, norm=True, gap=5)
    del ours["out"]
    plain = {name: t.clone() if name in POOLS else t for name, t in ours.items()}
    compiled = torch.compile(lambda **given: 2 * ssmgen.mamba3_layer(**given), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(**ours), 2 * ssmgen.mamba3_layer(**plain)) and all(torch.equal(ours[name], plain[name]) for name in POOLS)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("R", [1, 2])
def test_each_rank_of_the_heads_takes_its_part_of_the_row(R):
    """Two groups on four ranks: two ranks share a group, and all of them the angles."""
    from sharded_cases import everywhere, on, piece
    from test_sharded import rank_of
    from torch.distributed.tensor import Shard

    heads = dict(zip(POOLS, (1, 2, 1, 1), strict=True))
    for rank in range(4):
        step, ours = pair(R=R, norm=True)
        del ours["out"], step["out"]
        ours["state_indices"] = step["state_indices"] = None
        want = ssmgen.mamba3_state_update(**step)
        with rank_of(rank, 4) as mesh:
            theirs = everywhere(mesh, ours) | {name: on(mesh, ours[name], Shard(axis)) for name, axis in heads.items()}
            y = ssmgen.mamba3_layer(**theirs)
            assert y.placements == (Shard(1),) and y.shape == (4, 64)
            assert norm_error(y.to_local(), piece(want, mesh, [Shard(1)]).flatten(1)) < 1e-6  # sums on a CPU depend on the number of heads
            for name, axis in heads.items():
                assert norm_error(theirs[name].to_local(), piece(step[name], mesh, [Shard(axis)])) < 1e-6, name


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"projected": torch.zeros(4, 300)}, r"projected is \[4, 300\]; expected \[batch, 148 \+ 128 groups\] or \[batch, tokens, "),
    "axes": ({"projected": torch.zeros(404)}, r"projected is \[404\]"),
    "no tensor": ({"projected": [1.0]}, "projected is a list"),
    "state": ({"state": torch.zeros(6, 4, 16)}, r"state is \[6, 4, 16\], k_state is \[6, 2, 4, 32\], angle_state is \[6, 4, 8\]; expected"),
    "no angles": ({"angle_state": None}, "angle_state is a NoneType; expected"),
    "no sum": ({"mimo_o": None}, "mimo_x is given without mimo_o; expected both"),
    "norm": ({"norm_weight": torch.zeros(16)}, r"norm_weight is \[16\]"),
    "out": ({"out": torch.zeros(4, 60)}, r"out is \[4, 60\]; expected \[batch, heads, headdim\] .* or \[batch, heads \* headdim\]"),
    "padding": ({"out": None, "zero_padding": False}, "zero_padding is False and out is None"),
    "grad": ({"projected": torch.zeros(4, 404, requires_grad=True)}, "requires grad"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_calls_are_said_in_a_sentence(what):
    change, words = WRONG[what]
    before = layer()
    given = {name: t.clone() if isinstance(t, Tensor) else t for name, t in before.items()}
    with pytest.raises(ArgumentError, match=words) as refused:
        ssmgen.mamba3_layer(**given | change)
    assert str(refused.value).startswith("mamba3_layer cannot run")
    assert all(torch.equal(given[name], before[name]) for name in POOLS)
