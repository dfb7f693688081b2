"""Tiny models of transformers with random weights, one or more of every kind that ssmgen.compat.hf knows."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
from typing import Any

import pytest
import torch
from hf_models import TINY
from hf_models import tiny as tiny

from ssmgen.compat import hf
from ssmgen.compat.hf import between as hf_between
from ssmgen.compat.hf import layers as hf_layers
from ssmgen.compat.hf.functions import delta_faults, kda_faults
from ssmgen.compat.hf.roles import name_in, plain

# The replacements that are expected in each model folder.
CONV = ("causal_conv1d_update", "causal_conv1d_fn")
_SCANS = {
    ("mamba_selective_state_update", "mamba_selective_scan"): ("mamba", "falcon_mamba", "jamba", "zamba"),
    ("mamba2_selective_state_update", "mamba2_chunk_scan"): ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
    ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"): (
        "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "lara_mini", "olmo_hybrid",
    ),
    ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"): ("kimi_linear", "glm5_next", "bailing_hybrid"),
}  # fmt: skip
MODELS = {m: (*CONV, *scans) for scans, models in _SCANS.items() for m in models}
MODELS |= dict.fromkeys(("lfm2", "lfm2_moe", "lfm3", "inkling", "inkling2", "inkling2_loop"), CONV)
# Mixers that `fuse` replaces, by folder: mixers whose decode step is one call, and Mamba's, where only prompts are fused.
LAYERS = {
    "mamba2": "Mamba2Mixer", "bamba": "BambaMixer", "falcon_h1": "FalconH1Mixer", "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "nemotron_h": "NemotronHMamba2Mixer", "zamba2": "Zamba2MambaMixer", "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet", "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet", "qwen4_exp": "Qwen4ExpTextGatedDeltaNet",
    "lara_mini": "LaraMiniGatedDeltaNet", "kimi_linear": "KimiLinearDeltaAttention", "glm5_next": "Glm5NextTextLinearAttention",
    "bailing_hybrid": "BailingHybridDeltaAttention",
}  # fmt: skip
CLASSES = {"mamba": "MambaMixer", "falcon_mamba": "FalconMambaMixer", "jamba": "JambaMambaMixer"} | LAYERS
NORMS = {
    "mamba2": "MambaRMSNormGated", "bamba": "BambaRMSNormGated", "falcon_h1": "FalconH1RMSNormGated",
    "granitemoehybrid": "GraniteMoeHybridRMSNormGated", "nemotron_h": "NemotronHRMSNormGated", "zamba2": "Zamba2RMSNormGated",
    "qwen3_next": "Qwen3NextRMSNormGated", "qwen3_5": "Qwen3_5RMSNormGated", "qwen3_5_moe": "Qwen3_5MoeRMSNormGated",
    "qwen4_exp": "Qwen4ExpTextRMSNormGated", "lara_mini": "LaraMiniRMSNormGated", "olmo_hybrid": "OlmoHybridRMSNormGated",
    "kimi_linear": "KimiLinearRMSNormGated", "glm5_next": "Glm5NextTextRMSNormGated", "bailing_hybrid": "BailingHybridRMSNormGated",
}  # fmt: skip


def undo_leaks() -> list[str]:
    """Undoes every patch that is still active. Returns the objects that these had replaced."""
    leaked = sorted({r.label for r in hf._active.values()})
    for patch in {owner for r in list(hf._active.values()) for owner in r.owners}:
        patch.undo()
    hf._active.clear()
    return leaked


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Any:
    """The test that leaves a patch in place fails, and no other: it is undone."""
    yield
    assert not undo_leaks()


@pytest.fixture(autouse=True)
def the_originals_are_back(nothing_stays_patched: Any) -> Any:
    """Undone patches leave the identical objects."""
    before = replaced()
    yield
    assert not undo_leaks()
    assert all(now is before[label] for label, now in replaced().items())


def known(name: str) -> bool:
    """Whether the installed transformers has the model."""
    return importlib.util.find_spec(f"transformers.models.{name}") is not None


def built(name: str, **changes: Any) -> torch.nn.Module:
    """The model, or a skip where this transformers does not have it."""
    if not known(name):
        pytest.skip(f"this transformers has no {name}")
    return tiny(name, **changes)


def in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model as `from_pretrained` loads it in this dtype: with f32 weights where its code names them."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)
    return model


def modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def snapshot() -> dict[str, dict[str, Any]]:
    """The contents of all modeling files."""
    return {name: dict(vars(modeling(name))) for name in TINY if known(name)}


def assert_same(now: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> None:
    """The same objects under the same names."""
    for name, attributes in before.items():
        assert now[name].keys() == attributes.keys()
        assert all(now[name][a] is attributes[a] for a in attributes), name


def convolutions(model: torch.nn.Module) -> int:
    """Calls of short convolutions in a pass of the model: one of each, and of layers that are looped, one in each pass of the loop."""
    again = getattr(model.config, "loop_num_passes", 1) - 1
    looped = model.model.layers[model.config.loop_layer_index_start : model.config.loop_layer_index_end] if again else []
    return _convolutions(model) + again * sum(map(_convolutions, looped))


def _convolutions(module: torch.nn.Module) -> int:
    return sum(isinstance(layer, torch.nn.Conv1d) for layer in module.modules())


def generate(model: torch.nn.Module, tokens: int, **changes: Any) -> Any:
    """Generates `tokens` tokens after two prompts of five, greedily, with logits and cache."""
    ids = torch.arange(3, 13, device=next(model.parameters()).device).view(2, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, **changes}
    with torch.no_grad():
        return model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)


def states_of(generated: Any) -> list[torch.Tensor]:
    """The states of all layers that have one, as they are in the cache."""
    return states_of_cache(cache_of(generated))


def cache_of(output: Any) -> Any:
    """The cache that a model or `generate` returned, under its name in this transformers; None for none."""
    return output.get(name_in("cache", output) or "cache")


def takes_cache(model: torch.nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword that gives a model, or a layer, its cache."""
    return {name_in("cache", inspect.signature(plain(type(model).forward)).parameters): cache}


