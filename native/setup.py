"""Builds ssmgen-native for the torch that is installed. Plain setuptools: torch's own build extension wants ninja for a single file."""

import re
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import include_paths, library_paths

# Of the checkout that it lies in.
(VERSION,) = re.findall(r'^version = "(.*)"$', (Path(__file__).parents[1] / "pyproject.toml").read_text(), re.MULTILINE)

setup(
    name="ssmgen-native",
    version=VERSION,
    description="Calls of ssmgen that come again, in C++",
    license="Apache-2.0",
    python_requires=">=3.10",
    install_requires=[f"ssmgen=={VERSION}", f"torch=={torch.__version__.partition('+')[0]}"],
    ext_modules=[
        Extension(
            "ssmgen_native",
            ["ssmgen_native.cpp"],
            include_dirs=include_paths(),
            library_dirs=library_paths(),
            libraries=["c10", "torch_cpu", "torch_python"],
            define_macros=[
                ("BUILT_FOR_TORCH", f'"{torch.__version__}"'),
                ("BUILT_FOR_SSMGEN", f'"{VERSION}"'),
                ("_GLIBCXX_USE_CXX11_ABI", str(int(torch.compiled_with_cxx11_abi()))),
            ],
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
        )
    ],
)
