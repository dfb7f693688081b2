"""Content-addressed store of cubins.

An entry is one self-verifying file, published with os.replace: a reader sees all of it or none. A damaged entry is a miss and is
replaced. Nothing here is needed for correctness: with no directory, no lock or a full disk, kernels are compiled and kept in memory.
Kernels are always loaded from the bytes in memory, never by re-reading what was just written.
"""

from .entry import Entry, cache_key
from .layer import Layer
from .store import Cache, shared_cache
from .trust import distrust, make_private
from .upkeep import collect_garbage, verify

__all__ = ["Cache", "Entry", "Layer", "cache_key", "collect_garbage", "distrust", "make_private", "shared_cache", "verify"]
