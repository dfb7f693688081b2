"""Loading and launching on a card: streams, graphs, threads, several devices."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from ssu_cases import BF16, Case, assert_matches, expected, make_call

import ssmgen
from ssmgen.errors import ArgumentError, CaptureError, LaunchError
from ssmgen.launch import runtime
from ssmgen.select import registry

pytestmark = pytest.mark.gpu
each_way = pytest.mark.usefixtures("way")  # of making calls that come again

M2 = Case("m2", heads=8, groups=2, state=BF16, index=torch.int32, batch=4)


def fresh_case(headdim: int) -> Case:
    """No other test has this shape, so its kernel is not loaded yet."""
    return replace(M2, headdim=headdim)


@each_way
def test_graph_replay_equals_eager():
    eager, captured = make_call(M2, "cuda"), make_call(M2, "cuda")
    steps = 4
    for _ in range(steps):
        ssmgen.selective_state_update(*eager.args, **eager.kwargs)
    ssmgen.warm(ssmgen.selective_state_update, *captured.args, **captured.kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ssmgen.selective_state_update(*captured.args, **captured.kwargs)
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    used = captured.written.cuda()
    assert torch.equal(eager.args[0][used], captured.args[0][used]) and torch.equal(eager.kwargs["out"], captured.kwargs["out"])


def test_first_launch_ever_may_be_inside_a_capture_once_warm():
    call = make_call(fresh_case(104), "cuda")
    want = expected(call)
    assert not ssmgen.is_warm(ssmgen.selective_state_update, *call.args, **call.kwargs)
    assert ssmgen.warm(ssmgen.selective_state_update, *call.args, **call.kwargs) == 1
    assert ssmgen.warm(ssmgen.selective_state_update, *call.args, **call.kwargs) == 0
    assert ssmgen.is_warm(ssmgen.selective_state_update, *call.args, **call.kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ssmgen.selective_state_update(*call.args, **call.kwargs)
    graph.replay()
    torch.cuda.synchronize()
    assert_matches(call, want)


def test_capture_of_an_unloaded_kernel_names_the_remedy():
    call = make_call(fresh_case(112), "cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match=r"ssmgen.warm\(ssmgen.selective_state_update"), torch.cuda.graph(graph):
        ssmgen.selective_state_update(*call.args, **call.kwargs)
    ssmgen.selective_state_update(*call.args, **call.kwargs)  # and outside the capture everything works
    torch.cuda.synchronize()


def test_warm_covers_further_batch_sizes():
    call = make_call(fresh_case(120), "cuda")
    ssmgen.warm(ssmgen.selective_state_update, *call.args, **call.kwargs, batches=(1, 64, 512))
    assert ssmgen.is_warm(ssmgen.selective_state_update, *call.args, **call.kwargs, batches=(1, 64, 512))


@each_way
def test_stream_of_the_caller():
    """The work is ordered with the other work of the caller's stream, and the legacy stream is not involved."""
    call = make_call(M2, "cuda")
    want = expected(call)
    ssmgen.warm(ssmgen.selective_state_update, *call.args, **call.kwargs)
    x = call.args[1]
    kept = x.clone()
    x.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(kept)
        ssmgen.selective_state_update(*call.args, **call.kwargs)
    stream.synchronize()
    assert_matches(call, want)


@each_way
def test_bound_call_relaunches_on_the_current_stream():
    bound_call, eager = make_call(M2, "cuda"), make_call(M2, "cuda")
    bound = ssmgen.bind(ssmgen.selective_state_update, *bound_call.args, **bound_call.kwargs)
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        for _ in range(3):
            assert bound() is bound_call.kwargs["out"]
    torch.cuda.synchronize()
    for _ in range(3):
        ssmgen.selective_state_update(*eager.args, **eager.kwargs)
    used = eager.written.cuda()
    assert torch.equal(bound_call.args[0][used], eager.args[0][used])


@each_way
def test_threads_share_kernels_and_plans():
    """Eight threads, each on a separate stream, use separate shapes and a common one."""
    failures = []

    def work(i: int) -> None:
        try:
            for case in (fresh_case(64 + 8 * (i % 3)), M2):
                call = make_call(case, "cuda", seed=i)
                want = expected(call)
                with torch.cuda.stream(torch.cuda.Stream()) as _:
                    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                    ssmgen.selective_state_update(*call.args, **call.kwargs)
                    torch.cuda.current_stream().synchronize()
                assert_matches(call, want)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures


