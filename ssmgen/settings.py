"""All environment variables that ssmgen reads, each at the moment it is needed. None changes generated code."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError

ANYONE = "anyone-who-can-write-there"

VARIABLES = {
    "SSMGEN_CACHE_DIR": "directory that compiled kernels are read from and written to (default: $XDG_CACHE_HOME/ssmgen or ~/.cache/ssmgen)",
    "SSMGEN_CACHE_PATH": "read-only cache directories that are searched first, separated by ':'",
    "SSMGEN_CACHE_REMOTE": "URL of a store that machines share (s3://, gs://, file://, any protocol of fsspec), searched after "
    "the directories",
    "SSMGEN_CACHE_REMOTE_KEYS": "ed25519 public keys whose signed entries of that store are loaded: 64 hex digits each, separated by ','",
    "SSMGEN_CACHE_REMOTE_SECONDS": "longest wait for one request to that store (default: 10)",
    "SSMGEN_CACHE_REMOTE_SIGN": "file with the ed25519 private key (PEM) that signs entries sent to that store; "
    "its public key is trusted too",
    "SSMGEN_CACHE_REMOTE_TRUST": f"signed (default), or {ANYONE}: then entries of that store need no signature",
    "SSMGEN_CACHE_REMOTE_WRITE": "deny (default) or allow: with allow, kernels compiled by this process are sent to that store",
    "SSMGEN_COMPILE": "allow (default) or deny: with deny, a kernel that is in no cache is an error",
    "SSMGEN_NATIVE": "allow (default) or deny: with deny, calls do not use ssmgen-native even if it is installed",
    "SSMGEN_ENGINE_KEEP": "functions of vLLM and SGLang that the plugins do not replace, separated by ',', or all (default: none)",
    "SSMGEN_ENGINE_LINEAR": "deny (default) or allow: with allow, the plugins of vLLM and SGLang multiply up to 16 rows in linear layers",
    "SSMGEN_ENGINE_NOISE": "rounds of the noise, 1 to 32, with which the plugins round 16-bit states of vLLM and SGLang in decode steps; "
    "mamba:10 and delta:10 ask for noise in one kind of layers (default: 0, to nearest; 10 is usual)",
    "VLLM_BATCH_INVARIANT": "vLLM's own: with 1, bits do not depend on the batch, and the plugin refuses all else (default: 0)",
}


def cache_dir() -> Path | None:
    """The writable cache directory; None when there is no home to put it in. Raises ConfigError."""
    if given := os.environ.get("SSMGEN_CACHE_DIR"):
        return _directory("SSMGEN_CACHE_DIR", given)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification says to ignore other values
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
        raise ConfigError(variable, text, "names a home directory that does not exist; expected a directory") from None


@dataclass(frozen=True, slots=True)
class Remote:
    """A store that machines share, as the environment describes it."""

    url: str
    trusted: tuple[str, ...] = ()  # public keys, 64 hex digits each
    anyone: bool = False  # entries from other signers, or unsigned, are loaded too
    signing_key: Path | None = None
    writes: bool = False  # whether kernels compiled here are sent there
    seconds: float = 10.0  # at most, for one request


def remote() -> Remote | None:
    """The shared store; None if there is none. Raises ConfigError."""
    url = os.environ.get("SSMGEN_CACHE_REMOTE", "")
    if not url:
        return None
    if "://" not in url:
        raise ConfigError(
            "SSMGEN_CACHE_REMOTE", url, "is not a URL; expected one such as s3://bucket/path, or file:///path for a directory"
        )
    trust = os.environ.get("SSMGEN_CACHE_REMOTE_TRUST") or "signed"
    if trust not in ("signed", ANYONE):
        raise ConfigError("SSMGEN_CACHE_REMOTE_TRUST", trust, f"is unknown; expected signed or {ANYONE}")
    file = os.environ.get("SSMGEN_CACHE_REMOTE_SIGN", "")
    signing_key = _directory("SSMGEN_CACHE_REMOTE_SIGN", file) if file else None
    trusted, writes = _public_keys(), _allowed("SSMGEN_CACHE_REMOTE_WRITE", "deny")
    if trust == "signed" and not signing_key:
        if writes:
            raise ConfigError(
                "SSMGEN_CACHE_REMOTE_WRITE",
                "allow",
                "is set and there is no key to sign with; expected the file of a private key in SSMGEN_CACHE_REMOTE_SIGN",
            )
        if not trusted:
            raise ConfigError(
                "SSMGEN_CACHE_REMOTE",
                url,
                "is set and no key is trusted; expected public keys in SSMGEN_CACHE_REMOTE_KEYS, or a private key in "
                "SSMGEN_CACHE_REMOTE_SIGN",
            )
    return Remote(url, trusted, trust == ANYONE, signing_key, writes, _seconds("SSMGEN_CACHE_REMOTE_SECONDS", 10.0))


def _public_keys() -> tuple[str, ...]:
    given = os.environ.get("SSMGEN_CACHE_REMOTE_KEYS", "")
    keys = [key.lower() for word in given.split(",") if (key := word.strip())]
    if wrong := [key for key in keys if not re.fullmatch(r"[0-9a-f]{64}", key)]:
        raise ConfigError("SSMGEN_CACHE_REMOTE_KEYS", given, f"has invalid keys, {', '.join(wrong)}; expected public keys of 64 hex digits")
    return tuple(dict.fromkeys(keys))


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise ConfigError(variable, text, "is not a number of seconds; expected above 0 and at most 3600")
    return value


def _allowed(variable: str, default: str) -> bool:
    value = os.environ.get(variable, default)
    if value not in ("allow", "deny"):
        raise ConfigError(variable, value, "is unknown; expected allow or deny")
    return value == "allow"


def may_compile() -> bool:
    """Raises ConfigError."""
    return _allowed("SSMGEN_COMPILE", "allow")


def may_be_native() -> bool:
    """Raises ConfigError."""
    return _allowed("SSMGEN_NATIVE", "allow")


def kept_functions() -> frozenset[str]:
    """The functions that plugins leave to an engine; "all" for every one."""
    return frozenset(name for word in os.environ.get("SSMGEN_ENGINE_KEEP", "").split(",") if (name := word.strip()))


def linear_layers_are_asked_for() -> bool:
    """Whether plugins replace an engine's linear layers. Raises ConfigError."""
    return _allowed("SSMGEN_ENGINE_LINEAR", "deny")


NOISY = ("mamba", "delta")  # kinds of layers: Mamba; gated delta rules and KDA


def engine_noise() -> dict[str, int]:
    """Rounds of the noise for the states of vLLM and SGLang by kind of layer; 0 for none. Raises ConfigError."""
    value = os.environ.get("SSMGEN_ENGINE_NOISE", "") or "0"
    found = dict.fromkeys(NOISY, 0)
    for word in value.split(","):
        kind, colon, count = word.strip().rpartition(":")
        if not count.isdecimal() or int(count) > 32 or (colon and kind not in NOISY):
            raise ConfigError("SSMGEN_ENGINE_NOISE", value, "is not a number of rounds; expected 0 … 32, mamba:10 or delta:10")
        found |= dict.fromkeys([kind] if colon else NOISY, int(count))
    return found


def vllm_is_batch_invariant() -> bool:
    """Whether vLLM's mode is on, read as vLLM reads it. Raises ConfigError."""
    value = os.environ.get("VLLM_BATCH_INVARIANT", "0")
    try:
        return bool(int(value))
    except ValueError:
        raise ConfigError("VLLM_BATCH_INVARIANT", value, "is no number") from None
