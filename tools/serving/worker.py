"""One live vLLM, started by tools.serving.engines: `python -m tools.serving.worker`. Each line of its standard input is a request.

Requests and answers are lines of JSON; answers go to the file descriptor that its argument names, as vLLM writes to the standard output.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from . import needles
from .calls import Calls

LENGTHS = (1, 3, 17, 64, 130, 257, 400, 700)  # of prompts whose answers are compared: on both sides of chunk boundaries


def weights_as_trained(model: Any) -> None:
    """Random weights of ordinary sizes, equal in every process: with vLLM's dummy weights of 1e-3 all tokens are nearly equally likely."""
    import torch

    with torch.no_grad():
        for number, (name, p) in enumerate(sorted(model.named_parameters())):
            if not p.is_floating_point():
                continue
            noise = torch.Generator(p.device).manual_seed(number)
            last = name.rpartition(".")[2]
            if last == "A":  # of Mamba-2, negated already
                p.uniform_(-16, -1, generator=noise)
            elif last == "A_log":
                p.uniform_(0, 2.8, generator=noise)
            elif last == "dt_bias":  # steps of 1e-3 to 0.1
                p.uniform_(-6.9, -2.3, generator=noise)
            elif last == "bias":
                p.zero_()
            elif p.dim() < 2:  # norms, D
                p.fill_(1)
            else:
                p.normal_(0, 1.5 * p.shape[-1] ** -0.5, generator=noise)
        for layer in model.modules():
            if getattr(layer, "decode_conv1d_weight", None) is not None:  # Kimi-K3's copies of weights, for its fused decode step
                layer.decode_conv1d_weight.copy_(layer.conv1d.weight.view(3, -1, layer.conv1d.weight.shape[-1]).transpose(1, 2))
                layer.decode_norm_weight.copy_(layer.o_norm.weight)
            if hasattr(layer, "W_UK_T"):  # latent attention, whose decode steps read parts of kv_b_proj from other parameters
                layer.process_weights_after_loading(layer.kv_b_proj.weight.dtype)


def forget_tuning() -> int:
    """Makes Triton's autotuners choose again: their choices while other engines were being built are not valid.

    Returns the number of autotuners that had chosen.
    """
    from triton.runtime.autotuner import Autotuner

    gc.unfreeze()  # vLLM freezes all objects when it is built, and frozen objects are not listed
    tuned = [kernel for kernel in gc.get_objects() if type(kernel) is Autotuner and kernel.cache]
    gc.freeze()
    for kernel in tuned:
        kernel.cache.clear()
    chosen = sys.modules.get("vllm.model_executor.layers.mamba.ops.triton_helpers")
    if chosen is not None:
        chosen._autotuned_configs.clear()  # type: ignore[attr-defined]
    return len(tuned)


def covered(spans: list[tuple[float, float]]) -> float:
    """The total time covered by at least one of the spans (begin, end). Kernels of dependent launches overlap; a sum would count them
    twice."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


class Warnings(logging.Filter):
    """Keeps the warnings of a logger. A filter, because building an engine configures logging again, which removes handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.said.append(record.getMessage())
        return True


