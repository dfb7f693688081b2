"""Calls whose tokens lie on several ranks, compared with the same calls on one. Every case is a function of a mesh of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sharded_calls import BF16, F32, H, N, P, Tensors, linear, mamba, normal

import ssmgen
from ssmgen import distributed
from ssmgen.calls import context
from ssmgen.calls.context import Asked, Ends
from ssmgen.errors import ArgumentError
from ssmgen.spec.family import parts

PIECES = {4: (20, 24, 0, 16)}  # tokens of each rank, by how many ranks there are
TOKENS = 60
# Sequences start on a rank's edge, are empty, end on their first rank, or cross one, two or all edges; some tokens belong to none.
EXACT = ("chunk_scan", "chunk_simple_gla", "chunk_lightning_attn", "causal_conv1d")  # they take f32 inputs
THOROUGH = ("chunk_scan", "chunk_kda", "causal_conv1d")  # one function of each kind; the others run in two forms
STARTS = {"several": (0, 12, 20, 20, 37, 54, 60), "one": (0, 60), "gaps": (5, 24, 42)}


def inputs(name: str, device: str, dtype: torch.dtype) -> Tensors:
    """A call's arguments, of one batch of TOKENS tokens; for causal_conv1d also."""
    if name == "causal_conv1d":
        return {
            "x": normal(device, 4, 24, TOKENS, dtype=dtype),
            "weight": normal(device, 24, 4),
            "bias": normal(device, 24),
            "activation": "silu",
        }
    call = mamba(device, 2, (TOKENS,)) if name == "chunk_scan" else linear(device, name.removeprefix("chunk_"), 2, (TOKENS,))
    call = {n: t for n, t in call.items() if n not in ("state", "gv")}
    for n, t in call.items():
        if isinstance(t, torch.Tensor) and t.dim() == 4:
            call[n] = t.to(dtype)
    return call


def divided(function: str, call: Tensors, pieces: tuple[int, ...], rank: int) -> Tensors:
    """A rank's tokens."""
    dims = {n: t.dim() for n, t in call.items() if isinstance(t, torch.Tensor)}
    first, found = sum(pieces[:rank]), dict(call)
    for n in dims:
        words = parts("sharding")[function].axes_of(n, dims, dims[n])
        if "token" in words:
            found[n] = call[n].narrow(words.index("token"), first, pieces[rank])
    return found


def packed(function: str, call: Tensors, starts: tuple[int, ...]) -> Tensors:
    """Its first row, as packed sequences."""
    dims = {n: t.dim() for n, t in call.items() if isinstance(t, torch.Tensor)}
    rows = {n: call[n][0] if "batch" in parts("sharding")[function].axes_of(n, dims, dims[n]) else call[n] for n in dims}
    word = "query_start_loc" if function == "causal_conv1d" else "cu_seqlens"
    device = next(iter(rows.values())).device
    return call | rows | {word: torch.tensor(starts, dtype=torch.int32, device=device)}


def states(function: str, call: Tensors, dtype: torch.dtype = F32) -> torch.Tensor:
    """The initial states of the call's sequences."""
    starts = call.get("cu_seqlens", call.get("query_start_loc"))
    count = len(next(call[n] for n in ("x", "v") if n in call)) if starts is None else len(starts) - 1
    some = next(t for t in call.values() if isinstance(t, torch.Tensor))
    if function == "causal_conv1d":
        return normal(some.device, count, 24, 3, dtype=call["x"].dtype)
    rows = (N, P) if call.get("state_layout") == "kv" else (P, N)
    return normal(some.device, count, H, *rows, dtype=dtype)


