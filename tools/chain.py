"""A decode step of Mamba-2 layers as a chain of dependent launches: python -m tools.chain [--rows N …] [--layers N] [--json]

A layer is Mamba-Codestral-7B's: norm with residual, in-projection 18560 x 4096, mamba2_layer with bf16 states, out-projection 4096 x 8192.
Forms differ in triggers, in products, and in whether the norm is fused. All but cublas must give the same bits, which is
checked first. A form's time is one captured step; its weights exceed any cache, so they come from memory. The floor is the bytes of weights
and states, each read once and states also written, over the rate of a copy in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ssmgen
from ssmgen.bench.timing import ceilings_tbs, device_us
from ssmgen.calls.operator import call_of
from ssmgen.launch import runtime
from ssmgen.select import registry
from ssmgen.select.catalog import OPERATOR_OF
from ssmgen.spec.kernel import KernelSpec, Pdl
from tools.context import BF16, error
from tools.parallel import Layer

LAYERS, EPS = 8, 1e-5
BOUND = 5e-2  # of relative errors between forms that round elsewhere; eight layers on the CPU: 1e-2
STEPS = 4  # in a graph
Plan = Callable[[], object]


@dataclass(frozen=True)
class Form:
    """A way to launch the chain. pdl: whether launches are dependent. norm, layer, layer_norm: the triggers of a norm between layers, of a
    layer's first kernel and of its norm; None: as the rules and tables choose."""

    pdl: bool = True
    norm: Pdl | None = None
    layer: Pdl | None = None
    layer_norm: Pdl = Pdl.TRIGGER_LOADED
    cublas: bool = False  # products by torch
    fused: bool = False  # the norm and the residual are in the products

    def changed(self, spec: KernelSpec) -> KernelSpec:
        """The variant with this form's triggers."""
        if not self.pdl:
            return spec
        if spec.family == "gated_rms_norm":
            return replaced(spec, pdl=self.norm or spec.pdl)
        if spec.family == "mamba2_layer":
            return replaced(spec, pdl=self.layer or spec.pdl, norm_pdl=self.layer_norm)
        return spec


def replaced(spec: Any, **change: Any) -> KernelSpec:
    found: KernelSpec = replace(spec, **change)
    return found


FIRST = Pdl.TRIGGER_FIRST
FORMS = {
    "cublas": Form(norm=Pdl.TRIGGER_TOP, cublas=True),
    "no pdl": Form(pdl=False),
    "late": Form(norm=Pdl.TRIGGER_TOP),
    "norms first": Form(norm=FIRST, layer_norm=FIRST),
    "all first": Form(norm=FIRST, layer=FIRST, layer_norm=FIRST),
    "fused, late": Form(fused=True),
    "fused, norms first": Form(fused=True, layer_norm=FIRST),
    "fused, all first": Form(fused=True, layer=FIRST, layer_norm=FIRST),
}


class Chain:
    """Layers, and the tensors of a step of `rows` sequences."""

    def __init__(self, device: str, rows: int, layers: int = LAYERS, **sizes: int):
        self.layers = [Layer(device, **sizes) for _ in range(layers)]
        hidden, into = self.layers[0].out.shape[0], self.layers[0].into.shape[0]
        self.states = [layer.states(rows) | {"state": layer.states(rows)["state"].to(BF16)} for layer in self.layers]
        self.norms = [torch.rand(hidden, device=device, dtype=BF16) + 0.5 for _ in self.layers]
        self.token = torch.randn(rows, hidden, device=device, dtype=BF16)
        self.added, self.normed, self.residual = (torch.zeros_like(self.token) for _ in range(3))
        self.zeros = torch.zeros_like(self.token)
        self.projected = torch.zeros(rows, into, device=device, dtype=BF16)
        self.mixed = torch.zeros(rows, self.layers[0].out.shape[1], device=device, dtype=BF16)

    @property
    def bytes(self) -> int:
        """Weights are read; states are read and written."""
        weights = [t for layer in self.layers for t in (layer.into, layer.out)]
        states = [states[name] for states in self.states for name in ("state", "conv_state")]
        total: int = sum(t.nbytes for t in weights) + 2 * sum(t.nbytes for t in states)
        return total

    def restart(self) -> None:
        for states in self.states:
            for t in states.values():
                t.zero_()

    def results(self) -> list[Tensor]:
        """Copies of all that a step leaves."""
        return [t.clone() for t in (self.residual, self.added, *(t for states in self.states for t in states.values()))]

    def step(self, form: Form) -> Plan:
        """Launches a step in this form; plans are made once."""
        plans = [plan for i in range(len(self.layers)) for plan in self._layer(form, i)]

        def run() -> None:
            for plan in plans:
                plan()

        return run

    def _layer(self, form: Form, i: int) -> list[Plan]:
        layer, norm = self.layers[i], self.norms[i]
        if form.fused:
            x = self.residual if i else self.token
            into = planned(form, ssmgen.skinny_linear, x, layer.into, norm_weight=norm, eps=EPS, out=self.projected)
            back = planned(form, ssmgen.skinny_linear, self.mixed, layer.out, residual=x, out=self.residual)
            return [into, self._mixer(form, i), back]
        given = {"x": self.added, "residual": self.residual} if i else {"x": self.token, "residual": self.zeros}
        first = planned(form, ssmgen.rms_norm, weight=norm, eps=EPS, residual_out=self.residual, out=self.normed, **given)
        products = [(self.normed, layer.into, self.projected), (self.mixed, layer.out, self.added)]
        into, back = (product(form, *operands) for operands in products)
        return [first, into, self._mixer(form, i), back]

    def _mixer(self, form: Form, i: int) -> Plan:
        layer = self.layers[i]
        z, xBC, dt = self.projected.split([layer.kinds[0], sum(layer.kinds[1:4]), layer.heads], -1)
        return planned(
            form, ssmgen.mamba2_layer, xBC, dt=dt, A=layer.A, D=layer.D, z=z, dt_bias=layer.dt_bias, conv_weight=layer.conv_weight,
            conv_bias=layer.conv_bias, norm_weight=layer.norm, norm_group_size=layer.group_size, out=self.mixed, **self.states[i],
        )  # fmt: skip


