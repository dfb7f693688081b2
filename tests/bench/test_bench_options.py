"""Options of `ssmgen bench OPERATOR`: which ones do not apply, and what reaches the benchmark."""

from __future__ import annotations

from typing import Any

import pytest
from bench_cases import options_of, usage_error

from ssmgen.families.causal_conv1d.bench import Form as ConvForm
from ssmgen.families.causal_conv1d.spec import ConvLayout
from ssmgen.families.causal_conv1d_update.bench import Innermost
from ssmgen.families.combine_splits.bench import Form as CombineForm
from ssmgen.families.gated_rms_norm.bench import Form as NormForm
from ssmgen.spec.kernel import DType, PoolMode

# {command: words of the usage error}
WRONG = {
    "selective_state_update --tokens 2 --model mamba-130m": "; expected Mamba-2 models for several tokens",
    "selective_state_update --intermediates": "--intermediates is given for one token; expected --tokens of 2 or more",
    "selective_state_update --pool-mode split --no-intermediates": "No such option",
    "kda --model mamba-130m": "No such option",
    "rwkv7 --key-heads 4": "--key-heads does not apply to rwkv7",
    "gla --heads 6 --key-heads 4": "--heads is 6; expected a multiple of 4 key heads",
    "gated_delta_rule --intermediates": "--intermediates is given for one token; expected --tokens of 2 or more",
    "gla --ring": "--ring does not apply to gla, which has no ring",
    "gated_delta_rule --intermediates --tokens 2 --pool-mode split": "--intermediates is given with --pool-mode split",
    "gated_delta_rule --state f8": "'f8' is not one of",
    "dplr_delta_rule": "No such command",
    "combine_splits --shape 1,2,3": "is wrong; expected two positive numbers such as",
    "combine_splits --shape 0,2": "is wrong; expected two positive numbers such as",
    "combine_splits --form even": "'even' is not one of",
    "combine_splits --d-v 2048": "2048 is not in the range",
    "combine_splits --batch 2": "No such option",
    "causal_conv1d --shape 1,2": "is wrong; expected three positive numbers such as",
    "causal_conv1d --shape 1,0,2": "is wrong; expected three positive numbers such as",
    "causal_conv1d --shape 1,x,2": "is wrong; expected three positive numbers such as",
    "causal_conv1d --form even": "'even' is not one of",
    "causal_conv1d --width 9": "9 is not in the range",
    "causal_conv1d --batch 2": "No such option",
    "causal_conv1d_update --layout channel_last": "No such option",
    "causal_conv1d_update --state-layout any": "'any' is not one of",
    "mamba2_layer --model qwen3.5-35b-a3b": "--model is qwen3.5-35b-a3b; expected models with layers that mamba2_layer computes",
    "gdn_layer --state f8": "'f8' is not one of",
    "gdn_layer --batch 0": "0 is not in the range",
    "mamba2_layer --tokens 9": "; expected at most 8 for a layer",
    "mamba2_layer --intermediates": "--intermediates is given for one token; expected --tokens of 2 or more",
    "gdn_layer --slot-per-token": "--slot-per-token is given for one token; expected --tokens of 2 or more",
    "kda_layer --slot-per-token --intermediates --tokens 2": "--slot-per-token and --intermediates are both given; expected one",
    "mamba2_layer --state-layout kv": "No such option",
    "gated_rms_norm --shape 1,2,3": "is wrong; expected two positive numbers such as",
    "gated_rms_norm --form gla": "'gla' is not one of",
    "gated_rms_norm --rows 0": "0 is not in the range",
    "gated_rms_norm --batch 2": "No such option",
    "replay_selective_state_update --shape 1,2,3": "is wrong; expected four positive numbers such as",
    "replay_selective_state_update --shape 6,64,128,4": "--shape has 6 heads; expected a multiple of its 4 groups",
    "replay_selective_state_update --accepted 7": "7 accepted of a step of 6 tokens",
    "replay_selective_state_update --window 8": "--accepted 3 and --tokens 6 exceed a window of",
    "replay_selective_state_update --window 16 --accepted 17": "17 accepted tokens in a window of 16",
    "replay_selective_state_update --window 4 --accepted 1": "--tokens is 6 with a window of",
    "replay_selective_state_update --window 0 --writing 0.5": "--writing is given for a history of one step; expected a ring",
    "replay_selective_state_update --one-kernel --internal-pdl": "--internal-pdl is given for one kernel; expected --two-kernels",
    "replay_selective_state_update --rounding --state f32": "--rounding is given with --state f32; expected a shorter state",
    "replay_selective_state_update --tokens 33": "33 is not in the range",
    "replay_selective_state_update --writing 2": "2.0 is not in the range",
    "replay_selective_state_update --precision tf32": "'tf32' is not one of",
    "gated_delta_rule --tree": "--tree is given for one token; expected --tokens of 2 or more",
    "kda --tree --tokens 4 --ring": "--tree is given without --intermediates; expected both",
    "gated_delta_rule --tree --tokens 4 --no-intermediates": "--tree is given without --intermediates; expected both",
    "gated_delta_rule --tree --tokens 4 --pool-mode split": "--tree is given without --intermediates; expected both",
    "causal_conv1d_update --tree --tokens 1": "--tree is given for one token; expected --tokens of 2 or more",
}


