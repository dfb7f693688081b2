"""The benchmark of decode_attention: a rotation of whole heads, all tensors of one dtype, all sequences of one length.

Products and caches rotate over enough sets to exceed 640 MB; cos, sin and the position do not. TB/s counts the keys and values that the
sequences have, read once, and q, k, v and out. The ceiling is torch's out-of-place multiplication of the keys, which writes the values: the
same bytes without q, k, v and out, half of them written.

The peer is PyTorch: three operations each for the rotation of q and of k, two index_copy_ into the caches, then
scaled_dot_product_attention over all of a cache with a mask, as transformers' StaticCache needs it. Caches are as long as the
sequences. Host times are eager calls with prepared arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import click
import torch

import ssmgen

from ...bench import axes
from ...bench.axes import At
from ...bench.case import GATE, HOST_BATCH, Call, Case, Launch, kept, sets_of, some_of, taken
from ...bench.engine import Bench, Values
from ...calls.checks import TORCH_DTYPES
from ...select.models import Model
from ...spec.kernel import DType

SHAPES = [(12, 2, 128), (32, 8, 128), (16, 4, 256)]  # Falcon-H1-7B, Nemotron-H-8B, Qwen3.5-9B
LENGTHS = (256, 4096)
CHECKED = 4  # sequences that the correctness gate compares
BY_ROW = ("q", "k", "v", "key_cache", "value_cache", "position", "out")


def inputs(at: At, device: torch.device) -> Case:
    (q_heads, kv_heads, d), B, keys, dtype = at.shape, at.batch, at.keys, TORCH_DTYPES[at.dtype]
    moved = dtype.itemsize * B * d * (2 * keys * kv_heads + 2 * q_heads + 2 * kv_heads)
    sets = sets_of(moved)
    rows = torch.randn(sets, B, q_heads + 2 * kv_heads, d, device=device, dtype=dtype)
    q, k, v = rows.split([q_heads, kv_heads, kv_heads], dim=2)
    caches = torch.randn(2, sets, B, kv_heads, keys, d, device=device, dtype=dtype)
    angle = torch.rand(1, d // 2, device=device).repeat(1, 2)
    some = some_of(B, CHECKED, device)

    def part(call: Call) -> Call:
        return {**call, **{name: taken(call[name], some) for name in BY_ROW}}

    return Case(
        function=ssmgen.decode_attention,
        sets=sets,
        bytes=moved,
        rotating={"q": q, "k": k, "v": v, "key_cache": caches[0], "value_cache": caches[1], "out": torch.empty_like(q)},
        shared={
            "position": torch.full((B,), keys - 1, device=device),
            "cos": angle.cos().to(dtype),
            "sin": angle.sin().to(dtype),
        },
        part=part,
        beside={"mul": lambda i: torch.mul(caches[0, i], 1.0, out=caches[1, i])},
        ratios=("mul",),
        limits={"out": 2 * GATE[dtype]},  # the new key and value are rounded, too
        peer_limits={"out": 4 * GATE[dtype]},  # and so are the products of its rotation
        host=B <= HOST_BATCH,
    )


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def torch_chain(case: Case) -> Launch:
    """PyTorch's kernels, one after the other."""
    mask = torch.ones(1, 1, 1, case.at.keys, dtype=torch.bool, device=case.device)

    def run(i: int) -> torch.Tensor:
        call = case.arguments(i)
        cos, sin, where = call["cos"], call["sin"], call["position"][:1]
        keys, values = call["key_cache"], call["value_cache"]
        q, k = (rotated(call[name], cos, sin)[:, :, None] for name in ("q", "k"))
        keys.index_copy_(2, where, k)
        values.index_copy_(2, where, call["v"][:, :, None])
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]

    return kept(run)


def words(row: Mapping[str, Any]) -> str:
    return f"{' x '.join(map(str, row['shape']))}, {row['keys']} keys, {row['dtype']}"


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """The shapes above: models.toml has no attention."""
    return [{"shape": shape, "batch": batch, "keys": keys} for shape, batch, keys in product(SHAPES, batches, LENGTHS)]


BENCH = Bench(
    op="decode_attention",
    method=__doc__,
    axes=(
        axes.several(
            "--shape", "shapes", axes.Shape("Q,KV,D", "32,8,128"), SHAPES, "Query heads, key heads and their channels; may repeat."
        ),
        axes.several("--dtype", "dtypes", axes.Choice(DType), (DType.BF16,), "May repeat. Default: bf16."),
        axes.several("--keys", "keys", click.IntRange(1), LENGTHS, "Keys of a sequence, with the new one; may repeat. Default: 256, 4096."),
        axes.batches(1, 8),
    ),
    inputs=inputs,
    words=words,
    peers={"torch.chain": torch_chain},
    quick={"shapes": SHAPES[:1], "keys": LENGTHS[:1]},
    tuned=tuned,
    label=lambda at: f"decode_attention, {at.shape} batch {at.batch} keys {at.keys}",
)  # fmt: skip
