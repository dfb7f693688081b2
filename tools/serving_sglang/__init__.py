"""How fast SGLang is with and without ssmgen: one live engine after the other on one GPU. `python -m tools.serving_sglang`."""