@pytest.mark.parametrize("command", WRONG)
def test_options_that_do_not_apply_are_usage_errors(command):
    op, *args = command.split()
    assert WRONG[command] in usage_error(op, args)


REPLAY: dict[str, Any] = {"shape": (16, 64, 128, 1), "rounding": False, "precision": "f32", "with_conv1d": False}
REPLAY |= dict.fromkeys(("states", "batches", "tokens", "accepted", "windows", "writing"), ())
REPLAY |= dict.fromkeys(("two_kernels", "external_pdl", "internal_pdl"))
# {command: arguments of the benchmark's `run`}
REACHED: dict[str, dict[str, Any]] = {
    "combine_splits --shape 1,2 --d-v 64 --form pair --dtype f16 --hot": {
        "shapes": ((1, 2),), "widths": (64,), "forms": (CombineForm.PAIR,), "dtypes": (DType.F16,), "hot": True,
    },
    "gated_rms_norm --shape 1,64 --form kda --dtype f16 --rows 7 --hot": {
        "shapes": ((1, 64),), "forms": (NormForm.KDA,), "dtypes": (DType.F16,), "rows": (7,), "hot": True,
    },
    "causal_conv1d --shape 1,2,3 --shape 4,5,6 --layout channel_last --form odd --dtype f32": {
        "shapes": ((1, 2, 3), (4, 5, 6)), "layouts": (ConvLayout.LAST,), "forms": (ConvForm.ODD,), "width": 4, "dtype": DType.F32,
    },
    "causal_conv1d_update --batch 2 --tokens 4 --state-layout channels --dim 64 --width 3": {
        "batches": (2,), "tokens": (4,), "layouts": (Innermost.CHANNELS,), "dim": 64, "width": 3, "dtype": DType.BF16, "tree": False,
    },
    "mamba2_layer --model nemotron-h-8b --state f16 --batch 7 --tp 2 --tokens 4": {
        "names": ("nemotron-h-8b",), "states": (DType.F16,), "batches": (7,), "tp": 2, "tokens": (4,), "intermediates": None,
        "by_slot": False,
    },
    "replay_selective_state_update": REPLAY,
    "replay_selective_state_update --state f16 --state bf16 --batch 2 --tokens 4 --accepted 1 --accepted 2 --window 9 --writing 1 "
    "--shape 8,32,64,2 --rounding --precision bf16 --with-conv1d --two-kernels --no-external-pdl --internal-pdl": {
        "states": (DType.F16, DType.BF16), "batches": (2,), "tokens": (4,), "accepted": (1, 2), "windows": (9,), "writing": (1.0,),
        "shape": (8, 32, 64, 2), "rounding": True, "precision": "bf16", "with_conv1d": True, "two_kernels": True,
        "external_pdl": False, "internal_pdl": True,
    },
    "replay_selective_state_update --one-kernel": REPLAY | {"two_kernels": False},
}  # fmt: skip


@pytest.mark.parametrize("command", REACHED)
def test_options_reach_the_benchmark(command):
    assert options_of(*command.split()) == REACHED[command]


@pytest.mark.parametrize(
    ("op", "own", "wanted"),
    [
        ("gated_delta_rule", ["--pool-mode", "single", "--pool-mode", "split"], {"pools": tuple(PoolMode)}),
        ("selective_state_update", ["--model", "mamba2-130m"], {"names": ("mamba2-130m",)}),
    ],
)
def test_options_of_decode_steps_reach_the_benchmark(op, own, wanted):
    seen = options_of(op, "--batch", "2", "--batch", "4", "--state", "f32", "--tokens", "4", *own)
    assert seen.items() >= ({"batches": (2, 4), "states": (DType.F32,), "tokens": (4,)} | wanted).items()


def test_the_default_size_of_a_convolution_s_steps():
    assert options_of("causal_conv1d_update")["dim"] == 12288
