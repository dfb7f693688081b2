"""ssmgen.accelerate on a CPU: it generates the tokens of transformers' own generate, and reports the parts that it could not do."""

from __future__ import annotations

import copy

import pytest
import torch
from programs import succeeds
from selection import costly

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import built, minimax
from hf_cases import nothing_stays_patched as nothing_stays_patched

import ssmgen
from ssmgen.compat import hf
from ssmgen.compat.hf import generate as hf_generate
from ssmgen.compat.hf import linears
from ssmgen.compat.shared import linears as products
from ssmgen.errors import ArgumentError, PatchError

IDS = torch.arange(3, 13).view(2, 5)


def of_transformers(model, ids, count, **how):
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False, **how})


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_it_generates_what_the_model_does(name, monkeypatch):
    """Also from the second prompt on, on the same cache, and where that needs a longer one."""
    monkeypatch.setattr(hf_generate, "ROOM", 8)
    model = built(name)
    prompts = [(IDS, 3), (IDS[:, :3] + 20, 5), (IDS, 8)]
    want = [of_transformers(model, ids, count) for ids, count in prompts]
    with ssmgen.accelerate(model) as fast:
        got = [fast.generate(ids, count) for ids, count in prompts]
        calls = fast.patch.calls()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert calls and not any(c.original for c in calls.values())


def test_a_longer_prompt_behind_a_shorter_one_on_the_same_cache():
    """Qwen4 keeps the positions of all tokens in the cache or separately. A prompt has only its own tokens' positions."""
    model = built("qwen4_exp")
    prompts = [(IDS, 2), (IDS, 24)]
    want = [of_transformers(model, ids, count) for ids, count in prompts]
    with ssmgen.accelerate(model) as fast:
        got = [fast.generate(ids, count) for ids, count in prompts]
        positions = [*_found(fast._steps[2].cache, "position_ids")]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert positions and all(p.shape[-1] == 5 + 23 for p in positions)


def _found(cache, word):
    return (v for held in (cache, *cache.layers) for name, v in vars(held).items() if word in name and isinstance(v, torch.Tensor))


def test_a_step_that_replaces_what_the_cache_holds_is_not_captured(monkeypatch):
    """It would be one that nothing has computed; and the host would count on from it where the capture fails."""
    tried = []
    monkeypatch.setattr(hf_generate.Steps, "_capture", lambda steps: tried.append(steps.room) or "tried")
    for name in ("mamba2", "qwen3_next"):
        with ssmgen.accelerate(built(name)) as fast:
            fast._steps_of(2, 64).captures = True
            with pytest.warns(RuntimeWarning, match="not captured: tried"):
                fast.generate(IDS, 4)
        assert tried.pop() and not tried
    model = built("qwen4_exp")
    want = of_transformers(model, IDS, 24)
    with ssmgen.accelerate(model) as fast:
        fast._steps_of(2, 64).captures = True
        with pytest.warns(RuntimeWarning, match="steps of 2 sequences are not captured: each step allocates .*position_ids of the cache"):
            got = fast.generate(IDS, 24)
    assert not tried and torch.equal(got, want) and "position_ids" in fast.left[-1]


def test_padded_prompts_give_the_tokens_of_transformers():
    for name in ("mamba2", "qwen3_next"):  # without attention, and with it
        model, mask = built(name), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        want = of_transformers(model, IDS, 6, attention_mask=mask)
        with ssmgen.accelerate(model) as fast:
            assert torch.equal(fast.generate(IDS, 6, attention_mask=mask), want)


@costly(1)
@pytest.mark.parametrize("ends", ["one row", "both rows", "at once"])
def test_sequences_end_where_those_of_transformers_do(ends):
    model = built("mamba2")
    model.generation_config.eos_token_id = None
    free = of_transformers(model, IDS, 20)[:, 5:]
    tokens = {"one row": [int(free[0, 7])], "both rows": [int(free[0, 7]), int(free[1, 3])], "at once": [int(free[0, 0]), int(free[1, 0])]}
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = tokens[ends], 0
    want = of_transformers(model, IDS, 20)
    with ssmgen.accelerate(model) as fast:
        assert torch.equal(fast.generate(IDS, 20), want)


def test_what_was_done_and_what_was_not_is_told():
    with ssmgen.accelerate(built("mamba2")) as fast:
        text = str(fast)
    assert text.startswith("Mamba2ForCausalLM on cpu, float32\n  + 4 functions and the forwards of 4 classes are ssmgen's: mamba2.causal")
    assert "the model is on cpu, where the reference computes" in fast.left[0]
    with ssmgen.accelerate(built("jamba")) as fast:
        assert any("ssmgen has no fused step for layers of this kind" in words for words in fast.left)


