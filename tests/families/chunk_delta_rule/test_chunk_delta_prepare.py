"""The images of chunks, which the first kernel of chunk_delta_rule leaves: in the emulator, against float64, and the mistakes that show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import prompt_cases
import pytest
import torch
from delta_images import Images, images_are_right, images_of, pack, spans_of, unpack
from emulated_calls import SM80, launch_emulated, needs_emulator
from prompt_cases import ADVERSARIAL, OF_HEADS, Case, error, exact, states, views_of
from scan_cases import NAN, SM90, starts_of
from selection import costly
from ssu_cases import BF16, F16, F32
from torch import Tensor

import ssmgen
from ssmgen.emulator import EmulatorError
from ssmgen.engine.chunks.kernels import of_problem
from ssmgen.engine.chunks.problem import CHUNK
from ssmgen.engine.chunks.views import counts_of
from ssmgen.families.chunk_delta_rule.planning import FAMILY
from ssmgen.families.chunk_delta_rule.prepare import PrepareSpec
from ssmgen.families.chunk_delta_rule.problem import IMAGE, ChunkProblem
from ssmgen.spec.kernel import Arch, Pdl

SMALL = Case("chunk_gated_delta_rule")


@dataclass(frozen=True)
class Sizes:
    key_heads: int = 1
    group: int = 2  # heads of v for each of them
    head_k: int = 32
    x: torch.dtype = BF16
    gate: str = "log"
    form: str = "plain"  # of beta
    bias: bool = False
    gates: torch.dtype = F32  # dtype of g, beta, A_log and dt_bias
    l2norm: bool = True


def make(sizes: Sizes, *lead: int, seed: int = 0, decay: float = 1.0, alike: float = 0.0) -> dict[str, Any]:
    """A call. decay: factor of log decays; alike: how much of each key is the same one."""
    g = torch.Generator().manual_seed(seed)
    heads = sizes.key_heads * sizes.group

    def randn(*shape: int, dtype: torch.dtype = sizes.x) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    k = (1 - alike) * randn(*lead, sizes.key_heads, sizes.head_k, dtype=F32) + alike * randn(sizes.head_k, dtype=F32)
    if not sizes.l2norm:
        k = k / k.norm(dim=-1, keepdim=True)
    call: dict[str, Any] = {"q": randn(*lead, sizes.key_heads, sizes.head_k), "k": k.to(sizes.x), "v": randn(*lead, heads, 16)}
    log = -decay * torch.rand(*lead, heads, generator=g)
    if sizes.gate != "none":
        values = {"log": log, "linear": log.exp(), "raw": 3 * torch.randn(*lead, heads, generator=g)}[sizes.gate]
        call["g"] = values.to(sizes.gates)
    beta = torch.rand(*lead, heads, generator=g)
    call["beta"] = (beta if sizes.form == "plain" else 6 * beta - 1).to(sizes.gates)
    if sizes.gate == "raw":
        call["A_log"] = (decay * torch.rand(heads, generator=g)).log().to(sizes.gates)
        call["dt_bias"] = randn(heads, dtype=sizes.gates) if sizes.bias else None
    return call | {
        "use_qk_l2norm": sizes.l2norm,
        "beta_sigmoid": sizes.form != "plain",
        "allow_neg_eigval": sizes.form == "twice_sigmoid",
        **({"linear_gate": sizes.gate == "linear"} if sizes.gate != "none" else {}),
    }


def function_of(sizes: Sizes) -> Any:
    return ssmgen.chunk_delta_rule if sizes.gate == "none" else ssmgen.chunk_gated_delta_rule


def run(sizes: Sizes, *, arch: Arch = SM90, change: Callable[[str], str] = str, **kwargs: Any) -> tuple[Tensor, Images]:
    """([numbers, HV, IMAGE] bytes from the kernel in the emulator, NaN where it writes nothing; the expected images). `change` edits its
    text."""
    call = function_of(sizes).build(**kwargs)
    views = views_of(call)
    problem = FAMILY.problem_of(views, {n: t.data_ptr() for n, t in call.operands.items()}, call.options)
    views["workspace"].fill_(0xFF)
    spec = PrepareSpec(**of_problem(problem, ChunkProblem), pdl=Pdl.TRIGGER_LOADED if arch >= Arch(90) else Pdl.OFF)
    launch_emulated(spec, call.caller.family, views, call.options, call.operands, arch, change)
    counts = counts_of(views, CHUNK)
    found = views["workspace"][: counts.chunks * counts.heads * IMAGE]
    return found.view(counts.chunks, counts.heads, IMAGE), images_of(views, call.options)


def prepared(sizes: Sizes, *, bound: float = 2.0**-12, coefficients: float = 1e-5, **kwargs: Any) -> Tensor:
    """The same bytes, checked: T within `bound` in addition to its rounding, and coefficients within `coefficients`."""
    found, wanted = run(sizes, **kwargs)
    assert_images(found, wanted, sizes, bound, coefficients)
    return found


def assert_images(found: Tensor, wanted: Images, sizes: Sizes, bound: float = 2.0**-12, coefficients: float = 1e-5) -> None:
    read, served = unpack(found.flatten(), wanted, sizes.x), wanted.served > 0
    images_are_right(read, wanted, sizes.x, ROUNDING[sizes.x] + bound, coefficients)
    assert (found[~served] == 0xFF).all() and not read.T[served].triu(1).any() and not read.P[served].triu(1).any()


ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11}  # of a number, relative to it


GATES = {
    "log": Sizes(),
    "none": Sizes(gate="none"),
    "none-unnormalised": Sizes(gate="none", l2norm=False, form="sigmoid"),
    "unnormalised": Sizes(l2norm=False, gates=F16, x=F16),
    "linear": Sizes(gate="linear", form="sigmoid"),
    "raw": Sizes(gate="raw", gates=BF16, form="twice_sigmoid", bias=True),
}
SIZES = {  # of heads, of channels, and of copies
    "k16-8-bytes": (Sizes(head_k=16, group=1, key_heads=2), 4),
    "k80-4-bytes": (Sizes(head_k=80, group=5), 2),
    "k256": (Sizes(head_k=256, group=3, gate="raw", x=F16), 0),
}


@needs_emulator
@pytest.mark.parametrize("sizes", GATES.values(), ids=GATES)
def test_images_are_those_of_float64(sizes):
    prepared(sizes, **make(sizes, 2, 100, decay=0.3))


@needs_emulator
@pytest.mark.parametrize(("sizes", "offset"), SIZES.values(), ids=SIZES)
def test_sizes_and_strides(sizes, offset):
    """q and k are slices of one tensor, `offset` elements from multiples of 16 bytes; gates are slices of another."""
    call = make(sizes, 1, 70)
    wide = torch.cat([torch.full((1, 70, offset), NAN).to(sizes.x), call["q"].flatten(2), call["k"].flatten(2)], 2)
    q, k = wide[..., offset:].split(sizes.key_heads * sizes.head_k, 2)
    g, beta = torch.cat([call["g"], call["beta"]], 2).split(sizes.key_heads * sizes.group, 2)
    shape = (sizes.key_heads, sizes.head_k)
    prepared(sizes, arch=SM80, **call | {"q": q.unflatten(2, shape), "k": k.unflatten(2, shape), "g": g, "beta": beta})


STRONG = {
    "fast": ("log", lambda g: 40 * g),
    "never": ("log", lambda g: torch.where(torch.arange(64)[:, None] == 40, -torch.inf, g)),
    "zero": ("linear", lambda g: torch.where(torch.arange(64)[:, None] % 7 == 3, 0.0, g)),
}


@needs_emulator
@pytest.mark.parametrize(("gate", "change"), STRONG.values(), ids=STRONG)
def test_all_may_be_forgotten(gate, change):
    """f32 sums of logarithms, each at most 128, are accurate to 2^-24 of the largest sum."""
    sizes = Sizes(gate=gate, group=1)
    call = make(sizes, 1, 64)
    prepared(sizes, **call | {"g": change(call["g"])}, coefficients=2.0**-24 * 64 * 40)


@needs_emulator
@pytest.mark.parametrize(("form", "bound"), [("sigmoid", 2.0**-12), ("twice_sigmoid", 2.0**-9)], ids=["to-1", "to-2"])
def test_keys_may_be_alike(form, bound):
    """If each token takes back the write of the token before, the sums of a block are many times larger than their result."""
    sizes = Sizes(head_k=64, group=1, form=form)
    call = make(sizes, 1, 64, decay=0.01, alike=0.9)
    prepared(sizes, **call | {"beta": call["beta"] + 4}, bound=bound)


@needs_emulator
@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_the_inverse_is_what_16_bits_can_hold(alike):
    """Ones on its diagonal, and hardly more error than its rounding makes: of steps of nearly 2, which no decay makes small."""
    sizes = Sizes(head_k=64, group=1)
    call = make(sizes, 64, decay=0.001, alike=alike)
    found, wanted = run(sizes, **call | {"beta": torch.full_like(call["beta"], 1.99)}, cu_seqlens=starts_of((64,), "cpu"))
    T, exact = unpack(found.flatten(), wanted, sizes.x).T[0], wanted.T[0]
    assert (T.diagonal(dim1=1, dim2=2) == 1).all()
    assert (T - exact).norm() <= (1.1 if alike == 0 else 2.0) * (exact.to(sizes.x).double() - exact).norm()


LENGTHS = (0, 1, 15, 64, 0, 65, 63)


@needs_emulator
def test_sequences_have_numbers_of_their_own():
    """The bits are the same alone, and with any NaN in the other sequences and in tokens outside every sequence."""
    sizes = Sizes(group=1)
    call = make(sizes, sum(LENGTHS) + 9)
    starts = starts_of((4, *LENGTHS), "cpu", torch.int64)[1:]
    images = prepared(sizes, **call, cu_seqlens=starts)
    for s in (1, 5, 6):
        first, chunks = int(starts[s]), -(-LENGTHS[s] // CHUNK)
        span, numbers = slice(first, first + LENGTHS[s]), slice(first // CHUNK + s, first // CHUNK + s + chunks)
        alone = prepared(sizes, **{n: t[span][None] if n in SMALL.per_token else t for n, t in call.items()})
        assert torch.equal(alone[:chunks], images[numbers])
        others = {n: torch.full_like(call[n], NAN) for n in ("q", "k", "g", "beta")}
        for name, t in others.items():
            t[span] = call[name][span]
        among, _ = run(sizes, **call | others, cu_seqlens=starts)
        assert torch.equal(among[numbers], images[numbers])


# The computation by chunks that the chain follows.


def by_chunks(views: dict[str, Tensor], images: Images) -> tuple[Tensor, Tensor]:
    """(out, last states) in float64, from images of chunks, as the chain makes them."""
    q, k, v = (views[n].double() for n in ("q", "k", "v"))
    heads, each = v.shape[2], v.shape[2] // q.shape[2]
    out, spans = torch.zeros_like(v), spans_of(views)
    last = torch.zeros(len(spans), heads, v.shape[3], q.shape[3], dtype=torch.float64)
    if "initial_states" in views:
        last.copy_(views["initial_states"])
    for s, (row, begin, end) in enumerate(spans):
        for n, start in enumerate(range(begin, end, CHUNK)):
            at, span = (row * v.shape[1] + begin) // CHUNK + s + n, slice(start, min(start + CHUNK, end))
            for h in range(heads):
                S, (Q, K, U) = last[s, h], (t[row, span, i] for t, i in ((q, h // each), (k, h // each), (v, h)))
                T, P, c_x, c_u, c_o = (t[at, h][: len(U)] for t in (images.T, images.P, images.c_x, images.c_u, images.c_o))
                U = T[:, : len(U)] @ (U + c_x[:, None] * (K @ S.T))
                out[row, span, h] = c_o[:, None] * (Q @ S.T) + P[:, : len(U)] @ U
                last[s, h] = images.decay[at, h] * S + (c_u[:, None] * U).T @ K
    return out, last


@pytest.mark.parametrize("kind", ["random", *OF_HEADS])
def test_chunks_say_what_tokens_do(kind):
    call = prompt_cases.make(SMALL, 150, **ADVERSARIAL.get(kind, {})) | {"cu_seqlens": starts_of((70, 0, 1, 64, 15), "cpu")}
    call |= {"return_final_states": True, "initial_states": states(SMALL, 5)}
    built = SMALL.build(**call)
    out, last = by_chunks(views_of(built), images_of(views_of(built), built.options))
    wanted = exact(SMALL, call)
    assert error(out, wanted["out"]) < 1e-10 and error(last, wanted["final_states"]) < 1e-10


def test_images_are_kept_and_read_again():
    built = SMALL.build(**prompt_cases.make(SMALL, 137), cu_seqlens=starts_of((130, 7), "cpu"))
    wanted = images_of(views_of(built), built.options)
    assert wanted.served.tolist() == [64, 64, 2, 7]
    found = pack(wanted, BF16)
    assert len(found) == ssmgen.chunk_delta_rule_workspace(137, 2, SMALL.heads) == built.operands["workspace"].numel()
    images_are_right(unpack(found, wanted, BF16), wanted, BF16)
    worse = unpack(found, wanted, BF16)
    worse.T[1, 0, 3, 3] += 1
    with pytest.raises(AssertionError):
        images_are_right(worse, wanted, BF16)


MISTAKES = {
    "copies are not waited for": ("  wait_all_copies();\n", "", "copy"),
    "nor by all": ("  wait_all_copies();\n  __syncthreads();\n", "  wait_all_copies();\n", "shared memory"),
    "sums take the place of what is read": ("  meet(1, kThreads);\n", "", "shared memory"),
    "sums are read early": ("  __syncthreads();\n  if (!serves) return;\n", "  if (!serves) return;\n", "shared memory"),
    "blocks are read early": ("  __syncwarp();\n\n  // (I + A) T", "\n  // (I + A) T", "shared memory"),
    "blocks take the place of what is read": ("    __syncwarp();\n    const Place into", "    const Place into", "shared memory"),
    "upstream is not waited for": ("\n  wait_for_upstream();", "\n", "wait"),
    "rows behind the end": ("there ? source : from, there ? kCopy : 0", "source, kCopy", "beyond|outside|operand"),
}


@costly(2)
@needs_emulator
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    old, new, words = MISTAKES[mistake]
    sizes = Sizes(head_k=16, group=2)

    def change(text: str) -> str:
        assert text.count(old) == 1
        return text.replace(old, new)

    call = make(sizes, 40)
    with pytest.raises(EmulatorError, match=words):
        run(sizes, change=change, **call, cu_seqlens=torch.tensor([0, 40], dtype=torch.int32))
