"""The proof of batch invariance by live engines, with stand-ins for the engines; and a run of all of tools.serving that is cut."""

from __future__ import annotations

import functools
import json
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ssmgen.compat.shared import invariance
from tools.serving import __main__ as program
from tools.serving import needles, proof, run
from tools.serving.engines import Engine
from tools.serving.models import MODELS, prefix_block
from tools.serving.proof import BATCHES, BLOCKS, NEEDLES, ORDERS, SETTINGS, Proof, Row, compare, prove_all, table
from tools.serving.report import HEAD

stand_in = functools.partial(Engine, module="tests.support.serving_stand_in")
PROVING = [setting for setting in SETTINGS if setting.proves]


@pytest.fixture
def proved(tmp_path, monkeypatch):
    """The proofs of models with stand-ins, the rows and words in the order in which they were told, and the journal."""
    monkeypatch.setenv("SERVING_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("VLLM_PLUGINS", "another,ssmgen")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)

    def prove(fails: str = "", models=("mamba2",), seconds: float = 120):
        monkeypatch.setenv("SERVING_FAILS", fails)
        told = []
        found = prove_all(models, tmp_path / "engines", time.monotonic() + seconds, lambda p, row: told.append((p.model, row)), stand_in)
        journal = tmp_path / "journal"
        return found, told, [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []

    return prove


def test_a_proof_holds_where_only_the_control_differs(proved):
    (found,), told, journal = proved()
    assert found.problems == [] and found.verdict == "mamba2: proved" and found.as_dict()["proved"]
    rows = [row for _, row in told if isinstance(row, Row)]
    assert rows == found.rows
    batches = len(BATCHES) * ORDERS
    want = {setting.name: batches + (setting is not SETTINGS[0] and setting.proves) for setting in SETTINGS}
    want[PROVING[-1].name] += len(BLOCKS)
    assert {name: sum(row.setting == name for row in rows) for name in want} == want
    assert all(row.equal == row.compared > 0 for row in rows if row.setting != SETTINGS[-1].name)
    control = [row for row in rows if row.setting == SETTINGS[-1].name]
    assert all(row.equal == row.compared - 1 and row.tokens == 0 and row.worst > 0 for row in control)
    asked = {(entry["ours"], entry["mode"]) for entry in journal if entry["what"] == "needles"}
    assert asked == {(True, "1"), (False, None)}, "the mode is on with ssmgen only"


def test_engines_are_built_for_their_settings(proved):
    _, _, journal = proved()
    built = [entry for entry in journal if entry["what"] == "build"]
    assert sorted((e["step"], e["eager"], e["prefixes"], e["ours"]) for e in built) == sorted(
        (s.step, s.eager, s.prefixes, s.proves) for s in SETTINGS
    )
    assert {s.step for s in PROVING if not s.prefixes} == {256, 2048, 8192} and {s.eager for s in PROVING} == {True, False}
    assert all(e["wide"] and e["graphs"][-1] == max(BATCHES) and e["longest"] > max(NEEDLES) for e in built)


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("varies", "answers depend on the batch, pieces, the cache or graphs"),
        ("same", "the control's answers are equal, too, so that this proves nothing"),
        ("no hit", "no prefix was taken from the cache"), ("mamba2 needles", "no such kernel"), ("mamba2 build", "no such kernel"),
        ("mamba2 prefix", "no such kernel"),
    ],
)  # fmt: skip
def test_a_proof_that_does_not_hold(proved, fails, words):
    (found,), _, _ = proved(fails)
    assert any(words in problem for problem in found.problems) and found.verdict.startswith("mamba2: NOT proved; ")
    assert found.verdict in table([found]) and not found.as_dict()["proved"]


def test_a_model_that_fails_stops_no_other(proved):
    found, told, _ = proved("mamba2 build", models=("mamba2", "qwen3_5"))
    assert [each.problems == [] for each in found] == [False, True] and told[-1] == ("qwen3_5", "qwen3_5: proved")


def test_a_proof_without_time_is_none(proved):
    (found,), told, _ = proved(seconds=0)
    assert "not all requests were made" in found.problems and told[-1][1].startswith("mamba2: NOT proved")


def test_answers_are_compared_by_all_bits():
    want = {"1": [[5, [[5, -0.5], [6, -1.0]]], [7, [[7, -0.25]]]], "9": [[5, [[5, -0.5]]]]}
    row = compare("m", "s", "w", want, json.loads(json.dumps(want)))
    assert (row.compared, row.equal, row.tokens, row.worst) == (2, 2, 0, 0.0) and "equal in every bit" in str(row)
    other = {"1": [[5, [[5, -0.5 - 2**-24], [6, -1.0]]], [7, [[7, -0.25]]]]}
    row = compare("m", "s", "w", want, other)
    assert (row.compared, row.equal, row.tokens, row.worst) == (1, 0, 0, 2**-24) and "differ by up to 6e-08" in str(row)
    row = compare("m", "s", "w", want, {"1": [[6, [[5, -0.5], [6, -0.25]]], [8, [[8, -9.0]]]]})
    assert (row.tokens, row.worst) == (1, 0.75), "later tokens continue another text"
    assert str(Row("m", "s", "w", 1, 1, cached=64)).endswith("64 tokens from the cache |")


