"""Launches cubins: loaded kernels, plans, the driver call."""
