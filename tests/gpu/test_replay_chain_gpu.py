"""causal_conv1d_update before the replay functions on a card, in CUDA graphs, with dependent launches and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from bits import same
from card_calls import arch, launch, needs_pdl, waits_for_its_producer
from replay_cases import BF16, F32, I32, RING, STEP, make
from torch import Tensor

import ssmgen
from ssmgen.families.replay_selective_state_update import planning as op
from ssmgen.select import registry

pytestmark = [pytest.mark.gpu, needs_pdl]

WIDTH, STEPS, REPLAYS = 4, 20, 50  # of the convolution; of a graph; launches of the graph: 1000 steps in all


@dataclass(frozen=True)
class How:
    """Which launches may start early."""

    conv: bool = False
    replay: bool = False
    internal: bool = False


@dataclass(frozen=True)
class Form:
    ring: bool = False
    two_kernels: bool = False
    state: torch.dtype = BF16
    tokens: int = 6
    window: int = 8
    shape: tuple[int, int, int, int] = (16, 64, 128, 1)  # heads, headdim, d_state, groups

    def combinations(self) -> list[How]:
        """All that there are: external and internal edges of two kernels; the convolution's and the replay's of one."""
        if self.two_kernels:
            return [How(external, external, internal) for external, internal in product((False, True), repeat=2)]
        return [How(conv, step) for conv, step in product((False, True), repeat=2)]


FORMS = {
    "step": Form(),
    "step-two-kernels": Form(two_kernels=True),
    "ring": Form(ring=True, window=16),
    "ring-two-kernels": Form(ring=True, two_kernels=True, window=16, state=F32),
}


class Layer:
    """One mixer: the convolution's windows, states and histories in pools, and x, B and C as slices of the convolution's output."""

    def __init__(self, form: Form, slots: Tensor, pool: int, g: torch.Generator):
        H, P, N, G = form.shape
        batch, T, device = len(slots), form.tokens, slots.device
        self.form, self.slots, dim = form, slots, H * P + 2 * G * N

        def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(shape, generator=g, device=device).to(dtype)

        room, both = form.window + (T if form.ring else 0), () if form.ring else (2,)
        self.conv_state = normal(pool, WIDTH - 2 + T, dim).transpose(1, 2)
        self.weight, self.bias = normal(dim, WIDTH) * 0.5, normal(dim)
        self.hidden = normal(batch, T, dim)
        self.mixed = torch.full((batch, T, dim), float("nan"), dtype=BF16, device=device)
        x, B, C = self.mixed.split([H * P, G * N, G * N], -1)
        self.rate = -(torch.rand(H, generator=g, device=device) + 0.1)
        steps = torch.rand(pool, *both, H, room, generator=g, device=device)
        self.kept = {
            "state": normal(pool, H, P, N, dtype=form.state),
            "old_x": normal(pool, room, H, P),
            "old_B": normal(pool, *both, room, G, N),
            "old_dt": steps,
        }
        if form.ring:
            self.kept["ring_start"] = torch.randint(0, room, (pool,), generator=g, device=device, dtype=I32)
        else:
            self.kept["old_dA_cumsum"] = (steps * self.rate[:, None]).cumsum(-1)
            self.kept["cache_buf_idx"] = torch.randint(0, 2, (pool,), generator=g, device=device, dtype=I32)
        self.kept["prev_num_accepted_tokens"] = torch.zeros(pool, dtype=I32, device=device)
        self.inputs = {
            "x": x.unflatten(-1, (H, P)),
            "dt": normal(batch, T, H)[..., None].expand(-1, -1, -1, P),
            "A": self.rate[:, None, None].expand(-1, P, N),
            "B": B.unflatten(-1, (G, N)),
            "C": C.unflatten(-1, (G, N)),
            "D": normal(H, dtype=F32),
            "z": normal(batch, T, 2 * H, P)[:, :, H:],
            "dt_bias": normal(H, dtype=F32),
        }

    def __call__(self, how: How, accepted: Tensor, out: Tensor, x: Tensor | None = None, **kept: Tensor) -> None:
        """The convolution of x, or of the output that the layer before left here, and the step after it."""
        form, source = self.form, self.hidden if x is None else x
        ssmgen.causal_conv1d_update(
            source.transpose(1, 2), self.conv_state, self.weight, self.bias, "silu", conv_state_indices=self.slots,
            num_accepted_tokens=accepted, out=self.mixed.transpose(1, 2), pdl=how.conv,
        )  # fmt: skip
        function = ssmgen.checkpoint_selective_state_update if form.ring else ssmgen.replay_selective_state_update
        function(
            **self.kept | kept, **self.inputs, dt_softplus=True, state_indices=self.slots, out=out, after_conv=True,
            two_kernels=form.two_kernels, internal_pdl=how.internal, pdl=how.replay,
        )  # fmt: skip


class Chain:
    """STEPS steps of two layers. The second layer's convolution reads the output of the first layer's replay."""

    def __init__(self, form: Form, batch: int, device: str = "cuda", seed: int = 0):
        g = torch.Generator(device).manual_seed(seed)
        self.form, self.batch, self.pool, T = form, batch, 2 * batch + 3, form.tokens
        H, P = form.shape[:2]
        self.slots = torch.randperm(self.pool, generator=g, device=device)[:batch].to(I32)
        if batch > 2:
            self.slots[1] = -1
        self.layers = [Layer(form, self.slots, self.pool, g) for _ in range(2)]
        self.tokens = torch.randn(STEPS, *self.layers[0].hidden.shape, generator=g, device=device).to(BF16)
        self.outs = torch.full((STEPS, batch, T, H, P), float("nan"), dtype=BF16, device=device)

        def ints(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, (STEPS, *shape), generator=g, device=device, dtype=I32)

        room = self.layers[0].kept["old_x"].shape[1]
        self.accepted = ints(1, T + 1, batch)
        self.counts = ints(0, (form.window if form.ring else T) + 1, 2, self.pool)
        self.first = ints(0, room, 2, self.pool)
        self.buffers = [torch.full((self.pool,), i, dtype=I32, device=device) for i in range(2)]
        self.weights = torch.randint(1, 2**20, (T * H * P,), generator=g, device=device)
        self.clock = torch.zeros((), dtype=torch.int64, device=device)
        self.keys = torch.randint(1, 2**30, (batch,), generator=g, device=device)
        self.now = torch.ones(batch, dtype=I32, device=device)
        self.owned = torch.where(self.slots < 0, self.pool - 1, self.slots).long()
        for layer in self.layers:
            layer.kept["arrivals"] = torch.zeros(self.pool, dtype=I32, device=device)

    def pair(self, how: How, i: int, accepted: Tensor, kept: Callable[[int], dict[str, Tensor]]) -> None:
        first, second = self.layers
        H, P = self.form.shape[:2]
        first(how, accepted, second.hidden[..., : H * P].unflatten(-1, (H, P)), self.tokens[i], **kept(0))
        second(how, accepted, self.outs[i], **kept(1))

    def adjacent(self, how: How) -> None:
        """Only convolutions and replays: each step has separate tensors for count, buffer and first entry."""
        for i in range(STEPS):
            place = {"ring_start": self.first[i]} if self.form.ring else {"cache_buf_idx": self.buffers[i % 2]}
            own = [{"prev_num_accepted_tokens": self.counts[i, j], "arrivals": None} for j in range(2)]
            if self.form.ring:
                self.pair(how, i, self.accepted[i], lambda j: own[j] | {"ring_start": place["ring_start"][j]})  # noqa: B023
            else:
                self.pair(how, i, self.accepted[i], lambda j: own[j] | place)  # noqa: B023

    def kept_on_device(self, how: How) -> None:
        """The kernels do the bookkeeping, and between steps a prefix is accepted: another one in each step of each replay."""
        for i in range(STEPS):
            self.pair(how, i, self.now, lambda j: {})
            self.clock.add_(1)
            accepted = self.keys * (2 * self.clock + 1) % 7919 % (self.form.tokens + 1)
            self.now.copy_(accepted.clamp(min=1))
            for layer in self.layers:
                layer.kept["prev_num_accepted_tokens"].index_add_(0, self.owned, accepted.int())

    def results(self) -> dict[str, Tensor]:
        found = {f"{name} of layer {i}": t for i, layer in enumerate(self.layers) for name, t in layer.kept.items()}
        return found | {f"windows of layer {i}": layer.conv_state for i, layer in enumerate(self.layers)} | {"out": self.outs}

    def digest(self) -> Tensor:
        """A checksum of all outputs of a graph; it wraps around."""
        return (self.outs.view(torch.int16).long().flatten(2) * self.weights).sum(-1)


def run(form: Form, batch: int, how: How, steps: Callable[[Chain, How], None]) -> dict[str, Tensor]:
    """The results of 1000 steps, and a digest of each step's outputs. One graph; the host waits for nothing before the end."""
    steps(Chain(form, batch), how)  # compiles and loads
    chain = Chain(form, batch)
    torch.cuda.synchronize()
    graph, digests = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        steps(chain, how)
    for _ in range(REPLAYS):
        graph.replay()
        digests.append(chain.digest())
    torch.cuda.synchronize()
    return chain.results() | {"digests": torch.stack(digests)}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if not same(a[name], b[name])]


