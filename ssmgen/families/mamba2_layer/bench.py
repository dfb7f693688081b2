"""The benchmark is that of all layers; here are the models whose layers it times by default."""

from ...bench.layers import OPTIONS, QUICK, REPORT, Case, mistakes, of_model, point, run, table

__all__ = ["MODELS", "OPTIONS", "QUICK", "REPORT", "Case", "mistakes", "of_model", "point", "run", "table"]

MODELS = {"mamba2_layer": ("nemotron-h-8b", "mamba2-2.7b")}
