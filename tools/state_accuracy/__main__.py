"""`python -m tools.state_accuracy`: KL divergence of decode steps from exact logits by format of the state; writes docs/data.

The exact model computes in float64 and rounds no state. The others compute in f32 and store the state of each layer in a format after
each token. Random models of two layers; the same tokens and weights for all formats.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from .formats import FORMATS
from .models import DECAYS, LAYERS, LAYERS_OF, SHARPNESS, VOCABULARY, Run, head, last_hidden

DATA = Path(__file__).parents[2] / "docs" / "data" / "state_accuracy.json"
PIECE = 256  # tokens whose logits are computed together
SEED = 20


def divergence(exact: Tensor, found: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(KL of the exact model's distribution from the found one, whether the likeliest tokens agree), [decays, tokens] each."""
    divergences, agreements = [], []
    for a, b in zip(exact.split(PIECE, 1), found.double().split(PIECE, 1), strict=True):
        p, q = torch.log_softmax(a @ matrix, -1), torch.log_softmax(b @ matrix, -1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        agreements.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(divergences, 1), torch.cat(agreements, 1)


def study(tokens: int, last: int, kinds: list[str]) -> list[dict[str, object]]:
    """A row for each model, format and decay: means over the last tokens. States that are rounded once are rounded before these."""
    rows: list[dict[str, object]] = []
    matrix = head(SEED)
    for kind in kinds:
        exact = last_hidden(kind, tokens, Run(None, SEED), SEED)
        for form in FORMATS:
            began = time.monotonic()
            found = last_hidden(kind, tokens, Run(form, SEED + 3, tokens - last - 1), SEED)
            kl, agree = divergence(exact, found, matrix)
            for d, decay in enumerate(DECAYS):
                tail = kl[d, -last:]
                found_here = {"kl": tail.mean(), "kl_99": tail.quantile(0.99), "agree": agree[d, -last:].double().mean()}
                row = {"model": kind, "format": form.name, "bits": form.bits, "decay": decay}
                rows.append(row | {name: float(f"{float(value):.3g}") for name, value in found_here.items()})
            cells = "  ".join(f"{row['kl']:8.2g}" for row in rows[-len(DECAYS) :])
            print(f"{kind:18}{form.name:30}{cells}   {time.monotonic() - began:5.1f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the sequence (default: 4096)")
    parser.add_argument("--last", type=int, default=1024, help="tokens at its end that count (default: 1024)")
    parser.add_argument("--model", action="append", choices=[*LAYERS_OF], help="a kind of layer (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch (default: 2)")
    parser.add_argument("--out", type=Path, default=DATA, help="file that the results are written to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        rows = study(options.tokens, options.last, options.model or [*LAYERS_OF])
    about = {"command": "python -m tools.state_accuracy", "tokens": options.tokens, "last": options.last, "layers": LAYERS}
    about |= {"vocabulary": VOCABULARY, "logits": SHARPNESS, "torch": torch.__version__.partition("+")[0]}
    lines = ",\n".join(json.dumps(row) for row in rows)
    options.out.write_text(f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
