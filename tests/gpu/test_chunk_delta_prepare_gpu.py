"""The images of chunks on a card, at the sizes of models: against float64, and the same bytes every time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from delta_images import images_of
from prompt_cases import views_of
from scan_cases import starts_of
from ssu_cases import BF16, F16
from test_chunk_delta_prepare import GATES, Sizes, assert_images, function_of, make
from torch import Tensor

import ssmgen
from ssmgen.engine.chunks.problem import CHUNK
from ssmgen.engine.chunks.views import counts_of
from ssmgen.families.chunk_delta_rule.problem import IMAGE

pytestmark = pytest.mark.gpu

MODELS = {name: replace(sizes, key_heads=2, group=4, head_k=128) for name, sizes in GATES.items()} | {
    "olmo": Sizes(key_heads=4, group=1, head_k=96),
    "five-heads": Sizes(group=5, head_k=64, x=F16),
    "k256": Sizes(group=3, head_k=256, gates=BF16),
}


def launched(sizes: Sizes, call: dict[str, Any]) -> Tensor:
    """[numbers, HV, IMAGE] bytes, as a call on the card leaves them; NaN where it writes nothing."""
    given = {n: t.cuda() if isinstance(t, Tensor) else t for n, t in call.items()}
    counts = counts_of(views_of(function_of(sizes).build(**call)), CHUNK)
    size = ssmgen.chunk_delta_rule_workspace(call["v"][..., 0, 0].numel(), counts.sequences, counts.heads)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    function_of(sizes)(**given, workspace=workspace)
    return workspace.cpu().view(counts.chunks, counts.heads, IMAGE)


@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS)
def test_images_are_those_of_float64(sizes):
    call = make(sizes, 2, 150, decay=0.3)
    built = function_of(sizes).build(**call)
    found = launched(sizes, call)
    assert_images(found, images_of(views_of(built), built.options), sizes)
    assert all(torch.equal(launched(sizes, call), found) for _ in range(3))


def test_sequences_have_numbers_of_their_own():
    sizes, lengths = Sizes(key_heads=2, group=2, head_k=128), (0, 1, 64, 0, 0, 130, 63, 65) * 5
    call = make(sizes, sum(lengths) + 9) | {"cu_seqlens": starts_of(lengths, "cpu", torch.int64)}
    built = function_of(sizes).build(**call)
    assert_images(launched(sizes, call), images_of(views_of(built), built.options), sizes)
