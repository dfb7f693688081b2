"""The batch-invariant mode in vLLM's own scheduler and backends, if vLLM is installed: pieces of prompts, cached prefixes and preempted
requests. No model runs; the answers are made here."""

from __future__ import annotations

import json
import random
from collections import deque
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from engine_signatures import BACKENDS

from ssmgen.compat import vllm
from ssmgen.errors import BatchInvarianceError

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
BLOCK = 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip


@pytest.fixture(params=[True, False], ids=["on", "off"])
def mode(request, monkeypatch):
    """Whether the mode is on. The plugin is registered either way."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(request.param)))
    monkeypatch.delenv("SSMGEN_ENGINE_KEEP", raising=False)
    vllm.register()
    yield request.param
    vllm.unregister()


only_on = pytest.mark.parametrize("mode", [True], indirect=True, ids=["on"])


def scheduler_of(
    folder, kind: str = "MAMBA2", budget: int = 256, caching: bool = False, blocks: int = 1000, seqs: int = 8, dtype=torch.float32,
    block: int = BLOCK, ahead: bool = False, inner: bool = False, **more,
):  # fmt: skip
    """vLLM's scheduler of a hybrid model of one attention and one recurrent layer.

    ahead: it schedules a step before it knows the last one's tokens, as vLLM does by default
    inner: layers save states inside the last piece of a prompt, too
    """
    folder.joinpath("config.json").write_text(json.dumps(CONFIG))
    config, interface = import_module("vllm.config"), import_module("vllm.v1.kv_cache_interface")
    kinds = import_module("vllm.v1.attention.backends.registry").MambaAttentionBackendEnum
    model = config.ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float16", max_model_len=2048)
    scheduling = config.SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=2048, enable_chunked_prefill=True, is_encoder_decoder=False,
        watermark=0.0, async_scheduling=ahead, **more,
    )  # fmt: skip
    cache = config.CacheConfig(block_size=block, gpu_memory_utilization=0.9, cache_dtype="auto", enable_prefix_caching=caching)
    cache.num_gpu_blocks, cache.mamba_cache_mode = blocks, "align" if caching else "none"
    whole = config.VllmConfig(
        scheduler_config=scheduling, model_config=model, cache_config=cache, device_config=config.DeviceConfig(device="cpu")
    )
    attention = interface.FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    state = interface.MambaSpec(
        block_size=block if caching else 2048, shapes=((1, 1), (1, 1)), dtypes=(torch.float16, dtype), mamba_type=kinds[kind],
        mamba_cache_mode=cache.mamba_cache_mode,
        **({"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if inner else {}),
    )  # fmt: skip
    groups = [interface.KVCacheGroupSpec(["attention"], attention), interface.KVCacheGroupSpec(["recurrent"], state)]
    pools = interface.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    structured = import_module("vllm.v1.structured_output").StructuredOutputManager(whole)
    async_scheduler = import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    return (async_scheduler if ahead else import_module("vllm.v1.core.sched.scheduler").Scheduler)(
        vllm_config=whole, kv_cache_config=pools, structured_output_manager=structured, block_size=block if caching else 2048,
        hash_block_size=block if caching else None, log_stats=True,
    )  # fmt: skip


def requests_of(prompts, outputs: int = 20, first: int = 0):
    utils, hashing = import_module("vllm.v1.core.kv_cache_utils"), import_module("vllm.utils.hashing")
    utils.init_none_hash(hashing.sha256)
    hasher = utils.get_request_block_hasher(BLOCK, hashing.sha256)
    params = import_module("vllm.sampling_params").SamplingParams(ignore_eos=True, max_tokens=outputs)
    params.update_from_generation_config({}, 999)
    make = import_module("vllm.v1.request").Request
    return [
        make(
            request_id=str(first + i),
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )
        for i, tokens in enumerate(prompts)
    ]


def served(scheduler, requests, rng: random.Random, steps: int = 3000) -> SimpleNamespace:
    """Adds the requests over time and lets the scheduler work until all are done.

    pieces: {id: [(start, end)]}   mixed: steps with prompts and decode steps   cached: {id: tokens found in the cache, at each start}
    A cached state must be one that was made: a piece of the same tokens ended there.
    """
    output = import_module("vllm.v1.outputs").ModelRunnerOutput
    late, live, waiting = list(requests), {}, deque()
    made = scheduler.__dict__.setdefault("made_in_tests", {})  # {tokens: requests with a piece that ended there}
    found = SimpleNamespace(pieces={r.request_id: [] for r in requests}, mixed=0, preempted=0, cached={r.request_id: [] for r in requests})
    for _ in range(steps):
        while late and rng.random() < 0.3:
            request = late.pop(0)
            live[request.request_id] = request
            scheduler.add_request(request)
        if not late and not scheduler.has_unfinished_requests():
            break
        before = {i: r.num_preemptions for i, r in live.items()}
        step = scheduler.schedule()
        found.preempted += sum(r.num_preemptions - before[i] for i, r in live.items())
        ids, kinds, sampled = list(step.num_scheduled_tokens), set(), []
        for i in ids:
            end = live[i].num_computed_tokens
            start = end - step.num_scheduled_tokens[i]
            if not found.pieces[i] or found.pieces[i][-1][1] != start:  # it begins, or begins again
                found.cached[i].append(start)
                prefix = list(live[i].all_token_ids[:start])
                ended = [
                    r
                    for at in (range(start, start + 2049) if scheduler.mamba_has_prefill_checkpoint_blocks else [start])
                    for r in made.get(at, ())
                ]
                assert not start or any(list(r.all_token_ids[:start]) == prefix for r in ended), "a state that nobody made"
            found.pieces[i].append((start, end))
            made.setdefault(end, []).append(live[i])
            kinds.add(start < live[i].num_prompt_tokens)
            sampled.append([hash((i, end)) % 1000] if end >= live[i].num_tokens else [])
        found.mixed += len(kinds) > 1
        answer = output(req_ids=ids, req_id_to_index={i: n for n, i in enumerate(ids)}, sampled_token_ids=sampled, logprobs=None,
                      prompt_logprobs_dict={}, pooler_output=[])  # fmt: skip
        waiting.append((step, answer))
        if len(waiting) > scheduler.scheduler_config.async_scheduling or not ids:
            scheduler.update_from_output(*waiting.popleft())
    assert not late and not scheduler.has_unfinished_requests(), "requests wait forever"
    return found


def faults(pieces, prompt: int, grid: int) -> list[str]:
    """The pieces of one request that break the law."""
    words = []
    for start, end in pieces:
        if start < prompt:
            words += [f"{start} to {end} of {prompt}"] * (
                end > prompt or (end < prompt and end % grid != 0) or (end - start == 1 and start > 0)
            )
        elif end - start != 1:
            words.append(f"{start} to {end} after {prompt}")
    return words


def prompts_of(rng: random.Random, count: int = 12, longest: int = 700) -> list[list[int]]:
    """Many of a length just above a multiple of 64 or of a block."""
    lengths = [rng.choice((1, 2, 63, 64, 65, 127, 128, 129, 193, 257, 385, rng.randrange(1, longest))) for _ in range(count)]
    return [[rng.randrange(1000) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("ahead", [False, True], ids=["known", "ahead"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("kind", "grid"), [("MAMBA2", 64), ("GDN_ATTN", 64), ("MAMBA1", 4)])
def test_pieces_end_on_the_grid(mode, tmp_path, kind, grid, seed, ahead):
    rng = random.Random(seed)
    prompts = prompts_of(rng)
    requests = requests_of(prompts)
    found = served(scheduler_of(tmp_path, kind, budget=rng.choice((65, 100, 256)), ahead=ahead), requests, rng)
    broken = [words for r, p in zip(requests, prompts, strict=True) for words in faults(found.pieces[r.request_id], len(p), grid)]
    assert bool(broken) != mode, broken
    assert all(r.num_output_tokens == 20 for r in requests)
    if kind == "GDN_ATTN":
        assert bool(found.mixed) != mode


@pytest.mark.parametrize("ahead", [False, True], ids=["known", "ahead"])
@pytest.mark.parametrize("seed", range(2))
def test_a_preempted_request_repeats_its_steps_one_by_one(mode, tmp_path, seed, ahead):
    """vLLM repeats them in one piece, which runs as a prompt."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(100, 380))] for _ in range(6)]
    requests = requests_of(prompts, outputs=150)
    found = served(scheduler_of(tmp_path, blocks=16, budget=300, ahead=ahead), requests, rng, 6000)
    assert found.preempted
    broken = [words for r, p in zip(requests, prompts, strict=True) for words in faults(found.pieces[r.request_id], len(p), 64)]
    assert bool(broken) != mode, broken


