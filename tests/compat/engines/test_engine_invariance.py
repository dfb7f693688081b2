"""The engines' batch-invariant modes: which promises the plugins make, and everything that they refuse."""

from __future__ import annotations

import importlib
import inspect
import sys
from http import HTTPStatus
from types import ModuleType, SimpleNamespace

import pytest
import torch
from engine_signatures import BACKENDS, FUNCTIONS
from engine_stand_ins import found as place_of
from engine_stand_ins import importable, write

from ssmgen import chunk_gated_delta_rule, chunk_kda, chunk_lightning_attn, chunk_scan, selective_scan
from ssmgen.compat import sglang, vllm
from ssmgen.compat.sglang import invariance as of_sglang
from ssmgen.compat.shared import invariance
from ssmgen.compat.shared.operands import rows_of, written_rows
from ssmgen.compat.vllm import invariance as of_vllm
from ssmgen.errors import BatchInvarianceError, CaptureError, ConfigError
from ssmgen.settings import vllm_is_batch_invariant

PLUGINS, F32 = {"vllm": vllm, "sglang": sglang}, torch.float32
CLASSES = [(module, name) for module, names in BACKENDS.items() for name in names]
NEEDED = [(owner, place) for owner, places in of_vllm.FUNCTIONS.items() for place in places]


def deterministic(monkeypatch, on: bool) -> None:
    """SGLang's settings, as it publishes them in its processes."""
    context = ModuleType("sglang.srt.runtime_context")
    context.get_exec = lambda: SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=on))
    monkeypatch.setitem(sys.modules, context.__name__, context)


def turned(monkeypatch, engine: str, on: bool) -> None:
    if engine == "vllm":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(on)))
        of_vllm.on.known = None
    else:
        deterministic(monkeypatch, on)
        of_sglang.on.known = None


@pytest.fixture
def stand_in(request, tmp_path, monkeypatch):
    """An engine that can be imported, by name; "vllm" if the test names none."""
    package = getattr(request, "param", "vllm")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("SSMGEN_ENGINE_KEEP", raising=False)
    write(tmp_path, package)
    with importable(tmp_path, package):
        turned(monkeypatch, package, True)
        yield package
        PLUGINS[package].unregister()


both = pytest.mark.parametrize("stand_in", sorted(PLUGINS), indirect=True)


# The promise of vLLM's backends.


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_a_backend_promises_what_all_of_its_functions_keep(stand_in, module, name):
    backend = place_of(module, name)
    assert not backend.supports_batch_invariance()
    vllm.register()
    assert backend.supports_batch_invariance()
    assert not type("Child", (backend,), {"__module__": module}).supports_batch_invariance(), "a subclass has other kernels"
    vllm.unregister()
    assert not backend.supports_batch_invariance() and "supports_batch_invariance" not in vars(backend)


def test_the_classes_are_those_of_the_record():
    assert set(of_vllm.FUNCTIONS) == {".".join(place) for place in CLASSES}
    assert {place for _, place in NEEDED} <= {".".join(place) for place in FUNCTIONS}


@pytest.mark.parametrize(("owner", "place"), NEEDED, ids=lambda text: text.rpartition(".")[2])
def test_no_promise_with_a_function_that_is_kept(stand_in, monkeypatch, caplog, owner, place):
    (name,) = [n for m, n in FUNCTIONS if f"{m}.{n}" == place]
    monkeypatch.setenv("SSMGEN_ENGINE_KEEP", name)
    vllm.register()
    assert not place_of(*owner.rsplit(".", 1)).supports_batch_invariance()
    assert f"{place} is vllm's own: kept: SSMGEN_ENGINE_KEEP names it" in caplog.text


