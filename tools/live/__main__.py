"""`python -m tools.live`: installs vLLM, lets two engines answer, compares."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from ssmgen.cli import Command
from tools.serving.compare import compared
from tools.serving.engines import Engine, EngineError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",  # empty, not absent: vLLM takes Triton without a GPU's driver then
    "TRITON_INTERPRET": "1",
    "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",  # nothing is tuned
    "OMP_NUM_THREADS": "1",
    "SSMGEN_ENGINE_LINEAR": "allow",  # of f32, one row
}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
# Tests of the plugin with vLLM's own scheduler and layers.
TESTS = ("tests/compat/engines/test_engine_invariance_scheduler.py", "tests/compat/engines/test_engine_linears_vllm.py")
PROMPTS, TOKENS = 4, 4
STEP = 64  # tokens of the engine's step, fewer than prompts have: the longest comes in two parts
WIDER = 80  # the same in the batch-invariant mode, which needs 65
COMMON = {"causal_conv1d_update", "UnquantizedLinearMethod.apply"}
SERVED = {
    "mamba2": COMMON | {
        "causal_conv1d_fn", "mamba_chunk_scan_combined_varlen", "selective_state_update", "Mixer2RMSNormGated.forward_native",
    },
    "kimi_linear": COMMON | {
        "KimiGatedDeltaNetAttention._forward", "fused_recurrent_kda_packed_decode", "FusedRMSNormGated.forward_native",
    },
}  # fmt: skip
WITHIN = 1e-4  # of log-probabilities: f32, two layers, and rounded to 1e-5 by the engine's side


def install(packages: Path) -> None:
    """Installs vLLM and the packages it imports into a folder, unless it has them. Raises CalledProcessError."""
    if not (packages / "vllm").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--no-compile"]
        subprocess.run([*pip, "--target", str(packages), "-r", str(HERE / "packages.txt")], check=True)
    metadata = packages / "ssmgen_tools-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ssmgen-tools\nVersion: 0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[vllm.platform_plugins]\ninterpreted = tools.live.platform:activate\n", encoding="utf-8")


def ask(model: str, folder: Path, patience: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(answers, state) of an engine without and of one with ssmgen, which work at the same time. Raises EngineError."""
    engines: list[Engine] = []
    try:
        for with_ssmgen in (False, True):
            engines.append(Engine(model, with_ssmgen, folder, VARIABLES, "tools.live.worker"))
        requests: list[tuple[str, dict[str, Any]]] = [
            ("build", {"step": STEP, "model": model}),
            ("answers", {"prompts": PROMPTS, "tokens": TOKENS}),
            ("state", {}),
        ]
        for engine in engines:
            for do, more in requests:
                engine.say(do, **more, **({"folder": str(engine.folder / "model")} if do == "build" else {}))
        said = [[engine.hear(patience) for _ in requests] for engine in engines]
    finally:
        for engine in engines:
            engine.end()
    return [(answers, state) for _, answers, state in said]


def ask_alone(folder: Path, patience: float) -> list[int]:
    """The prompts whose answers depend on the batch, in an engine with ssmgen in its batch-invariant mode. Raises EngineError."""
    engine = Engine("mamba2-invariant", True, folder, VARIABLES | INVARIANT, "tools.live.worker")
    try:
        engine.ask("build", patience, step=WIDER, model="mamba2", folder=str(engine.folder / "model"))
        differ: list[int] = engine.ask("alone", patience, prompts=PROMPTS, tokens=TOKENS)["differ"]
    finally:
        engine.end()
    return differ


def problems(model: str, own: dict[str, Any], ours: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The problems in words: different answers, and faults in the state of the engine with ssmgen."""
    difference, missing = compared(own, ours), SERVED[model] - set(state["taken"])
    kept = [f"{place}: {what}" for place, what in state["outcome"].items() if what.startswith("kept")]
    found = [
        (difference.equal < difference.count or difference.within > WITHIN, f"answers differ: {difference}"),
        (missing, f"ssmgen was not called for {', '.join(sorted(missing))}"),
        (state["refused"], f"ssmgen refused calls of {state['refused']}"),
        (state["warnings"], "\n    ".join(["the plugin warned:", *state["warnings"]])),
        (kept, "\n    ".join(["not replaced:", *kept])),
    ]
    return [f"{model}: {words}" for wrong, words in found if wrong]


@click.command(cls=Command)
@click.option("--model", "models", type=click.Choice([*SERVED]), multiple=True, default=tuple(SERVED), help="May repeat. Default: all.")
@click.option("--packages", type=click.Path(file_okay=False, path_type=Path), help="To keep vLLM's packages in. Default: a temporary one.")
@click.option("--patience", type=float, default=240, show_default=True, help="Seconds that an engine may take for an answer.")
def live(models: tuple[str, ...], packages: Path | None, patience: float) -> None:
    """Small models of random weights in a live vLLM on the CPU: greedy tokens without and with ssmgen, and calls that ssmgen took.

    They are a Mamba-2, and Kimi-Linear's layers of Kimi delta attention, which take a minute or two more.

    Installs vLLM's wheel without its dependencies (0.6 GB of downloads, 1.6 GB on disk). No compiled code of it runs: Triton's kernels
    are interpreted. ssmgen's functions run their references, as they do for any CPU tensor, after all code that sorts and checks arguments;
    no kernel of ssmgen runs. One more engine answers in vLLM's batch-invariant mode, and vLLM's scheduler and linear layers run tests.
    Ends with exit code 1 where tokens differ, a function was not called, a call went to the engine's own, or the mode's bits depend on
    the batch.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        packages = packages or Path(temporary) / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        install(packages)
        click.echo(f"vLLM installed after {time.monotonic() - begin:.0f} s")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
        os.environ["VLLM_PLUGINS"] = "interpreted"
        try:
            asked = {model: ask(model, Path(temporary), patience) for model in dict.fromkeys(models)}
            differ = ask_alone(Path(temporary), patience)
        except EngineError as e:
            raise SystemExit(str(e)) from None
        click.echo(f"batch-invariant answers after {time.monotonic() - begin:.0f} s")
        tested = subprocess.run([sys.executable, "-m", "pytest", "-q", *TESTS], cwd=ROOT).returncode
    found = []
    for model, ((own, own_state), (ours, state)) in asked.items():
        memory = ", ".join(f"{each['bytes'] / 2**30:.2f}" for each in (own_state, state))
        click.echo(f"{model}: {compared(own, ours)}; GiB of the two engines at most: {memory}")
        for name, count in sorted(state["taken"].items()):
            click.echo(f"  {count:4} calls of {name}")
        found += problems(model, own, ours, state)
    click.echo(f"ended after {time.monotonic() - begin:.0f} s")
    found += [f"in the batch-invariant mode, answers to prompts {differ} depend on the batch"] * bool(differ)
    found += [f"{' or '.join(TESTS)} fails with vLLM's own classes"] * bool(tested)
    if found:
        raise SystemExit("\n".join(["vLLM with ssmgen is not as without:", *(f"  - {words}" for words in found)]))


if __name__ == "__main__":
    live()