def states_of_cache(cache: Any, kinds: tuple[str, ...] = ("conv_states", "recurrent_states")) -> list[torch.Tensor]:
    found = [state for layer in cache.layers for kind in kinds for state in _listed(getattr(layer, kind, None))]
    return [state for state in found if isinstance(state, torch.Tensor)]


def _listed(states: Any) -> list[Any]:
    return list(states.values()) if isinstance(states, dict) else states if isinstance(states, list) else [states]


class DecodeStep:
    """The model's next step after two prompts of five, as a function of the cache; `cache` is such a cache."""

    def __init__(self, model: torch.nn.Module):
        ids = torch.arange(3, 13, device=next(model.parameters()).device).view(2, 5)
        out = model(input_ids=ids, use_cache=True)
        self.model, self.cache, self.token = model, cache_of(out), torch.tensor([[7], [9]], device=ids.device)
        (self.takes,) = takes_cache(model, self.cache)  # its name: Dynamo does not trace signatures

    def __call__(self, cache: Any) -> torch.Tensor:
        return self.model(input_ids=self.token, use_cache=True, **{self.takes: cache}).logits


def forget(cache: Any, tokens: int = 5) -> None:
    """Attention layers keep this many tokens. The cache of an endless generation then does not grow."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[..., -tokens:, :].clone(), layer.values[..., -tokens:, :].clone()


def last_logits(step: DecodeStep, cache: Any, steps: int) -> torch.Tensor:
    """The logits of the last of `steps` steps. The caches keep only the tokens that `forget` leaves."""
    for _ in range(steps):
        logits = step(cache)
        forget(cache)
    return logits


DELTA_RULE, KDA, MAMBA1 = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba_selective_scan"
OF_PROMPTS = {"causal_conv1d_fn": "causal_conv1d", MAMBA1: "selective_scan", "mamba2_chunk_scan": "chunk_scan"}
OF_PROMPTS |= {DELTA_RULE: "chunk_gated_delta_rule", KDA: "chunk_kda"}
_FAULTS = {OF_PROMPTS[DELTA_RULE]: delta_faults, OF_PROMPTS[KDA]: kda_faults}


def of_prompts(name: str) -> dict[str, str]:
    """{function that a layer calls over a prompt: ssmgen's}, in their order."""
    return {function: ours for function, ours in OF_PROMPTS.items() if function in MODELS[name]}


def unserved(function: str, dtype: torch.dtype) -> list[str]:
    """Why a card computes no such call of a tiny model, in words; nothing where it does."""
    return list(_FAULTS[function](16, 16, dtype)) if function in _FAULTS else []


def prompt_calls(name: str, model: torch.nn.Module) -> dict[str, hf.Calls]:
    """The calls of a prompt. A card computes only calls that have kernels."""
    layers, weight = convolutions(model), next(model.parameters())
    left = {function for function, ours in of_prompts(name).items() if weight.is_cuda and unserved(ours, weight.dtype)}
    counts = {function: layers * (scans_of_a_layer(name) if function == MAMBA1 else 1) for function in of_prompts(name)}
    return {f"{name}.{function}": hf.Calls(0, n) if function in left else hf.Calls(n, 0) for function, n in counts.items()}


def scans_of_a_layer(name: str) -> int:
    """Calls that a layer makes of its scan, or of its state's update: zamba's one per head."""
    return 2 if name == "zamba" else 1


PROMPTED = [name for name in TINY if len(of_prompts(name)) > 1]


def prompted(name: str, **changes: Any) -> torch.nn.Module:
    """A tiny model whose layers scan prompts, and in which nothing is chosen: its experts all take part, and attention goes to all tokens
    alike or nearly so, so that roundings stay small."""
    experts = [TINY[name][n] for n in ("num_local_experts", "num_experts", "n_routed_experts") if n in TINY[name]]
    even = {"num_experts_per_tok": experts[0]} if experts else {}
    even |= {"initializer_range": 0.05} if {DELTA_RULE, KDA} & of_prompts(name).keys() else {}
    even |= {option: size for option, size in (("indexer_budget", 256), ("index_topk", 1024)) if option in TINY[name]}
    even |= {"topk_group": TINY[name]["n_group"]} if "n_group" in TINY[name] else {}
    return built(name, **even | changes)


def minimax(**changes: Any) -> torch.nn.Module:
    """MiniMax's, in f32, in evaluation mode, on the CPU; its experts all take part, so that roundings stay small."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 4,
        "num_local_experts": 2, "num_experts_per_tok": 2, "initializer_range": 0.2, "max_position_embeddings": 256, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    return MiniMaxForCausalLM(MiniMaxConfig(**sizes | changes)).eval()


class Prompt:
    """A model's results for a prompt of two rows: logits, and each cache layer's convolution window and state."""

    def __init__(self, out: Any):
        self.logits = out.logits
        self.cache = cache_of(out)
        self.states = [] if self.cache is None else [state.clone() for state in states_of_cache(self.cache)]
        self.recurrent = [] if self.cache is None else [state.clone() for state in states_of_cache(self.cache, ("recurrent_states",))]

    @classmethod
    def run(cls, model: torch.nn.Module, length: int, *, rows: slice = slice(None), tokens: slice = slice(None), **how: Any) -> Prompt:
        """A pass over some rows and some columns of the tokens."""
        ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(0))[rows, tokens]
        with torch.no_grad():
            return cls(model(input_ids=ids.to(model.device), **{"use_cache": True, **how}))

    def go_on(self, model: torch.nn.Module, length: int) -> Prompt:
        """Another prompt after this one, on a copy of its cache."""
        return self.run(model, length, **takes_cache(model, copy.deepcopy(self.cache)))


def norm_of_error(got: Prompt, exact: Prompt) -> float:
    """The relative error, in L2, of logits and states: the root of the mean of its squares."""
    pairs = list(zip((got.logits, *got.states), (exact.logits, *exact.states), strict=True))
    return (sum(((a.double() - b.double()).norm() / b.double().norm()).item() ** 2 for a, b in pairs) / len(pairs)) ** 0.5


# Fused layers.


def mixer_class(name: str) -> type[torch.nn.Module]:
    """The class of a model's layers that `patch(fuse=True)` knows."""
    return getattr(modeling(name), CLASSES[name])


def mixers(model: torch.nn.Module) -> list[Any]:
    """The model's layers that are fused."""
    classes = tuple(mixer_class(name) for name in CLASSES if known(name))
    return [layer for layer in model.modules() if isinstance(layer, classes)]


def fused_label(name: str) -> str:
    return f"{name}.{CLASSES[name]}"


def fused_operator(name: str) -> tuple[Any, str]:
    """(module, name) of the operator that computes the layer, where the layer looks it up."""
    if DELTA_RULE in MODELS[name]:
        return hf_layers.native_gdn, "gdn_layer"
    return (hf_layers.native_gdn, "kda_layer") if KDA in MODELS[name] else (hf_layers.native_mamba2, "mamba2_layer")


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to rounding: within 1e-4 of the largest."""
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got - want).abs().max() <= 1e-4 * want.abs().max(), (got - want).abs().max()


def assert_same_generation(got: Any, want: Any) -> None:
    """Tokens; logits, states and windows to rounding."""
    assert torch.equal(got.sequences, want.sequences)
    ours, theirs = states_of(got), states_of(want)
    assert len(ours) == len(theirs) > 0
    for a, b in zip((*got.logits, *ours), (*want.logits, *theirs), strict=True):
        assert_close(a, b)


INDEXED = ("qwen4_exp",)  # whose indexer calls a norm for every block that a token sees


class Some:
    """Equal to any number of calls that are all ssmgen's."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, hf.Calls) and other.ssmgen > 0 and other.original == 0


SOME: Any = Some()


def fused_calls(name: str, model: torch.nn.Module, steps: int) -> dict[str, hf.Calls]:
    """The calls of a fused generation with `steps` decode steps."""
    calls = fused_prompt_calls(name, model)
    prompts = calls.get(fused_label(name), hf.Calls(0, 0)).ssmgen
    norms = {label: SOME if name in INDEXED else hf.Calls(count * (steps + 1), 0) for label, count in norms_of_a_pass(model).items()}
    return {**calls, fused_label(name): hf.Calls(prompts + convolutions(model) * steps, 0), **norms}


def gated_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's norms that `patch(fuse=True)` replaces."""
    return [layer for layer in model.modules() if type(layer).__name__ in NORMS.values()]


def norm_label(norm: torch.nn.Module) -> str:
    """The label uses the folder of the norm's class, which may differ from the model's."""
    return f"{type(norm).__module__.split('.')[2]}.{type(norm).__name__}"


def norms_of_a_pass(model: torch.nn.Module, mask: torch.Tensor | None = None) -> dict[str, int]:
    """How often a pass of the model calls its norms without a gate, by label. A module that several layers share is called by each.

    mask: of the prompt, [batch, T], or None for a token by itself; an indexer of blocks calls one for every token that sees a block.
    """
    counts: dict[str, int] = {}

    def count(norm: torch.nn.Module, *_: Any) -> None:
        counts[norm_label(norm)] = counts.get(norm_label(norm), 0) + 1

    norms = [layer for layer in model.modules() if hf_between.style_of(type(layer)) is not None]
    hooks = [norm.register_forward_hook(count) for norm in norms]
    patched = {r: (r.served, r.kept) for r in hf._active.values()}  # this pass must not change their counts
    with torch.no_grad():
        if mask is None:
            model(input_ids=torch.ones(1, 1, dtype=torch.long, device=next(model.parameters()).device))
        else:
            model(input_ids=torch.ones_like(mask), attention_mask=mask)
    for hook in hooks:
        hook.remove()
    for replacement, before in patched.items():
        replacement.served, replacement.kept = before
    return counts


def fused_prompt_calls(name: str, model: torch.nn.Module, mask: torch.Tensor | None = None) -> dict[str, hf.Calls]:
    """The calls of a prompt with `fuse=True`: one of every layer, or where it is not fused, its functions' and its norm's. mask: see
    `norms_of_a_pass`."""
    calls = prompt_calls(name, model)
    between = {label: hf.Calls(count, 0) for label, count in norms_of_a_pass(model, mask).items()}
    if name in CLASSES and not any(c.original for c in calls.values()):
        return {fused_label(name): hf.Calls(convolutions(model), 0)} | between
    found = gated_norms(model)
    return calls | ({norm_label(found[0]): hf.Calls(len(found), 0)} if found else {}) | between


def replaced() -> dict[str, Any]:
    """Objects that patches replace: functions of modeling files and forwards of layers."""
    here = [name for name in TINY if known(name)]
    functions = {f"{name}.{f}": getattr(modeling(name), f) for name in here for f in MODELS[name] if hasattr(modeling(name), f)}
    functions |= {fused_label(name): vars(mixer_class(name))["forward"] for name in CLASSES if known(name)}
    norms = {name: getattr(modeling(name), NORMS[name], None) for name in here if name in NORMS}
    return functions | {f"{name}.{NORMS[name]}": vars(norm)["forward"] for name, norm in norms.items() if norm is not None}


def change_rates(model: torch.nn.Module, how: str) -> None:
    """Adds 1 to A_log of the model's fused layers."""
    with torch.no_grad():
        for mixer in mixers(model):
            new = mixer.A_log + 1.0
            if how == "in place":
                mixer.A_log.copy_(new)
            elif how == "another parameter":
                mixer.A_log = torch.nn.Parameter(new)
            elif how == "other data":
                mixer.A_log.data = new
        if how == "a state dict":
            model.load_state_dict({n: p + 1.0 if n.endswith("A_log") else p for n, p in model.state_dict().items()})
