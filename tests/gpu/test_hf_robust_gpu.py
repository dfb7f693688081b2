"""Long generation with patched models needs no more memory at the end than at the beginning, on the card or on the host."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import DecodeStep, built, last_logits, prompt_calls

from ssmgen.compat import hf

pytestmark = pytest.mark.gpu

STEPS = 10_000
MODELS = {
    "mamba2": {"num_hidden_layers": 2},
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},  # its cache needs one of the latter
}


def resident() -> int:
    """Bytes of the process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("fuse", [False, True], ids=["patched", "fused"])
@pytest.mark.parametrize(("name", "sizes"), MODELS.items(), ids=MODELS)
def test_long_generations_need_no_more_memory(name, sizes, fuse):
    model = built(name, **sizes).cuda()
    with hf.patch(model, fuse=fuse) as patch, torch.no_grad():
        step = DecodeStep(model)
        counts = []
        for steps in (100, STEPS - 100):
            logits = last_logits(step, step.cache, steps)
            assert torch.isfinite(logits).all()
            del logits
            gc.collect()
            counts.append((torch.cuda.memory_allocated(), len(gc.get_objects()), resident()))
    (device, objects, bytes_then), (device_now, objects_now, bytes_now) = counts
    steps = {label: c for label, c in patch.calls().items() if label not in prompt_calls(name, model)}
    assert any(c.ssmgen >= STEPS for c in steps.values()) and not any(c.original for c in steps.values())
    assert device_now == device
    assert objects_now - objects < STEPS // 4, "not one for every step"
    assert bytes_now - bytes_then < 64 << 20
