"""One live vLLM on a CPU, started by tools.live: `python -m tools.live.worker`. It is asked as tools.serving.worker is."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmgen.settings import vllm_is_batch_invariant
from tools.serving.calls import Calls
from tools.serving.worker import Server, serve, weights_as_trained

MAMBA2 = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 32, "head_dim": 16, "num_heads": 8, "n_groups": 2,
    "expand": 2, "conv_kernel": 4, "chunk_size": 64, "time_step_rank": 4, "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2",
}  # fmt: skip
# Kimi delta attention only: vLLM's latent attention has CUDA kernels. A dense MLP: num_experts is missing.
KIMI_LINEAR = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
    "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4},
    "max_position_embeddings": 256, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"mamba2": MAMBA2, "kimi_linear": KIMI_LINEAR}
LONGEST = 256  # tokens of a sequence
LENGTHS = (65, 150, 30, 129)  # of prompts that are asked together and alone: cut, whole, and with a rest of one token at a cut


def by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer whose rows do not depend on their number, as vLLM's batch-invariant products of a GPU. A CPU's library has none."""
    rows = [torch.mv(weight, row) for row in x.reshape(-1, x.shape[-1])]
    out = torch.stack(rows).reshape(*x.shape[:-1], weight.shape[0]) if rows else x.new_empty(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


class LiveServer(Server):
    """A vLLM engine in this process. Requests name its methods. Calls are counted from the import of vLLM on."""

    def __init__(self) -> None:
        self.calls = Calls()
        if "ssmgen" in os.environ.get("VLLM_PLUGINS", "").split(","):
            from ssmgen.compat import vllm

            self.calls.count(vllm)
        super().__init__()

    def build(self, folder: str, step: int, model: str) -> dict[str, Any]:
        """Builds the engine. folder: for the model's configuration   step: tokens of the engine's step, at most   model: of MODELS"""
        begin = time.perf_counter()
        if vllm_is_batch_invariant():
            torch.nn.functional.linear = by_rows
        Path(folder).mkdir(parents=True)
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
        self.vocabulary = MODELS[model]["vocab_size"]
        self.llm = self.make(
            folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32", seed=0, enforce_eager=True, max_model_len=LONGEST,
            max_num_seqs=4, max_num_batched_tokens=step, enable_prefix_caching=False, disable_log_stats=True,
            kv_cache_memory_bytes=2**26,
        )  # fmt: skip
        self.llm.apply_model(weights_as_trained)
        return {"seconds": time.perf_counter() - begin}

    def alone(self, prompts: int, tokens: int) -> dict[str, Any]:
        """The numbers of the prompts whose log-probabilities differ in a bit between a batch of all prompts and each prompt alone."""
        asked = [
            [(7 * i + 11 * n + (j % 37) * (5 + i)) % (self.vocabulary - 16) + 8 for j in range(n)] for i, n in enumerate(LENGTHS[:prompts])
        ]

        def said(batch: list[list[int]]) -> list[Any]:
            return [
                [{t: p.logprob for t, p in step.items()} for step in a.outputs[0].logprobs]
                for a in self._generate(batch, tokens, logprobs=2)
            ]

        together = said(asked)
        return {"differ": [i for i, prompt in enumerate(asked) if said([prompt]) != [together[i]]]}

    def state(self) -> dict[str, Any]:
        """The state of Server, and this process's peak of memory in bytes."""
        return super().state() | {"bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        serve(LiveServer(), sys.stdin, lambda what: print(json.dumps(what), file=answers))


if __name__ == "__main__":
    main()
