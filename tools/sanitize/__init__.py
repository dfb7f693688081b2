"""Kernels under NVIDIA's compute-sanitizer, each by itself, on the operands that `ssmgen check` gives them: `python -m tools.sanitize`."""
