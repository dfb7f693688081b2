"""Replaces methods of another package's layer class in this process, and restores them. Refused calls raise; nothing falls back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import PatchError, bullets
from .replacing import differences

_missing = object()


class LayerPatch:
    """A patch in force. As a context manager it undoes itself.

    A_form: the activation of A that patched layers use
    """

    def __init__(self, owner: type, methods: Mapping[str, Callable[..., Any]], A_form: str, names: Mapping[tuple[Any, str], Any] = {}):
        """methods: replacements, with the parameters of the package's own; names: {(object, attribute): value} to set as well.

        Raises PatchError if the class is patched already, or if the package's methods have other parameters. Nothing is then replaced.
        """
        self.A_form, self.place = A_form, f"{owner.__module__}.{owner.__qualname__}"
        self._values: dict[tuple[Any, str], Any] = {(owner, name): method for name, method in methods.items()} | dict(names)
        self._originals: dict[tuple[Any, str], Any] = {}
        problems = []
        for name, method in methods.items():
            own = getattr(owner, name, None)
            if getattr(own, "_of_ssmgen", False):
                raise PatchError(f"{self.place} is patched already; expected one patch. Call undo() of the other patch first.")
            if own is None:
                problems.append(f"{self.place}.{name} does not exist")
            elif drift := differences(method, own):
                problems.append(f"the parameters of {self.place}.{name} differ from those that ssmgen knows: {'; '.join(drift)}")
        if problems:
            raise PatchError(f"cannot patch:\n{bullets(problems)}\nNothing was replaced.")
        for (owner_, name), value in self._values.items():
            self._originals[owner_, name] = vars(owner_).get(name, _missing)
            setattr(owner_, name, value)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The replaced methods, while the patch is in force."""
        return tuple([f"{self.place}.{name}" for owner, name in self._originals if isinstance(owner, type)])

    def undo(self) -> None:
        """Restores the package's own methods, the same objects. A second time: nothing.

        Raises PatchError if other code has replaced one of ours since; that one stays, and all others are restored.
        """
        overwritten = []
        for (owner, name), original in self._originals.items():
            if vars(owner).get(name, _missing) is not self._values[owner, name]:
                overwritten.append(f"{self.place}.{name} is now {vars(owner).get(name, 'missing')!r}")
            elif original is _missing:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals = {}
        if overwritten:
            raise PatchError(f"other code replaced these after ssmgen did; ssmgen does not restore them:\n{bullets(overwritten)}")

    def __enter__(self) -> LayerPatch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        return f"ssmgen computes {', '.join(self.replaced) or 'nothing: the patch is undone'}; A_form is {self.A_form!r}"


def ours(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a replacement, so that a second patch is refused."""
    vars(method)["_of_ssmgen"] = True
    return method
