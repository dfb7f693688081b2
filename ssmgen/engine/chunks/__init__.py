"""Prompts in chunks of tokens: what families share whose kernels walk a sequence chunk by chunk."""
