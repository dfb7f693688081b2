"""Every launch of every kernel waits for the upstream kernel, on every path: a kernel that has ended proves that all before it have."""

from __future__ import annotations

import pytest
from exits import exits_without_wait

from ssmgen.compile.render import render
from ssmgen.spec.kernel import Arch, KernelSpec, Pdl
from ssmgen.variants import generate

SM90 = Arch.parse("sm_90a")
# Conditions on a thread's place in the launch. A thread may end without a wait there, because other threads of the launch wait on the same
# path. `>=`: past the end of the work.
PLACES = {
    "row >= rows", "item >= pieces", "channel >= dim", "sequence >= sequences", "sequence >= sequences || channel >= dim",
    "first >= outputs", "warp == kWarps", "warp < 4", "warp == 1",
}  # fmt: skip


def waits(path: str) -> bool:
    """Whether other threads wait where this one, on a path without a wait, ends: only its place may have led it there."""
    taken = {word for word in path.split(" and ") if not word.startswith("not (")}
    return bool(taken) and taken <= PLACES


def default_variants() -> list[KernelSpec]:
    return [spec for spec, arch in generate.default_variants() if arch == SM90]


def test_default_variants_wait_on_all_paths():
    specs = default_variants()
    assert len(specs) > 150 and all(spec.pdl is not Pdl.OFF for spec in specs)
    wrong = {spec.name: lost for spec in specs if (lost := [path for path in exits_without_wait(render(spec, SM90)) if not waits(path)])}
    assert not wrong


KERNEL = 'extern "C" __global__ void k(int n) {{\n{}\n}}\n'


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ("wait_for_upstream(); store(n);", []),
        ("if (padded) return;\nwait_for_upstream();", ["padded"]),
        ("if (padded) { wait_for_upstream(); return; }\nwait_for_upstream();", []),
        ("if (a) { if (b) wait_for_upstream(); } else wait_for_upstream();", ["a and not (b)"]),
        ("for (int i = 0; i < n; ++i) wait_for_upstream();", ["always"]),
        ("const auto f = [&] { wait_for_upstream(); return 1; };\nf();", ["always"]),
        ("// wait_for_upstream();\nif (a) {\n  x = 1;\n}\nload(n);", ["always"]),
        ("wait_for_upstream();\nif (a) return;", []),
        ("if (a) x = 1; else if (b) return;\nwait_for_upstream();", ["not (a) and b"]),
    ],
)
def test_paths_without_a_wait(body, paths):
    assert exits_without_wait(KERNEL.format(body)) == paths


@pytest.mark.parametrize(
    ("path", "well"),
    [
        ("row >= rows", True),
        ("not (length == 0) and warp < 4", True),
        ("length == 0", False),
        ("always", False),
        ("warp < 4 and padded", False),
    ],
)
def test_only_places_excuse_a_path(path, well):
    assert waits(path) is well
