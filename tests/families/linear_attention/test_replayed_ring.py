"""States that are read through a ring of the tokens that they lack: plain steps, and float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same as equal
from emulated_calls import SM90, emulate, needs_emulator
from selection import costly
from torch import Tensor
from torch.nn.functional import softplus

import ssmgen
from ssmgen import Ring
from ssmgen.errors import ArgumentError
from ssmgen.families.linear_attention.spec import space
from ssmgen.select.models import Client, Role, Wanted, find_model
from ssmgen.spec.kernel import DType, Index, Layout, PoolMode, Update
from ssmgen.spec.kernel import Ring as Kind

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BATCH, SLOTS, LENGTH, HK, HV = 4, 6, 8, 2, 4
SLOT = torch.tensor([4, -1, 2, 0], dtype=torch.int32)


def emulated(function, *args, **kwargs) -> Tensor:
    """The function's result, from its kernel's text."""
    return emulate(function.build(*args, **kwargs))


def reference(function, *args, **kwargs) -> Tensor:
    return function(*args, **kwargs)


runs = pytest.mark.parametrize("run", [reference, pytest.param(emulated, marks=needs_emulator)])
names = pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])


class Steps:
    """A pool, a ring, and the operands of steps."""

    def __init__(
        self, name: str, state: torch.dtype, io: torch.dtype, K: int = 32, V: int = 24, kept: torch.dtype | None = None, **more: Any
    ):
        self.g = torch.Generator().manual_seed(1)
        self.function, self.per_channel, self.io, self.K, self.V = getattr(ssmgen, name), name == "kda", io, K, V
        self.state = self.randn(SLOTS, HV, V, K, dtype=state)
        gate = (HV, K) if self.per_channel else (HV,)
        self.weights = {"A_log": torch.rand(HV, generator=self.g) - 1, "dt_bias": self.randn(*gate)}
        self.ring = Ring(
            *(torch.full((SLOTS, LENGTH, *inner), torch.nan, dtype=kept or io) for inner in ((HK, K), (HV, V))),
            torch.full((SLOTS, LENGTH, *gate), torch.nan), None,
        )  # fmt: skip
        self.how: dict[str, Any] = {"use_qk_l2norm": True, "beta_sigmoid": True, "state_indices": SLOT} | more

    def randn(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(shape, generator=self.g).to(dtype)

    def token(self) -> dict[str, Tensor]:
        gate = (HV, self.K) if self.per_channel else (HV,)
        shapes = {"q": (HK, self.K), "k": (HK, self.K), "v": (HV, self.V), "g": gate, "beta": (HV,)}
        return {n: self.randn(BATCH, *shape, dtype=self.io) for n, shape in shapes.items()}

    def step(self, run: Any, x: dict[str, Tensor], position: Tensor, **more: Any) -> Tensor:
        return run(self.function, self.state, **x, **self.weights, **self.how, ring=self.ring, ring_position=position, **more)

    def plain(self, state: Tensor, x: dict[str, Tensor]) -> Tensor:
        return self.function(state, **x, **self.weights, **self.how)

    def fill(self, counts: list[int]) -> None:
        """Random tokens in the rings of the sequences' slots."""
        for slot, count in zip(SLOT.tolist(), counts, strict=True):
            if slot >= 0:
                k = self.randn(count, HK, self.K)
                self.ring.k[slot, :count] = k / k.norm(dim=-1, keepdim=True)
                self.ring.v[slot, :count] = self.randn(count, HV, self.V)
                assert self.ring.g is not None
                self.ring.g[slot, :count] = -torch.rand(self.ring.g[slot, :count].shape, generator=self.g)

    def wanted(self, x: dict[str, Tensor], b: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(output, state, key, error, log decay) of a sequence in float64."""
        slot, rep = int(SLOT[b]), HV // HK
        assert self.ring.g is not None
        S = self.state[slot].double()
        for i in range(count):
            decay = self.ring.g[slot, i].double().exp()
            S = S * (decay[:, None, :] if self.per_channel else decay[:, None, None])
            S = S + self.ring.v[slot, i].double()[..., None] * self.ring.k[slot, i].double().repeat_interleave(rep, 0)[:, None]
        q, k = (x[n][b].double() for n in ("q", "k"))
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        key, q, k = k, *(t.repeat_interleave(rep, 0) for t in (q, k))
        rate = self.weights["A_log"].double().exp()
        log = -(rate[:, None] if self.per_channel else rate) * softplus(x["g"][b].double() + self.weights["dt_bias"].double())
        S = S * (log.exp()[:, None, :] if self.per_channel else log.exp()[:, None, None])
        error = x["beta"][b].double().sigmoid()[:, None] * (x["v"][b].double() - (S * k[:, None]).sum(-1))
        S = S + error[..., None] * k[:, None]
        return (S * q[:, None]).sum(-1) * self.K**-0.5, S, key, error, log


def near(got: Tensor, want: Tensor) -> bool:
    """Within a rounding of its dtype, and sums in f32."""
    return torch.allclose(got.double(), want, rtol=torch.finfo(got.dtype).eps, atol=4e-5 * float(want.abs().max()))


@costly(12, 24)
@runs
@names
@pytest.mark.parametrize(
    ("state", "io", "kept"), [(F32, BF16, F32), (F32, BF16, BF16), (BF16, BF16, BF16), (F16, F16, F16), (F32, F32, F32)]
)
@pytest.mark.parametrize("size", [(32, 24), (36, 20), (7, 5)], ids=str)
@pytest.mark.parametrize("flush", [False, True])
def test_a_step_in_float64(run, name, state, io, kept, size, flush):
    """The ring's unused places hold NaN. One sequence is padding, one fills its ring, and one writes its state early, if asked."""
    s = Steps(name, state, io, *size, kept)
    counts = [6, 2, LENGTH - 1, 3]
    s.fill(counts)
    x, asked = s.token(), torch.tensor([0, 1, 0, 7])
    before, old_ring = s.state.clone(), Ring(*(None if t is None else t.clone() for t in s.ring))
    wanted = {b: s.wanted(x, b, counts[b]) for b in (0, 2, 3)}
    out = s.step(run, x, torch.tensor(counts), **({"ring_flush": asked} if flush else {}))
    assert not out[1].any()
    for b, (y, S, key, error, log) in wanted.items():
        slot, at = int(SLOT[b]), counts[b]
        assert near(out[b], y)
        if at == LENGTH - 1 or (flush and b == 3):
            assert near(s.state[slot], S)
            s.state[slot] = before[slot]
        else:
            for ring, want in zip(s.ring[:3], (key, error, log), strict=True):
                assert ring is not None and near(ring[slot, at], want)
                ring[slot, at] = torch.nan
            for ring, old in zip(s.ring[:3], old_ring[:3], strict=True):
                assert ring is not None and old is not None
                old[slot, at] = torch.nan
    assert equal(s.state, before)
    assert all(t is None or equal(t, old) for t, old in zip(s.ring, old_ring, strict=True)), "only the next place of a ring is written"


@runs
@names
def test_steps_with_a_ring_of_f32_are_plain_steps(run, name):
    """The sequences of twenty steps write their states at different times. A step with an empty ring has the bits of a plain one."""
    s = Steps(name, F32, F32)
    plain, position = s.state.clone(), torch.tensor([0, 0, 3, 0])
    s.ring.k[2], s.ring.v[2] = 0, 0
    assert s.ring.g is not None
    s.ring.g[2] = 0
    for _ in range(20):
        x = s.token()
        want, got = s.plain(plain, x), s.step(run, x, position)
        live = SLOT >= 0
        assert torch.allclose(got[live], want[live], rtol=1e-4, atol=1e-5)
        position = (position + 1) % LENGTH
        written = SLOT[(position == 0) & live].long()
        assert torch.allclose(s.state[written], plain[written], rtol=1e-4, atol=1e-5)
    empty = Steps(name, F32, BF16)
    x, state = empty.token(), empty.state.clone()
    got = empty.step(run, x, torch.zeros(BATCH, dtype=torch.int64), ring_flush=torch.ones(BATCH, dtype=torch.int64))
    assert equal(got, run(empty.function, state, **x, **empty.weights, **empty.how)) and equal(empty.state, state)


@runs
@names
def test_numbers_out_of_range_are_padding(run, name):
    s = Steps(name, F32, BF16)
    s.fill([3, 3, 3, 3])
    x, out = s.token(), torch.full((BATCH, HV, s.V), 7.0, dtype=BF16)
    before = [t.clone() for t in (s.state, *s.ring[:3]) if t is not None]
    s.step(run, x, torch.tensor([-1, 0, LENGTH, 2**31]), out=out)
    assert not out.any() and all(equal(a, b) for a, b in zip(before, (s.state, *s.ring[:3]), strict=True))
    out.fill_(7.0)
    s.step(run, x, torch.tensor([-1, 0, LENGTH, 2**31]), out=out, zero_padding=False)
    assert (out == 7).all()


@needs_emulator
@names
def test_variants_are_bit_equal(name):
    s = Steps(name, F32, BF16)
    s.fill([5, 2, LENGTH - 1, 3])
    x, given, found = s.token(), torch.tensor([5, 2, LENGTH - 1, 3]), []

    def built() -> tuple[Any, list[Tensor]]:
        state, ring = s.state.clone(), Ring(*(None if t is None else t.clone() for t in s.ring))
        call = s.function.build(state, **x, **s.weights, **s.how, ring=ring, ring_position=given)
        return call, [state, *(t for t in ring if t is not None)]

    specs = [v for v in space(built()[0].problem()[0], SM90) if v.threads <= 128 and v.prefetch == 0 and v.pdl.value == "off"][::7]
    for spec in specs:
        call, written = built()
        found.append([emulate(call, spec), *written])
    assert len(specs) >= 6 and all(equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ring": None}, r"lacks ring\.k, ring\.v, ring\.g; expected"),
        ({"ring_position": None, "ring_flush": torch.zeros(4, dtype=torch.int32)}, "lacks ring_position; expected"),
        ({"state_indices": None}, "lacks state_indices; expected"),
        ({"ring_ready": True}, "ring_position is given with ring_ready=True; expected none"),
        ({"update_state": False}, "ring_position is given with update_state=False"),
        ({"state_layout": "kv"}, "ring_position is given with state_layout='kv'"),
        ({"dst_state_indices": SLOT}, "ring_position is given with dst_state_indices"),
        ({"ring_position": torch.zeros(3, dtype=torch.int32)}, "ring_position is"),
        ({"ring_position": torch.zeros(4)}, "ring_position"),
    ],
)  # fmt: skip
def test_what_does_not_fit(change, words):
    s = Steps("gated_delta_rule", F32, BF16)
    given = {"ring": s.ring, "ring_position": torch.zeros(4, dtype=torch.int32)} | s.how | change
    with pytest.raises(ArgumentError, match=words):
        s.function(s.state, **s.token(), **s.weights, **given)


