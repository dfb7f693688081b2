"""Fixtures and operands of the tests that call the engines' functions through the names that the plugins replace."""

from __future__ import annotations

import compileall
import functools
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_signatures import IMPORTS, SIGNATURES
from engine_stand_ins import found as place_of
from engine_stand_ins import importable, write
from torch import Tensor
from torch_conv import F32, randn

from ssmgen.compat import sglang, vllm


@functools.cache
def published(package: str) -> tempfile.TemporaryDirectory:
    """A folder with the package's stand-in, compiled, for all tests of this process. Imports do not compile it if the caller's environment
    has PYTHONDONTWRITEBYTECODE."""
    folder = tempfile.TemporaryDirectory(prefix="ssmgen-engine-")
    write(Path(folder.name), package)
    compileall.compile_dir(folder.name, quiet=1)
    return folder


def replaced(monkeypatch, plugin, package: str):
    """The engine's functions by name, as its layers hold them. Functions of equal name carry the drop-in's name; ssu_backend is the
    engine's Mamba backend."""
    if torch.version.cuda is None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("SSMGEN_ENGINE_KEEP", raising=False)
    with importable(Path(published(package).name), package):
        plugin.register()
        found = SimpleNamespace()
        for module, name in SIGNATURES:
            if module.startswith(f"{package}."):
                setattr(found, name, place_of(module, name))
        for module in IMPORTS:
            if module.startswith(f"{package}.") and not module.endswith("ssu_dispatch"):
                vars(found).update({n: f for n, f in vars(import_module(module)).items() if callable(f) and hasattr(f, "__wrapped__")})
        for r in plugin._ENGINE.replacements:
            setattr(found, r.function.__name__, place_of(r.module, r.name))
        (dispatch,) = [import_module(m) for m in IMPORTS if m.startswith(f"{package}.") and m.endswith("ssu_dispatch")]
        to_nearest = SimpleNamespace(enable_stochastic_rounding=False, stochastic_rounding_philox_rounds=0)
        found.ssu_backend = dispatch.TritonSSUBackend(to_nearest)
        yield found
        plugin.unregister()


@pytest.fixture(name="vllm")
def vllm_functions(monkeypatch):
    yield from replaced(monkeypatch, vllm, "vllm")


@pytest.fixture(name="sglang")
def sglang_functions(monkeypatch):
    """causal_conv1d_update is the function that the layers hold; causal_conv1d_update_triton is the other one."""
    for engine in replaced(monkeypatch, sglang, "sglang"):
        engine.causal_conv1d_update = import_module("sglang.srt.models.lfm2").causal_conv1d_update
        yield engine


@pytest.fixture(autouse=True)
def no_call_goes_to_the_engine(request, caplog):
    yield
    said = [r.getMessage() for r in caplog.get_records("call") if "'s own" in r.getMessage()]
    assert bool(said) == (request.node.get_closest_marker("refused") is not None), said


def poisoned(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def pages(n: int, *inner: int, dtype: torch.dtype = F32, gap: int = 5) -> Tensor:
    """A pool whose slots are parts of larger pages, as engines lay them out; NaN between them."""
    size = torch.Size(inner).numel()
    pool = poisoned(n, size + gap, dtype=dtype)[:, :size].unflatten(1, inner)
    return pool.copy_(randn(n, *inner, seed=9))


HK, HV, K, V = 2, 4, 12, 20


def gdn_operands(*lead: int, kda: bool = False) -> dict[str, Tensor]:
    """q, k, v; the raw gate a and the logit b of beta; A_log and dt_bias."""
    gate = (HV, K) if kda else (HV,)
    x = {n: randn(*lead, heads, width, seed=s) for s, (n, heads, width) in enumerate((("q", HK, K), ("k", HK, K), ("v", HV, V)))}
    x |= {"a": randn(*lead, *gate, seed=5), "b": randn(*lead, HV, seed=6)}
    return x | {"A_log": randn(HV, seed=7) / 4, "dt_bias": randn(*gate, seed=8).flatten()}


def delta_token(
    S: Tensor, x: dict[str, Tensor], *at: int, scale: float = K**-0.5, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """(states [HV, V, K], outputs [HV, V]) after a token, in float64, of raw gates, logits, and q and k of length one."""
    q, k, v, a, b = (x[n][at].double() for n in "qkvab")
    q, k = ((t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HV // HK, 0) for t in (q, k))
    raw, A = a + x["dt_bias"].double().view(a.shape), x["A_log"].double().exp().view(HV, *[1] * (a.dim() - 1))
    g = -A * raw.exp().log1p() if lower_bound is None else lower_bound * (A * raw).sigmoid()
    S = S * g.exp().view(HV, 1, -1)
    S = S + (b.sigmoid()[:, None] * (v - (S * k[:, None]).sum(-1)))[..., None] * k[:, None]
    return S, scale * (S * q[:, None]).sum(-1)


def near(got: Tensor, want: Tensor) -> bool:
    """Equal within one rounding to the dtype and the roundings of a few f32 sums."""
    bound = (want.abs().max().item() + 1) * (torch.finfo(got.dtype).eps / 2 + 8 * (K + 8) * torch.finfo(F32).eps)
    return got.shape == want.shape and (got.double() - want).abs().max().item() <= bound
