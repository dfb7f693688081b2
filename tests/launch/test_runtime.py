"""The launch path without a GPU: the real bindings' types, with a driver call that inspects its arguments."""

from __future__ import annotations

import ctypes
import struct
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from emulated_calls import SM90, needs_emulator
from ssu_cases import BF16, Case, assert_matches, expected, make_call

from ssmgen import emulator
from ssmgen.calls import fast_path, planning
from ssmgen.errors import LaunchError
from ssmgen.families.selective_state_update import planning as op
from ssmgen.families.selective_state_update.spec import SsuSpec
from ssmgen.launch import enqueue, runtime
from ssmgen.launch.enqueue import LaunchConfig
from ssmgen.select.registry import select
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import DType, Index

SPEC = SsuSpec(d_state=16, headdim=64, tied=False, dt_limit=True, index=Index.I32, D=DType.F32, lanes=4, vec=4, tile=64, threads=64)


def read_arguments(address: int, spec: SsuSpec) -> dict[str, int | float]:
    """The values that a kernel would find through the array of argument pointers."""
    pointers = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
    sizes = {p.name: struct.calcsize("=" + p.code) for p in spec.parameters()}
    raw = {p.name: (p.code, ctypes.string_at(pointers[i], sizes[p.name])) for i, p in enumerate(spec.parameters())}
    return {name: struct.unpack("=" + code, data)[0] for name, (code, data) in raw.items()}


def values_of(spec: SsuSpec) -> dict[str, int | float]:
    """A different value for every argument that is not a pointer."""
    rest = [p for p in spec.parameters() if p.code != "Q"]
    return {p.name: i + 0.5 if p.code == "f" else -7 if p.code == "q" and p.name == "pad_slot_id" else 1000 + i for i, p in enumerate(rest)}


as_launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


@pytest.fixture
def fake(monkeypatch, way):
    """A driver whose launches are recorded, on a stream of the test's choice."""
    state = SimpleNamespace(stream=0, calls=[], configs=[], results=[])

    @as_launch
    def launch(config, handle, address, extra):
        state.configs.append(config)
        state.calls.append((LaunchConfig.from_buffer_copy(LaunchConfig.from_address(config)), handle, address, extra))
        return state.results.pop(0) if state.results else 0

    monkeypatch.setattr(enqueue, "launcher", lambda: launch)
    monkeypatch.setattr(runtime, "current_raw_stream", lambda device: state.stream)
    return state


def launch_of(spec=SPEC, pdl=False, values=None, grid=12) -> runtime.Launch:
    return runtime.Launch(SimpleNamespace(spec=spec, handle=4711, pdl=pdl), 0, grid, values or values_of(spec))


def test_every_argument_arrives_where_the_parameter_list_has_it(fake):
    pointers = [0x1000 * (i + 1) for i, p in enumerate(SPEC.parameters()) if p.code == "Q"]
    plan = launch_of().at(pointers)  # which owns what the address points to
    plan()
    ((config, handle, address, extra),) = fake.calls
    found = read_arguments(address, SPEC)
    names = [p.name for p in SPEC.parameters()]
    assert [found[n] for n in names[: len(pointers)]] == pointers
    assert {n: found[n] for n in names[len(pointers) :]} == values_of(SPEC)
    assert handle == 4711 and extra is None
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (12, 1, 1) and (config.blockDimX, config.blockDimY) == (64, 1)


def test_plans_of_one_launch_do_not_share_their_pointers(fake):
    launch, count = launch_of(), sum(p.code == "Q" for p in SPEC.parameters())
    plans = [launch.at([base + i for i in range(count)]) for base in (100, 200, 300)]
    for plan in plans:
        plan()
    assert [read_arguments(address, SPEC)["state"] for _, _, address, _ in fake.calls] == [100, 200, 300]


@pytest.mark.parametrize("pdl", [False, True])
def test_a_configuration_is_laid_out_as_the_driver_s(pdl):
    """It equals the bindings' configuration byte by byte, except for the attribute's address; the attribute itself is equal."""
    cu, ours = runtime.driver(), LaunchConfig.of(12, 64, 1 << 16, 0x7000, pdl)
    theirs, attribute = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ, theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 12, 1, 1, 64, 1, 1
    theirs.sharedMemBytes, theirs.hStream = 1 << 16, 0x7000
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    if pdl:
        theirs.attrs, theirs.numAttrs = [attribute], 1
    got, want = bytearray(ours), bytearray(ctypes.string_at(int(theirs.getPtr()), ctypes.sizeof(ours)))
    at = LaunchConfig.attrs.offset
    where = ctypes.c_void_p.from_buffer(want, at).value
    if pdl:
        assert bytes(ours.attrs[0]) == ctypes.string_at(where, ctypes.sizeof(ours.attrs[0]))
        got[at : at + 8] = want[at : at + 8]
    assert got == want and (where is not None) is pdl


def test_dependent_launch_is_the_kernel_s(fake):
    for pdl in (False, True):
        launch_of(pdl=pdl).at([0] * 9)()
    assert [config.numAttrs for config, *_ in fake.calls] == [0, 1]


def test_each_stream_has_a_configuration_made_once(fake):
    plan = launch_of().at([0] * 9)
    for fake.stream in (5, 7, 5, 7, 0):
        plan()
    streams = [config.hStream or 0 for config, *_ in fake.calls]
    assert streams == [5, 7, 5, 7, 0] and fake.configs[0] == fake.configs[2] != fake.configs[1]


def test_a_failed_launch_says_what_was_launched(fake):
    fake.results = [int(runtime.driver().CUresult.CUDA_ERROR_INVALID_VALUE)]
    with pytest.raises(LaunchError, match=r"CUDA_ERROR_INVALID_VALUE\n  grid 12, block 64\n  .*'pad_slot_id': -7"):
        launch_of().at([0] * 9)()


