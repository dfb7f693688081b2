"""The environment variables that ssmgen reads, all of them, at the moment they are needed. None changes generated code."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = {
    "SSMGEN_CACHE_DIR": "directory that compiled kernels are read from and written to (default: $XDG_CACHE_HOME/ssmgen or ~/.cache/ssmgen)",
    "SSMGEN_CACHE_PATH": "read-only cache directories that are searched first, separated by ':'",
    "SSMGEN_COMPILE": "allow (default) or deny: with deny, a kernel that is in no cache is an error",
    "SSMGEN_ENGINE_KEEP": "functions of vLLM and SGLang that the plugins leave as they are, separated by ',', or all (default: none)",
}


def cache_dir() -> Path | None:
    """The writable cache directory; None when there is no home to put it in."""
    if given := os.environ.get("SSMGEN_CACHE_DIR"):
        return Path(given)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "ssmgen"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "ssmgen" if home != Path("/") else None


def read_only_layers() -> list[Path]:
    return [Path(p) for p in os.environ.get("SSMGEN_CACHE_PATH", "").split(os.pathsep) if p]


def may_compile() -> bool:
    value = os.environ.get("SSMGEN_COMPILE", "allow")
    if value not in ("allow", "deny"):
        raise ValueError(f"SSMGEN_COMPILE={value!r} is neither allow nor deny")
    return value == "allow"


def kept_functions() -> frozenset[str]:
    """The functions that plugins leave to an engine; "all" for every one."""
    return frozenset(name for word in os.environ.get("SSMGEN_ENGINE_KEEP", "").split(",") if (name := word.strip()))