def test_the_cache_has_to_be_hit_in_every_row():
    rows = [Row("m", PROVING[-1].name, "w", 1, 1, cached=n) for n in (0, 64)]
    assert "no prefix was taken from the cache" in Proof("m", rows, finished=True).problems
    assert "nothing was compared" in Proof("m", finished=True).problems


# Prompts, and what is kept of an answer.


def test_needles_are_in_every_batch_at_other_places():
    vocabulary, places = 512, {}
    for size in BATCHES:
        for seed in range(ORDERS):
            prompts, where = needles.batch_of(NEEDLES, size, seed, vocabulary)
            assert len(prompts) == size and set(where) <= set(NEEDLES) and len(where) == min(len(NEEDLES), size - 1)
            assert all(prompts[i] == needles.prompt_of(n, vocabulary) for n, i in where.items())
            assert all(1 <= len(p) <= needles.LONGEST_OTHER for i, p in enumerate(prompts) if i not in where.values())
            assert needles.batch_of(NEEDLES, size, seed, vocabulary) == (prompts, where), "every process asks the same"
            places[size, seed] = where
    assert places[128, 0] != places[128, 1] and set(places[2, 0]) != set(places[2, 1])


def answer(*steps, cached=None):
    output = SimpleNamespace(token_ids=[t for t, _ in steps], logprobs=[{n: SimpleNamespace(logprob=p) for n, p in b} for _, b in steps])
    return SimpleNamespace(outputs=[output], num_cached_tokens=cached)


def test_an_answer_is_its_tokens_and_best_log_probabilities():
    assert needles.said(answer((4, [(9, -1.5), (4, -0.25)]), (2, [(2, 0.0)]))) == [[4, [[4, -0.25], [9, -1.5]]], [2, [[2, 0.0]]]]


def test_needles_are_asked_alone_and_in_a_batch():
    seen = []

    def generate(prompts, tokens, **more):
        seen.append([len(p) for p in prompts])
        return [answer((len(p), [(3, -1.0)])) for p in prompts]

    alone = needles.of_batch(generate, 512, (1, 70), 0, 0, 5)
    assert seen == [[1], [70]] and alone == {"1": [[1, [[3, -1.0]]]], "70": [[70, [[3, -1.0]]]]}
    assert needles.of_batch(generate, 512, (1, 70), 8, 1, 5) == alone and len(seen[2]) == 8


@pytest.mark.parametrize(("blocks", "before"), [("one", 64 + 32), ("half", 5 * 64 + 32), ("all", 700)])
def test_another_prompt_leaves_blocks_of_the_needle(blocks, before):
    """700 tokens have 10 blocks of 64; the other prompt goes on differently."""
    seen, cache = [], SimpleNamespace(block_size=64)
    config = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))
    llm = SimpleNamespace(reset_prefix_cache=lambda: True, llm_engine=config)

    def generate(prompts, tokens, **more):
        seen.extend(prompts)
        return [answer((1, [(3, -1.0)]), cached=128)]

    found = needles.after_prefix(llm, generate, 512, 700, blocks, 5)
    assert found == {"said": {"700": [[1, [[3, -1.0]]]]}, "cached": 128, "block": 64}
    first, needle = seen
    assert len(first) == before and len(needle) == 700
    kept = before - 32 if blocks != "all" else 700
    assert first[:kept] == needle[:kept] and (blocks == "all" or first[kept:] != needle[kept:before])
    llm.reset_prefix_cache = lambda: False
    with pytest.raises(RuntimeError, match="has not emptied its cache"):
        needles.after_prefix(llm, generate, 512, 700, blocks, 5)


