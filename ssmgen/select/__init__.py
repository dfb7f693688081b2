"""From a problem to a spec: the registry, tuned tables, public models."""