@each_way
def test_a_new_thread_without_a_context():
    call = make_call(M2, "cuda")
    want = expected(call)
    bound = ssmgen.bind(ssmgen.selective_state_update, *call.args, **call.kwargs)
    torch.cuda.synchronize()
    failures = []

    def work() -> None:
        try:
            bound()
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures, failures
    assert_matches(call, want)


@each_way
def test_same_pattern_elsewhere_in_memory():
    """A plan found by its pattern is used with the new tensors' pointers, and alignment is looked at again."""
    first, second = make_call(M2, "cuda", seed=1), make_call(M2, "cuda", seed=2)
    for call in (first, second):
        want = expected(call)
        ssmgen.selective_state_update(*call.args, **call.kwargs)
        torch.cuda.synchronize()
        assert_matches(call, want)
    third = make_call(M2, "cuda", seed=3)
    want = expected(third)
    B = third.args[4]
    shifted = torch.empty(B.numel() + 1, dtype=B.dtype, device="cuda")[1:].view(B.shape)
    shifted.copy_(B)
    args = (*third.args[:4], shifted, *third.args[5:])
    ssmgen.selective_state_update(*args, **third.kwargs)
    torch.cuda.synchronize()
    assert_matches(third, want)


@each_way
def test_changed_metadata_of_the_same_object_is_noticed():
    call = make_call(M2, "cuda")
    ssmgen.selective_state_update(*call.args, **call.kwargs)
    x = call.args[1]
    x.resize_(2, *x.shape[1:])
    with pytest.raises(ArgumentError, match="dt is"):
        ssmgen.selective_state_update(*call.args, **call.kwargs)


@each_way
def test_requires_grad_is_refused_only_in_grad_mode():
    call = make_call(M2, "cuda")
    weight = torch.nn.Parameter(torch.randn(8, device="cuda"))
    args = (*call.args[:6], weight, *call.args[7:])
    for _ in range(2):
        with pytest.raises(ArgumentError, match="requires grad"):
            ssmgen.selective_state_update(*args, **call.kwargs)
        with torch.no_grad():
            ssmgen.selective_state_update(*args, **call.kwargs)
    torch.cuda.synchronize()


@each_way
def test_overlap_is_found_for_pointers_not_seen_before():
    call = make_call(Case("m2", heads=4, x=torch.float32), "cuda")
    ssmgen.selective_state_update(*call.args, **call.kwargs)
    with pytest.raises(ArgumentError, match="out overlaps x"):
        ssmgen.selective_state_update(*call.args, **(call.kwargs | {"out": call.args[1]}))


def test_fork_before_cuda_is_used():
    """A child that forks after the import, as a data loader's does, can use the card."""
    program = (
        "import os, torch, ssmgen, ssmgen.calls.api\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    s = torch.zeros(1, 2, 8, 16, device='cuda'); x = torch.ones(1, 2, 8, device='cuda')\n"
        "    b = torch.ones(1, 1, 16, device='cuda')\n"
        "    y = ssmgen.selective_state_update(s, x, x[..., 0], -x[0, :, 0], b, b)\n"
        "    os._exit(0 if abs(float(y[0, 0, 0]) - 16) < 1e-3 else 7)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("current", [0, 1])
@each_way
@pytest.mark.parametrize("own_stream", [False, True])
def test_the_tensors_decide_the_device(current, own_stream):
    for device in ("cuda:0", "cuda:1"):
        call = make_call(M2, device)
        want = expected(call)
        with torch.cuda.device(current):
            if own_stream:
                stream = torch.cuda.Stream(device)
                stream.wait_stream(torch.cuda.default_stream(device))
                with torch.cuda.stream(stream):
                    torch.cuda.set_device(current)
                    ssmgen.selective_state_update(*call.args, **call.kwargs)
            else:
                ssmgen.selective_state_update(*call.args, **call.kwargs)
            assert torch.cuda.current_device() == current
        torch.cuda.synchronize(device)
        assert_matches(call, want)


@each_way
def test_error_of_the_driver_names_the_launch():
    call = make_call(M2, "cuda")
    built = ssmgen.selective_state_update.build(*call.args, **call.kwargs)
    problem, size, device, _ = built.problem()
    launch = built.launch_with(registry.select(built.caller.family.operator, problem, size, runtime.device_arch(device.index), True))
    broken = runtime.Launch(launch.kernel, launch.device, 0, launch.arguments.values).at([0] * 10)
    with pytest.raises(LaunchError, match="grid 0"):
        broken()
