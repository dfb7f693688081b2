"""Patched layers of Mamba-3, of mamba-ssm and flash-linear-attention: stand-ins in float64 give the expected results."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mamba3_stand_ins import SIGNATURES, Cache, Layer, OfFla, OfMambaSsm, OfRelease, module_of, twins
from selection import costly
from torch import Tensor, nn

from ssmgen.compat import fla, mamba_ssm
from ssmgen.compat.shared import mamba3_layers
from ssmgen.engine.accuracy import norm_error
from ssmgen.errors import ArgumentError, PatchError, UnsupportedError

SSM, FLA = "mamba_ssm.modules.mamba3", "fla.layers.mamba3"
LAYERS: dict[str, dict[str, Any]] = {
    "siso": {},
    "siso-norm-groups": {"norm": True, "groups": 3},
    "siso-all-angles": {"rope_fraction": 1.0},
    "mimo": {"rank": 4},
    "mimo-norm-groups": {"rank": 2, "norm": True, "groups": 2, "rope_fraction": 1.0},
    "mimo-of-one": {"rank": 1},
}
every = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
F32 = 5e-6  # a layer of f32 and its two products


@pytest.fixture
def ssm():
    made = module_of(SSM, OfMambaSsm, mamba3_mimo_combined=None)
    with mamba_ssm.patch_mamba3(module=made) as patch:
        yield SimpleNamespace(layer=made.Mamba3, of=OfMambaSsm, patch=patch, module=made)


@pytest.fixture
def of_fla():
    made = module_of(FLA, OfFla)
    with fla.patch_mamba3(module=made) as patch:
        yield SimpleNamespace(layer=made.Mamba3, of=OfFla, patch=patch, module=made)


def pair(peer: Any, **options: Any) -> tuple[Layer, Layer]:
    """(a patched layer in f32, the stand-in in float64 with its parameters)"""
    torch.manual_seed(0)
    patched, exact = twins(peer.layer(layer_idx=0, **options))
    exact.__class__ = peer.of
    return patched, exact


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, 24)


def near(a: Tensor, b: Tensor, bound: float = F32) -> bool:
    return a.shape == b.shape and norm_error(a, b) < bound


def alike(found: Any, exact: Any) -> bool:
    """States: angles may differ by whole turns."""
    return near(found[0].cos(), exact[0].cos()) and near(found[0].sin(), exact[0].sin()) and all(map(near, found[1:], exact[1:]))


def params(offset: int = 0) -> Any:
    return SimpleNamespace(key_value_memory_dict={}, seqlen_offset=offset)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


# mamba-ssm.


@every
def test_a_step_is_the_layer_s(ssm, layer):
    patched, exact = pair(ssm, **layer)
    ours, theirs = patched.fresh(3), exact.fresh(3)
    for _ in range(3):
        u = inputs(3)
        out, *states = patched.step(u, *ours, other=1)
        assert near(out, exact.step(u.double(), *theirs)[0]) and all(a is b for a, b in zip(states, ours, strict=True))
    assert alike(ours, theirs)
    u = inputs(3, 1)  # as generation passes it
    assert near(patched.step(u, *ours)[0], exact.step(u[:, 0].double(), *theirs)[0].unsqueeze(1)) and alike(ours, theirs)


@costly(8)
@every
@pytest.mark.parametrize("cuts", [(7,), (1, 6), (4, 1, 1, 3), (3, 4, 1)], ids=str)
def test_a_prompt_may_be_cut(ssm, layer, cuts):
    patched, exact = pair(ssm, **layer)
    u, ours = inputs(2, sum(cuts)), params()
    whole = exact.prompt(u.double(), theirs := exact.fresh(2))
    found = []
    for piece in u.split(list(cuts), 1):
        found.append(patched(piece, inference_params=ours))
        ours.seqlen_offset += piece.shape[1]
    assert near(torch.cat(found, 1), whole) and alike(ours.key_value_memory_dict[0], theirs)
    assert near(patched(u), whole)  # without a cache
    ours.seqlen_offset = 0  # another prompt in the same cache starts from nothing
    assert near(patched(u[:, :3], inference_params=ours), whole[:, :3])


@every
def test_sequences_may_be_packed(ssm, layer):
    patched, exact = pair(ssm, **layer)
    starts, u, ours = torch.tensor([0, 4, 4, 5, 9], dtype=torch.int32), inputs(1, 9), params()
    want = exact.prompt(u.double(), theirs := exact.fresh(4), starts)
    assert near(patched(u, cu_seqlens=starts), want)
    assert near(patched(u, cu_seqlens=starts, inference_params=ours), want) and alike(ours.key_value_memory_dict[0], theirs)
    ours.seqlen_offset = 9
    starts, u = torch.tensor([0, 2, 5, 5, 6], dtype=torch.int32), inputs(1, 6)
    want = exact.prompt(u.double(), theirs, starts)
    assert near(patched(u, cu_seqlens=starts, inference_params=ours), want) and alike(ours.key_value_memory_dict[0], theirs)
    u = inputs(4, 1)  # the next token of each
    assert near(patched(u, inference_params=ours), exact.prompt(u.double(), theirs))
    ours.seqlen_offset = 0  # other sequences in the same cache, one of them without tokens
    starts, u = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32), inputs(1, 6)
    want = exact.prompt(u.double(), theirs := exact.fresh(4), starts)
    assert near(patched(u, cu_seqlens=starts, inference_params=ours), want) and alike(ours.key_value_memory_dict[0], theirs)


def test_caches_of_16_bit_layers_keep_their_types(ssm):
    torch.manual_seed(0)
    patched, exact = twins(ssm.layer(layer_idx=0, rank=2), torch.bfloat16)
    exact.__class__ = ssm.of
    states = patched.fresh(3)
    assert [t.dtype for t in states] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    u = inputs(3).bfloat16()
    out, *_ = patched.step(u, *states)
    assert out.dtype == torch.bfloat16 and near(out, exact.step(u.double(), *exact.fresh(3))[0], 2e-2)


@pytest.mark.parametrize("width", [12, 24])
def test_rows_of_a_prompt_begin_at_words(ssm, width, monkeypatch):
    """Kernels of prompts refuse 16-bit rows at odd elements. With 3 heads a projected row has 93 elements, and its parts are copied."""
    layer = ssm.layer(width).bfloat16()
    calls: list[dict[str, Tensor]] = []
    own = mamba3_layers.mamba3_chunk_scan
    monkeypatch.setattr(mamba3_layers, "mamba3_chunk_scan", lambda **given: calls.append(given) or own(**given))
    u = torch.randn(2, 5, width).bfloat16()
    assert layer(u).shape == u.shape and layer.in_proj.out_features == {12: 93, 24: 150}[width]
    for name in ("x", "z", "B", "C"):
        t = calls[0][name]
        assert t.data_ptr() % 4 == 0 and all(step % 2 == 0 for step in t.stride()[:-1])
        assert (t.untyped_storage().data_ptr() == calls[0]["dt"].untyped_storage().data_ptr()) is (width == 24)  # a view, or a copy


# flash-linear-attention.


@every
def test_fla_s_layer_steps_and_continues(of_fla, layer):
    patched, exact = pair(of_fla, **layer)
    ours, theirs, u = Cache(), Cache(), inputs(2, 9)
    for piece in u.split([4, 1, 3, 1], 1):
        out, nothing, cache = patched(piece, past_key_values=ours, use_cache=True)
        want, _, _ = exact(piece.double(), past_key_values=theirs, use_cache=True)
        assert near(out, want) and nothing is None and cache is ours
        assert alike(ours[0]["recurrent_state"], theirs[0]["recurrent_state"])
    assert ours.seen == 9
    assert near(patched(u)[0], exact(u.double())[0])
    states, same = patched.fresh(2), exact.fresh(2)
    assert near(patched.step(u[:, :1], *states), exact.step(u[:, :1].double(), *same)) and alike(states, same)


@pytest.mark.parametrize("layer", [LAYERS["siso"], LAYERS["mimo"]], ids=["siso", "mimo"])
def test_fla_s_padding_is_no_token(of_fla, layer):
    """Left padding of a prompt, and of a piece that continues."""
    patched, exact = pair(of_fla, **layer)
    ours, theirs = Cache(), Cache()
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]])
    u = inputs(3, 8)
    for start, end in ((0, 5), (5, 8)):
        given = {"attention_mask": mask[:, :end], "use_cache": True}
        out, want = (
            patched(u[:, start:end], past_key_values=ours, **given)[0],
            exact(u[:, start:end].double(), past_key_values=theirs, **given)[0],
        )
        assert near(out, want) and not out[mask[:, start:end] == 0].any()
        assert alike(ours[0]["recurrent_state"], theirs[0]["recurrent_state"])


def test_fla_s_packed_sequences(of_fla):
    patched, exact = pair(of_fla)
    starts, u, cache = torch.tensor([0, 3, 4]), inputs(1, 4), Cache()
    out = patched(u, past_key_values=cache, use_cache=True, cu_seqlens=starts)[0]
    assert near(out, exact.prompt(u.double(), theirs := exact.fresh(2), starts)) and alike(cache[0]["recurrent_state"], theirs)


# The patch.


@pytest.mark.parametrize(("place", "of"), [(SSM, OfMambaSsm), (FLA, OfFla)], ids=["mamba_ssm", "fla"])
def test_stand_ins_have_the_published_parameters(place, of):
    """The patch compares parameters with the class that it finds, so these also pin its own."""
    for name, words in SIGNATURES[place].items():
        found = inspect.signature(getattr(of, name)).parameters.values()
        assert ", ".join([str(p.replace(annotation=p.empty)) for p in found]) == words


@pytest.mark.parametrize(("patch", "of"), [(mamba_ssm.patch_mamba3, OfMambaSsm), (fla.patch_mamba3, OfFla)], ids=["mamba_ssm", "fla"])
def test_undo_restores_the_same_objects(patch, of):
    module = module_of("peer", of)
    before = dict(vars(module.Mamba3))
    handle = patch(module=module)
    assert set(handle.replaced) == {f"peer.Mamba3.{n}" for n in ("step", "forward", "cuda_kernels_forward") if n in before}
    assert all(vars(module.Mamba3)[name.rpartition(".")[2]] is not before[name.rpartition(".")[2]] for name in handle.replaced)
    with pytest.raises(PatchError, match="is patched already; expected one patch"):
        patch(module=module)
    handle.undo()
    assert dict(vars(module.Mamba3)) == before and handle.replaced == ()
    handle.undo()
    with patch(module=module) as again:
        module.Mamba3.step = before["step"]
        with pytest.raises(PatchError, match=r"peer\.Mamba3\.step is now"):
            again.undo()
    assert dict(vars(module.Mamba3)) == before


def test_a_layer_made_before_is_patched_too():
    module = module_of(SSM, OfMambaSsm)
    torch.manual_seed(0)
    layer, u = module.Mamba3(), inputs(2, 3)
    plain = layer(u)
    with mamba_ssm.patch_mamba3(module=module):
        found = layer(u)
    assert near(found, plain) and torch.equal(layer(u), plain) and not torch.equal(found, plain)


@pytest.mark.parametrize(
    ("patch", "of", "form"),
    [(mamba_ssm.patch_mamba3, OfMambaSsm, "heavy"), (mamba_ssm.patch_mamba3, OfRelease, "softplus"), (fla.patch_mamba3, OfFla, "softplus")],
    ids=["mamba_ssm", "release", "fla"],
)
def test_the_form_of_a_is_the_installed_one_or_as_asked(patch, of, form):
    module = module_of("peer", of)
    torch.manual_seed(0)
    layer, exact = twins(module.Mamba3(layer_idx=0))
    exact.__class__ = of
    outs, u = [], inputs(2, 4)
    for asked in (None, "softplus", "heavy"):
        with patch(asked, module=module) as handle:
            assert handle.A_form == (asked or form) and repr(handle.A_form) in str(handle)
            out = layer(u)
            outs.append(out[0] if of is OfFla else out)
    same = outs[1 if form == "softplus" else 2]
    assert near(outs[0], exact.prompt(u.double(), exact.fresh(2))) and torch.equal(outs[0], same) and not near(outs[1], outs[2], 1e-3)
    with pytest.raises(PatchError, match="A_form is 'ready'"):
        patch("ready", module=module)


def test_an_unknown_form_of_a_is_asked_for():
    """As flash-linear-attention had it before July 2026: the floor's sign is wrong."""

    class Wrong(OfFla):
        def _compute_a(self, dd_A):
            return -nn.functional.softplus(dd_A).clamp(max=-self.A_floor)

    class Renamed(OfMambaSsm):
        _preprocess = None

    for patch, of in ((fla.patch_mamba3, Wrong), (mamba_ssm.patch_mamba3, Renamed)):
        module = module_of("peer", of)
        with pytest.raises(PatchError, match=r"peer computes A in a form that ssmgen does not know .* Pass A_form"):
            patch(module=module)
        with patch("softplus", module=module) as handle:
            assert handle.A_form == "softplus"


