"""The parts of tools.sanitize that run without the sanitizer: its kernels, controls, images, and its reading of reports."""

from __future__ import annotations

import ctypes
import json
import sys

import pytest

from ssmgen.compile import nvrtc
from ssmgen.compile.render import render
from ssmgen.emulator.check import trial_of
from ssmgen.errors import SpecError
from ssmgen.launch import enqueue
from ssmgen.spec.kernel import MAP_BYTES
from tools.sanitize import __main__ as program
from tools.sanitize import images, replay, reports
from tools.sanitize.cases import TOKENS, chosen, edited
from tools.sanitize.edits import EDITS

RACE = """========= COMPUTE-SANITIZER
ran /tmp/0 0123456789abcdef
========= Error: Race reported between Write access at k1+0x10 in ssmgen.cu:2 and Read access at k1+0x20 in ssmgen.cu:1 [12 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
REPORTS = {
    "nothing": ("========= COMPUTE-SANITIZER\nran /tmp/0 0123456789abcdef\n========= ERROR SUMMARY: 0 errors\n", 0, "memcheck", "nothing"),
    "no race": (
        "ran /tmp/0 0123456789abcdef\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
        0,
        "racecheck",
        "nothing",
    ),
    "a race": (RACE, 0, "racecheck", "1 hazard (1 error, 0 warnings): 12 of 1 pairs"),
    "errors": ("========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n", 1, "memcheck", "3 errors"),
    "without the sanitizer": ("ran /tmp/0 0123456789abcdef\n", 0, "none", "nothing"),
    "a refused launch": (
        "launching it: CUDA_ERROR_INVALID_VALUE\n",
        1,
        "none",
        "failed, exit code 1: launching it: CUDA_ERROR_INVALID_VALUE",
    ),
    "no summary": ("ran /tmp/0 0123456789abcdef\n", 0, "memcheck", "failed, exit code 0: ran /tmp/0 0123456789abcdef"),
    "too long": ("========= COMPUTE-SANITIZER\n", None, "racecheck", "did not end"),
    "too long behind the kernels": ("ran /tmp/0 0123456789abcdef\n", None, "racecheck", "did not end, but the kernels had"),
}


@pytest.mark.parametrize("report", REPORTS)
def test_reports_are_read(report):
    log, code, tool, verdict = REPORTS[report]
    row = reports.row("some", tool, log, code, 1.0)
    assert row.verdict == verdict and row.clean == (verdict == "nothing") and bool(row.digest) == ("ran" in log)


def test_lines_of_texts_are_shown():
    assert reports.located(RACE, {"k1": "a line\nanother"}) == "k1:1: a line\nk1:2: another\n"


def test_every_kernel_that_waits_at_barriers_has_its_control():
    """Prompts are long enough for stages to be used again, and products have more tiles than stages. The control and the planted errors
    change every text with such barriers."""
    cases = chosen([])
    with_barriers = [c for c in cases if any("mbarrier.init" in render(part, c.arch) for part in c.spec.kernels)]
    for edit in ("each lane arrives", "a lane does not arrive", "one arrives for others that may not be done"):
        assert [(c.spec, c.tokens) for c in edited(cases, [edit])] == [(c.spec, c.tokens) for c in with_barriers]
    assert (
        edited(cases, ["no wait for a chunk"])
        and len(with_barriers) > 30
        and all((c.tokens or 0) >= TOKENS for c in with_barriers if c.spec.kind != "skinny_linear")
    )
    assert len({c.name for c in cases}) == len(cases) and all(c.spec.name in c.name for c in cases)
    with pytest.raises(SpecError, match="no-such-kernel"):
        chosen(["scan", "no-such-kernel"])


def test_edited_texts_compile():
    (case,) = chosen(["chunk_scan: Mamba-2, a batch from zeros, few heads, seq_idx"])[:1]
    text = render(case.spec, case.arch)
    for edit in EDITS.values():
        made = edit.made(text)
        assert made != text or not edit.changes(case.spec, case.arch)
        nvrtc.compile_cubin(made, case.arch, "an edited kernel")


class Driver:
    """The parts of the driver that launching an image needs; kernels do nothing."""

    def __init__(self):
        self.memory, self.launches = [], []

    def allocate(self, address, count):
        self.memory.append(ctypes.create_string_buffer(count.value + 256))
        address._obj.value = -(-ctypes.addressof(self.memory[-1]) // 256) * 256
        return 0

    def store(self, address, data, count):
        ctypes.memmove(address.value, data, count.value)
        return 0

    def load(self, data, address, count):
        ctypes.memmove(data, address.value, count.value)
        return 0

    def launch(self, config, kernel, arguments, extra):
        first = ctypes.cast(arguments.value, ctypes.POINTER(ctypes.c_void_p))[0]
        c = config._obj
        self.launches.append(
            (c.gridDimX, c.blockDimX, c.sharedMemBytes, c.numAttrs, ctypes.cast(first, ctypes.POINTER(ctypes.c_uint64))[0])
        )
        return 0

    def __getattr__(self, name):
        known = {"cuMemAlloc_v2": self.allocate, "cuMemcpyHtoD_v2": self.store, "cuMemcpyDtoH_v2": self.load}
        return known.get(name, lambda *given: 0)


@pytest.mark.parametrize("word", ["causal_conv1d: channel_last, not aligned", "scan_wg_p64n128_bf16_bf16_stays"])
def test_an_image_launches_what_check_runs(word, tmp_path, monkeypatch):
    (case,) = chosen([word])[:1]
    images.write(case, tmp_path)
    driver = Driver()
    monkeypatch.setattr(replay, "cuda", lambda: driver)
    monkeypatch.setattr(enqueue, "launcher", lambda: driver.launch)
    digest = replay.run(tmp_path)
    assert digest == replay.run(tmp_path) and len(digest) == 16
    trial, image = trial_of(case.spec, case.batch, 0, case.tokens), json.loads((tmp_path / "image.json").read_text())
    assert image["operands"].keys() == trial.named.keys()
    grid, threads, shared, attributes, first = driver.launches[0]
    whole = trial.launch_of(case.spec)[1]
    assert grid == (min(whole, images.BLOCKS) if case.spec.stays else whole) and threads == case.spec.threads_per_block
    assert (shared, attributes) == (case.spec.dynamic_bytes, 1)
    name = case.spec.operands()[0]
    tensor, skipped = trial.named[name], image["operands"][name]["skipped"]
    assert first % 16 == skipped == tensor.data_ptr() % 16
    assert ctypes.string_at(first, tensor.element_size()) == ctypes.string_at(tensor.data_ptr(), tensor.element_size())


def test_tensor_maps_are_asked_for_as_calls_have_them(monkeypatch):
    monkeypatch.setattr(replay, "cuda", Driver)
    tiles = replay.value_of({"tiles": ["x", [64, 7, 1, 2, 3], [288, 16, 144, 4096], [64, 64, 1, 1, 1]]})
    assert tiles.operand == "x" and len(replay.tensor_map(tiles, 256)) == MAP_BYTES


def test_what_no_time_is_left_for_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sanitize", "combine_splits", "--sanitizer", sys.executable, "--jobs", "1", "--within", "0.001"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    said = capsys.readouterr().out.splitlines()[-1]
    assert ended.value.code == 1 and "0 runs" in said and int(said.split()[0]) >= int(said.split()[-4]) > 3