def test_a_thread_without_a_context_gets_one_and_launches_again(fake, monkeypatch):
    made = []
    monkeypatch.setattr(runtime, "ensure_context", made.append)
    fake.results = [int(runtime.driver().CUresult.CUDA_ERROR_INVALID_CONTEXT)]
    launch_of().at([0] * 9)()
    assert made == [0] and len(fake.calls) == 2


def test_launches_in_a_row_stop_at_the_one_that_fails(fake):
    other = replace(SPEC, tile=32)
    launches = [launch_of(), launch_of(other, grid=13), launch_of()]
    plan = runtime.Chain(launches, [range(9), range(9, 18), range(9)]).at(range(18))
    plan()
    assert [read_arguments(address, SPEC)["state"] for _, _, address, _ in fake.calls] == [0, 9, 0]
    fake.results = [0, int(runtime.driver().CUresult.CUDA_ERROR_INVALID_VALUE)]
    with pytest.raises(LaunchError, match=r"tile=32.*\n  grid 13, block 64"):
        plan()
    assert len(fake.calls) == 5


@pytest.mark.parametrize(("stream", "current", "entered"), [(0, 1, [0]), (0, 0, []), (5, 1, [])])
def test_a_default_stream_is_that_of_the_tensors_device(fake, monkeypatch, stream, current, entered):
    """Its handle is 0 on every device, so the launch's has to be the current one."""
    seen = []

    @contextmanager
    def device(index):
        seen.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(runtime, "current_device", lambda: current)
    fake.stream = stream
    launch_of().at([0] * 9)()
    assert seen == entered and len(fake.calls) == 1


@needs_emulator
def test_a_plan_run_by_the_emulator(fake, monkeypatch):
    """From checked operands over problem, spec, values and plan to a result, as on a card without the driver."""
    call = make_call(Case("m2", heads=2, groups=2, state=BF16, index=torch.int32, split=True), "cpu")
    want = expected(call)
    named = {n: call.named[n] for n in op.OPERANDS.names if n in call.named}
    views = op.views_of(named, call.options, [])
    problem = op.problem_of(views, {n: t.data_ptr() for n, t in named.items()}, call.options)
    spec = select("selective_state_update", problem, 5, SM90, True)
    grid = 5 * spec.nheads * spec.tiles

    @as_launch
    def launch(config, handle, address, extra):
        emulator.run(spec, SM90, LaunchConfig.from_address(config).gridDimX, SimpleNamespace(address=address), named)
        return 0

    monkeypatch.setattr(enqueue, "launcher", lambda: launch)
    launch_of(spec, True, op.kernel_values(spec, views, call.options), grid).at([t.data_ptr() for t in named.values()])()
    assert_matches(call, want)


# Patterns: a call is matched to one before its plan is looked up.


def pattern_of(given, resolve=lambda pointers: None) -> fast_path.Pattern:
    return fast_path.Pattern(given, resolve, [i for i, t in enumerate(given) if t is not None])


def test_guard_sees_every_property():
    base = torch.zeros(4, 6)
    guard = fast_path.tensor_guard([base, torch.zeros(3)])
    assert guard(torch.ones(4, 6), torch.ones(3))
    for other in (torch.zeros(4, 5), torch.zeros(6, 4).t(), torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(4, 6, device="meta")):
        assert not guard(other, torch.zeros(3))
    assert not guard(torch.zeros(4, 6, requires_grad=True), torch.zeros(3))


def test_guard_of_one_tensor_given_twice():
    t = torch.zeros(4)
    guard = fast_path.tensor_guard([t, t])
    assert guard(t, t) and guard(torch.ones(4), torch.ones(4)) and not guard(t, torch.zeros(5))


def test_resize_of_the_same_object_is_noticed():
    t, other = torch.zeros(4, 4), torch.zeros(2)
    guard = fast_path.tensor_guard([t, other])
    t.resize_(2, 4)
    assert not guard(t, other)


def test_pointers_are_resolved_once_and_the_table_is_bounded(monkeypatch):
    seen = []
    fixed = torch.zeros(1)
    pattern = pattern_of((torch.zeros(2), fixed, None), seen.append)
    a, b = torch.zeros(2), torch.zeros(2)
    for t in (a, b, a, b):
        assert pattern.plan((t, fixed)) is planning.nothing
    assert len(seen) == 2
    monkeypatch.setattr(fast_path.Pattern, "limit", 3)
    kept = [torch.zeros(2) for _ in range(20)]
    for t in kept:
        pattern.plan((t, fixed))
    assert len(pattern.plans) <= 3


def test_a_tensor_that_is_no_operand_is_compared_and_passed_to_nothing():
    seen = []
    given = (torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(4))
    pattern = fast_path.Pattern(given, seen.append, [2, 0], unused=[1])
    pattern.plan(pattern.pick(given))
    assert seen == [(given[2].data_ptr(), given[0].data_ptr())]
    assert pattern.matches(*given) and not pattern.matches(given[0], given[1].int(), given[2])


def test_weights_that_require_grad_match_only_without_grad_mode():
    weight = torch.nn.Parameter(torch.zeros(2))
    given = weight, torch.zeros(1)
    pattern = pattern_of(given)
    with torch.no_grad():
        assert pattern.matches(*given)
    assert not pattern.matches(*given)


def test_arguments_outlive_what_they_were_made_from():
    packed = [Arguments(SPEC, values_of(SPEC)).at(range(9)) for _ in range(50)]
    assert all(read_arguments(p.address, SPEC)["dt_max"] == values_of(SPEC)["dt_max"] for p in packed)