def test_a_model_that_does_not_run_on_a_static_cache_generates_by_itself():
    model = minimax()
    want = of_transformers(model, IDS, 4)
    with ssmgen.accelerate(model) as fast:
        assert any("generate is model.generate: it does not run on transformers' StaticCache" in words for words in fast.left)
        assert torch.equal(fast.generate(IDS, 4), want)


def test_everything_wrong_is_said_at_once():
    with ssmgen.accelerate(built("mamba2")) as fast:
        with pytest.raises(ArgumentError) as e:
            fast.generate(IDS[0].float(), 0, attention_mask=torch.ones(1, 1))
        for words in (
            "input_ids is float32 [5]; expected int32 or int64",
            "max_new_tokens is 0; expected 1 or more",
            "attention_mask is [1, 1]",
        ):
            assert words in str(e.value)
    with pytest.raises(PatchError, match="has been undone"):
        fast.generate(IDS, 2)
    fast.undo()


def test_nothing_stays_replaced_where_it_fails(monkeypatch):
    with pytest.raises(PatchError, match="has no layer of a known model"):
        ssmgen.accelerate(torch.nn.Linear(2, 2))
    monkeypatch.setattr(hf_generate, "_replaced", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ssmgen.accelerate(built("mamba2"))
    assert not hf._active


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": "mamba2"}, "model is 'mamba2'; expected a model. Load it: transformers.AutoModelForCausalLM.from_pretrained('mamba2')"),
        ({"model": 3}, "model is int; expected a torch.nn.Module"),
        ({"batches": 2}, "batches is 2; expected sizes of 1 or more, such as batches=[2]"),
        ({"batches": [0, 2]}, "batches is [0, 2]; expected sizes of 1 or more"),
        ({"batches": []}, "batches is []; expected sizes of 1 or more"),
        ({"prompt_length": 0}, "prompt_length is 0; expected 1 token or more"),
    ],
    ids=["name", "number", "one-size", "no-sequence", "no-size", "no-prompt"],
)
def test_a_wrong_argument_is_a_clear_error(wrong, words):
    with pytest.raises(ArgumentError) as e:
        ssmgen.accelerate(**{"model": built("mamba2")} | wrong)
    assert words in str(e.value)


def test_generate_takes_what_the_models_does():
    """A streamer, beams, a configuration and end tokens. A model that samples by default is greedy unless sampling is requested."""
    from transformers import GenerationConfig

    model = built("mamba2")
    model.generation_config.do_sample = True
    mask, greedy = torch.ones_like(IDS), of_transformers(model, IDS, 6)
    end = int(greedy[0, 7])
    beams = model.generate(IDS, attention_mask=mask, max_new_tokens=4, num_beams=3, do_sample=False)
    ended = model.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=9)
    with ssmgen.accelerate(model) as fast:
        assert torch.equal(fast.generate(IDS, max_new_tokens=6, do_sample=False, num_beams=1), greedy)
        assert torch.equal(fast.generate(input_ids=IDS, attention_mask=mask, max_new_tokens=6), greedy)
        assert torch.equal(fast.generate(inputs=IDS, max_length=5 + 6, attention_mask=mask), greedy)
        assert torch.equal(fast.generate(IDS, GenerationConfig(max_new_tokens=6, do_sample=False), attention_mask=mask), greedy)
        assert torch.equal(fast.generate(IDS, 4, num_beams=3, attention_mask=mask), beams)
        assert torch.equal(fast.generate(IDS, 6, eos_token_id=end, pad_token_id=9), ended)
        full = fast.generate(IDS, 6, attention_mask=mask, return_dict_in_generate=True, output_logits=True)
        assert torch.equal(full.sequences, greedy) and len(full.logits) == 6
        assert fast.patch.calls() and not any(c.original for c in fast.patch.calls().values())


def test_it_is_called_as_the_model_is():
    model = built("mamba2")
    with torch.no_grad():
        want = model(input_ids=IDS).logits
        with ssmgen.accelerate(model) as fast:
            got = fast(input_ids=IDS).logits
            assert fast.patch.calls()["mamba2.Mamba2Mixer"].ssmgen > 0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def a_forward_of_tomorrow(self, hidden_states, memory, attention_mask=None, **kwargs):
    raise AssertionError


def test_a_layer_that_cannot_be_replaced_is_said_first_and_is_an_error_where_asked(monkeypatch):
    """The next transformers may give a forward a parameter that nothing here knows."""
    model = built("mamba2")
    monkeypatch.setattr(type(model.backbone.layers[0].mixer), "forward", a_forward_of_tomorrow)
    assert not hf.fusible(model)
    words = "its forward takes self, hidden_states, memory, attention_mask, kwargs, not self, hidden_states, cache, attention_mask"
    with (
        pytest.warns(RuntimeWarning, match=r"ssmgen does not replace.*\n  - mamba2\.Mamba2Mixer: its forward takes"),
        ssmgen.accelerate(model) as fast,
    ):
        text = str(fast)
        assert str(fast.patch).startswith(f"not replaced: mamba2.Mamba2Mixer: {words}\n")
    assert text.splitlines()[0].endswith("; 1 known functions are not replaced: mamba2.Mamba2Mixer")
    assert f"mamba2.Mamba2Mixer is not replaced: {words}" in fast.left and fast.patch.lost == {"mamba2.Mamba2Mixer": words}
    with pytest.warns(RuntimeWarning), pytest.raises(PatchError, match=r"strict=True\) cannot replace.*\n  - mamba2.Mamba2Mixer"):
        ssmgen.accelerate(model, strict=True)
    assert not hf._active


