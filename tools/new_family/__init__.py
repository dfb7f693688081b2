"""The scaffold of a family: `python -m tools.new_family NAME`."""
