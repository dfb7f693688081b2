"""`python -m tools.fleet start`: cold processes that start at once, with a real S3 server. `simulate`: a model of a thousand. `share`: the
cost of sharing work."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path

from ssmgen.cache.exchange import push
from ssmgen.cache.remote import SharedStore
from ssmgen.settings import Remote

from .crew import shared
from .processes import remote_of, start_all, summary
from .simulation import simulate
from .stand_in import s3


def _requests(counts: Counter[str]) -> str:
    return f"  {counts.total()} requests: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())


def starts(given: argparse.Namespace) -> None:
    """Three times: without a store, with an empty store that is written, and with the resulting entries in one index."""
    print(f"{given.processes} processes, each as a machine of its own; {given.kernels} kernels; compiling is a sleep of {given.compile} s")
    with tempfile.TemporaryDirectory() as folder, s3() as store:
        root, more = Path(folder), {**store.variables, "SSMGEN_CACHE_REMOTE_SECONDS": "60"}
        for name, remote in {
            "no store": {},
            "empty store, written back": remote_of(store.url, root, writes=True) | more,
            "what they sent, pushed": remote_of(store.url, root, writes=False) | more,
        }.items():
            if name.startswith("what"):
                os.environ.update(store.variables)
                described = Remote(store.url, signing_key=root / "key.pem")
                print(f"  ssmgen cache push: {push(SharedStore(described), []).listed} kernels in one index")
            store.requests.clear()
            done = start_all(given.processes, given.kernels, given.compile, root / name, remote)
            print(f"{name:28}{summary(done)}")
            if remote:
                print(_requests(store.requests), flush=True)
            for text in {text for one in done for text in one.warnings}:
                print(f"  warned: {text}")


def model(given: argparse.Namespace) -> None:
    """The same three, of threads; sleeps for compiling and for the store."""
    print(
        f"{given.starts} cold starts at once, modelled (threads, and sleeps of {given.compile} s for compiling and {given.delay} s for a "
        f"request); {given.kernels} kernels"
    )
    with tempfile.TemporaryDirectory() as folder:
        for store in ("none", "empty", "full"):
            done, modelled = simulate(given.starts, given.kernels, given.compile, given.delay, Path(folder), store)
            print(f"{store:8}{summary(done)}")
            if store != "none":
                print(_requests(modelled.requests), flush=True)


def share(given: argparse.Namespace) -> None:
    """Processes that torchrun starts and that share sleeps."""
    for processes in given.processes:
        print(shared(given.items, given.seconds, processes), end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.fleet", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, work in ("start", starts), ("simulate", model):
        command = commands.add_parser(name, help=work.__doc__)
        command.set_defaults(work=work)
        command.add_argument("--kernels", type=int, default=20)
        command.add_argument("--compile", type=float, default=0.8, help="Seconds per kernel.")
        if work is starts:
            command.add_argument("--processes", type=int, default=64)
        else:
            command.add_argument("--starts", type=int, default=1000)
            command.add_argument("--delay", type=float, default=0.02, help="Seconds per request.")
    sharing = commands.add_parser("share", help=share.__doc__)
    sharing.set_defaults(work=share)
    sharing.add_argument("--items", type=int, default=200)
    sharing.add_argument("--seconds", type=float, default=0.25, help="Of each item.")
    sharing.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":
    main()
