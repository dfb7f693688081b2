"""Launches the kernels of images: `python -m tools.sanitize.replay FOLDER …`. By ctypes: torch takes long to start under the sanitizer.

Each operand is a separate allocation. A line per image has a digest of its output, which is equal in every run of an image.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from ssmgen.launch.enqueue import LaunchConfig, enqueuing
from ssmgen.select.catalog import parse
from ssmgen.spec.arguments import Arguments, Tiles, Value
from ssmgen.spec.kernel import MAP_BYTES

DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
UINT16, SWIZZLE_128, L2_256 = 1, 3, 3  # CUtensorMapDataType, -Swizzle, -L2promotion
u64, u32 = ctypes.c_uint64, ctypes.c_uint32


@functools.cache
def cuda() -> Any:
    """The driver."""
    return ctypes.CDLL("libcuda.so.1")


def done(code: int, what: str) -> None:
    """Exits with the driver's error."""
    if code:
        name = ctypes.c_char_p()
        cuda().cuGetErrorName(code, ctypes.byref(name))
        sys.exit(f"{what}: {(name.value or b'?').decode()}")


def tensor_map(tiles: Tiles, address: int) -> bytes:
    """As runtime.tensor_map makes it."""
    if 0 in tiles.sizes:
        return bytes(MAP_BYTES)
    rank, room = len(tiles.sizes), ctypes.create_string_buffer(MAP_BYTES + 63)
    aligned = -(-ctypes.addressof(room) // 64) * 64
    arrays = (u64 * rank)(*tiles.sizes), (u64 * (rank - 1))(*tiles.strides), (u32 * rank)(*tiles.box), (u32 * rank)(*[1] * rank)
    code = cuda().cuTensorMapEncodeTiled(ctypes.c_void_p(aligned), UINT16, rank, u64(address), *arrays, 0, SWIZZLE_128, L2_256, 0)
    done(code, f"a tensor map of {tiles.operand}")
    return ctypes.string_at(aligned, MAP_BYTES)


def value_of(given: Any) -> Value:
    if not isinstance(given, dict):
        return given
    operand, *numbers = given["tiles"]
    return Tiles(operand, *map(tuple, numbers))


def place(path: Path, count: int) -> int:
    """The address of an operand's copy on the device."""
    address = u64()
    done(cuda().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(count, 1))), f"memory for {path.stem}")
    if count:
        done(cuda().cuMemcpyHtoD_v2(address, path.read_bytes(), ctypes.c_size_t(count)), f"a copy of {path.stem}")
    return address.value


def run(folder: Path) -> str:
    """A digest of its kernels' output."""
    image = json.loads((folder / "image.json").read_text())
    placed = {name: place(folder / f"{name}.bin", o["bytes"]) for name, o in image["operands"].items()}
    begins = {name: placed[name] + o["skipped"] for name, o in image["operands"].items()}
    for launch in image["launches"]:
        spec, library, kernel = parse(launch["spec"]), ctypes.c_void_p(), ctypes.c_void_p()
        cubin = (folder / launch["cubin"]).read_bytes()
        done(cuda().cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0), f"loading {spec.name}")
        done(cuda().cuLibraryGetKernel(ctypes.byref(kernel), library, spec.name.encode()), f"finding {spec.name}")
        if spec.dynamic_bytes:
            done(cuda().cuKernelSetAttribute(DYNAMIC_SHARED, spec.dynamic_bytes, kernel, 0), f"shared memory of {spec.name}")
        values = {name: value_of(value) for name, value in launch["values"].items()}
        packed = Arguments(spec, values, tensor_map).at([begins[name] for name in spec.operands()])
        config = LaunchConfig.of(launch["grid"], spec.threads_per_block, spec.dynamic_bytes, 0, launch["pdl"])
        done(enqueuing(config, kernel.value or 0, packed.address)(), f"launching {spec.name}")
        done(cuda().cuCtxSynchronize(), spec.name)
    digest = hashlib.sha256()
    for name in image["written"]:
        data = ctypes.create_string_buffer(max(image["operands"][name]["bytes"], 1))
        done(cuda().cuMemcpyDtoH_v2(data, u64(placed[name]), ctypes.c_size_t(len(data))), f"a copy of {name}")
        digest.update(data.raw)
    for address in placed.values():
        done(cuda().cuMemFree_v2(u64(address)), "cuMemFree")
    return digest.hexdigest()[:16]


def main(folders: list[str]) -> None:
    context, device = ctypes.c_void_p(), ctypes.c_int()
    done(cuda().cuInit(0), "cuInit")
    done(cuda().cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    done(cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "a context")
    done(cuda().cuCtxSetCurrent(context), "a context")
    for folder in folders:
        print("ran", folder, run(Path(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
