"""chunk_delta_rule and chunk_linear_attention: operands of their functions, expected results in float64 from the textbook recurrences, and
ways to run a call: on a card or in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bits import error, same
from emulated_calls import SM90, emulate
from scan_cases import placed
from sequence_laws import NAN, Run, Sequences, starts_of
from ssu_cases import BF16, F16, F32
from torch import Tensor
from torch.nn.functional import normalize, softplus

import ssmgen
from ssmgen.families.chunk_delta_rule import chain as delta_chain
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.families.chunk_linear_attention import chain as linear_chain
from ssmgen.families.chunk_linear_attention.problem import LinearPromptProblem, Rule
from ssmgen.launch import runtime
from ssmgen.spec.kernel import Arch

__all__ = ["BF16", "F16", "F32", "NAN", "SM90", "error", "same", "starts_of"]

BOUNDS = {BF16: 6e-3, F16: 1.5e-3}  # relative L2 error, random operands
STORED = {F32: 0.0, BF16: 2.0**-9, F16: 2.0**-12}  # a state's rounding
HARD = {BF16: 1.5e-2, F16: 4e-3}  # keys that are nearly one, steps of 1 and 2, decays of nothing and of all

PER_TOKEN = {  # parameters with a token's numbers
    "chunk_gated_delta_rule": ("q", "k", "v", "g", "beta"),
    "chunk_delta_rule": ("q", "k", "v", "beta"),
    "chunk_kda": ("q", "k", "v", "g", "beta"),
    "chunk_gla": ("q", "k", "v", "gk"),
    "chunk_gdn2": ("q", "k", "v", "g", "b", "w"),
    "chunk_comba": ("q", "k", "v", "p", "g", "beta"),
    "chunk_rwkv7": ("r", "w", "k", "v", "kk", "a"),
    "chunk_dplr_delta_rule": ("q", "k", "v", "a", "b", "gk"),
}
OF_DELTA_RULE = ("chunk_gated_delta_rule", "chunk_delta_rule")
OF_LINEAR_ATTENTION = tuple(name for name in PER_TOKEN if name not in OF_DELTA_RULE)
FUNCTIONS = ("chunk_gated_delta_rule", *OF_LINEAR_ATTENTION)  # each with gates


@dataclass(frozen=True)
class Case(Sequences):
    """A function, and the sizes of a call: small for the emulator, a model's on a card."""

    function: str = "chunk_kda"
    heads: int = 2
    key_heads: int = 1
    head_k: int = 32
    head_v: int = 32
    x: torch.dtype = BF16
    device: str = "cpu"

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.head_v, self.head_k

    @property
    def per_head(self) -> bool:
        """Whether this is a function of chunk_delta_rule, whose state has one decay per head."""
        return self.function in OF_DELTA_RULE

    @property
    def chunk(self) -> int:
        """Tokens of one."""
        return self.rule.tokens

    @property
    def rule(self) -> Rule:
        low = dict.fromkeys(("chunk_rwkv7", "chunk_dplr_delta_rule"), Rule.LOW_RANK)
        return {"chunk_gla": Rule.PLAIN, "chunk_comba": Rule.OLD, **low}.get(self.function, Rule.DELTA)

    @property
    def few(self) -> float:
        """Relative L2 error of a few tokens: each operand of a product is rounded by up to 2^-9, and nothing averages that."""
        return {BF16: 8e-3 if self.per_head else 9e-3, F16: 1.5e-3}[self.x]

    @property
    def per_token(self) -> tuple[str, ...]:
        return PER_TOKEN[self.function]

    @property
    def decode(self) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = getattr(ssmgen, self.function.removeprefix("chunk_"))
        return found

    def made(self, *lead: int, slow: bool = False) -> dict[str, Any]:
        return make(self, *lead)

    def exact(self, call: Mapping[str, Any], **more: Any) -> dict[str, Tensor]:
        return exact(self, call, **more)

    def step(self, state: Tensor, call: dict[str, Any]) -> Tensor:
        return self.decode(state, **call)

    def of(self, run: Run) -> Run:
        return partial(run, self)

    def bound(self) -> float:
        return BOUNDS[self.x]

    def state_bound(self, dtype: torch.dtype) -> float:
        return BOUNDS[self.x] + STORED[dtype]

    def step_bound(self) -> float:
        return self.bound() if self.per_head else self.few

    def build(self, **kwargs: Any) -> Any:
        return getattr(ssmgen, self.function).build(**kwargs)

    def workspace(self, tokens: int, sequences: int, *segments: int) -> int:
        """Bytes of a call's workspace. Without `segments`, it has room for the rule's number."""
        if self.per_head:
            return ssmgen.chunk_delta_rule_workspace(tokens, sequences, self.heads, self.head_k, self.head_v, *segments)
        sizes = tokens, sequences, self.heads, self.head_k, self.rule.value, self.head_v
        return ssmgen.chunk_linear_attention_workspace(*sizes, *segments)