def product(form: Form, x: Tensor, weight: Tensor, out: Tensor) -> Plan:
    if form.cublas:
        return lambda: torch.mm(x, weight.t(), out=out)
    return planned(form, ssmgen.skinny_linear, x, weight, out=out)


def planned(form: Form, function: Any, *args: Any, **kwargs: Any) -> Plan:
    """The call's launches, with this form's triggers. On the CPU, the reference."""
    call = call_of(function, *args, pdl=form.pdl, **kwargs)
    problem, size, device, _ = call.problem()
    if device.type != "cuda":
        return call.plan()
    arch, name = runtime.device_arch(device.index), runtime.device_name(device.index)
    spec = registry.select(OPERATOR_OF[type(problem)], problem, size, arch, form.pdl, name)
    return call.launch_with(form.changed(spec)).at(call.pointers)


def checked(chain: Chain, steps: dict[str, Plan]) -> None:
    """Raises AssertionError if forms differ: in bits, or, with cuBLAS, or a norm or residual that is rounded elsewhere, by too much."""
    found: dict[str, list[Tensor]] = {}
    for name, step in steps.items():
        chain.restart()
        chain.residual.zero_()
        for _ in range(2):
            step()
        if FORMS[name].fused:
            chain.added.zero_()
        found[name] = chain.results()
    for one, other in (("late", "no pdl"), ("late", "norms first"), ("late", "all first")):
        assert all(map(torch.equal, found[one], found[other])), f"{one} and {other} differ"
    for other in ("fused, norms first", "fused, all first"):
        assert all(map(torch.equal, found["fused, late"], found[other])), f"fused, late and {other} differ"
    # The residual before the last layer's output is added, and after it.
    sums = found["late"][0].float() + found["late"][1].float()
    assert error(found["cublas"][0], found["late"][0]) < BOUND and error(found["fused, late"][0], sums) < BOUND


def measured(rows: int, layers: int, rounds: int, rate: float) -> dict[str, Any]:
    """Microseconds of a step, by form."""
    torch.manual_seed(0)
    chain = Chain("cuda", rows, layers)
    steps = {name: chain.step(form) for name, form in FORMS.items()}
    checked(chain, steps)
    contenders = {name: (lambda i, step=step: step()) for name, step in steps.items()}
    return {"rows": rows, "layers": layers, "floor_us": chain.bytes / rate, "us": device_us(contenders, 1, rounds, least=STEPS)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.chain", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 8), help="Sequences of a step, 1 to 16. Default: 1 8.")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="Also print one JSON document, as the last line.")
    chosen = parser.parse_args()
    rate, found = ceilings_tbs()["out_of_place"] * 1e6, []  # bytes per microsecond
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy moves {rate / 1e6:.2f} TB/s")
    for rows in chosen.rows:
        found.append(measured(rows, chosen.layers, chosen.rounds, rate))
        row = found[-1]
        print(f"{rows} rows, {chosen.layers} layers: floor {row['floor_us']:.1f} us")
        for name, us in row["us"].items():
            print(f"  {name:20s} {us:7.1f} us  {us / row['floor_us']:.3f} x the floor", flush=True)
    if chosen.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_s": rate / 1e6, "rows": found}))


if __name__ == "__main__":
    main()
