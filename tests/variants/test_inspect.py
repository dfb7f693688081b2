"""Looking at kernels: summaries of SASS, comparisons, colours in a terminal and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ssmgen
from ssmgen.cache.store import shared_cache
from ssmgen.cli import highlight
from ssmgen.compile.render import render
from ssmgen.spec.kernel import Arch
from ssmgen.variants import inspect

ROOT = Path(ssmgen.__file__).parent.parent
SM90 = Arch.parse("sm_90a")
COPY = inspect.resolve("slot_copy:slot_bytes=4096", None)
WIDE_COPY = inspect.resolve("slot_copy:slot_bytes=8192", None)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
COLOUR = re.compile(r"\x1b\[[39]\dm")  # a pager writes other colours

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @!UP0 LDG.E.U16 R8, desc[UR4][R2.64+0x10] ;
        /*0028*/                   LDG.E.LTC128B R9, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], [R2.64] ;
        /*0040*/                   LDGDEPBAR ;
        /*0050*/              @P1  STG.E.EF.128 desc[UR4][R2.64], R4 ;
        /*0060*/                   STL [R1], R4 ;
        /*0070*/                   LDL.64 R4, [R1] ;
        /*0080*/                   LDS.128 R12, [R9] ;
        /*0090*/                   STS [R9], R12 ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00b0*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*00c0*/                   HFMA2.MMA R3, -RZ, RZ, 0, 0 ;
        /*00d0*/                   SHFL.BFLY PT, R5, R4, 0x8, 0x1f ;
.L_x_1:
        /*00e0*/                   BRA `(.L_x_1) ;
        /*00f0*/                   NOP ;
"""


def test_summary_counts_what_a_listing_holds():
    assert inspect.sass_summary(LISTING) == {
        "instructions": 16,
        "global_loads": 3,
        "global_loads_16_byte": 1,
        "global_stores": 1,
        "global_stores_16_byte": 1,
        "local_memory": 2,
        "shared_loads": 1,
        "shared_stores": 1,
        "shuffles": 1,
        "barriers": 1,
        "tensor_core": 1,
    }


def test_stats_of_a_copy():
    """A thread copies 16 bytes: one load and one store of that width, and no more registers than let an SM be full."""
    stats = inspect.stats(COPY, SM90, shared_cache())
    assert (stats["global_loads_16_byte"], stats["global_stores_16_byte"], stats["local_memory"]) == (1, 1, 0)
    assert (stats["threads"], stats["blocks_per_sm"], stats["warps_per_sm"], stats["max_warps_per_sm"]) == (128, 16, 64, 64)
    assert stats["occupancy_limit"] == "warps" and stats["spill_stores"] == stats["spill_loads"] == stats["shared"] == 0


def test_stats_say_what_is_missing(monkeypatch):
    def missing() -> str:
        raise inspect.DisassemblerMissingError

    monkeypatch.setattr(inspect, "_nvdisasm", missing)
    stats = inspect.stats(COPY, SM90, shared_cache())
    assert "pip install 'ssmgen[sass]'" in stats["sass"] and "global_loads" not in stats and stats["registers"] > 0


def test_a_comparison_leaves_out_names_and_addresses():
    moved = LISTING.replace("/*00", "/*01")
    assert moved != LISTING and inspect.comparable(moved, "sass", COPY) == inspect.comparable(LISTING, "sass", COPY)
    ptx = inspect.text_of(COPY, "ptx", SM90, shared_cache())
    renamed = ptx.replace(COPY.name, WIDE_COPY.name)
    assert renamed != ptx and inspect.comparable(renamed, "ptx", WIDE_COPY) == inspect.comparable(ptx, "ptx", COPY)


@pytest.mark.parametrize("form", ["cu", "ptx", "sass"])
def test_colours_change_no_character(form):
    text = inspect.text_of(COPY, form, SM90, shared_cache())
    coloured = highlight.for_terminal(text, form)
    assert coloured != text and ESCAPE.sub("", coloured).rstrip() == text.rstrip()


def test_every_character_of_sass_is_known():
    lexer = highlight.LEXERS["sass"]()
    found = inspect.text_of(inspect.resolve("ssu_h128p64n128g8_bf16_l16v8i4t64x256_pf264", None), "sass", SM90, shared_cache())
    assert not [text for kind, text in lexer.get_tokens(found + LISTING) if kind is highlight.Error]


def in_terminal(*args: str, **env: str) -> str:
    """The output of a command on a terminal of 24 lines. A pager, which waits for a key, is told to quit."""
    ours, theirs = pty.openpty()
    told = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "LESS", "PAGER")}
    told |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"} | env
    command = [sys.executable, "-m", "ssmgen", *args]
    # It runs in a separate session; otherwise the pager would read from the tests' terminal.
    done = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=told, start_new_session=True)
    os.close(theirs)
    written = b""
    while True:
        if not select.select([ours], [], [], 1.0)[0]:
            os.write(ours, b"q")
            continue
        try:
            read = os.read(ours, 65536)
        except OSError:  # Linux reports in this way that the other side is closed
            break
        written += read
    os.close(ours)
    assert done.wait(60) in (0, 1), written.decode()
    return written.decode()


@pytest.mark.matrix
def test_terminals_get_colours_and_pipes_do_not():
    args = ("diff", str(COPY), str(WIDE_COPY))
    assert "\x1b[32m" in in_terminal(*args)
    assert not COLOUR.search(in_terminal(*args, NO_COLOR="1"))
    piped = subprocess.run([sys.executable, "-m", "ssmgen", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    assert piped.returncode == 1 and piped.stdout.startswith("--- ") and not ESCAPE.search(piped.stdout)


@pytest.mark.matrix
def test_terminals_without_colours_get_none():
    assert not COLOUR.search(in_terminal("diff", str(COPY), str(WIDE_COPY), TERM="dumb"))


@pytest.mark.matrix
@pytest.mark.skipif(not shutil.which("less"), reason="needs less")
def test_the_pager_keeps_colours():
    name = str(COPY)
    assert render(COPY, SM90).count("\n") > 24
    assert "\x1b[35m" in in_terminal("show", name, PAGER="less") and "\x1b[35m" not in in_terminal("show", name, PAGER="less", NO_COLOR="1")
