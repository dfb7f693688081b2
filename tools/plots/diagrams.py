"""Drawings without measurements: the pipeline, the chunk algorithm, the lane map of a decode kernel."""

from __future__ import annotations

from .svg import WIDTH, arrow, drawing, line, rectangle, text


def pipeline() -> str:
    """The stages between a call and a launch, and the results that each stage keeps."""
    stages = (
        ("problem", "shapes, dtypes, alignment", "box"), ("spec", "lanes, vector width, tile, stages", "soft"),
        ("source", "CUDA, rendered by Jinja", "soft"), ("cubin", "compiled by NVRTC in 0.1 to 2.1 s", "soft"),
        ("kernel", "loaded on the GPU", "warm"), ("plan", "arguments of a repeated call", "warm"),
        ("launch", "on the current stream", "warm"),
    )  # fmt: skip
    parts = [text(16, 26, "From a call to a launch", size=15, kind="own")]
    for i, (name, told, kind) in enumerate(stages):
        y = 42 + 42 * i
        parts += [rectangle(16, y, 110, 30, kind, 5), text(71, y + 20, name, "middle", size=14), text(140, y + 20, told, kind="quiet")]
        if i:
            parts.append(arrow(71, y - 12, 71, y - 1))
    parts += [
        line(372, 44, 372, 198),
        text(382, 118, "works without a GPU", size=12.5),
        text(382, 136, "cubins stay in the cache", kind="quiet", size=12),
    ]
    parts += [
        line(372, 212, 372, 322),
        text(382, 262, "needs the GPU", size=12.5),
        text(382, 280, "a repeated call starts at", kind="quiet", size=12),
    ]
    parts.append(text(382, 296, "its plan", kind="quiet", size=12))
    return drawing(WIDTH, 346, "From a call to a launch", parts)


def chunks() -> str:
    """A prompt in chunks of 64 tokens: products within a chunk, one state from chunk to chunk."""
    parts = [text(16, 26, "A prompt as chunks of 64 tokens", size=15, kind="own")]
    wide, gap = 112.0, 20.0
    for i in range(4):
        x = 24 + i * (wide + gap)
        parts += [
            rectangle(x, 44, wide, 26, "box", 4), text(x + wide / 2, 62, f"tokens {64 * i} to {64 * i + 63}", "middle", size=11.5),
            rectangle(x, 92, wide, 58, "cool", 4), text(x + wide / 2, 115, "within the chunk:", "middle", size=11.5),
            text(x + wide / 2, 133, "mask(q kᵀ) v", "middle", size=11.5),
            rectangle(x, 176, wide, 58, "soft", 4), text(x + wide / 2, 199, "scan: q S, then", "middle", size=11.5),
            text(x + wide / 2, 217, "S ← decay S + k vᵀ", "middle", size=11),
            rectangle(x, 258, wide, 26, "warm", 4), text(x + wide / 2, 276, "output", "middle", size=11.5),
            arrow(x + wide / 2, 70, x + wide / 2, 91), arrow(x + wide / 2, 150, x + wide / 2, 175),
            arrow(x + wide / 2, 234, x + wide / 2, 257),
        ]  # fmt: skip
        if i < 3:
            parts.append(arrow(x + wide, 205, x + wide + gap - 1, 205))
    parts += [text(16, 310, "Violet: all chunks at once, on the tensor cores. Green: one chunk after another;", kind="quiet", size=12)]
    parts += [text(16, 327, "the state S stays in registers. Long prompts of few heads are split into segments.", kind="quiet", size=12)]
    return drawing(WIDTH, 342, "A prompt as chunks of 64 tokens", parts)


def lanes() -> str:
    """One warp of a decode kernel: rows of 128 bf16 values, 16 lanes to a row, 8 values to a lane, 4 rows in flight."""
    parts = [text(16, 26, "One warp of a decode step: d_state 128, bf16", size=15, kind="own")]
    left, cell = 66.0, 13.4
    parts.append(text(left + 8 * cell, 50, "lanes 0 to 15", "middle", "quiet", 12))
    parts.append(text(left + 24.5 * cell, 50, "lanes 16 to 31", "middle", "quiet", 12))
    parts.append(text(left + 32.5 * cell + 4, 50, "rows", "start", "quiet", 12))
    for row in range(4):
        y = 60 + 34 * row
        parts.append(text(16, y + 17, f"load {row}", kind="quiet", size=12))
        for lane in range(32):
            x = left + cell * (lane + (0.5 if lane > 15 else 0))
            parts.append(rectangle(x, y, cell - 2, 24, "soft" if lane < 16 else "cool", 2))
        parts += [text(left + 32.5 * cell + 4, y + 16, f"{2 * row}, {2 * row + 1}", "start", "quiet", 12)]
    told = (
        "A cell is one lane's 16-byte load: 8 values of a row of the state.",
        "16 lanes own a row (lanes=16, vec=8); a warp loads 2 rows at a time and has 4 such",
        "loads in flight (ilp=4). Each lane updates its values in registers, the 16 lanes sum",
        "C · S with shuffles, and the new state goes back to the same addresses.",
    )
    parts += [text(16, 216 + 18 * i, words, kind="quiet", size=12) for i, words in enumerate(told)]
    return drawing(WIDTH, 288, "One warp of a decode step", parts)


DRAWINGS = {"pipeline": pipeline, "chunks": chunks, "lanes": lanes}
