"""The matrices of cases for causal_conv1d and causal_conv1d_update."""

from __future__ import annotations

from dataclasses import replace

from conv_cases import I32, I64, KINDS, PACKED, POOL, RING, ROLL, SHORT, STATEFUL, Case, UpdateCase
from ssu_cases import BF16, F16, F32
from varying import vary


def matrix() -> list[Case]:
    kinds = list(KINDS.values())
    first, first_slice, last, odd = (KINDS[k] for k in ("first", "first-slice", "last", "last-odd"))
    types = [(F32, F32, F32), (F16, F16, F16), (BF16, F32, F32), (F16, F32, BF16), (F32, BF16, None), (BF16, F16, None)]
    names = {F32: "f32", F16: "f16", BF16: "bf16", None: "none"}
    packed = {"lengths": PACKED, **POOL}
    short = {"lengths": SHORT, **POOL}
    many = (5, 1, 0, 2)
    cases = [
        *kinds,
        *[replace(c, id=f"{k}-w{w}") for k, c in KINDS.items() if k != "last-any" for w in range(1, 9) if w != 4],
        *[replace(c, id=f"{c.id}-{'-'.join(names[n] for n in t)}", x=t[0], weight=t[1], bias=t[2]) for c in kinds[::2] for t in types],
        *[r for c in kinds for r in vary(c, bare={"bias": None, "silu": False}, states=STATEFUL, seq_idx={"seq_idx": True, "x": F32})],
        *[r for c in kinds for r in vary(c, ids_states={"seq_idx": True, **STATEFUL, "states": "windows", "width": 3})],
        *[replace(c, id=f"{c.id}-packed", **(packed if "first" in c.id else short)) for c in kinds],
        *[replace(c, id=f"{c.id}-packed-states", lengths=SHORT, **STATEFUL, starts=I64, three=True, x=F32, width=3) for c in kinds],
        *[replace(c, id=f"{c.id}-pool", **POOL, batch=5, length=9, states="windows") for c in kinds[::3]],
        *[replace(c, id=f"{c.id}-n{n}", length=n, **STATEFUL) for c in kinds for n in (1, 2)],
        *[
            replace(c, id=f"{c.id}-{len(n)}-sequences", lengths=n, dim=8, **POOL)
            for c in (first_slice, last)
            for n in (many * 17, many * 260)
        ],
        *vary(first, in_place_states={"initial": True, "final": "in_place"}, wild={"scale": 40.0}, taps_odd={"taps": "odd"}),
        *vary(last, in_place_states={"initial": True, "final": "in_place"}, wild={"scale": 40.0}, taps_odd={"taps": "odd"}),
        *vary(first, taps_across={"taps": "transposed"}, out_shifted={"out": "first_slice"}, out_last={"out": "last"}, dim1={"dim": 1}),
        *vary(first, b0_final={"final": "new"}, b1_initial={"initial": True, "states": "gaps"}, pad5={**packed, "pad_slot_id": 5}),
        *vary(first_slice, out_aligned={"out": "first"}, out_dense={"out": "first_dense", **STATEFUL}, f32_w8={"x": F32, "width": 8}),
        *vary(last, taps_across={"taps": "transposed"}, out_odd={"out": "last_odd"}, out_first={"out": "first"}, dim1={"dim": 1}),
        *vary(last, b0_final={"final": "new"}, b1_initial={"initial": True, "states": "gaps"}, pad5={**short, "pad_slot_id": 5}),
        *vary(
            last, pool_fresh={"lengths": SHORT, "pool": True, "index": I32}, pool_order={"lengths": SHORT, "pool": True, "started": True}
        ),
        *vary(odd, pool_gaps={**short, "states": "gaps", "starts": I64, "index": I32}, w8_packed={**short, "width": 8, "x": F32}),
        *vary(first, packed_gaps={**packed, "states": "gaps", "starts": I64, "index": I32}, packed_w8={**packed, "width": 8, "x": F32}),
        *vary(first, none={"length": 0}, packed_none={"lengths": (0, 0, 0), **POOL}, packed_none_final={"lengths": (0, 0), **STATEFUL}),
        *vary(last, none_final={"length": 0, **STATEFUL}, none_pool={"length": 0, **POOL}),
    ]
    assert len({c.id for c in cases}) == len(cases)
    return cases