@pytest.mark.parametrize("changed", [None, "more"], ids=["gone", "drifted"])
@pytest.mark.parametrize(
    "place",
    [
        ("vllm.model_executor.layers.mamba.ops.ssd_combined", "mamba_chunk_scan_combined_varlen"),
        *[(module, f"{owner}.{name}") for module, owner, name in (p.rsplit(".", 2) for p in of_vllm.AROUND)],
    ],
    ids=lambda place: place[1],
)
def test_no_promise_with_a_function_that_has_drifted(tmp_path, monkeypatch, place, changed):
    """Neither with one of the layers', nor with one of the scheduler's that the mode changes."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    if changed is None and place[1].endswith("__init__"):
        pytest.skip("every class has one")
    first = "cls" if place[1].endswith("block_size") else "self"
    write(tmp_path, "vllm", "99.1", {place: changed and f"{first}, more"})
    with importable(tmp_path, "vllm"):
        try:
            vllm.register()
            importlib.import_module(place[0])
            backend = place_of("vllm.v1.attention.backends.mamba2_attn", "Mamba2AttentionBackend")
            assert not backend.supports_batch_invariance()
        finally:
            vllm.unregister()


def test_a_broken_promise_is_an_error_at_the_import(tmp_path, monkeypatch):
    """A module may be imported after the promise."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    place = ("vllm.model_executor.layers.mamba.ops.ssd_combined", "mamba_chunk_scan_combined_varlen")
    write(tmp_path, "vllm", "99.1", {place: "x, more"})
    with importable(tmp_path, "vllm"):
        try:
            vllm.register()
            assert place_of("vllm.v1.attention.backends.mamba2_attn", "Mamba2AttentionBackend").supports_batch_invariance()
            with pytest.raises(BatchInvarianceError, match=r"ssd_combined.*is vllm's own(.|\n)*install vllm 0.33.0, or leave the mode"):
                importlib.import_module(place[0])
        finally:
            vllm.unregister()


# Refused calls.


@pytest.mark.parametrize("error", [None, CaptureError("spec", "sm_90a", "f")], ids=["arguments", "capture"])
@both
def test_a_refused_call_is_an_error_and_not_the_engine_s(stand_in, monkeypatch, error):
    plugin = PLUGINS[stand_in]
    r = plugin._ENGINE.replacements[0]
    if error is not None:

        def refuse(*args, **kwargs):
            raise error

        refuse.__signature__ = inspect.signature(r.function)
        monkeypatch.setattr(plugin._ENGINE, "replacements", (type(r)(r.module, r.name, refuse), *plugin._ENGINE.replacements[1:]))
    plugin.register()
    function = place_of(r.module, r.name)
    wrong = [torch.zeros(2, 3)] * 8
    with pytest.raises(BatchInvarianceError, match=rf"{r.name} cannot give(.|\n)*ssmgen refuses the call(.|\n)*leave the mode"):
        function(*wrong)
    turned(monkeypatch, stand_in, False)
    assert function(*wrong) == f"the engine's {r.place}"


def test_the_variable_is_read_as_vllm_reads_it(monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert not vllm_is_batch_invariant()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    with pytest.raises(ConfigError, match="is no number"):
        vllm_is_batch_invariant()


def test_sglang_before_its_settings_are_published(monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.runtime_context", raising=False)
    assert of_sglang.is_deterministic() is None
    deterministic(monkeypatch, True)
    assert of_sglang.is_deterministic()

    def unpublished():
        raise ValueError("config namespace 'exec' not published")

    monkeypatch.setattr(sys.modules["sglang.srt.runtime_context"], "get_exec", unpublished)
    assert of_sglang.is_deterministic() is None


# Prompts.


@pytest.fixture
def watched():
    """vLLM's mode is asked, as if its plugin were registered."""
    of_vllm.on.watch(True)
    yield
    of_vllm.on.watch(False)


@pytest.mark.parametrize("function", [chunk_scan, chunk_gated_delta_rule, chunk_kda, chunk_lightning_attn, selective_scan])
def test_sequences_stay_whole_in_the_mode(monkeypatch, watched, function):
    assert invariance.whole(function) == {}
    turned(monkeypatch, "vllm", True)
    assert invariance.whole(function) == {"segments": 1}


def test_rows_lie_alike_in_the_mode(monkeypatch, watched):
    """A row at an odd multiple of 4 bytes would give the call another form of the kernel."""
    wide = torch.zeros(4, 66, dtype=torch.bfloat16)
    odd, even = wide[:, 2:], torch.zeros(4, 64, dtype=torch.bfloat16)
    assert rows_of(odd) is odd and written_rows(odd) is odd
    turned(monkeypatch, "vllm", True)
    assert rows_of(even) is even and written_rows(even) is even
    for found in (rows_of(odd), written_rows(odd)):
        assert found is not odd and found.data_ptr() % 16 == 0 and found.stride() == (64, 1)


@pytest.mark.parametrize(
    ("start", "end", "limit", "prompt", "grid", "want"),
    [
        (0, 100, 100, 300, 64, 64), (64, 164, 164, 300, 64, 128), (0, 300, 300, 300, 64, 300), (0, 256, 256, 257, 64, 192),
        (0, 256, 257, 257, 64, 257), (192, 256, 256, 257, 64, 192), (64, 100, 100, 300, 64, 64), (0, 63, 63, 64, 64, 0),
        (0, 1, 1, 1, 64, 1), (300, 310, 310, 300, 64, 301), (300, 300, 300, 300, 64, 300), (128, 400, 400, 300, 64, 300),
        (0, 7, 7, 9, 4, 4), (0, 8, 8, 9, 4, 4),
    ],
)  # fmt: skip
def test_where_a_piece_ends(start, end, limit, prompt, grid, want):
    assert invariance.piece_end(start, end, limit, prompt, grid) == want


# Settings of vLLM. Its own scheduler is asked in test_engine_invariance_scheduler.py.


def vllm_config(**changed) -> SimpleNamespace:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(use_replayssm=False, block_size=128), additional_config={}, speculative_config=None,
        kv_transfer_config=None, mamba_config=SimpleNamespace(backend=SimpleNamespace(value="triton")),
    )  # fmt: skip
    for name, value in changed.items():
        owner, _, leaf = name.rpartition("__")
        setattr(getattr(config, owner) if owner else config, leaf, value)
    return config


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None), ({"speculative_config": object()}, "--speculative-config"), ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"cache_config__use_replayssm": True}, "--use-replayssm"),
        ({"mamba_config__backend": SimpleNamespace(value="flashinfer")}, "--mamba-backend triton"),
        ({"additional_config": {"kda_prefill_backend": "flashinfer"}}, "--kda-prefill-backend triton or flashkda"),
        ({"additional_config": {"kda_decode_backend": "flashinfer"}}, "--kda-decode-backend triton or native"),
        ({"additional_config": {"gdn_prefill_backend": "cutedsl"}}, "--gdn-prefill-backend triton or flashinfer"),
        ({"additional_config": {"gdn_prefill_backend": " FlashInfer", "kda_prefill_backend": "auto"}}, None),
    ],
    ids=lambda v: None if not isinstance(v, dict) else "-".join(v) or "nothing",
)  # fmt: skip
def test_settings_of_vllm(changed, words):
    scheduler = SimpleNamespace(
        need_mamba_block_aligned_split=False, mamba_partial_cache_hit=False, max_num_scheduled_tokens=256,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0), hash_block_size=16,
    )  # fmt: skip
    states = [SimpleNamespace(mamba_type=SimpleNamespace(name="GDN_ATTN"), dtypes=(torch.bfloat16, F32))]
    found = of_vllm._objections(scheduler, vllm_config(**changed), states, 64)
    assert not found if words is None else len(found) == 1 and words in found[0]
    scheduler.mamba_partial_cache_hit = True
    assert "--prefix-match-unit" in of_vllm._objections(scheduler, vllm_config(), states, 64)[0]


