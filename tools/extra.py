"""`python -m tools.extra`: the extra that fits the CUDA of the installed torch, cu12 or cu13. The README's install lines use it."""

from __future__ import annotations


def extra_of(cuda: str | None) -> str:
    """cuda: torch.version.cuda. A torch without CUDA takes either extra: cu12, under whose compiler CI compares registers."""
    return f"cu{cuda.partition('.')[0]}" if cuda else "cu12"


def main() -> None:
    import torch

    print(extra_of(torch.version.cuda))


if __name__ == "__main__":
    main()
