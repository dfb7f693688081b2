"""Compiles a spec to a cubin: rendering templates, NVRTC, occupancy."""