@pytest.mark.parametrize(("mode", "cache", "want"), [("1", "align", 192), ("0", "align", 48), ("1", "none", 48)])
def test_blocks_of_hybrid_models_are_multiples_of_64(monkeypatch, mode, cache, want):
    turned(monkeypatch, "vllm", mode == "1")
    config, seen = SimpleNamespace(cache_config=SimpleNamespace(block_size=48, mamba_cache_mode=cache)), []
    of_vllm.block_size(lambda cls, given, backend: seen.append((cls, given.cache_config.block_size, backend)), int, config, str)
    assert seen == [(int, want, str)]


# SGLang's scheduler.


def sglang_scheduler(dtype=F32, **changed) -> SimpleNamespace:
    pool = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(temporal=torch.zeros(2, 2, dtype=dtype))))
    made = SimpleNamespace(
        is_hybrid_ssm=True, truncation_align_size=None, page_size=1, disable_radix_cache=True, is_mixed_chunk=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: True), req_to_token_pool=pool,
    )  # fmt: skip
    vars(made).update(changed)
    return made


@pytest.fixture
def ready(stand_in):
    """SGLang's stand-in with the plugin; gives its scheduler's method, and forgets afterwards that one has started."""
    sglang.register()
    yield place_of("sglang.srt.managers.scheduler", "Scheduler.init_mamba_truncation_align")
    of_sglang._Served.grid = 0


of_sglang_only = pytest.mark.parametrize("stand_in", ["sglang"], indirect=True)


@of_sglang_only
@pytest.mark.parametrize(
    ("changed", "want"), [({}, 64), ({"page_size": 48}, 192), ({"truncation_align_size": 4096}, 4096), ({"is_hybrid_ssm": False}, None)]
)
def test_sglang_s_prompts_are_cut_at_multiples_of_64(ready, monkeypatch, changed, want):
    scheduler = sglang_scheduler(**changed)
    ready(scheduler)
    assert scheduler.truncation_align_size == want
    turned(monkeypatch, "sglang", False)
    scheduler = sglang_scheduler(**changed)
    ready(scheduler)
    assert scheduler.truncation_align_size == changed.get("truncation_align_size") and not of_sglang._Served.grid


