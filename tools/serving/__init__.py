"""How fast vLLM is with and without ssmgen: live engines of both kinds, side by side and in turns on one GPU. `python -m tools.serving`."""
