"""Mamba-3: S <- exp(dt A) S + (1 - trap) dt exp(dt A) v_before k_before + trap dt v k, with rotated k and q."""
