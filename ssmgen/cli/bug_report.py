"""Facts for a bug report: versions, devices and settings."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from .. import __version__
from ..cache.store import shared_cache
from ..compile import nvrtc
from ..errors import SsmgenError
from ..settings import VARIABLES


def describe() -> dict[str, Any]:
    """Facts by name. Asks for a GPU only through torch, and reports what is missing as text."""
    facts: dict[str, Any] = {"ssmgen": __version__, "python": platform.python_version()}
    for package in ("torch", "cuda-bindings", "jinja2", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    try:
        facts["nvrtc_build"], facts["nvrtc_library"] = nvrtc.build_id(), nvrtc.library_path()
    except SsmgenError as e:
        facts["nvrtc_build"] = str(e)
    try:
        import torch

        facts["torch_cuda"] = torch.version.cuda
        facts["devices"] = [
            f"{torch.cuda.get_device_name(i)} sm_{''.join(map(str, torch.cuda.get_device_capability(i)))}"
            for i in range(torch.cuda.device_count())
        ]
    except (ImportError, RuntimeError) as e:
        facts["devices"] = str(e)
    try:
        facts["cache_layers"] = [str(layer.root) for layer in shared_cache().layers]
    except SsmgenError as e:
        facts["cache_layers"] = str(e)
    try:
        from ..launch import native

        facts["ssmgen-native"] = native.state()
    except (ImportError, SsmgenError) as e:
        facts["ssmgen-native"] = str(e)
    facts["variables"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return facts