def test_strict_is_content_where_nothing_is_lost():
    with ssmgen.accelerate(built("mamba2"), strict=True) as fast:
        assert fast.patch.lost == {} and str(fast).splitlines()[0] == "Mamba2ForCausalLM on cpu, float32"


def test_naming_it_imports_no_transformers():
    program = "import sys, ssmgen\nassert 'torch' not in sys.modules\nssmgen.accelerate\nassert 'transformers' not in sys.modules\n"
    succeeds(program)


@pytest.fixture
def rows(monkeypatch):
    """The rows of each call of skinny_linear by a linear layer."""
    found = []
    ours = products.skinny_linear
    monkeypatch.setattr(products, "skinny_linear", lambda x, *rest: found.append(x.shape[:-1].numel()) or ours(x, *rest))
    return found


def test_linear_layers_multiply_few_rows_by_skinny_linear_and_undo_restores_them(rows):
    model = built("mamba2")
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear and not any(n % 8 for n in m.weight.shape)]
    assert layers
    weights = [(m.weight, m.weight.data_ptr()) for m in layers]
    want = of_transformers(model, IDS[:1], 3)
    with ssmgen.accelerate(model) as fast:
        said = f"{len(layers)} linear layers multiply up to 16 rows (f32, and GPUs before sm_90: 1) by skinny_linear"
        assert any(said in words for words in fast.done)
        assert torch.equal(fast.generate(IDS[:1], 3), want) and rows == [1] * len(rows) and len(rows) >= 2 * len(layers)
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert all(m.weight is weight and m.weight.data_ptr() == where for m, (weight, where) in zip(layers, weights, strict=True))


def test_without_tensor_cores_one_row_is_multiplied_by_skinny_linear(rows, monkeypatch):
    monkeypatch.setattr(products, "tensor_cores", lambda device: False)
    layer = torch.nn.Linear(24, 16).bfloat16()
    made = linears.Linears(layer)
    with torch.no_grad():
        layer(torch.randn(2, 24).bfloat16()), layer(torch.randn(1, 24).bfloat16())
    assert rows == [1]
    made.undo()
    assert "forward" not in layer.__dict__


def test_a_linear_layer_leaves_other_calls_to_pytorch(rows):
    layer = torch.nn.Linear(24, 16).bfloat16()
    given = [torch.randn(*shape, 24).bfloat16() for shape in ((2, 8), (8, 2), (17,), (0,), (1,))]
    given[1] = given[1].transpose(0, 1)
    with torch.no_grad():
        want = [layer(x) for x in given]
        made = linears.Linears(layer)
        got = [layer(x) for x in given]
        assert rows == [16, 16, 1], "17 rows, and none, are PyTorch's"
        made.load([4, 40])
        assert sorted(rows) == [1, 4, 16, 16], "more than 16 have nothing to load"
    assert layer(given[0]).requires_grad and len(rows) == 4, "calls that record a gradient are PyTorch's"
    with torch.no_grad():
        layer.float()(given[0].float())
        assert len(rows) == 4, "16 rows of f32, too"
        layer(given[4].float())
        assert rows[-1] == 1
        compiled = torch.compile(layer.bfloat16(), fullgraph=True, backend="eager")
        assert torch.equal(compiled(given[0]), got[0]) and torch.equal(copy.deepcopy(layer)(given[0]), got[0])
    made.undo()
    assert all(torch.allclose(a, b, rtol=2**-6, atol=1e-3) for a, b in zip(got, want, strict=True))


def test_linear_layers_that_are_not_plain_stay_as_they_are():
    class Own(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    hooked, odd, own = torch.nn.Linear(16, 8), torch.nn.Linear(16, 12), Own(16, 8)
    hooked.forward = lambda x: x
    narrow = torch.nn.Linear(16, 8).to(torch.float64)
    model = torch.nn.ModuleList([hooked, odd, own, narrow, torch.nn.Linear(16, 8)])
    made = linears.Linears(model)
    assert made.modules == [model[4]]
    for words in ("something else has replaced", "not multiples of 8", "own forward", "weights are float64"):
        assert words in made.words
    made.undo()
    made.undo()
    assert "forward" not in model[4].__dict__ and hooked.forward(3) == 3