def test_rings_that_do_not_fit():
    s = Steps("gated_delta_rule", F32, BF16)
    assert s.ring.g is not None
    for ring, words in (
        (s.ring._replace(g=s.ring.g.bfloat16()), "g is torch.bfloat16 with ring_position; expected torch.float32"),
        (s.ring._replace(k=s.ring.k.float()), "v is torch.bfloat16; expected torch.float32, the dtype of ring.k"),
        (s.ring._replace(v=s.ring.v[:, :3]), "one length"), (s.ring._replace(beta=s.ring.g), r"ring\.beta; expected none"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=words):
            s.function(s.state, **s.token(), **s.weights, **s.how, ring=ring, ring_position=torch.zeros(4, dtype=torch.int32))


def test_what_no_kernel_serves():
    s = Steps("gated_delta_rule", F32, BF16)
    call = s.function.build(s.state, **s.token(), **s.weights, **s.how, ring=s.ring, ring_position=torch.zeros(4, dtype=torch.int32))
    problem = call.problem()[0]
    assert problem.ring is Kind.REPLAY and not problem.faults()
    for change in ({"layout": Layout.KV}, {"update": Update.NONE}, {"pool": PoolMode.SPLIT}, {"g": None, "gate": problem.gate}):
        assert any("ring is replay; expected tokens=one" in fault for fault in replace(problem, **change).faults())
    assert any("if and only if ring is replay" in fault for fault in replace(problem, position=Index.NONE).faults())
    assert any(
        "flush and kept with it alone" in fault for fault in replace(problem, ring=Kind.NONE, position=Index.NONE, flush=Index.I32).faults()
    )


@pytest.mark.parametrize(
    ("model", "state", "kept"), [("qwen3.5-397b-a17b", DType.F32, DType.F32), ("kimi-linear-48b-a3b", DType.BF16, None)]
)
def test_a_model_s_ring_is_of_its_states_dtype(model, state, kept):
    (problem,) = find_model(model).problems((state,), ring=Kind.REPLAY)
    assert not problem.faults() and (problem.kept, problem.position, problem.index) == (kept, Index.I32, Index.I32)


def test_the_engines_kernels_for_a_ring():
    """No packed sequences, which the engines also have without a ring."""
    wanted = Wanted(caller=Client.ENGINES, states=(DType.F32,), indices=(Index.I32,), ring=Kind.REPLAY)
    (problem,) = find_model("qwen3.5-397b-a17b").asked(wanted, Role.STATE)
    assert problem.ring is Kind.REPLAY and not problem.faults()


@needs_emulator
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gated_delta_rule", {"A_log": None, "dt_bias": None}), ("kda", {"A_log": None, "dt_bias": None}), ("kda", {"lower_bound": -5.0}),
        ("gated_delta_rule", {"dt_bias": None}), ("kda", {"use_qk_l2norm": False, "beta_sigmoid": False}),
        ("gated_delta_rule", {"allow_neg_eigval": True, "scale": 0.5}),
    ],
)  # fmt: skip
def test_other_gates_and_step_sizes(name, change):
    """The kernel and the reference, of log decays, a bounded gate, no norm, plain and doubled step sizes."""
    found = []
    for run in (reference, emulated):
        s = Steps(name, F32, F32)
        s.fill([6, 2, LENGTH - 1, 3])
        x = s.token()
        if change.get("A_log", 0) is None:
            x["g"] = -x["g"].abs()
        if not change.get("use_qk_l2norm", True):
            x["k"], x["beta"] = x["k"] / 8, x["beta"].sigmoid()
        given = s.weights | s.how | change
        out = run(s.function, s.state, **x, **given, ring=s.ring, ring_position=torch.tensor([6, 2, LENGTH - 1, 3]))
        found.append([out, s.state, *(t[SLOT[SLOT >= 0].long(), :4].nan_to_num() for t in s.ring if t is not None)])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))