class Server:
    """A vLLM engine in this process. Requests name its methods."""

    calls: Calls | None = None

    def __init__(self) -> None:
        from vllm import LLM  # some seconds, of the CPU only

        self.make, self.llm = LLM, None
        self.vocabulary = 0
        self.warnings = Warnings()
        logging.getLogger("vllm.ssmgen").addFilter(self.warnings)

    def build(
        self, model: str, layers: int, dtype: str, graphs: list[int], longest: int, step: int, folder: str, compiled: bool,
        eager: bool = False, prefixes: bool = False, wide: bool = False, state: str = "",
        count: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Builds the engine. dtype: of weights   graphs: batch sizes with captured decode steps; the last one is the largest batch

        longest, step: most tokens of a sequence, and of the engine's step   folder: for the model's configuration
        compiled: by torch.compile, vLLM's default   eager: no graphs   prefixes: a cache of them   wide: recurrent states in f32
        state: their dtype; empty for the model's   count: the calls that ssmgen takes
        """
        from .models import config_of, pool_bytes, prefix_block

        begin = time.perf_counter()
        if count:
            from ssmgen.compat import vllm

            self.calls = Calls()
            self.calls.count(vllm)
        config = config_of(model, layers, longest)
        self.vocabulary = config.vocab_size
        config.save_pretrained(folder)
        sequences, sizes = graphs[-1], {"cudagraph_capture_sizes": graphs}
        more: dict[str, Any] = {"mamba_ssm_cache_dtype": "float32" if wide else state} if wide or state else {}
        if prefixes and (block := prefix_block(model)):
            more["block_size"] = block
        self.llm = self.make(
            folder, skip_tokenizer_init=True, load_format="dummy", dtype=dtype, seed=0, max_model_len=longest, max_num_seqs=sequences,
            max_num_batched_tokens=step, enable_prefix_caching=prefixes, disable_log_stats=True, enforce_eager=eager, **more,
            compilation_config=sizes if compiled else {**sizes, "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            # the pool's size is given, not measured: other engines share the GPU
            gpu_memory_utilization=0.02, kv_cache_memory_bytes=pool_bytes(model, layers, sequences, wide or dtype == "float32"),
            additional_config={"gdn_prefill_backend": "triton"},  # FlashInfer, Hopper's default, needs packages and nvcc
        )  # fmt: skip
        self.llm.apply_model(weights_as_trained)
        return {"seconds": time.perf_counter() - begin}

    def answers(self, prompts: int, tokens: int) -> dict[str, Any]:
        """Greedy tokens of `prompts` prompts, and the log-probabilities of the two best tokens at each place."""
        said = [a.outputs[0] for a in self._generate(prompts_of(prompts, self.vocabulary), tokens, logprobs=2)]
        best = [[sorted((round(p.logprob, 5) for p in step.values()), reverse=True)[:2] for step in a.logprobs] for a in said]
        return {"tokens": [list(a.token_ids) for a in said], "best": best}

    def needles(self, **asked: Any) -> dict[str, Any]:
        """Answers to needles alone or in a batch, with all bits: the arguments of needles.of_batch."""
        return {"said": needles.of_batch(self._generate, self.vocabulary, **asked)}

    def prefix(self, **asked: Any) -> dict[str, Any]:
        """The answer to a needle after another prompt with its first blocks: the arguments of needles.after_prefix."""
        return needles.after_prefix(self.llm, self._generate, self.vocabulary, **asked)

    def generate(self, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
        """Seconds to generate `tokens` tokens for each of `batch` prompts of `prompt` tokens, all submitted at once.

        cpu: seconds of the CPU, of all threads of this process
        """
        asked = [[(7 * i + 31 * j) % (self.vocabulary - 16) + 8 for j in range(prompt)] for i in range(batch)]
        _synchronize()
        begin, cpu = time.perf_counter(), time.process_time()
        self._generate(asked, tokens)
        return {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}

    def busy(self, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
        """Seconds in which the GPU is busy during `generate`, and its kernels and copies; None for both without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return {"seconds": None, "kernels": None}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            self.generate(batch, prompt, tokens)
            _synchronize()
        ranges = [event.time_range for event in seen.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
        return {"seconds": 1e-6 * covered([(each.start, each.end) for each in ranges]), "kernels": len(ranges)}

    def tune(self, prompt: int) -> dict[str, Any]:
        """Tunes autotuned kernels again, with a prompt of `prompt` tokens; no other process may use the GPU. kernels: their number"""
        begin = time.perf_counter()
        kernels = forget_tuning()
        self.generate(1, prompt, 2)
        return {"seconds": time.perf_counter() - begin, "kernels": kernels}

    def state(self) -> dict[str, Any]:
        """The plugin's result here: {function: outcome}, its warnings, and counted calls: {function: calls}, taken and refused."""
        calls = {"taken": self.calls.taken, "refused": self.calls.refused} if self.calls else {"taken": {}, "refused": {}}
        if "ssmgen" not in os.environ.get("VLLM_PLUGINS", "").split(","):
            return {"outcome": {}, "warnings": [], **calls}
        from ssmgen.compat import vllm as plugin

        return {"outcome": plugin.register(), "warnings": self.warnings.said, **calls}

    def _generate(self, prompts: list[list[int]], tokens: int, **more: Any) -> Any:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False)


def prompts_of(count: int, vocabulary: int) -> list[list[int]]:
    """The prompts whose answers are compared, of LENGTHS in turn."""
    return [
        [(7 * i + 11 * n + (j % 37) * (5 + i)) % (vocabulary - 16) + 8 for j in range(n)]
        for i in range(count)
        for n in [LENGTHS[i % len(LENGTHS)]]
    ]


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def serve(server: Any, lines: Any, answer: Callable[[dict[str, Any]], None]) -> None:
    """Serves the request on each line until the input ends. An error is an answer too, and the last one."""
    for line in lines:
        asked = json.loads(line)
        try:
            answer(getattr(server, asked.pop("do"))(**asked))
        except Exception as e:
            answer({"error": f"{type(e).__name__}: {e}"})
            raise


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        serve(Server(), sys.stdin, lambda what: print(json.dumps(what), file=answers))


if __name__ == "__main__":
    main()
