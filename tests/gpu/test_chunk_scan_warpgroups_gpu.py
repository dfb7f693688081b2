"""chunk_scan by warpgroups on a card: the laws of its results at the sizes of models, with sequences that blocks divide and with others,
and with blocks that stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import attention_cases
import pytest
import scan_cases as laws
import torch
from repeats import others_in_graphs
from scan_cases import BF16, BOUNDS, F16, F32, SM90, Sizes, error, exact, make, same

import ssmgen
from ssmgen.families.chunk_scan.spec import OPERATOR, ScanProblem
from ssmgen.families.chunk_scan.warpgroups import WarpgroupScanSpec, warpgroup_space
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Pdl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]


@dataclass(frozen=True)
class Form:
    """Sizes of a call, and the kernel that serves it: the registry's choice, or one with other fields."""

    sizes: Sizes
    parts: int  # blocks that divide a sequence
    may_stay: bool = False  # blocks serve many short sequences instead
    how: dict[str, Any] = field(default_factory=dict)
    tokens: int = 1500  # of a long sequence

    def spec(self, problem: ScanProblem) -> WarpgroupScanSpec:
        spec = select(OPERATOR, problem, self.sizes.heads, SM90, True)
        assert isinstance(spec, WarpgroupScanSpec) and (spec.parts == self.parts or (self.may_stay and spec.stays))
        return replace(spec, **self.how)

    def run(self, **more: Any) -> laws.Scan:
        return partial(laws.launched, spec=self.spec, **more)


def sizes_of(heads: int) -> Sizes:
    return Sizes(heads=heads, groups=8, headdim=64, d_state=128, device="cuda")


PARTS = {128: 1, 32: 3, 24: 4, 16: 6, 8: 8}  # by heads: how many blocks divide a sequence
HEADS = {f"{heads}-heads": Form(sizes_of(heads), parts, tokens=4100) for heads, parts in PARTS.items()}
STAY = {f"{heads}-heads-stay": Form(sizes_of(heads), 1, how={"stays": True}, tokens=4100) for heads in (128, 48)}
# Models whose heads are not 64 x 64 or 64 x 128.
MODELS = {
    "falcon-h1-7b": Form(Sizes(heads=24, headdim=128, d_state=256, device="cuda"), 2, may_stay=True),
    "falcon-h1-1.5b": Form(Sizes(heads=48, headdim=64, d_state=256, device="cuda"), 2, may_stay=True),
    "nemotron-h-47b": Form(Sizes(heads=256, groups=8, headdim=64, d_state=256, device="cuda"), 1, may_stay=True),
    "nemotron-nano-9b": Form(Sizes(heads=128, groups=8, headdim=80, d_state=128, device="cuda"), 1, may_stay=True),
    "granite-350m": Form(Sizes(heads=48, headdim=32, d_state=128, device="cuda"), 2, may_stay=True),
    "falcon-h1-tiny": Form(Sizes(heads=24, headdim=32, d_state=64, device="cuda"), 4, may_stay=True),
    "four-of-144": Form(Sizes(heads=4, headdim=144, d_state=256, device="cuda"), 6, may_stay=True),
}


