"""The environment variables that ssmgen reads, all of them, at the moment they are needed. None changes generated code."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError

VARIABLES = {
    "SSMGEN_CACHE_DIR": "directory that compiled kernels are read from and written to (default: $XDG_CACHE_HOME/ssmgen or ~/.cache/ssmgen)",
    "SSMGEN_CACHE_PATH": "read-only cache directories that are searched first, separated by ':'",
    "SSMGEN_COMPILE": "allow (default) or deny: with deny, a kernel that is in no cache is an error",
    "SSMGEN_ENGINE_KEEP": "functions of vLLM and SGLang that the plugins leave as they are, separated by ',', or all (default: none)",
}


def cache_dir() -> Path | None:
    """The writable cache directory; None when there is no home to put it in. Raises ConfigError."""
    if given := os.environ.get("SSMGEN_CACHE_DIR"):
        return _directory("SSMGEN_CACHE_DIR", given)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification has others ignored
        return Path(xdg) / "ssmgen"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "ssmgen" if home != Path("/") else None


def read_only_layers() -> list[Path]:
    """The directories that are searched first. Raises ConfigError."""
    return [_directory("SSMGEN_CACHE_PATH", p) for p in os.environ.get("SSMGEN_CACHE_PATH", "").split(os.pathsep) if p]


def _directory(variable: str, text: str) -> Path:
    """A directory's path with ~ and ~user replaced as a shell does it: quoted, or in a container's ENV, no shell has replaced them."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(variable, text, "names a home directory that does not exist") from None


def may_compile() -> bool:
    """Raises ConfigError."""
    value = os.environ.get("SSMGEN_COMPILE", "allow")
    if value not in ("allow", "deny"):
        raise ConfigError("SSMGEN_COMPILE", value, "is neither allow nor deny")
    return value == "allow"


def kept_functions() -> frozenset[str]:
    """The functions that plugins leave to an engine; "all" for every one."""
    return frozenset(name for word in os.environ.get("SSMGEN_ENGINE_KEEP", "").split(",") if (name := word.strip()))
