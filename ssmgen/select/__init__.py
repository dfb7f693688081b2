"""The choice of a spec for a problem: the registry, tuned tables, public models."""