def test_other_parameters_are_refused():
    class Newer(OfMambaSsm):
        def step(self, u, angle_state, ssm_state, k_state, v_state, slots=None, **kwargs): ...

    module = module_of("peer", Newer)
    with pytest.raises(PatchError, match=r"peer\.Mamba3\.step differ from those that ssmgen knows: slots is new"):
        mamba_ssm.patch_mamba3(module=module)
    assert "forward" not in vars(module.Mamba3)  # inherited, and nothing is replaced
    with pytest.raises(PatchError, match="has no class Mamba3"):
        mamba_ssm.patch_mamba3(module=SimpleNamespace(__name__="peer"))


@pytest.mark.parametrize(("patch", "place"), [(mamba_ssm.patch_mamba3, SSM), (fla.patch_mamba3, FLA)], ids=["mamba_ssm", "fla"])
def test_a_missing_package_is_said(patch, place, monkeypatch):
    monkeypatch.setitem(sys.modules, place, None)
    with pytest.raises(PatchError, match=rf"cannot import {place} .*Install"):
        patch()


def test_mimo_layers_can_be_made_without_tilelang(ssm):
    """mamba-ssm refuses to make them if its function is missing."""
    assert ssm.module.mamba3_mimo_combined is mamba_ssm.mamba3_mimo
    ssm.patch.undo()
    assert ssm.module.mamba3_mimo_combined is None
    ssm.module.mamba3_mimo_combined = own = object()
    with mamba_ssm.patch_mamba3(module=ssm.module):
        assert ssm.module.mamba3_mimo_combined is own