@pytest.mark.parametrize("steps", [Chain.adjacent, Chain.kept_on_device], ids=["adjacent", "kept-on-device"])
@pytest.mark.parametrize("batch", [1, 4, 32, 200])
@pytest.mark.parametrize("form", FORMS)
def test_a_thousand_steps_are_bit_equal_with_dependent_launches_and_without(form, batch, steps):
    form = FORMS[form]
    none, *others = form.combinations()
    want = run(form, batch, none, steps)
    outs, valid = want["out"].float(), torch.arange(batch, device="cuda")
    valid = valid[valid != 1] if batch > 2 else valid
    assert outs.isfinite().all() and outs[:, valid].any(-1).all(), "the chain computes something in every token"
    assert batch <= 2 or not outs[:, 1].any(), "padding"
    assert all(want[f"state of layer {i}"].isfinite().all() for i in range(2))
    for how in others:
        assert not differing(run(form, batch, how, steps), want), how


def test_kept_on_device_draws_other_counts_in_every_replay():
    """The bookkeeping is at work: the digests of a graph's steps differ from replay to replay, and nothing is left half counted."""
    for form in (FORMS["step"], FORMS["ring"]):
        found = run(form, 4, How(True, True), Chain.kept_on_device)
        digests = found["digests"]
        assert (digests[1:, :, 0] != digests[:-1, :, 0]).any(-1).all()
        counts = found["prev_num_accepted_tokens of layer 0"]
        slots = Chain(form, 4).slots
        counts = counts[slots[slots >= 0].long()]
        assert (counts >= 0).all() and (counts <= form.window).all()
        assert not any(found[f"arrivals of layer {i}"].any() for i in range(2))


