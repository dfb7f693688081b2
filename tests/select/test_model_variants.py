"""The `ssmgen build` line of a kernel that is not built: found for models' kernels, and quickly denied for all others."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ssmgen.cli import main
from ssmgen.select import model_variants, registry, tuned
from ssmgen.select.catalog import LAUNCHED_BY, OPERATOR_OF, parse
from ssmgen.select.model_variants import options_for, problems_by_models, specs_for
from ssmgen.select.models import Model, Wanted, find_model
from ssmgen.spec.kernel import SM90, Arch, KernelSpec, Problem, changed

SM80, SM90A = Arch.parse("sm_80"), Arch.parse("sm_90a")
MOST = 40  # problems whose variants are listed for a kernel that no model has, of 1500 that models pose


def kernel(model: str, kind: str, **fields: object) -> KernelSpec:
    """A kernel of a model's calls, by the first word of its text, with other values in some fields."""
    found = specs_for(find_model(model).asked(Wanted()), SM90A, (True,))
    return changed(next(spec for spec in found if str(spec).startswith(f"{kind}:")), **fields)


UNKNOWN = {
    "tool": lambda: parse("slot_copy:slot_bytes=4096"),
    "step": lambda: kernel("qwen3.5-4b", "linear_attention", nheads=18, key_heads=18),
    "prompts": lambda: kernel("qwen3.5-4b", "chunk_delta_rule_warpgroups", head_v=72),
    "part": lambda: kernel("qwen3.5-4b", "chunk_delta_rule_prepare", head_k=72),
    "layer": lambda: kernel("nemotron-h-8b", "mamba2_layer", nheads=18, ngroups=18),
    "norm of layers": lambda: kernel("nemotron-h-8b", "layer_gated_norm", size=1040),
    "another variant": lambda: kernel("nemotron-h-8b", "mamba2_layer", tile=8),
    "another variant of a part": lambda: kernel("qwen3.5-4b", "chunk_delta_rule_prepare", min_blocks=7),
}


@pytest.fixture
def work(monkeypatch) -> dict[str, list]:
    """Fresh caches; problems whose variants are listed, and models that are asked for their problems."""
    done: dict[str, list] = {"listed": [], "asked": []}
    asked, ranges = Model.asked, registry.ranges

    def asking(self: Model, *of: object) -> list:
        done["asked"].append(self)
        return asked(self, *of)

    def listing(operator: str, problem: object, *how: object) -> tuple:
        done["listed"].append(problem)
        return ranges(operator, problem, *how)

    listing.cache_clear = ranges.cache_clear
    options_for.cache_clear()
    model_variants._posed.cache_clear()
    monkeypatch.setattr(Model, "asked", asking)
    monkeypatch.setattr(registry, "ranges", listing)
    return done


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_a_kernel_of_no_model_is_denied_with_little_work(make, work):
    """A problem is listed only if its calls launch such kernels and if it agrees with the kernel in all fields that both have."""
    spec = make()
    work["listed"].clear()
    assert options_for(spec, SM90A) == ""
    assert len(set(work["listed"])) <= MOST
    assert {type(problem) for problem in work["listed"]} <= set(LAUNCHED_BY.get(type(spec), {}))


def test_models_are_asked_once_for_all_kernels_of_the_same_types(work):
    kernels = [kernel("nemotron-h-8b", "mamba2_layer", nheads=heads, ngroups=heads) for heads in (18, 20, 22)]
    work["asked"].clear()
    assert options_for(kernels[0], SM90A) == ""
    count = len(work["asked"])
    assert count > 0
    assert options_for(kernels[1], SM90A) == options_for(kernels[2], SM80) == ""
    assert len(work["asked"]) == count


@pytest.mark.parametrize("arch", [SM80, SM90A], ids=str)
def test_the_catalog_knows_who_launches_a_kernel(arch):
    """A kernel that it does not know of an operator would lose its line."""
    launched = set()
    for problem in problems_by_models():
        operator = OPERATOR_OF[type(problem)]
        for size in (1, 1024):
            kinds = {type(spec) for spec in registry.select(operator, problem, size, arch, arch >= SM90).kernels}
            assert all(type(problem) in LAUNCHED_BY[kind] for kind in kinds), (operator, kinds)
            launched |= kinds
    assert len(launched) > 12


@pytest.mark.parametrize(
    ("model", "kind"),
    [("nemotron-h-8b", "layer_gated_norm"), ("qwen3.5-4b", "delta_layer"), ("qwen3.5-4b", "chunk_delta_rule_prepare")],
)
def test_a_part_of_a_call_has_a_line_that_builds_it(model, kind, own_cache):
    spec = kernel(model, kind)
    built = CliRunner().invoke(main, ["build", *options_for(spec, SM90A).split(), "--dry-run", "--json"])
    assert str(spec) in {variant["spec"] for variant in json.loads(built.output)["variants"]}


@pytest.mark.parametrize("gpu", tuned.gpus(SM90A))
def test_a_measured_variant_has_a_line_too(gpu):
    def only_measured(problem: Problem) -> set[KernelSpec]:
        ruled, measured = (specs_for([problem], SM90A, (True,), gpus=(one,)) for one in (None, gpu))
        return set(measured) - set(ruled)

    spec, models = next((spec, names) for problem, names in problems_by_models().items() for spec in only_measured(problem))
    assert options_for(spec, SM90A) == f"--model {models[0]} --arch sm_90a"


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("skinny_linear_fma:k=2048,x=f32,out=f32,tile=2,pdl=off", SM80),
        ("causal_conv1d:layout=channel_first,width=4,vec=8,pdl=off", Arch(75)),
    ],
)
def test_models_calls_that_nothing_serves_are_passed_over(text, arch):
    """mamba3's prompts in f32 have no kernel on sm_80, and sm_75 has none at all: the kernel's own error is the one to report."""
    assert options_for(parse(text), arch) == ""
