"""State space models: h <- exp(dt A) h + dt x B."""