def exact(function: str, call: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states of the whole call, by the reference in f64; but outputs are rounded to their dtype."""
    made = getattr(ssmgen, function).build(**{n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in call.items()})
    views = made.caller.checked(made.operands, made.options, None, made.objections)
    views["final_states"] = views["final_states"].to(torch.promote_types(views["final_states"].dtype, torch.float64))
    if made.before is not None:
        made.before()
    made.caller.reference(views, made.options, torch.float64)
    return made.operands["out"], views["final_states"]


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """Relative error in the L2 norm."""
    assert got.shape == want.shape, (got.shape, want.shape)
    error = (got.double().cpu() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= bound, f"{float(error):.2e} above {bound:.2e}"


def agrees(mesh: Any, function: str, call: Tensors, begin: torch.Tensor | None, bounds: tuple[float, float]) -> None:
    """This rank's outputs and all final states, at bounds on each one's error."""
    group, rank, pieces = mesh.get_group(), mesh.get_local_rank(), PIECES[mesh.size()]
    call = call | ({} if begin is None else {"initial_states": begin}) | {"return_final_states": True}
    out, final = exact(function, call)
    mine = divided(function, call, pieces, rank)
    got, ends = getattr(distributed, function)(**mine, group=group)
    if begin is not None:
        assert ends.dtype == begin.dtype
    want = divided(function, {next(n for n in parts("sharding")[function].returns): out}, pieces, rank)["out"]
    starts = call.get("cu_seqlens", call.get("query_start_loc"))
    if starts is not None:  # tokens outside every sequence have no output
        first = sum(pieces[:rank])
        own = [t for t in range(pieces[rank]) if starts[0] <= first + t < starts[-1]]
        axis = -1 if function == "causal_conv1d" else 0
        got, want = got.index_select(axis, torch.tensor(own, device=got.device).long()), want.index_select(axis, torch.tensor(own).long())
    if want.numel():
        close(got, want, bounds[0])
    close(ends, final, bounds[1])
    again = getattr(distributed, function)(**mine, group=group)
    assert torch.equal(again[1], ends)


OPTIONS: Tensors = {"scale": 0.5, "beta_sigmoid": True, "allow_neg_eigval": True, "dt_limit": (0.0, 4.0), "segments": 2, "pdl": False}


def forms_agree(mesh: Any, function: str, call: Tensors, bounds: tuple[float, float]) -> None:
    """A call returns and writes the same as on one device: without final states, with `out` and `final_states_out`, with arguments by
    position, and with all options of the function."""
    group, rank, pieces = mesh.get_group(), mesh.get_local_rank(), PIECES[mesh.size()]
    run, known = getattr(distributed, function), getattr(ssmgen, function).names
    call = call | {name: value for name, value in OPTIONS.items() if name in known}
    begin = states(function, call, BF16)
    call = call | {"initial_states": begin}
    out, final = exact(function, call | {"return_final_states": True})
    mine = divided(function, call, pieces, rank)
    want = divided(function, {next(n for n in parts("sharding")[function].returns): out}, pieces, rank)["out"]

    def agrees(got: Any) -> None:
        assert isinstance(got, torch.Tensor)
        close(got, want, bounds[0]) if want.numel() else None

    agrees(run(**mine, group=group))
    agrees(run(*(mine.pop(name) for name in known if name in ("x", "q", "r")), **mine, group=group))
    mine = divided(function, call, pieces, rank)
    given = {"out": torch.full_like(want, torch.nan, device=begin.device), "final_states_out": torch.full_like(begin, torch.nan)}
    assert run(**mine, **given, group=group) is given["out"]
    agrees(given["out"])
    close(given["final_states_out"], final, 2.0**-8)
    again = run(**mine, **given, return_final_states=True, group=group)
    assert all(a is b for a, b in zip(again, given.values(), strict=True))


def dtensors_agree(mesh: Any, function: str, call: Tensors, bounds: tuple[float, float], over_heads: bool = False) -> None:
    """Tensors sharded over tokens, and on another mesh axis over heads. Outputs are sharded like them; final states are replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if over_heads:
        mesh = init_device_mesh(mesh.device_type, (2, mesh.size() // 2))
    dims = {n: t.dim() for n, t in call.items() if isinstance(t, torch.Tensor)}

    def placed(n: str) -> list[Any]:
        words = parts("sharding")[function].axes_of(n, dims, dims[n])
        heads = [Shard(words.index("head")) if "head" in words else Replicate()] if over_heads else []
        return [*heads, Shard(words.index("token")) if "token" in words else Replicate()]

    theirs = {n: distribute_tensor(call[n], mesh, placed(n)) if n in dims and call[n].is_floating_point() else call[n] for n in call}
    out, final = exact(function, call | {"return_final_states": True})
    got, ends = getattr(ssmgen, function)(**theirs, return_final_states=True)
    like = next(theirs[n] for n in ("x", "v") if n in theirs)
    assert got.placements == like.placements and got.shape == like.shape and not ends.placements[-1].is_shard()
    close(got.full_tensor(), out, bounds[0])
    close(ends.full_tensor(), final, bounds[1])


def what_is_begun_is_finished(mesh: Any, call: Tensors, form: Tensors) -> None:
    """A family may start before the exchange, also on the last rank, and continue after it. Packed sequences start over."""
    function, rule, asked = ssmgen.chunk_delta_rule, parts("context")["chunk_delta_rule"], []
    ranks, rank, finished = mesh.size(), mesh.get_local_rank(), []

    def ends(function: Any, given: Tensors, start: torch.Tensor | None, what: Asked) -> Ends:
        def finish(S: torch.Tensor | None, final: bool) -> torch.Tensor | None:
            finished.append(final)
            result = function(**given, initial_states=S, return_final_states=final)
            return result[1] if final else None

        asked.append(what)
        found = rule.ends(function, given, start, what) if what.N else Ends(None)
        return found._replace(finish=finish)

    for arguments, again in ((call, True), (form, False)):
        mine = divided("chunk_delta_rule", arguments, PIECES[ranks], rank) | {"return_final_states": True}
        want = distributed.chunk_delta_rule(**mine, group=mesh.get_group())
        asked.clear(), finished.clear()
        got = context.run(function, rule._replace(cheap=lambda given: True, ends=ends), mine, mesh.get_group())
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        there = PIECES[ranks][rank] > 0
        last = rank + 1 == ranks
        assert finished == [True] * (there and again)
        assert asked == [Asked(not last, not last and rank > 0)] * (there and (again or not last))


def nothing_goes_on(mesh: Any, call: Tensors) -> None:
    """A convolution of width 1, and an empty list of packed sequences, pass no state on."""
    pieces, rank = PIECES[mesh.size()], mesh.get_local_rank()
    mine = {n: t.clone() for n, t in divided("causal_conv1d", call, pieces, rank).items()}
    want = divided("causal_conv1d", {"x": ssmgen.causal_conv1d(**call)}, pieces, rank)["x"]
    assert torch.equal(distributed.causal_conv1d(**mine, group=mesh.get_group()), want)


def all_that_is_wrong_is_said(mesh: Any, call: Tensors) -> None:
    """On all ranks, before they wait for each other."""
    wrong = call | {"A": call["A"][:1], "state": states("chunk_scan", call), "return_checkpoints": True}
    mine = divided("chunk_scan", wrong, PIECES[mesh.size()], mesh.get_local_rank())
    try:
        distributed.chunk_scan(**mine, group=mesh.get_group())
    except ArgumentError as e:
        assert [p.partition(" is ")[0] for p in e.problems if "a pool is on one device" in p] == [
            "state",
            "return_checkpoints",
        ]
        assert any(p.startswith("A is [1]") for p in e.problems)
    else:
        raise AssertionError("nothing was wrong")


def cases(device: str) -> dict[str, Callable[[Any], None]]:
    """References on the CPU work in f32: a state is off by some ulps of a sum of 60 tokens, an output of 16 bits by their rounding."""
    found: dict[str, Callable[[Any], None]] = {}
    for function in distributed.functions():
        torch.manual_seed(0)
        dtype = F32 if function in EXACT else BF16
        call = inputs(function, device, dtype)
        bounds = (2e-6 if dtype is F32 else 2.0**-8, 2e-6)
        forms = {"rows": call} | {how: packed(function, call, STARTS[how]) for how in STARTS}
        if "state_layout" in getattr(ssmgen, function).names:
            forms["kv"] = call | {"state_layout": "kv"}
        for how in forms if function in THOROUGH else ("rows", "several"):
            if how in forms:
                begin = states(function, forms[how]) if how != "one" else None
                found[f"{function}-{how}"] = partial(agrees, function=function, call=forms[how], begin=begin, bounds=bounds)
        found[f"{function}-forms"] = partial(forms_agree, function=function, call=call, bounds=bounds)
        if function in THOROUGH:
            found[f"{function}-dtensors"] = partial(dtensors_agree, function=function, call=call, bounds=bounds)
        if function in ("chunk_scan", "chunk_kda"):
            found[f"{function}-dtensors-heads"] = partial(dtensors_agree, function=function, call=call, bounds=bounds, over_heads=True)
    plain = {"x": normal(device, 24, TOKENS), "weight": normal(device, 24, 1)}
    found["no-window"] = partial(nothing_goes_on, call=plain | {"query_start_loc": torch.tensor(STARTS["several"], device=device).int()})
    found["no-sequence"] = partial(
        nothing_goes_on, call=plain | {"query_start_loc": torch.zeros(1, device=device).int(), "out": torch.ones(24, TOKENS)}
    )
    delta = inputs("chunk_delta_rule", device, BF16)
    several = packed("chunk_delta_rule", delta, STARTS["several"])
    found["begun"] = partial(what_is_begun_is_finished, call=delta, form=several)
    found["wrong"] = partial(all_that_is_wrong_is_said, call=inputs("chunk_scan", device, F32))
    return found


# On cards.


def long(name: str, device: str, tokens: int) -> Tensors:
    """A batch of one sequence, of sizes that warpgroups take."""
    heads = {"q": 2, "k": 2, "v": 4, "B": 2, "C": 2, "x": 4}
    call: Tensors = {n: normal(device, 1, tokens, heads[n], 128, dtype=BF16) for n in ("xBC" if name == "chunk_scan" else "qkv")}
    if name == "chunk_scan":  # some heads forget within a chunk, others nothing
        return call | {
            "dt": normal(device, 1, tokens, 4, dtype=BF16),
            "A": -torch.tensor([1e-4, 1e-2, 1.0, 50.0], device=device),
            "dt_softplus": True,
        }
    gate = (1, tokens, 4, 128) if name == "chunk_kda" else (1, tokens, 4)
    call |= {"g": -normal(device, *gate, positive=True) / 100}
    return call | {"beta": torch.sigmoid(normal(device, 1, tokens, 4)), "use_qk_l2norm": True}


def agrees_on_cards(mesh: Any, function: str, call: Tensors, begin: torch.Tensor | None, captured: bool = False) -> None:
    """The result equals the same call on one card, except for roundings of products."""
    tokens = next(call[n] for n in ("x", "v") if n in call).shape[0 if "cu_seqlens" in call else 1]
    group, rank, pieces = mesh.get_group(), mesh.get_local_rank(), (tokens * 3 // 5, tokens - tokens * 3 // 5)
    call = call | ({} if begin is None else {"initial_states": begin}) | {"return_final_states": True}
    mine = divided(function, call, pieces, rank)
    run = partial(getattr(distributed, function), **mine, group=group)
    want, final = getattr(ssmgen, function)(**call)
    got, ends = run()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads may call what a capture forbids
            got, ends = run()
        got.fill_(torch.nan)
        ends.fill_(torch.nan)
        graph.replay()
    close(got, divided(function, {"out": want}, pieces, rank)["out"].cpu(), 1e-2)
    close(ends, final.cpu(), 1e-2)


def cases_on_cards(device: str) -> dict[str, Callable[[Any], None]]:
    found: dict[str, Callable[[Any], None]] = {}
    for function in ("chunk_scan", "chunk_gated_delta_rule", "chunk_kda"):
        torch.manual_seed(0)
        call = long(function, device, 3000)
        begin = normal(device, 1, 4, 128, 128)
        found[f"{function}-row"] = partial(agrees_on_cards, function=function, call=call, begin=None)
        found[f"{function}-row-from-a-state"] = partial(agrees_on_cards, function=function, call=call, begin=begin)
        form = packed(function, call, (0, 700, 2900, 3000))
        found[f"{function}-packed"] = partial(agrees_on_cards, function=function, call=form, begin=begin.expand(3, -1, -1, -1).contiguous())
    return found


def cases_over_nccl(device: str) -> dict[str, Callable[[Any], None]]:
    graphs = {f"{name}-graph": partial(case, captured=True) for name, case in cases_on_cards(device).items()}
    return cases_on_cards(device) | graphs