# Refused calls.


def refused(layer: Layer, kind: type[Exception], words: str, call: Any) -> None:
    with pytest.raises(kind, match=words):
        call(layer)


def test_what_it_does_not_serve_is_said(ssm):
    layer, _ = pair(ssm, norm=True)
    u, states = inputs(3, 4), layer.fresh(3)
    refused(layer, UnsupportedError, "seq_idx is given", lambda m: m(u, seq_idx=torch.zeros(3, 4, dtype=torch.int32)))
    refused(layer, ArgumentError, r"u is \[3, 4, 24\]; expected \[batch, d_model\]", lambda m: m.step(u, *states))
    cache = params()
    layer(u, inference_params=cache)
    cache.seqlen_offset = 4
    refused(layer, UnsupportedError, "the cache holds 3 sequences; expected 2", lambda m: m(u[:2, :1], inference_params=cache))
    refused(layer, UnsupportedError, "the cache holds 3 sequences; expected 2", lambda m: m(u[:2], inference_params=cache))
    with torch.enable_grad():
        refused(layer, UnsupportedError, "a gradient is asked for", lambda m: m(u))
        refused(layer, UnsupportedError, "a gradient is asked for", lambda m: m.step(u[:, 0], *states))
        layer.requires_grad_(False)
        assert layer(u).shape == u.shape
    layer.norm.norm_before_gate = False
    refused(layer, UnsupportedError, "norm has group_size 8 and norm_before_gate False", lambda m: m(u))
    layer.norm.norm_before_gate, layer.norm.eps = True, 1e-3
    refused(layer, UnsupportedError, "norm has eps 0.001; expected 1e-05", lambda m: m.step(u[:, 0], *states))
    layer.norm.eps, layer.C_norm.eps = 1e-5, 1e-3
    refused(layer, UnsupportedError, "C_norm has eps 0.001", lambda m: m(u))


def test_what_fla_s_layer_does_not_serve_is_said(of_fla):
    layer, _ = pair(of_fla)
    u = inputs(3, 4)
    refused(layer, ArgumentError, r"attention_mask is \[3, 1, 4\]", lambda m: m(u, attention_mask=torch.ones(3, 1, 4)))
    layer(u, past_key_values=(cache := Cache()), use_cache=True)
    refused(layer, UnsupportedError, "the cache holds 3 sequences; expected 2", lambda m: m(u[:2, :1], past_key_values=cache))
    with torch.enable_grad():
        refused(layer, UnsupportedError, "a gradient is asked for", lambda m: m(u))
    layer.layer_idx = None
    refused(layer, ArgumentError, "layer_idx is None", lambda m: m(u, past_key_values=cache))