@pytest.mark.parametrize(("kind", "inner"), [("MAMBA2", False), ("MAMBA2", True), ("GDN_ATTN", True)])
@pytest.mark.parametrize("ahead", [False, True], ids=["known", "ahead"])
@pytest.mark.parametrize("seed", range(2))
def test_cached_prefixes_leave_two_tokens_and_hold_no_outputs(mode, tmp_path, kind, inner, seed, ahead):
    rng = random.Random(seed)
    shared = [rng.randrange(1000) for _ in range(3 * BLOCK)]
    prompts = [shared[: n * BLOCK] + tail for n, tail in ((3, [1]), (3, [2, 3]), (2, [4]), (1, [5] * 70), (3, [6] * 200), (2, []), (3, []))]
    rng.shuffle(prompts)
    scheduler = scheduler_of(tmp_path, kind, budget=rng.choice((200, 300, 700)), caching=True, ahead=ahead, inner=inner)
    requests = requests_of(prompts, outputs=2 * BLOCK)
    found = served(scheduler, requests, rng)
    second = requests_of([list(r.all_token_ids) + [7] * 90 for r in requests], first=100)
    more = served(scheduler, second, rng)
    hits = [*found.cached.values(), *more.cached.values()]
    assert any(hit for each in hits for hit in each), "no prefix was found"
    beyond = [hit > r.num_prompt_tokens for r, s in zip(requests, second, strict=True) for hit in more.cached[s.request_id]]
    assert any(beyond) != mode
    pieces = found.pieces | more.pieces
    broken = [words for r in (*requests, *second) for words in faults(pieces[r.request_id], r.num_prompt_tokens, BLOCK)]
    assert bool(broken) != mode, broken


