"""The families of kernels: a package each, whose `FAMILY` says what it has. They are found, not listed."""
