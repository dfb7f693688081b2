"""A small report, shared by the tests of its files and the tests in a browser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bench_cases import HEAD

from ssmgen.families.selective_state_update.spec import SsuProblem
from ssmgen.spec.kernel import Arch, KernelSpec, Problem
from ssmgen.variants import generate
from tools.report import content

ARCHS = [Arch.parse("sm_80"), Arch.parse("sm_90a")]
TIMED = (
    "selective_state_update:d_state=16,headdim=1536,nheads=1,ngroups=1,state=f32,x=bf16,dt=bf16,A=f32,B=bf16,C=bf16,D=bf16,z=bf16,"
    "dt_bias=f32,out=bf16,tied=no,dt_softplus=yes,dt_limit=no,index=i32,pool=single,state_loads=vector,operand_loads=vector,lanes=4,vec=4,"
    "ilp=4,tile=128,threads=128,min_blocks=0,prefetch=0,pdl=trigger_slot"
)


@contextmanager
def few_variants() -> Iterator[None]:
    """Leaves few variants to show: of the defaults Nemotron's update of bf16 states and the slot copy, of models' calls that update."""
    every, every_problem = generate.default_variants, content.problems_by_models

    def some(archs: Sequence[Arch]) -> list[tuple[KernelSpec, Arch]]:
        return [(spec, arch) for spec, arch in every(archs) if spec.stem.startswith(("ssu_h128p64n128g8_bf16", "slot_copy"))]

    def its_own(*args: Any) -> dict[Problem, list[str]]:
        return {p: names for p, names in every_problem(*args).items() if isinstance(p, SsuProblem) and "nemotron-h-8b" in names}

    with mock.patch.object(content, "default_variants", some), mock.patch.object(content, "problems_by_models", its_own):
        yield


def benchmark() -> dict[str, Any]:
    """As `ssmgen bench … --json` prints it, with one row."""
    row = {
        "model": "mamba-130m",
        "state": "f32",
        "heads": 1,
        "tokens": 1,
        "intermediates": False,
        "batch": 8,
        "us": {"ssmgen_pdl": 2.5, "ssmgen": 3.25, "copy": 2.0, "two_kernels": 4.0, "flashinfer": 5.0},
        "served_us": 2.5,
        "tbs": 1.5,
        "ceiling_fraction": 0.4,
        "copy_ratio": 1.25,
        "peer_ratio": {"flashinfer": 0.5},
        "host_us": {"ssmgen": 9.0},
        "spec": TIMED,
        "rule": "latency",
        "compile_seconds": 0.1,
        "variants": {"two_kernels": {"specs": ["slot_copy:slot_bytes=4096,threads=128,min_blocks=0,pdl=off"], "rule": "none"}},
    }
    return HEAD | {"rows": [row]}
