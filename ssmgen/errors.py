"""One class per cause. Every message lists all problems, states that nothing was launched, and says how to go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SsmgenError(Exception):
    """Base of every error that ssmgen raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses build their message from several arguments; pickling only carries the finished one, so that
        # an error crosses a process pool unchanged.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[SsmgenError], args: tuple[Any, ...], state: dict[str, Any]) -> SsmgenError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


def bullets(items: Sequence[str]) -> str:
    return "\n".join(f"  - {item}" for item in items)


class ArgumentError(SsmgenError, ValueError):
    """A call's arguments are not legal. Raised before anything is launched; no tensor was touched."""

    def __init__(self, operator: str, problems: Sequence[str]):
        super().__init__(f"{operator} cannot run:\n{bullets(problems)}\nNothing was launched and the state is unchanged.")
        self.problems = list(problems)


class TrialError(SsmgenError):
    """A family's trial of a variant cannot run as it is written."""


class SpecError(SsmgenError, ValueError):
    """A kernel spec is not legal for an architecture, or its text cannot be read."""

    def __init__(self, spec: str, problems: Sequence[str]):
        super().__init__(f"not a legal kernel spec: {spec}\n{bullets(problems)}")
        self.problems = list(problems)


class UnsupportedError(SsmgenError, NotImplementedError):
    """No kernel serves this problem on this architecture."""

    def __init__(self, problem: str, reasons: Sequence[str]):
        super().__init__(f"no kernel serves {problem}:\n{bullets(reasons)}")
        self.reasons = list(reasons)


class UnknownArchError(SsmgenError, ValueError):
    """The limits of an architecture's multiprocessors are not in the table of `occupancy`."""

    def __init__(self, arch: str, known: Sequence[str]):
        super().__init__(f"cannot compute occupancy: no SM limits are known for {arch}; expected one of {', '.join(known)}")


class CompilerMissingError(SsmgenError):
    """NVRTC or the CUDA Python bindings are not installed."""

    def __init__(self, detail: str):
        super().__init__(
            f"NVRTC could not be loaded ({detail}).\n"
            "Install the extra that matches torch.version.cuda: pip install 'ssmgen[cu12]' or pip install 'ssmgen[cu13]'."
        )


class CompileError(SsmgenError):
    """NVRTC rejected a generated source, or the result breaks a limit that the build set."""

    def __init__(self, what: str, spec: str, options: Sequence[str], log: str, listing: str):
        super().__init__(
            f"{what}\n  spec:    {spec}\n  options: {' '.join(options)}\n{log.strip()}\n{listing}".rstrip()
            + f"\nSee the whole source with: ssmgen show '{spec}' --cu"
        )


class SpillError(SsmgenError):
    """A variant spills registers to local memory and the build does not allow it."""

    def __init__(self, spec: str, arch: str, spills: int, registers: int):
        super().__init__(
            f"{spec} for {arch} spills {spills} bytes at {registers} registers.\n"
            "Lower ilp, raise threads or lower min_blocks; or accept it with --max-spill."
        )


class NotBuiltError(SsmgenError):
    """The kernel is not in any cache layer and SSMGEN_COMPILE=deny forbids compiling it."""

    def __init__(self, spec: str, arch: str, model: str = ""):
        """model: options of `ssmgen build` that build all kernels of a known model with this shape."""
        whole = f"\nBuild all kernels of a model with this shape with: ssmgen build {model}" if model else ""
        super().__init__(
            f"{spec} is not built for {arch}, and SSMGEN_COMPILE=deny forbids compiling.\n"
            f"Build it with: ssmgen build --spec '{spec}' --arch {arch}{whole}"
        )


class CacheError(SsmgenError, OSError):
    """A file or directory of a cache cannot be used. Calls warn and go on without it; commands on the cache fail."""

    def __init__(self, path: object, reason: str):
        super().__init__(f"{path} {reason}")
        self.path, self.reason = str(path), reason


class RemoteError(SsmgenError, OSError):
    """A store that machines share cannot be used. Calls warn and go on without it; commands on the store fail."""

    def __init__(self, place: str, reason: str):
        super().__init__(f"{place} {reason}")
        self.place, self.reason = place, reason


class ConfigError(SsmgenError, ValueError):
    """An environment variable has an invalid value."""

    def __init__(self, name: str, value: str, problem: str):
        super().__init__(f"{name}={value!r} {problem}.\nSet it to something else, or unset it.")


class CaptureError(SsmgenError):
    """A kernel would have to be compiled or loaded while a CUDA graph is being captured."""

    def __init__(self, spec: str, arch: str, operator: str):
        super().__init__(
            f"{arch} kernel {spec} is not loaded, and a CUDA graph is being captured.\n"
            f"Call ssmgen.warm(ssmgen.{operator}, ...) with the same arguments before the capture."
        )


class BatchInvarianceError(SsmgenError):
    """An engine's batch-invariant mode cannot keep its promise: bits that do not depend on other requests."""

    def __init__(self, where: str, problems: Sequence[str], advice: str):
        super().__init__(f"{where} cannot give batch-invariant bits:\n{bullets(problems)}\n{advice}")
        self.problems = list(problems)


class LoadError(SsmgenError):
    """The driver refused a cubin."""

    def __init__(self, spec: str, arch: str, detail: str):
        super().__init__(f"the driver refused the {arch} cubin of {spec}: {detail}\nCompare its architecture and compiler with: ssmgen env")


class LaunchError(SsmgenError):
    """cuLaunchKernelEx failed."""

    def __init__(self, spec: str, detail: str, grid: int, block: int, arguments: str):
        super().__init__(f"launching {spec} failed: {detail}\n  grid {grid}, block {block}\n  {arguments}")


class TensorMapError(SsmgenError):
    """The driver refused to describe a tensor for copies of its tiles."""

    def __init__(self, operand: str, detail: str, tiles: str):
        super().__init__(f"the driver refused a tensor map of {operand}: {detail}\n  {tiles}\nPass {operand} as a contiguous tensor.")


class ModelError(SsmgenError, ValueError):
    """A model name is not in models.toml, or the model cannot be divided into this number of ranks."""


class PatchError(SsmgenError, ValueError):
    """Models or layers of another package cannot be patched or warmed, or a patch cannot be undone."""


class DriftError(SsmgenError):
    """The committed generated sources or their lock file differ from the rendered templates."""

    def __init__(self, problems: Sequence[str]):
        super().__init__(f"generated/ is out of date:\n{bullets(problems)}\nRun: ssmgen generate")
        self.problems = list(problems)
