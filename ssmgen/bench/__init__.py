"""Measurement: what `ssmgen bench` runs. A number comes with its peers and its ceiling, taken in the same run, or not at all."""
