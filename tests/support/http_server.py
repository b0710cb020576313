"""A server of ranges over HTTP on a free port of this machine, that can be told to fail as real ones do."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal[
    "", "stall", "truncate", "reset", "long", "short", "busy", "no-ranges", "forbidden", "shifted"
]


@dataclass
class Site:
    """What is served, and how.

    Args:
        url: Of the root.
        files: Content by path, which begins with a slash.
        tags: ETag by path; none by default.
        faults: The next answers of a path, "" for a good one; afterwards all are good.
        always: The fault of every answer of a path that is not in ``faults`` any more.
        cut: Bytes of the body before a fault.
        requests: (path, first byte asked for) of all requests so far.
        num_bytes: Payload bytes sent so far.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    cut: int = 1000
    requests: list[tuple[str, int]] = field(default_factory=list)
    num_bytes: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, path: str, content: bytes, *, tag: str = "v1") -> str:
        """Serve ``content`` and return its URL."""
        self.files[path], self.tags[path] = content, tag
        return self.url + path

    def next_fault(self, path: str) -> Fault:
        """Return how the next answer fails."""
        with self.lock:
            waiting = self.faults.get(path)
            return waiting.pop(0) if waiting else self.always.get(path, "")


@contextmanager
def serve() -> Iterator[Site]:
    """Serve a site until the end of the block."""
    site = Site()

    class Handler(_Handler):
        pass

    Handler.site = site
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield site
    finally:
        site.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *args: object) -> None:
        """Say nothing: the tests read what the client says."""

    def handle(self) -> None:
        """Serve a connection; clients that give up reset it."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        content = self.site.files.get(self.path)
        start, end = self._range(0 if content is None else len(content))
        with self.site.lock:
            self.site.requests.append((self.path, start))
        # The look at a file is not the read of it.
        fault: Fault = "" if end - start == 1 else self.site.next_fault(self.path)
        if content is None or fault in ("busy", "forbidden"):
            self._refuse(404 if content is None else 503 if fault == "busy" else 403)
        elif start >= len(content):
            self._refuse(416, **{"Content-Range": f"bytes */{len(content)}"})
        elif fault == "no-ranges":
            self._send(200, content, fault)
        else:
            whole = f"bytes {start + (fault == 'shifted')}-{end - 1}/{len(content)}"
            self._send(206, content[start:end], fault, **{"Content-Range": whole})

    def do_HEAD(self) -> None:
        content = self.site.files.get(self.path)
        if content is None:
            self._refuse(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{self.site.tags[self.path]}"')
        self.end_headers()

    def do_PUT(self) -> None:
        self.site.put(self.path, self.rfile.read(int(self.headers["Content-Length"])))
        self._refuse(201)

    def _range(self, size: int) -> tuple[int, int]:
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        return int(first), min(size, int(last) + 1) if size else int(last) + 1

    def _refuse(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: bytes, fault: Fault, **headers: str) -> None:
        self.send_response(status)
        announced = {"long": len(body) + 50, "short": min(len(body), self.site.cut)}.get(fault, len(body))
        for name, value in {**headers, "Content-Length": str(announced)}.items():
            self.send_header(name, value)
        tag = self.site.tags.get(self.path)
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        sent = body[: self.site.cut] if fault in ("stall", "truncate", "reset", "short") else body
        try:
            self.wfile.write(sent)
            self.wfile.flush()
        except OSError:
            return  # the client went first
        finally:
            with self.site.lock:
                self.site.num_bytes += len(sent)
        if fault == "stall":
            self.site.closing.wait(30)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault:
            self.close_connection = True