@of_sglang_only
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": torch.bfloat16}, "--mamba-ssm-dtype float32"), ({"disable_radix_cache": False}, "--disable-radix-cache"),
        ({"is_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "--speculative-algorithm"),
    ],
)  # fmt: skip
def test_settings_of_sglang(ready, changed, words):
    with pytest.raises(BatchInvarianceError, match=words) as e:
        ready(sglang_scheduler(**changed))
    assert len(e.value.problems) == 1 and not of_sglang._Served.grid


@of_sglang_only
def test_sglang_with_a_function_of_its_own(stand_in, monkeypatch):
    monkeypatch.setenv("SSMGEN_ENGINE_KEEP", "chunk_kda,merge_state")
    sglang.register()
    with pytest.raises(BatchInvarianceError, match=r"fla\.kda\.chunk_kda is sglang's own") as e:
        place_of("sglang.srt.managers.scheduler", "Scheduler.init_mamba_truncation_align")(sglang_scheduler())
    assert len(e.value.problems) == 1, "merging works row by row"


@of_sglang_only
def test_sglang_s_later_pieces_are_cut_there_too(ready):
    floor = of_sglang.floor_chunked_tokens
    assert floor(lambda self, room, rest: room, None, 100, 300) == 100
    ready(sglang_scheduler())
    assert [floor(lambda self, room, rest: min(room, rest), None, room, 300) for room in (100, 64, 299, 300, 500)] == [
        64,
        64,
        256,
        300,
        300,
    ]
    with pytest.raises(BatchInvarianceError, match="memory for 63 tokens of a prompt, and a piece of it needs 64"):
        floor(lambda self, room, rest: room, None, 63, 300)


@of_sglang_only
def test_sglang_s_requests_that_ignore_their_end_wait_for_room(ready):
    add = place_of("sglang.srt.managers.schedule_policy", "PrefillAdder.add_one_req_ignore_eos")
    sys.modules["sglang.srt.managers.schedule_policy"].AddReqResult = SimpleNamespace(OTHER="other")
    request = SimpleNamespace(full_untruncated_fill_ids=[0] * 300, prefix_len=0)
    ready(sglang_scheduler())
    own = "the engine's sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req_ignore_eos"
    assert add(SimpleNamespace(rem_chunk_tokens=63), request) == "other"
    assert add(SimpleNamespace(rem_chunk_tokens=64), request) == add(SimpleNamespace(rem_chunk_tokens=None), request) == own
    request.prefix_len = 250
    assert add(SimpleNamespace(rem_chunk_tokens=50), request) == own and add(SimpleNamespace(rem_chunk_tokens=49), request) == "other"


@of_sglang_only
def test_sglang_s_retracted_requests_end(ready):
    """Their outputs, computed again, would go through the prompts' kernels."""
    batch = importlib.import_module("sglang.srt.managers.schedule_batch")
    batch.FINISH_ABORT = lambda message, status_code: (message, status_code)
    retracted, other = SimpleNamespace(to_finish=None), object()
    answer = ([retracted], 0.5, [other])
    assert of_sglang.retract_decode(lambda self: answer, None) == answer and retracted.to_finish is None
    ready(sglang_scheduler())
    assert of_sglang.retract_decode(lambda self: answer, None) == ([], 0.5, [other, retracted])
    assert retracted.to_finish == (of_sglang.RETRACTED, HTTPStatus.SERVICE_UNAVAILABLE)


@of_sglang_only
def test_sglang_s_functions_for_prompts_and_steps_alike_are_refused(stand_in):
    """They tell prompts from steps by the number of tokens of all requests."""
    sglang.register()
    attention = "sglang.kernels.ops.attention"
    q = torch.zeros(3, 2, 16)
    meta = SimpleNamespace(batch_size=3, s_offsets=torch.arange(3), q_offsets=torch.arange(4), s_scales=torch.ones(3))
    with pytest.raises(BatchInvarianceError, match="prompts and decode steps are one function"):
        place_of(f"{attention}.linear.seg_la", "seg_la_fwd")(q, q, q, torch.zeros(3, 2, 16, 16), torch.ones(2), meta)
    with pytest.raises(BatchInvarianceError, match="prompts and decode steps are one function"):
        place_of(f"{attention}.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_update")(
            q[None], q[None], q[None], torch.zeros(1, 3, 2), initial_state_source=torch.zeros(3, 2, 16, 16),
            initial_state_indices=torch.arange(3), cu_seqlens=torch.arange(4),
        )  # fmt: skip
