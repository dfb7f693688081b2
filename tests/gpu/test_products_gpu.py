"""Products of warpgroups on a card equal the emulator's."""

from __future__ import annotations

import pytest
import torch
from product_cases import Product, close, close_twice, numbers_of, product_of, random, with_library
from test_products_panels import PANELS, run_panels
from test_products_stored import PEERS, RING, TWICE, is_turned, run_peers, run_ring, run_twice
from test_products_tf32 import PRODUCT, run_tf32
from torch import Tensor

from ssmgen.compile.nvrtc import compile_cubin
from ssmgen.launch import runtime
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch

SM90 = Arch.parse("sm_90a")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]


def launch(text: str, a: Tensor, b: Tensor, out: Tensor, block: int = 128, blocks: int = 1, shared: int = 16384) -> Tensor:
    """`run` of product_cases, on the card."""
    cu = runtime.driver()

    def checked(result):
        return runtime.check(result, AssertionError)

    device = [t.cuda() for t in (a, b, out)]
    cubin = compile_cubin(with_library(text, numbers_of(a), blocks > 1), SM90, "product").cubin
    library = checked(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes, config.hStream = shared, torch.cuda.current_stream().cuda_stream
    packed = Arguments(Product(), {}).at([t.data_ptr() for t in device])
    checked(cu.cuLaunchKernelEx(config, int(checked(cu.cuLibraryGetKernel(library, b"product"))), packed.address, 0))
    return out.copy_(device[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("columns", [64, 128])
def test_a_product(columns, by_columns, dtype):
    a, b = random(64, 64, dtype=dtype), random(64, columns, dtype=dtype)
    out = launch(product_of(columns, by_columns), a, b if by_columns else b.T.contiguous(), torch.full((64, columns), torch.nan))
    assert close(out, a.double() @ b.double())


def test_a_matrix_is_turned():
    assert is_turned(launch)


def test_a_ring_of_bulk_copies():
    out, want = run_ring(RING, launch)
    assert close(out / 4, want / 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_a_triangle_in_panels(dtype):
    assert close(*run_panels(PANELS, dtype, launch))


def test_a_product_of_a_stored_product():
    assert close_twice(*run_twice(TWICE, launch))


def test_blocks_of_a_cluster_read_each_other():
    assert torch.equal(*run_peers(PEERS, launch))


def test_a_product_of_what_tf32_has_of_numbers():
    out, want = run_tf32(PRODUCT, launch)
    assert torch.allclose(out, want, rtol=2.0**-21, atol=2.0**-21)
