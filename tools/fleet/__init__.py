"""What a fleet's shared store of kernels costs and saves: `python -m tools.fleet --help`."""
