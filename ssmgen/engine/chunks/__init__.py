"""Prompts in chunks of tokens: shared code of families whose kernels process a sequence chunk by chunk."""
