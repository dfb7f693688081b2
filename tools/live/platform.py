"""A platform of vLLM on the CPU with interpreted Triton kernels: scheduler, model runner and layers are the GPU's.

vLLM's own CPU platform calls other Mamba functions, from a C++ extension that the CUDA wheel lacks.
"""

from __future__ import annotations

import torch
from torch.library import Library
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

# The plugin does nothing on a torch without CUDA.
torch.version.cuda = torch.version.cuda or "12.9"

# The function of that extension that the worker calls, to bind memory to a node.
EXTENSION = Library("_C", "FRAGMENT")
EXTENSION.define("init_cpu_memory_env(int[] nodes) -> ()")
EXTENSION.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")


def activate() -> str:
    """The entry point of `vllm.platform_plugins`."""
    return f"{__name__}.InterpretedPlatform"


class InterpretedPlatform(CpuPlatform):
    """Neither of vLLM's platforms by its name, so that layers take their Triton kernels."""

    _enum = PlatformEnum.OOT

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        vllm_config.parallel_config.worker_cls = "tools.live.device.InterpretedWorker"
        super().check_and_update_config(vllm_config)

    @classmethod
    def import_kernels(cls) -> None:
        pass

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        pass

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        return "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
