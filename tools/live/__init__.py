"""A live vLLM on a CPU, without and with ssmgen: whether the plugin serves what the engine asks for. `python -m tools.live`."""
