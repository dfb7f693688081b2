"""A temporary real S3 server (moto's) with a proxy that counts requests and injects faults."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

BUCKET = "kernels"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "stand-in", "AWS_SECRET_ACCESS_KEY": "stand-in", "AWS_DEFAULT_REGION": "us-east-1"}
HOP_BY_HOP = {"connection", "content-length", "expect", "keep-alive", "transfer-encoding"}


@dataclass(frozen=True, slots=True)
class Fault:
    """The treatment of a request."""

    delay: float = 0.0
    status: int = 0  # this answer, without asking the server
    code: str = "InternalError"  # S3's name for it
    keep: int | None = None  # bytes of the answer's body that are sent before the connection ends
    altered: Callable[[bytes], bytes] | None = None


@dataclass
class StandIn:
    """An S3 server. `fault` decides the treatment of a request from its method and path."""

    url: str
    endpoint: str
    fault: Callable[[str, str], Fault | None] = lambda method, path: None
    requests: Counter[str] = field(default_factory=Counter)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of processes that are to use it."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint, "AWS_EC2_METADATA_DISABLED": "true"}


def kind(method: str, path: str) -> str:
    """The kind of a request, for printed counts."""
    if "list-type" in path:
        what = "list"
    elif "/index/" in path:
        what = "whole index" if path.endswith("/all") else "index of one"
    else:
        what = next((word for word in ("objects", "claims") if f"/{word}/" in path), "other")
    return f"{method} {what}"


def _handler(stand_in: StandIn, backend: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version: ClassVar[str] = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            stand_in.requests[kind(self.command, self.path)] += 1
            fault = stand_in.fault(self.command, self.path) or Fault()
            time.sleep(fault.delay)
            if fault.status:
                told = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>a fault of the test</Message></Error>".encode()
                return self._answer(fault.status, {"content-type": "application/xml"}, told)
            server = http.client.HTTPConnection("127.0.0.1", backend, timeout=60)
            with contextlib.closing(server):
                headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
                server.request(self.command, self.path, body or None, headers)
                answer = server.getresponse()
                data = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
            if fault.altered:
                data = fault.altered(data)
            self._answer(answer.status, kept, data, fault.keep)

        def _answer(self, status: int, headers: dict[str, str], data: bytes, keep: int | None = None) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[:keep])
            self.close_connection = self.close_connection or keep is not None

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # of clients that have given up
                super().handle()

    return Handler


@contextlib.contextmanager
def s3() -> Iterator[StandIn]:
    """A server with an empty bucket, inside a `with` block. It runs in another process, with that process's memory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        backend = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(backend)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **CREDENTIALS},
    )  # fmt: skip
    stand_in = StandIn(f"s3://{BUCKET}/ssmgen", "")
    proxy: ThreadingHTTPServer | None = None
    try:
        _wait_for(backend, server)
        ThreadingHTTPServer.request_queue_size = 256  # of connections: a fleet's processes come at once
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stand_in, backend))
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        stand_in.endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", backend, timeout=60)) as made:
            made.request("PUT", f"/{BUCKET}")
            if (answer := made.getresponse()).status != 200:
                raise RuntimeError(f"moto's server makes no bucket: {answer.read()!r}")
        yield stand_in
    finally:
        if proxy:
            proxy.shutdown()
            proxy.server_close()
        server.kill()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError("moto's server does not start")