def of(forms: dict[str, Form]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("form", forms.values(), ids=forms)


LENGTHS = (1, 15, 63, 64, 65, 127, 129, 300, 511, 512, 513, 700, 704, 768, 769, 833, 1023, 1025, 1500, 2049)
LAWS: dict[str, Callable[[laws.Scan, Sizes], None]] = {
    "lengths": partial(laws.lengths_are_accurate, lengths=LENGTHS),
    "packing": partial(laws.packing_changes_no_bit, lengths=(*laws.LENGTHS, 512, 513, 768, 769, 1500)),
    "neighbours": partial(laws.neighbours_do_not_matter, lengths=(65, 0, 700, 1, 1500, 64)),
    "pool-f32": partial(laws.a_pool_is_touched_where_it_should_be, state=F32),
    "pool-bf16": partial(laws.a_pool_is_touched_where_it_should_be, state=BF16),
    "pool-f16": partial(laws.a_pool_is_touched_where_it_should_be, state=F16),
}


@of(HEADS | STAY | MODELS)
@pytest.mark.parametrize("law", LAWS)
def test_laws(form, law):
    LAWS[law](form.run(), form.sizes)


@of(HEADS | STAY | MODELS)
@pytest.mark.parametrize("decay", [1e-3, 16.0])
def test_long_and_short_memories(form, decay):
    gated = (form.sizes.headdim, form.sizes.d_state) == (64, 128)
    laws.is_accurate(form.run(), form.sizes, form.tokens, decay, z=gated, step=3.0 if decay > 1 else 0.0)


@of(HEADS | STAY | MODELS)
def test_the_same_bits_ten_thousand_times(form):
    """Runs in graphs, with more heads of sequences than SMs or with fewer."""
    assert not others_in_graphs(form.run(), make(form.sizes, 3, 1100))


@of(HEADS | MODELS)
def test_ids_and_checkpoints_of_long_sequences(form):
    """Divided or not, they are right, and they change no bit of the results without positions."""
    tokens = 1500
    call = make(form.sizes, 2, tokens, decay=0.02)
    call["seq_idx"] = (torch.arange(tokens, device="cuda") // 350).int().repeat(2, 1)
    listed = torch.tensor([1, 63, 350, 351, 512, 513, 700, 1499, 1500, 1501, 2200, 3000], device="cuda")
    more = {"return_final_states": True, "checkpoint_positions": listed, "return_checkpoints": True}
    wanted, found = exact(call, **more), form.run()(**call, **more)
    for name, own in zip(("out", "final_states", "checkpoints"), found, strict=True):
        assert error(own, wanted[name]) <= BOUNDS[BF16], name
    plain = form.run()(**call, return_final_states=True)
    assert all(same(a, b) for a, b in zip(found, plain, strict=False)) and same(found[2][-1], found[1][1])


@of(HEADS)
@pytest.mark.parametrize("x", [BF16, F16])
@pytest.mark.parametrize(("headdim", "d_state"), [(64, 64), (128, 64), (128, 128)])
def test_other_sizes(form, x, headdim, d_state):
    sizes = replace(form.sizes, x=x, headdim=headdim, d_state=d_state)
    laws.is_accurate(ssmgen.chunk_scan, sizes, 700, 0.1)


@of(MODELS)
def test_f16(form):
    laws.is_accurate(ssmgen.chunk_scan, replace(form.sizes, x=F16), 700, 0.1)


# No sequence is divided: there are many heads, or the call requests it.
ONE_SEGMENT = partial(ssmgen.chunk_scan, segments=1)
whole = pytest.mark.parametrize(
    ("sizes", "scan"), [(sizes_of(128), HEADS["128-heads"].run()), (sizes_of(16), ONE_SEGMENT)], ids=["128-heads", "one-segment"]
)


@whole
@pytest.mark.parametrize("cut", [64, 640, 1472])
def test_a_cut_changes_no_bit(sizes, scan, cut):
    laws.a_cut_changes_no_bit(scan, sizes, 1500, cut)


@of(MODELS)
def test_a_cut_changes_no_bit_of_models(form):
    laws.a_cut_changes_no_bit(ONE_SEGMENT, form.sizes, 1500, 640)


@whole
def test_ids_are_sequences(sizes, scan):
    laws.ids_are_sequences(scan, sizes, (*laws.LENGTHS, 1000))


@of(HEADS)
def test_ids_go_on(form):
    laws.ids_go_on(form.run(), form.sizes)


@whole
@pytest.mark.parametrize(("state", "ids"), [(F32, False), (F32, True), (BF16, False), (F16, False)], ids=["f32", "ids", "bf16", "f16"])
def test_checkpoints_are_final_states(sizes, scan, state, ids):
    laws.checkpoints_are_final_states(scan, sizes, state, ids=ids, lengths=(*laws.LENGTHS, 700))


@whole
def test_checkpoints_of_a_batch(sizes, scan):
    laws.checkpoints_of_a_batch(scan, sizes)


def first_and_last_are_as_alone(form: Form, call: dict[str, Any], out: torch.Tensor, states: torch.Tensor) -> None:
    for i in (0, len(out) - 1):
        own = {n: t[i : i + 1] if n in ("x", "dt", "B", "C") else t for n, t in call.items()}
        one, last = form.run()(**own, return_final_states=True)
        assert same(one[0], out[i]) and same(last[0], states[i])


@of(HEADS)
def test_place_in_the_batch_changes_no_bit(form):
    call = make(form.sizes, 5, 1100)
    first_and_last_are_as_alone(form, call, *form.run()(**call, return_final_states=True))


@of(MODELS)
def test_many_short_sequences(form):
    """A dense batch of short sequences is served by blocks that stay, with the bits of others."""
    call = make(form.sizes, 40, 130)
    assert form.spec(laws.problem_of(**call)).stays
    first_and_last_are_as_alone(form, call, *ssmgen.chunk_scan(**call, return_final_states=True))


@pytest.mark.parametrize("lengths", [(2048,) * 5, (64, 3000, 1, 0, 700, 128, 2000, 65) * 5], ids=["alike", "others"])
@of(STAY)
def test_blocks_that_stay_change_no_bit(form, lengths):
    """This includes 40 sequences, which are examined 32 at a time."""
    call = make(form.sizes, sum(lengths)) | {"cu_seqlens": laws.starts_of(lengths, "cuda"), "return_final_states": True}
    call["initial_states"] = torch.randn(len(lengths), form.sizes.heads, 64, 128, device="cuda")
    found, wanted = form.run()(**call), replace(form, how={"stays": False}).run()(**call)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


@of(HEADS)
def test_stages_and_launches_change_no_bit(form):
    call = make(form.sizes, 2, 1100) | {"return_final_states": True}
    wanted, problem = form.run()(**call), laws.problem_of(**call)
    others = {(s.stages, s.pdl) for s in warpgroup_space(problem, SM90)}
    assert len(others) > len(Pdl)
    for stages, pdl in others:
        spec = replace(form.spec(problem), stages=stages, pdl=pdl)
        assert all(same(a, b) for a, b in zip(laws.launched(spec=spec, **call), wanted, strict=True)), spec


@of(HEADS)
def test_in_a_graph(form):
    """The same graph serves other lengths, for which blocks divide different sequences."""
    call = make(form.sizes, 1500)
    call |= {"cu_seqlens": laws.starts_of((100, 1400), "cuda"), "out": torch.empty_like(call["x"])}
    states = torch.empty(2, form.sizes.heads, 64, 128, device="cuda")
    call |= {"final_states_out": states, "return_final_states": True}
    ssmgen.chunk_scan(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ssmgen.chunk_scan(**call)
    for lengths in ((100, 1400), (700, 800), (1500, 0), (64, 1000)):
        call["cu_seqlens"].copy_(laws.starts_of(lengths, "cuda"))
        call["out"].zero_()
        states.fill_(laws.NAN)
        graph.replay()
        again = call | {"out": torch.zeros_like(call["out"]), "final_states_out": torch.empty_like(states)}
        out, last = form.run()(**again)
        assert same(call["out"], out) and same(states, last)


@pytest.mark.parametrize("attention", attention_cases.FORMS)
@of(HEADS)
def test_linear_attention(form, attention):
    name, call = attention_cases.make(attention, form.sizes, 2, 1100)
    attention_cases.is_accurate(form.run(function=getattr(ssmgen, name)), call)