def test_prefixes_of_models_without_attention_end_where_the_mode_allows():
    """vLLM's own blocks there have 16 tokens, and the mode refuses prefixes that do not end at multiples of 64."""
    found = {model: prefix_block(model) for model in MODELS}
    assert found["mamba2"] and found["mamba2"] % invariance.CHUNK == 0 and found["mamba2"] < NEEDLES[-1]
    assert not any(found[model] for model in ("nemotron_h", "qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "kimi_k3"))


# The whole command.


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `python -m tools.serving` with stand-ins."""
    monkeypatch.setenv("SERVING_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("VLLM_PLUGINS", "ssmgen")
    monkeypatch.setenv("SERVING_FAILS", "")
    monkeypatch.setattr(run.Engine.__init__, "__defaults__", ("tests.support.serving_stand_in", None))
    monkeypatch.setattr(program.metadata, "version", lambda name: "0.33.0")

    def invoke(*given):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        done = CliRunner().invoke(program.serving, [*given, "--json", str(tmp_path / "out.json"), "--folder", str(folder)])
        return done, json.loads((tmp_path / "out.json").read_text())

    return invoke


SMALL = ("--model", "mamba2", "--batch", "1", "--batch", "8", "--steps", "4", "--rounds", "2")


def test_one_command_measures_and_proves(command, tmp_path):
    done, kept = command(*SMALL, "--prove", "mamba2", "--limit", "300")
    assert done.exit_code == 0, done.output
    assert [each["proved"] for each in kept["proofs"]] == [True] and not (tmp_path / "out.json.part").exists()
    (model,) = kept["models"]
    assert all(len(case["own"]) == len(case["ssmgen"]) == 2 and case["gpu_share"]["own"] for case in model["rates"])
    lines = done.output.splitlines()
    first = lines.index(HEAD.splitlines()[0])
    row = next(line for line in lines[first + 2 :] if line.startswith("| mamba2"))
    assert row.startswith("| mamba2, 20 layers | 1 prompt of 2048 | 1 000 000 | 1 000 000 | 1.00 | 1.00 … 1.00 | – | – | – | – |")
    assert "| 75 % | 50 % | 25 % | 50 % |" in done.output and done.output.rstrip().endswith("mamba2: proved")


def test_the_engine_with_ssmgen_has_narrow_states_with_noise(command, tmp_path):
    done, _ = command(*SMALL, "--narrow")
    built = [entry for entry in map(json.loads, (tmp_path / "journal").read_text().splitlines()) if entry["what"] == "build"]
    assert sorted((entry["ours"], entry["state"], entry["noise"]) for entry in built) == [(False, "", None), (True, "float16", "10")]
    assert done.exit_code == 0 and "| mamba2, 20 layers, f16 states | decode, 8 |" in done.output, done.output


def test_linear_layers_are_compared_between_engines_with_the_plugin(command, tmp_path, monkeypatch):
    done, kept = command(*SMALL, "--linear")
    built = [entry for entry in map(json.loads, (tmp_path / "journal").read_text().splitlines()) if entry["what"] == "build"]
    assert sorted((entry["ours"], entry["linear"]) for entry in built) == [(True, "allow"), (True, "deny")]
    assert done.exit_code == 0 and "| mamba2, 20 layers, linear layers | decode, 8 |" in done.output, done.output
    monkeypatch.setenv("SERVING_FAILS", "idle")
    done, kept = command(*SMALL, "--linear")
    assert done.exit_code == 1 and "the plugin has not replaced linear layers: both engines are alike" in kept["models"][0]["failures"]


def test_a_run_that_is_cut_leaves_its_rows_and_its_file(command, monkeypatch):
    """In the second round, and in the proof."""
    measured = []
    real = run.Case.rate

    def rate(case, engine, patience):
        measured.append(case)
        if len(measured) == 11:
            raise KeyboardInterrupt
        return real(case, engine, patience)

    monkeypatch.setattr(run.Case, "rate", rate)
    done, kept = command(*SMALL)
    assert done.exit_code != 0 and done.output.count("| mamba2, 20 layers | decode, 8 |") == 2
    assert [len(case["own"]) for case in kept["models"][0]["rates"]] == [2, 1, 1, 1]
    monkeypatch.setattr(run.Case, "rate", real)
    monkeypatch.setattr(proof, "requests", lambda: (_ for _ in [("alone", "needles", {})] if stop()))

    def stop():
        raise KeyboardInterrupt

    done, kept = command("--model", "none", "--prove", "mamba2")
    assert done.exit_code != 0 and kept["proofs"][0]["proved"] is False and "NOT proved" in done.output


def test_a_limit_ends_the_timing_and_leaves_time_for_the_proofs(command, monkeypatch):
    seen = []
    monkeypatch.setattr(program, "run", lambda pairs, options, folder, note, tell_case: seen.append(options))
    monkeypatch.setattr(program, "prove_all", lambda models, folder, until, tell: seen.append((models, until - time.monotonic())))
    command(*SMALL, "--limit", "480", "--prove", "mamba2", "--prove", "qwen3_5", "--prove", "mamba2")
    options, (models, left) = seen
    assert models == ("mamba2", "qwen3_5") and 470 < left <= 480
    assert options.limit == 480 - program.PROOFS - 2 * program.EACH and options.limit > 200
    assert options.seconds == options.patience == options.limit - program.WATCHES
    done, _ = command(*SMALL, "--limit", "200", "--prove", "mamba2")
    assert done.exit_code == 2 and "expected 245 or more, or --model none" in done.output and len(seen) == 2
    command(*SMALL)
    assert seen[2].limit == float("inf") and seen[3][1] == float("inf")


def test_nothing_is_timed_after_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVING_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("VLLM_PLUGINS", "ssmgen")
    monkeypatch.setenv("SERVING_FAILS", "")
    options = run.Options(timed=("mamba2",), batches=(1,), steps=4, rounds=2, patience=120, limit=0)
    pairs = run.pairs_of(options)
    run.run(pairs, options, tmp_path / "engines", lambda text: None, start=stand_in)
    assert pairs[0].rates == {} and pairs[0].busy == {} and pairs[0].compared