# Equal decays of all channels, of none, and of all except one, in every token; nearly equal keys; steps of 1 and 2.
ADVERSARIAL: dict[str, dict[str, float]] = {
    "near keys": {"near": 0.05, "gate": 0.01},
    "near keys, steps of 1": {"near": 0.05, "step": 1.0, "gate": 0.01},
    "no decay": {"step": 1.0, "gate": 0.0},
    "steps of 2": {"step": 1.99, "gate": 0.01},
    "slow": {"gate": 0.01},
    "fast": {"gate": 40.0},
    "-5": {"log": -5.0},
    "-40": {"log": -40.0},
    "one channel never": {"log": -5.0, "spared": 1.0},
    "one channel at once": {"log": 0.0, "fast": 1.0},
}
OF_HEADS = ("near keys", "near keys, steps of 1", "no decay", "steps of 2", "slow", "fast")  # with one decay for all channels


def make(
    case: Case, *lead: int, seed: int = 0, gate: float = 1.0, near: float = 0.0, step: float | None = None, log: float | None = None,
    spared: float = 0.0, fast: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """A call on dense operands. gate: factor of log decays between 0 and -0.2. log: the log decay of all channels, except one spared
    channel and one fast channel. near: keys are one key plus this much noise (0: all noise). step: beta (or RWKV-7's a) of all tokens;
    None: between 0 and 1."""
    g = torch.Generator().manual_seed(seed)
    HV, V, K = case.state
    HK = case.key_heads

    def keys() -> Tensor:
        noise = torch.randn(*lead, HK, K, generator=g)
        one = torch.randn(HK, K, generator=torch.Generator().manual_seed(seed + 1))
        return one + near * noise if near else noise

    def short(t: Tensor) -> Tensor:
        return t.to(case.device, case.x)

    logs = -gate * torch.rand(*lead, HV, K, generator=g) * 0.2
    logs = logs if log is None else torch.full_like(logs, log)
    logs[..., K // 3] *= 1 - spared
    logs[..., K // 2] -= 40 * fast
    q, k, v, unit = torch.randn(*lead, HK, K, generator=g), keys(), torch.randn(*lead, HV, V, generator=g), normalize(keys(), dim=-1)
    steps, channels = torch.rand(*lead, HV, generator=g), torch.rand(*lead, HK, K, generator=g)
    steps, channels = (t if step is None else torch.full_like(t, step) for t in (steps, channels))
    rows = torch.rand(*lead, HV, V, generator=g)
    logs, steps = logs.to(case.device), steps.to(case.device)
    delta = {"q": short(q), "k": short(k), "v": short(v), "use_qk_l2norm": True}
    bare = {"q": short(q), "k": short(k / K**0.5), "v": short(v)}
    erase = channels.repeat_interleave(HV // HK, -2)
    return {
        "chunk_gated_delta_rule": lambda: delta | {"g": logs[..., 0].contiguous(), "beta": steps},
        "chunk_delta_rule": lambda: delta | {"beta": steps},
        "chunk_kda": lambda: delta | {"g": logs, "beta": steps},
        "chunk_gla": lambda: bare | {"gk": logs},
        "chunk_gdn2": lambda: delta | {"g": logs, "b": short(erase), "w": rows.to(case.device)},
        "chunk_comba": lambda: delta | {"p": short(k + 0.3 * keys()), "g": logs[..., 0].contiguous(), "beta": steps},
        "chunk_rwkv7": lambda: {"r": bare["q"], "k": bare["k"], "v": bare["v"], "w": logs, "kk": short(unit), "a": short(channels)},
        "chunk_dplr_delta_rule": lambda: bare | {"a": short(-unit), "b": short(unit * channels), "gk": logs},
    }[case.function]()


def cut(case: Case, call: Mapping[str, Any], *at: Any) -> dict[str, Any]:
    """The call with this index into the operands per token."""
    return case.cut(call, *at)


def tokens_of(case: Case, call: Mapping[str, Any], span: slice) -> dict[str, Any]:
    """The call on some of its packed tokens, as a batch of one."""
    return cut(case, cut(case, call, span), None)


def states(case: Case, count: int, dtype: torch.dtype = F32, seed: int = 1) -> Tensor:
    return case.states(count, dtype, seed)


# The expected results of a call.


def norm(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def logs_of(call: Mapping[str, Any]) -> Tensor:
    """[…, HV, K] or [..., HV, 1], log decays of a call's gates, in float64."""
    g = next((call[n].double() for n in ("g", "gk") if call.get(n) is not None), None)
    if g is None:
        return torch.zeros((), dtype=torch.float64)
    per_head = g.dim() < call["v"].dim()
    g = g[..., None] if per_head else g
    bias, rate = call.get("dt_bias"), call.get("A_log")
    g = g if bias is None else g + bias.double().reshape(*g.shape[-2:])
    rate = None if rate is None else rate.double().exp()[:, None]
    if (bound := call.get("lower_bound")) is not None:
        return bound * torch.sigmoid(g if rate is None else rate * g)
    return g if rate is None else -rate * softplus(g)


def recurrence(case: Case, call: Mapping[str, Any], before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out [T, HV, V], states before the first token and after each [T + 1, HV, V, K]) of one sequence [T, …], in float64: the formulas of
    the functions' docstrings, S as a matrix."""
    HV, V, K = case.state
    call = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in call.items()}
    if case.function == "chunk_rwkv7":
        call |= {"q": call["r"], "g": call["w"], "a": -call["kk"].double(), "b": call["kk"].double() * call["a"].double()}
    keys = {n: call[n].double().repeat_interleave(HV // case.key_heads, 1) for n in ("q", "k", "p") if n in call}
    keys = {n: norm(t) for n, t in keys.items()} if call.get("use_qk_l2norm") else keys
    q, k, v = keys["q"], keys["k"], call["v"].double()
    D = logs_of(call).exp().expand(len(v), HV, K)
    beta = call["beta"].double() if "beta" in call else torch.ones(len(v), HV, dtype=torch.float64)
    if call.get("beta_sigmoid"):
        beta = beta.sigmoid() * (2 if call.get("allow_neg_eigval") else 1)
    low = [call[n].double().repeat_interleave(HV // case.key_heads, 1) for n in ("a", "b")] if case.rule is Rule.LOW_RANK else []
    scale = call.get("scale", 1.0 if case.function == "chunk_rwkv7" else K**-0.5)
    S = torch.zeros(HV, V, K, dtype=torch.float64) if before is None else before.cpu().double()
    states, out = [S], torch.empty_like(v)
    for t in range(len(v)):
        for h in range(HV):
            old, d, key = states[-1][h], torch.diag(D[t, h]), k[t, h]
            match case.rule:
                case Rule.PLAIN:
                    new = old @ d + torch.outer(v[t, h], key)
                case Rule.LOW_RANK:
                    new = old @ d + torch.outer(old @ low[0][t, h], low[1][t, h]) + torch.outer(v[t, h], key)
                case Rule.OLD:
                    new = old @ d + beta[t, h] * torch.outer(v[t, h] - old @ keys["p"][t, h], key)
                case Rule.DELTA if "w" in call:
                    read = old @ d @ (call["b"][t, h].double() * key)
                    new = old @ d + torch.outer(call["w"][t, h].double() * v[t, h] - read, key)
                case _:
                    new = old @ d + beta[t, h] * torch.outer(v[t, h] - old @ d @ key, key)
            S = new[None] if h == 0 else torch.cat([S, new[None]])
            out[t, h] = scale * new @ q[t, h]
        states.append(S)
    return out, torch.stack(states)


def views_of(call: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = call.caller.checked(call.operands, call.options, None)
    return found


def exact(case: Case, call: Mapping[str, Any], **more: Any) -> dict[str, Tensor]:
    """The tensors that the call must write, in float64, token by token, by the reference."""
    built = case.build(**call, **more)
    views = views_of(built)
    if built.before is not None:
        views["v"] = (call["v"].double() * call["w"].double()).view_as(views["v"])
    views = placed(views, case.heads * case.head_v * case.head_k)
    wanted = {n: views[n].double() for n in built.caller.family.written if n in views and n != "workspace"}
    built.caller.reference(views | wanted, built.options, torch.float64)
    return {n: t.cpu() for n, t in wanted.items()}


# Ways to run a call.


def public(case: Case, **kwargs: Any) -> Any:
    """As its users have it: on CPU tensors the reference, on a card what is served."""
    return getattr(ssmgen, case.function)(**kwargs)


def emulated(case: Case, *, spec: Any = None, arch: Arch = SM90, change: Callable[[str], str] = str, **kwargs: Any) -> Any:
    """The call's result from its kernels in the emulator. spec: a variant, or a function of the problem that makes one; None: the
    registry's choice. `change` edits the kernels' texts."""
    return emulate(case.build(**kwargs), spec, arch, change)


def launched(case: Case, *, spec: Any, **kwargs: Any) -> Any:
    """The call's result as a given variant makes it on a card."""
    call = case.build(**kwargs)
    problem, size, _, _ = call.problem()
    if call.before is not None:
        call.before()
    if size:
        call.launch_with(spec(problem) if callable(spec) else spec).at(call.pointers)()
    return call.result


CHAINS = {DeltaProblem: delta_chain, LinearPromptProblem: linear_chain}


def candidates(problem: Any, heads: int, arch: Arch, pdl: bool) -> Any:
    return CHAINS[type(problem)].candidates(problem, heads, arch, pdl)


def variant(backend: Any, problem: Any) -> Any:
    """The first rule of a backend that is legal."""
    return next(s for _, s, _ in candidates(problem, 1, SM90, True) if s and s.backend is backend and not s.violations(SM90))


def by_warps(problem: Any) -> Any:
    """The variant for this card in which each warp computes its own products. Warpgroup variants, which may come first, differ bitwise."""
    arch = runtime.device_arch(torch.cuda.current_device())
    rules = candidates(problem, 1, arch, arch >= Arch(90))
    return next(spec for _, spec, _ in rules if spec and not spec.grouped and not spec.violations(arch))


def problem_of(case: Case, **kwargs: Any) -> Any:
    return case.build(**kwargs).problem()[0]
