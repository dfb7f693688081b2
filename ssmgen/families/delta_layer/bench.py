"""The benchmark is that of all layers; here are the models whose layers it times by default."""

from ...bench.layers import OPTIONS, QUICK, REPORT, Case, mistakes, of_model, point, run, table

__all__ = ["MODELS", "OPTIONS", "QUICK", "REPORT", "Case", "mistakes", "of_model", "point", "run", "table"]

MODELS = {"gdn_layer": ("qwen3.5-35b-a3b", "qwen3.5-397b-a17b"), "kda_layer": ("kimi-linear-48b-a3b", "kimi-k3")}
