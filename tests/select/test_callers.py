"""Builds by caller: each caller's own path requests only kernels of the built set."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from caller_calls import CALLS, bf16

from ssmgen.calls import planning
from ssmgen.calls.checks import STORED_DTYPES
from ssmgen.engine.norm_kernel import NormProblem
from ssmgen.select.model_variants import specs_for
from ssmgen.select.models import Client, Wanted, find_model
from ssmgen.spec.kernel import Arch, DType, Index, Pdl, Problem

SM90 = Arch.parse("sm_90a")
LAYERS = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
# transformers' models with one recurrent layer, whose heads are the table's
OF_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron-h-8b": (
        "nemotron_h",
        {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "layers_block_type": ["mamba", "attention"]},
    ),
    "qwen3-next-80b-a3b": ("qwen3_next", HEADS | LAYERS),
    "kimi-linear-48b-a3b": ("kimi_linear", {"linear_num_heads": 32, "linear_head_dim": 128} | LAYERS),
    "mamba-130m": ("mamba", {"hidden_size": 768, "state_size": 16, "num_hidden_layers": 1}),
}


@pytest.fixture
def posed(monkeypatch) -> dict[Problem, str]:
    """{problem: the public function} of all calls, which compute nothing; except norms of f32, on which `patch` tries a class of norms."""
    found: dict[Problem, str] = {}
    computed = planning.Caller.plan

    def plan(self, given, options, pdl, objections=()):
        problem = self.problem_of(given, options, pdl, objections)[0]
        if isinstance(problem, NormProblem) and problem.x is DType.F32:
            return computed(self, given, options, pdl, objections)
        found.setdefault(problem, self.name)
        return lambda: None

    monkeypatch.setattr(planning.Caller, "plan", plan)
    return found


def asked(name: str, caller: Client) -> set[Problem]:
    return set(find_model(name).asked(Wanted().of(caller)))


def in_bf16(model: torch.nn.Module) -> torch.nn.Module:
    """The model of from_pretrained(dtype=torch.bfloat16): Kimi delta attention's dt_bias stays in f32."""
    for name, weight in model.named_parameters():
        if not ("dt_bias" in name and "kimi" in type(model).__name__.lower()):
            weight.data = weight.data.bfloat16()
    return model


def packed(problem: Any) -> bool:
    """Whether it is of packed sequences."""
    return getattr(problem, "query_start_loc", getattr(problem, "cu_seqlens", Index.NONE)) is not Index.NONE


def installed() -> tuple[int, ...]:
    """The release of transformers."""
    return tuple(map(int, metadata.version("transformers").split(".")[:2]))


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_transformers_asks_for_nothing_else(name, posed):
    pytest.importorskip("transformers")
    from hf_cases import built

    from ssmgen.compat import hf

    kind, changes = OF_TRANSFORMERS[name]
    model = in_bf16(built(kind, **changes))
    for fuse in (True, False):
        with hf.patch(model, fuse=fuse), torch.no_grad():
            for batch, tokens in ((1, 8), (2, 9)):
                ids = torch.full((batch, tokens), 5)
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2, do_sample=False)
    problems = {problem for problem, function in posed.items() if function != "rms_norm"}
    # transformers before 5.20 keeps a mask without padding, for which layers of Mamba pack their sequences
    assert len(problems) >= 4 and all(packed(problem) for problem in problems - asked(name, Client.TRANSFORMERS))
    assert installed() < (5, 20) or problems <= asked(name, Client.TRANSFORMERS)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    before = len(posed)
    with hf.patch(model, fuse=True), torch.no_grad():
        model.generate(padded + 4, attention_mask=padded, max_new_tokens=1, do_sample=False)
    left = {problem for problem in list(posed)[before:] if problem not in asked(name, Client.TRANSFORMERS)}
    assert "batches with padding" in Client.TRANSFORMERS.left
    assert all(map(packed, left))