def update_matrix() -> list[UpdateCase]:
    shift, roll, ring = UpdateCase("shift"), UpdateCase("roll", ROLL, tokens=4), UpdateCase("ring", RING, state="channels", extra=3)
    channels = replace(shift, id="shift-channels", state="channels")
    plain = replace(shift, id="shift-any", state="any", dim=37, layout="odd")
    types = [(F32, F32, F32), (F16, F16, F16), (BF16, F32, F32), (F16, BF16, F32), (F32, F16, None), (BF16, BF16, None)]
    packed = {"lengths": (3, 1, 0, 9, 2, 4, 6), "tokens": None}
    saved = {"windows": {"saved": "windows"}, "channels": {"saved": "channels"}, "odd": {"saved": "odd", "dim": 37}}
    indexed = {"saved_index": I32, "saved": "windows", "batch": 8}
    bases = [shift, channels, plain]
    anywhere = {"state": "any", "dim": 37, "layout": "odd", "taps": "odd"}
    cases = [
        *[replace(shift, id=f"shift-t{t}", tokens=t) for t in (*range(1, 17), 20)],
        *[replace(channels, id=f"shift-channels-t{t}", tokens=t, extra=t % 4) for t in (1, 2, 3, 5, 9, 16, 20)],
        *[replace(c, id=f"{c.id}-w{w}", width=w) for c in bases for w in (2, 3, 5, 6, 7, 8)],
        *[replace(plain, id=f"shift-any-t{t}", tokens=t, extra=t % 3) for t in (1, 3, 20)],
        *[replace(c, id=f"{c.id}-types-{i}", x=t[0], weight=t[1], bias=t[2]) for c in bases for i, t in enumerate(types)],
        *[replace(c, id=f"{c.id}-longer", extra=5, tokens=3) for c in bases],
        *[replace(c, id=f"{c.id}-longer-in-place", extra=2, tokens=4, in_place=True) for c in bases],
        *[replace(shift, id=f"shift-dim{d}", dim=d) for d in (1, 2, 4, 100, 516, 2064)],
        *vary(shift, bare={"bias": None, "silu": False}, odd_x={"layout": "odd", "tokens": 2}, x_tokens={"layout": "windows", "tokens": 3}),
        *vary(shift, in_place={"in_place": True}, no_pool={"index": None}, i64_pad3={"index": I64, "pad_slot_id": 3, "batch": 9}),
        *vary(shift, batch130={"batch": 130}, batch130_odd={"batch": 131, **anywhere}, batch1={"batch": 1}, taps={"taps": "transposed"}),
        *vary(
            shift, state_odd={"state": "channels_odd"}, out_odd={"out": "odd"}, in_place_t3={"in_place": True, "tokens": 3, "layout": "odd"}
        ),
        *[replace(roll, id=f"roll-t{t}", tokens=t) for t in (None, 1, 2, 3, 5, 8, 16, 20)],
        *[replace(roll, id=f"roll-w{w}", width=w, x=x) for w, x in ((2, F32), (3, F16), (5, BF16), (8, F32))],
        *vary(roll, i64={"position": I64}, longer={"extra": 3}, channels={"state": "channels"}, any=anywhere, in_place={"in_place": True}),
        *vary(roll, channels_t16={"state": "channels", "tokens": 16, "extra": 1}, t20_any={**anywhere, "tokens": 20, "width": 2}),
        *vary(roll, packed={**packed}, packed_any={**packed, **anywhere, "position": I64}, saved=saved["windows"]),
        *vary(
            ring, t1={}, t4={"tokens": 4}, t16={"tokens": 16}, t20={"tokens": 20}, least={"extra": 0}, i64={"position": I64, "tokens": 2}
        ),
        *vary(
            ring, windows={"state": "windows", "tokens": 3}, any={**anywhere, "tokens": 3}, packed=packed, packed_any={**packed, **anywhere}
        ),
        *vary(
            ring, w8={"width": 8, "x": F32, "tokens": 5}, w2={"width": 2, "x": F16, "extra": 0, "tokens": 5}, in_place={"in_place": True}
        ),
        *vary(shift, packed=packed, packed_i64={**packed, "starts": I64, "x": F32}, packed_channels={**packed, "state": "channels"}),
        *vary(shift, packed_any={**packed, **anywhere, "extra": 3}, packed_in_place={**packed, "in_place": True, "extra": 2}),
        *[replace(shift, id=f"shift-saved-{k}", tokens=3, **s) for k, s in saved.items()],
        *[replace(shift, id=f"shift-saved-{k}-w2-f32", width=2, x=F32, **s) for k, s in saved.items()],
        *vary(shift, saved_rows={**indexed, "tokens": 4}, saved_rows_i64={**indexed, "saved_index": I64, "saved": "odd", "dim": 37}),
        *vary(shift, saved_packed={**packed, **indexed, "saved_tokens": -3}, saved_wide={**indexed, "tokens": 2, "saved_tokens": 3}),
        *vary(ring, saved={"saved": "channels", "tokens": 3}, saved_t20={"saved": "windows", "tokens": 20}),
    ]
    wide = {"saved": "windows", "batch": 8}
    cases += [
        *[replace(c, id=f"{c.id}-tree", parents=I32, tokens=7, saved="odd" if c is plain else "windows") for c in bases],
        *[
            replace(shift, id=f"shift-tree-w{w}", parents=I64, width=w, tokens=t, x=x)
            for w, t, x in ((2, 4, F32), (3, 2, F16), (8, 5, BF16))
        ],
        *vary(shift, tree_longer={"parents": I32, "extra": 1, "tokens": 3, **wide}, tree_t20={"parents": I32, "tokens": 20, **wide}),
        *vary(
            shift,
            tree_packed={**packed, "parents": I64, **indexed, "saved_tokens": -3},
            tree_one={**packed, "parents": I32, "lengths": (1,)},
        ),
        *vary(
            shift,
            children={"children": I32, "tokens": 4, **wide},
            children_t20={"children": I64, "tokens": 20},
            tree_t1={"children": I64, "tokens": 1},
        ),
        *vary(plain, children={"children": I64, "tokens": 9, "saved": "odd"}),
        *vary(roll, tree={"parents": I32}, tree_t9={"parents": I32, "tokens": 9, "state": "channels", "saved": "channels"}),
        *vary(ring, tree={"parents": I32, "tokens": 6}, tree_packed={**packed, **anywhere, "parents": I32}),
    ]
    assert len({c.id for c in cases}) == len(cases)
    return cases