def test_repeated_chains_are_hash_equal():
    first = run(FORMS["step"], 32, How(True, True), Chain.adjacent)
    for _ in range(4):
        assert not differing(run(FORMS["step"], 32, How(True, True), Chain.adjacent), first)


def test_one_kernel_and_two_leave_the_same():
    for name in ("step", "ring"):
        one, two = FORMS[name], replace(FORMS[name], two_kernels=True)
        for steps in (Chain.adjacent, Chain.kept_on_device):
            want = run(one, 4, How(True, True), steps)
            assert not differing(run(two, 4, How(True, True, True), steps), want)


# A producer that writes x, B and C late.


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("after_conv", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("base", [STEP, RING], ids=lambda c: c.id)
def test_pdl_waits_for_a_producer_that_triggers_early(base, after_conv, two):
    """Without its wait the kernel reads too early, so the test can detect a missing wait."""
    case = replace(base, heads=16, headdim=64, d_state=128, groups=1, accepted=(0,), index=None, two_kernels=two, after_conv=after_conv)
    call = make(case, "cuda")
    spec = registry.select(op.OPERATOR, call.problem, op.FAMILY.size_of(call.views), arch(), True)
    first = spec.kernels[:1] if two else spec.kernels
    hasty = launch(spec, op.FAMILY, call.views, call.options, call.operands, hasty=first)
    state, out, written = call.kwargs["state"], call.kwargs["out"], call.memory.buffers["conv"][0]
    waits_for_its_producer(lambda pdl: call.run(pdl=pdl), hasty, written, state, out)