def test_mamba_ssm_asks_for_nothing_else(posed):
    """Mamba2.forward and Mamba2.step of mamba-ssm, with the functions of causal-conv1d."""
    from ssmgen.compat import causal_conv1d as conv
    from ssmgen.compat import mamba_ssm

    model, batch = find_model("mamba2-130m"), 2
    H, P, N, channels = model.nheads, model.headdim, model.d_state, model.conv_channels
    weight, bias, A, D, dt_bias = bf16(channels, 4), bf16(channels), torch.zeros(H), bf16(H), bf16(H)
    for tokens in (8, 33):
        xBC = bf16(batch, tokens, channels + 8)[..., :channels]
        x, B, C = conv.causal_conv1d_fn(xBC.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2).split([H * P, N, N], -1)
        heads, B, C = x.unflatten(-1, (H, P)), B[:, :, None], C[:, :, None]
        mamba_ssm.mamba_chunk_scan_combined(
            heads, bf16(batch, tokens, H), A, B, C, 256, D=D, dt_bias=dt_bias, dt_softplus=True, return_final_states=True
        )
        mamba_ssm.rmsnorm_fn(x, bf16(H * P), None, z=bf16(batch, tokens, H * P), norm_before_gate=False)
    x = conv.causal_conv1d_update(bf16(batch, channels), bf16(batch, channels, 4), weight, bias, "silu")[:, : H * P]
    state = torch.zeros(batch, H, P, N, dtype=STORED_DTYPES[model.state])
    heads = (t[:, None].expand(H, P) for t in (D, dt_bias))
    mamba_ssm.selective_state_update(
        state, x.unflatten(-1, (H, P)), bf16(batch, H)[..., None].expand(-1, -1, P), A[:, None, None].expand(H, P, N),
        bf16(batch, 1, N), bf16(batch, 1, N), next(heads), z=None, dt_bias=next(heads), dt_softplus=True,
    )  # fmt: skip
    assert len(posed) >= 5 and set(posed) <= asked("mamba2-130m", Client.MAMBA_SSM)


@pytest.mark.parametrize("name", ["mamba3-siso-187m", "mamba3-mimo-187m"])
def test_patched_layers_of_mamba3_ask_for_nothing_else(name, posed):
    """Prompts, pieces that continue, and steps of mamba-ssm's layer, with its parameters in their types."""
    from mamba3_stand_ins import OfMambaSsm, module_of

    from ssmgen.compat import mamba_ssm

    model, module = find_model(name), module_of("peer", OfMambaSsm)
    rank = None if model.rank == 1 else model.rank
    layer = module.Mamba3(model.nheads * model.headdim // 2, model.d_state, model.headdim, model.ngroups, rank=rank, layer_idx=0)
    for of, weight in layer.named_parameters():
        weight.data = weight.data.bfloat16() if "proj" in of or "norm" in of else weight.data
    cache = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    with mamba_ssm.patch_mamba3(module=module), torch.no_grad():
        for tokens in (9, 1, 5, 1):
            layer(bf16(2, tokens, layer.out_proj.out_features), inference_params=cache)
            cache.seqlen_offset += tokens
    assert len(posed) == 3 and set(posed) <= asked(name, Client.MAMBA_SSM)
    assert len(asked(name, Client.MAMBA_SSM)) == 3 and not asked(name, Client.TRANSFORMERS)


@pytest.mark.parametrize("engine", CALLS)
def test_engines_ask_for_nothing_else(engine, posed):
    name, make_calls, count = CALLS[engine]
    make_calls(find_model(name))
    assert len(posed) == count and set(posed) <= asked(name, Client.ENGINES)


def test_each_caller_has_a_part():
    """Fewer variants for one caller than for all, and none for a launch that no call makes."""
    model = find_model("nemotron-h-8b")
    built = {caller: set(specs_for(model.asked(Wanted().of(caller)), SM90, (True,))) for caller in Client}
    every = set(specs_for(model.asked(Wanted()), SM90, (True,)))
    assert all(specs and specs <= every and 2 * len(specs) < len(every) for specs in built.values())
    assert all(spec.pdl is not Pdl.OFF for spec in every)
    assert not find_model("qwen3-next-80b-a3b").asked(Wanted().of(Client.MAMBA_SSM))
    assert not find_model("rwkv7-0.1b").asked(Wanted().of(Client.TRANSFORMERS))
    problems = [p for name in OF_TRANSFORMERS for c in Client for p in asked(name, c)]
    assert not any(fault for p in problems for fault in p.faults())
    assert {p.state for p in asked("nemotron-h-8b", Client.TRANSFORMERS) if hasattr(p, "state")} == {DType.F32}
