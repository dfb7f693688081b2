"""Linear attention, with a delta rule or without: S <- D∘S + e write."""
