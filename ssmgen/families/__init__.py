"""The families of kernels: a package each, whose record, `FAMILY`, lists its parts. They are found, not listed."""
