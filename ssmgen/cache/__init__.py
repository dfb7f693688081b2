"""Content-addressed store of cubins.

An entry is one self-verifying file, published with os.replace: a reader sees all of it or none. A damaged entry is a miss and is
replaced. Nothing here is needed for correctness: with no directory, no lock or a full disk, kernels are compiled and kept in memory.
Kernels are always loaded from the bytes in memory, never by re-reading what was just written.

`store` is the interface for a process: memory, read-only layers, the user's directory, the compiler. The package imports none of its
modules: a thread that imports a module waits for the package, and a thread that imports the package would wait for that module.
"""
