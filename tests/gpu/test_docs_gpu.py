"""The documentation's examples on a card, including the ones that need a card."""

from __future__ import annotations

import pytest
import torch
from docs_pages import name_of, run, with_examples


@pytest.mark.gpu
@pytest.mark.parametrize("page", with_examples(), ids=name_of)
def test_examples(page, monkeypatch):
    monkeypatch.setenv("SSMGEN_CACHE_PATH", "")  # which a page sets
    torch.manual_seed(0)
    run(page, on_card=True)
    torch.cuda.synchronize()
