"""From a cubin to a launch: loaded kernels, plans, the driver call."""