@only_on
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"dtype": torch.bfloat16}, "recurrent states are bfloat16.*--mamba-ssm-cache-dtype float32"),
        ({"dtype": torch.float16, "kind": "GDN_ATTN"}, "recurrent states are float16"),
        ({"budget": 64, "seqs": 4}, "a step has 64 tokens; a piece of a prompt can need 65: --max-num-batched-tokens 65"),
        ({"budget": 128, "caching": True}, "can need 129"),
        ({"caching": True, "block": 80}, "multiples of 80 tokens, not of 64: a --block-size"),
        ({"long_prefill_token_threshold": 50}, "--long-prefill-token-threshold is 50"),
    ],
    ids=lambda v: None if isinstance(v, str) else "-".join(v),
)  # fmt: skip
def test_settings_that_change_bits_are_refused(mode, tmp_path, how, words):
    with pytest.raises(BatchInvarianceError, match=words):
        scheduler_of(tmp_path, **how)


@only_on
def test_a_short_convolution_alone_needs_no_grid(mode, tmp_path):
    """Its windows are copies of inputs of 16 bits, and it has the same bits in any pieces."""
    assert scheduler_of(tmp_path, "SHORT_CONV", dtype=torch.float16).ssmgen_grid == 1


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, names in BACKENDS.items() for n in names], ids=lambda text: text.rpartition(".")[2]
)
@only_on
def test_vllm_s_own_backends_promise(mode, module, name):
    assert getattr(import_module(module), name).supports_batch_invariance()
    vllm.unregister()
    assert not getattr(import_module(module), name).supports_batch_invariance()


@only_on
def test_backends_of_other_kernels_promise_nothing(mode):
    convolution = import_module("vllm.v1.attention.backends.short_conv_attn")
    assert not convolution.PleShortConvAttentionBackend.supports_batch_invariance()
    assert convolution.ShortConvAttentionBackend.supports_batch_invariance()


@pytest.mark.parametrize("kind", ["MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN"])
@only_on
def test_vllm_selects_the_backends(mode, kind):
    select = import_module("vllm.v1.attention.selector")._cached_get_mamba_attn_backend.__wrapped__
    kinds = import_module("vllm.v1.attention.backends.registry").MambaAttentionBackendEnum
    assert select(kinds[kind]).supports_batch_invariance()
    vllm.unregister()
    with pytest.raises(RuntimeError, match="batch_invariant mode is not supported"):
        select(kinds[kind])
