"""One live SGLang, started by tools.serving_sglang: `python -m tools.serving_sglang.worker`. It speaks as tools.serving.worker does."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tools.serving import needles
from tools.serving.models import config_of
from tools.serving.worker import prompts_of, serve

from .plugin import NAME

SLOTS = 6  # of states for each sequence: its own, two of cached prefixes, two that overlapped steps write, and a spare one
TOKENS = 131072  # at least, for keys and values in attention layers
STEP = 8192  # most tokens of a prompt in one step
LAYERS = {"layers_block_type", "mtp_layers_block_type"}
KINDS = {"linear_attention": "mamba", "full_attention": "attention"}  # {transformers' name: SGLang's} in these
PATIENCE = 20.0  # seconds until the scheduler has put its last batch away


def arguments(folder: str, dtype: str, longest: int, graphs: list[int]) -> dict[str, Any]:
    """Arguments of sglang.Engine. graphs: batches with captured decode steps, the largest one last   longest: tokens of a sequence

    Everything is computed by SGLang's own kernels and Triton's: FlashInfer, FlashAttention and grammars are not needed.
    """
    return {
        "model_path": folder, "skip_tokenizer_init": True, "load_format": "dummy", "dtype": dtype, "random_seed": 0,
        "context_length": longest, "max_running_requests": graphs[-1], "chunked_prefill_size": STEP, "mem_fraction_static": 0.85,
        "max_mamba_cache_size": SLOTS * graphs[-1] + 16, "max_total_tokens": max(TOKENS, 2 * graphs[-1] * 128),
        "cuda_graph_bs_decode": graphs, "cuda_graph_max_bs_decode": graphs[-1], "disable_prefill_cuda_graph": True,
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none", "mamba_backend": "triton",
        "linear_attn_backend": "triton", "linear_attn_decode_backend": "triton", "linear_attn_prefill_backend": "triton",
        "moe_runner_backend": "triton", "disable_flashinfer_autotune": True, "watchdog_timeout": 1800, "log_level": "info",
    }  # fmt: skip


def write_config(config: Any, folder: Path) -> None:
    """Writes transformers' configuration with the fields that SGLang's own classes read."""
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(as_sglang_reads(json.loads(file.read_text(encoding="utf-8"))), indent=1), encoding="utf-8")


def as_sglang_reads(fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration of transformers, with the names and fields that published models have and transformers 5.17 does not write."""
    own: dict[str, Any] = {}
    if fields["model_type"] == "nemotron_h":
        own = {name: [KINDS.get(kind, kind) for kind in fields[name]] for name in LAYERS & fields.keys()}
    elif fields["model_type"] == "mamba2":
        own = {"intermediate_size": fields["expand"] * fields["hidden_size"], "rms_norm": True}
    elif fields["model_type"].startswith("qwen3") and "layer_types" in fields:
        own = {"full_attention_interval": fields["layer_types"].index("full_attention") + 1}
    return fields | own


def write_entry_point(folder: Path) -> None:
    """Writes what makes tools.serving_sglang.plugin one of SGLang's plugins for a process with this folder in its path."""
    about = folder / f"{NAME}-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = tools.serving_sglang.plugin:register\n", encoding="utf-8")


def said(answer: dict[str, Any]) -> needles.Answer:
    """The tokens of SGLang's answer, and the log-probabilities of the best tokens at each place, with all bits."""
    best = [sorted([number, p] for p, number, _ in step) for step in answer["meta_info"]["output_top_logprobs"]]
    return [list(pair) for pair in zip(answer["output_ids"], best, strict=True)]


class Server:
    """An SGLang engine of this process and its children. Requests name its methods."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.vocabulary = 0
        self.counts = Path()

    def build(self, model: str, layers: int, dtype: str, graphs: list[int], longest: int, folder: str, **more: Any) -> dict[str, Any]:
        """Builds the engine. folder: for the model's configuration and the plugin's files   more: arguments of sglang.Engine"""
        place = Path(folder)
        write_entry_point(place / "path")
        sys.path.insert(0, str(place / "path"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(place / "path"), os.environ.get("PYTHONPATH"))))
        self.counts = place / "counts.json"
        import sglang

        begin = time.perf_counter()
        config = config_of(model, layers, longest)
        self.vocabulary = config.vocab_size
        write_config(config, place / "model")
        self.engine = sglang.Engine(**arguments(str(place / "model"), dtype, longest, graphs) | more)
        if not self.state()["filled"]:
            raise RuntimeError("the model has SGLang's dummy weights: it has not called model_loader.loader.initialize_dummy_weights")
        return {"seconds": time.perf_counter() - begin}

    def answers(self, prompts: int, tokens: int) -> dict[str, Any]:
        """Greedy tokens of `prompts` prompts, and the log-probabilities of the two best tokens at each place."""
        self._forget()
        said = self._generate(prompts_of(prompts, self.vocabulary), tokens, return_logprob=True, top_logprobs_num=2)
        best = [[sorted((round(p[0], 5) for p in step), reverse=True)[:2] for step in a["meta_info"]["output_top_logprobs"]] for a in said]
        return {"tokens": [a["output_ids"] for a in said], "best": best}

    def needles(self, **asked: Any) -> dict[str, Any]:
        """Answers to needles alone or in a batch, with all bits: the arguments of needles.of_batch."""

        def generate(prompts: list[list[int]], tokens: int, logprobs: int) -> Any:
            return self._generate(prompts, tokens, return_logprob=True, top_logprobs_num=logprobs)

        return {"said": needles.of_batch(generate, self.vocabulary, **asked, said=said)}

    def generate(self, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
        """Seconds to generate `tokens` tokens for each of `batch` prompts of `prompt` tokens, all sent at once, with no cached prefix.

        cpu: seconds of the CPU in this process, without the scheduler's
        """
        asked = [[(7 * i + 31 * j) % (self.vocabulary - 16) + 8 for j in range(prompt)] for i in range(batch)]
        self._forget()
        begin, cpu = time.perf_counter(), time.process_time()
        self._generate(asked, tokens)
        return {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}

    def state(self) -> dict[str, Any]:
        """The plugin's result in the scheduler's process, as tools.serving.worker tells it. filled: parameters of each filled model"""
        self.engine.collective_rpc("write_counts", file=str(self.counts))
        told: dict[str, Any] = json.loads(self.counts.read_text(encoding="utf-8"))
        return told

    def end(self) -> dict[str, Any]:
        """Ends the scheduler's process, which frees the GPU's memory."""
        self.engine.shutdown()
        return {}

    def _generate(self, prompts: list[list[int]], tokens: int, **more: Any) -> Any:
        how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return self.engine.generate(input_ids=prompts, sampling_params=how, **more)

    def _forget(self) -> None:
        """Forgets cached prefixes, as soon as the scheduler is idle."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self.engine.collective_rpc("forget_prefixes")
            except AssertionError:  # SGLang's way to tell that the method has raised an error
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def main() -> None:
    os.setpgid(0, 0)  # SGLang's processes are a group with this one, and end with it
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        serve(Server(), sys.stdin, lambda what: print(json.dumps(what), file=answers))


if __name__ == "__main__":
    main()
