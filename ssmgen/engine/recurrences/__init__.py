"""Recurrences: problem, kernel, reference and models of each. Decode steps, layers and prompts build on them."""
