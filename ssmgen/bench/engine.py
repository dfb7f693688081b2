"""The engine of all benchmarks: a family declares its axes, inputs, peers and words, and `run` makes the report."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ..calls import api
from ..compile import nvrtc
from ..compile.render import render
from ..errors import SsmgenError
from ..launch import runtime
from ..select.models import Model
from ..spec.kernel import Arch, KernelSpec
from . import report as reports
from . import schema, timing
from .axes import At, Axis
from .case import Case, Variants, by_pdl, name_of
from .progress import PRINTING, Watch
from .schema import Fields, Report

Device = torch.device
Values = Iterable[Mapping[str, Any]]  # the values of cases on the axes; on axes without one, a case lies at the first of the defaults
Peer = Callable[[Case], timing.Launch | None]  # a launch of another package's function; None where that does not serve the case
ROUNDS = 7


def no_model(model: Model, tp: int, quick: bool) -> None:
    """No options: no model in models.toml is known to use the operator."""


@dataclass(kw_only=True, eq=False)
class Bench:
    """The benchmark of an operator.

    method: how it is measured, in words.
    axes: the variables, the outermost loop first.
    inputs: makes the case that lies at these values.
    words, size: the name of a row, and its place on a curve; from the fields of the row and of the report's head, in old reports too.
    peers: other packages by name.
    quick: options of a quick run.
    of_model: options for a model, already divided by tp; None where the model does not use the operator.
    mistakes: options of a command that do not go together, in words.
    settle: the cases of a combination of values, with their missing fields; none if the case does not exist.
    ceiling: the ceiling of the report that bounds it.
    copied: a slot copy is timed with it; otherwise the case has a contender "mul".
    fields, measured_fields: fields of rows in addition to the axes, before the measurement and after it.
    parts: rows name each kernel of a variant.
    tuned: the cases that `ssmgen tune` measures, of these models (if none is named, of its own choice), batches and numbers of tokens.
    label: the name of such a case.
    """

    op: str
    method: str
    axes: tuple[Axis, ...]
    inputs: Callable[[At, Device], Case]
    tuned: Callable[[Sequence[Model], Sequence[int], Sequence[int]], Values]
    label: Callable[[At], str]
    words: Callable[[Mapping[str, Any]], str]
    size_of: str = "batch"
    size: Callable[[Mapping[str, Any]], str] = lambda row: str(row["batch"])
    peers: Mapping[str, Peer] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    of_model: Callable[[Model, int, bool], Mapping[str, Any] | None] = no_model
    mistakes: Callable[..., list[str]] = lambda **chosen: []
    settle: Callable[[At], Iterable[At]] = lambda at: (at,)
    ceiling: str = "out_of_place"
    copied: bool = False
    fields: Fields = field(default_factory=dict)
    measured_fields: Fields = field(default_factory=dict)
    parts: bool = False
    nameless: bool = False  # reports of release 0.1 do not say which operator they are of

    @functools.cached_property
    def form(self) -> Report:
        """The schema of a report."""
        shown = [axis for axis in self.axes if not axis.hidden]
        case = {axis.field: axis.kind for axis in shown if not axis.head}
        head = {axis.field: axis.kind for axis in shown if axis.head}
        row = {**(schema.COPY if self.copied else schema.MUL), **self.measured_fields}
        times = () if self.copied else ("mul",)
        return Report({**self.fields, **case}, head, row, self.copied, times)

    def points(self, **chosen: Any) -> list[At]:
        """The cases for these options, whose missing ones are the defaults. Raises TypeError for an option that is none."""
        if unknown := chosen.keys() - {axis.argument for axis in self.axes}:
            raise TypeError(f"{self.op} has no option {', '.join(sorted(unknown))}")
        found = [At()]
        for axis in self.axes:
            found = [At(**vars(at), **{axis.name: value}) for at in found for value in axis.values(chosen.get(axis.argument), at)]
        settled = [point for at in found for point in self.settle(at)]
        return list({json.dumps(self.named(at)): at for at in settled}.values())

    def case(self, device: Device | str = "cuda", **fields: Any) -> Case:
        """The case at these values; on an axis that is not named, it lies at the first of the defaults. Raises SsmgenError."""
        at = At()
        for axis in self.axes:
            value = fields.pop(axis.name) if axis.name in fields else next(iter(axis.values(None, at)))
            at = At(**vars(at), **{axis.name: value})
        (at, *_) = self.settle(At(**vars(at), **fields))
        return self.made(at, device)

    def made(self, at: At, device: Device | str) -> Case:
        case = self.inputs(at, Device(device))
        case.at = at
        return case

    def named(self, at: At) -> dict[str, Any]:
        """The fields of a row that say which case it is."""
        shown = {axis.name for axis in self.axes if not axis.hidden} | {name.rstrip("?") for name in self.fields}
        return {name: _plain(value) for name, value in vars(at).items() if name in shown}

    @torch.no_grad()
    def run(
        self, *, rounds: int = ROUNDS, peers: bool = True, watch: Watch = PRINTING, device: Device | str = "cuda", **chosen: Any
    ) -> dict[str, Any]:  # fmt: skip
        """The whole report, as JSON would hold it. chosen: by the axes' arguments; None, or nothing, for the default.

        Raises SsmgenError without a GPU, and for options that do not go together; Interrupted, with the report so far, after Ctrl-C.
        """
        report = reports.begin(self.method) | {"op": self.op}
        points = self.points(**chosen)
        for axis in self.axes if points else ():
            if axis.head:
                report[axis.name] = _plain(getattr(points[0], axis.name))
        watch.begins(self.op, len(points))
        for i, at in enumerate(points):
            try:
                with reports.case(report, self.named(at), watch) as row:
                    row |= self.measured(at, Device(device), report["ceilings_tbs"], rounds, peers, watch)
            except KeyboardInterrupt as e:
                report["failed"] += [{**self.named(left), "error": reports.NOT_REACHED} for left in points[i:]]
                raise reports.Interrupted(report) from e
        return report

    def measured(
        self, at: At, device: Device, ceilings: Mapping[str, float], rounds: int, peers: bool, watch: Watch
    ) -> dict[str, Any]:  # fmt: skip
        """The measured fields of a row. Raises SsmgenError where a result is wrong."""
        case = self.made(at, device)
        arch = runtime.device_arch(case.device.index)
        variants = case.variants(arch)
        errors = gates(case, variants)
        others = {**case.rivals, **(peers_of(case, self.peers) if peers else {})}
        contenders = {name: case.bound(**how) for name, how in variants.items()} | case.contenders()
        pdls = sorted({bool(how["pdl"]) for how in variants.values()}, reverse=True)
        contenders |= {name_of(case.ahead.name, pdl): case.ahead.bound(pdl=pdl) for pdl in pdls} if case.ahead else {}
        contenders |= reports.slot_copies(*case.copied, pdls) if case.copied else {}
        contenders |= {name: call for name, call in others.items() if name not in contenders}
        watch.timing(len(contenders))
        us = timing.device_us(contenders, case.sets, rounds)
        first = next(iter(variants))  # the plain call: pdl=None is pdl=True where the device can
        plain = {name: value for name, value in variants[first].items() if name != "pdl"}
        served, copies = us[first], [us[name] for name in ("copy_pdl", "copy") if name in us]
        tbs, copy = case.bytes / served / 1e6, min(copies, default=None)
        row: dict[str, Any] = {"us": us, "sm_mhz": timing.sm_mhz(), "served_us": served, "bytes": case.bytes, "tbs": tbs}
        row |= {f"{name}_ratio": served / us[name] for name in case.ratios}
        if self.copied:
            row |= {"copy_us": copy, "copy_ratio": served / copy if copy and case.comparable else None}
            row |= {"ceiling_fraction": tbs / ceilings[self.ceiling]}
        row |= {"peer_ratio": {name: served / us[name] for name in others}}
        row |= {"host_us": reports.host_us(case.function, {**case.arguments(0), **plain}, others) if case.host else {}}
        row |= {"out_error": max(error["out"] for error in errors)} | dict(case.row)
        states = [error[name] for error in errors for name in ("state", "intermediate_states") if name in error]
        row |= {"state_error": max(states)} if self.copied else {}
        row |= self.served(case, variants[first], arch)
        if case.variants is not by_pdl:
            best = min(variants, key=us.__getitem__)
            row |= {"served": first, "best": best, "sets": case.sets}
            row |= {"variants": {name: self.served(case, how, arch) for name, how in variants.items() if name != first}}
        return row

    def served(self, case: Case, how: Mapping[str, Any], arch: Arch) -> dict[str, Any]:
        """The variant that serves a case, its rule, and the seconds of compiling it."""
        how = {} if case.variants is by_pdl else how
        chosen = api.explain(case.function, **{**case.arguments(0), **how}, arch=str(arch)).chosen
        if chosen is None:
            raise SsmgenError(f"{self.op}: no kernel serves this call")
        kernels = chosen.spec.kernels if self.parts else (chosen.spec,)
        specs = {"specs": [str(spec) for spec in kernels]} if self.parts else {"spec": str(chosen.spec)}
        return {**specs, "rule": chosen.rule, "compile_seconds": sum(_compile_seconds(spec, arch) for spec in kernels)}


@functools.cache
def _compile_seconds(spec: KernelSpec, arch: Arch) -> float:
    return nvrtc.compile_cubin(render(spec, arch), arch, str(spec)).seconds


def gates(case: Case, variants: Variants) -> list[dict[str, float]]:
    """The norm errors of each variant from the case's gate. Raises SsmgenError that names all that fail."""
    passed, wrong = [], []
    for name, how in variants.items():
        try:
            passed.append(case.gate(**how))
        except SsmgenError as e:
            wrong.append(f"{name if case.variants is not by_pdl else 'with PDL' if how['pdl'] else 'without PDL'}: {e}")
    if wrong:
        raise SsmgenError("; ".join(wrong))
    return passed


def peers_of(case: Case, peers: Mapping[str, Peer]) -> dict[str, timing.Launch]:
    """The peers that run. If the case has limits for peers, only the peers within these limits."""
    usable = reports.usable({name: make(case) for name, make in peers.items()})
    for name in list(usable) if case.peer_limits else ():
        errors = case.peer_errors(name, usable[name])
        if not all(error < case.peer_limits[operand] for operand, error in errors.items()):
            said = ", ".join(f"{operand} error {error:.1e}" for operand, error in errors.items())
            reports.left_out(name, "checked,", SsmgenError(said))
            del usable[name]
    return usable


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
