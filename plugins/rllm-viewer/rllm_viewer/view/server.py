"""Serves the page and its data of the given folders, and answers only GET requests from a browser on this machine."""

from __future__ import annotations

import math
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rllm_core.run_folder.recorded import GROUPS
from rllm_viewer.view import assets
from rllm_viewer.view.answers import RequestHandler
from rllm_viewer.view.search import Query
from rllm_viewer.view.viewed_run import NotFound, ViewedRun, encoded

ADDRESS = "127.0.0.1"
# Another site could point its own host name at our address; its page would then see the answers.
HOSTS = ("127.0.0.1", "localhost", "[::1]")
UPDATED_EVERY_SECONDS = 1.0
# A page that is opened during the first read of a long run requests some files, and should not wait.
GIVE_WAY_SECONDS = 0.1
HEAD_START_SECONDS = 1.0
SEARCH_SECONDS = 120.0
HEADERS = {
    "Content-Security-Policy": assets.POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ViewServer(ThreadingHTTPServer):
    """Serves some runs, and keeps their indexes up to date.

    Args:
        runs: Runs to show.
        port: Port on this machine; 0 for any that is free.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[ViewedRun], port: int) -> None:
        self._closing = threading.Event()
        self._asked = 0
        self._opened = -math.inf
        self._asking = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self.answers = RequestHandler(runs)
        for run in runs:
            run.index.give_way = self._give_way
        super().__init__((ADDRESS, port), _Handler)
        self._updating = threading.Thread(target=self._update, name="index", daemon=True)
        self._updating.start()

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def server_close(self) -> None:
        """Stops serving and updating the indexes."""
        self._closing.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports errors, except a browser that has closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @contextmanager
    def answering(self, path: str) -> Iterator[None]:
        """Pauses the indexing until a request ends, and shortly after, for the next requests of the page."""
        with self._asking:
            if path == "/":
                self._opened = time.monotonic()
            self._asked += 1
            self._idle.clear()
        try:
            yield
        finally:
            with self._asking:
                self._asked -= 1
                if not self._asked:
                    self._idle.set()

    def _give_way(self) -> None:
        self._closing.wait(max(0.0, self._opened + HEAD_START_SECONDS - time.monotonic()))
        self._idle.wait(GIVE_WAY_SECONDS)

    def _update(self) -> None:
        while not self._closing.is_set():
            for run in self.answers.runs:
                try:
                    run.update()
                except OSError as error:  # such as a deleted folder
                    run.problem = f"{error.filename or run.path} cannot be read: {error.strerror or error}"
                else:
                    run.problem = None
            self._closing.wait(UPDATED_EVERY_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    timeout = 60
    server_version = "rllm-viewer"
    sys_version = ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS and self.headers.get("Host") not in HOSTS:
            self._refuse(HTTPStatus.FORBIDDEN, "open the page as http://localhost or http://127.0.0.1")
            return
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query, keep_blank_values=True))
        try:
            if (run := self.server.answers.searched(address.path)) is not None:
                self._search(run, query)
                return
            with self.server.answering(address.path):
                if (file := assets.FILES.get(address.path)) is not None:
                    self._send(HTTPStatus.OK, file.content_type, file.content)
                else:
                    self._send(HTTPStatus.OK, "application/json", self.server.answers.answer(address.path, query))
        except NotFound as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))

    def _only_get(self) -> None:
        self.close_connection = True  # the request body is not read
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "the viewer only reads: use GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _only_get

    def _search(self, run: ViewedRun, query: Mapping[str, str]) -> None:
        """Forwards the lines of a search, and ends the search if the browser disconnects."""
        wanted = Query(query.get("q", ""), query.get("regex") == "1", query.get("exact") == "1")
        try:
            wanted.pattern()
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        self.close_connection = True
        self._head(HTTPStatus.OK, "application/x-ndjson", None)
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "rllm_viewer.view.search", str(run.path / f"{GROUPS}.jsonl")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        ) as process:
            try:
                self._pass_on(process, encoded(wanted))
            finally:
                process.kill()

    def _pass_on(self, process: subprocess.Popen[bytes], query: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(query)
        process.stdin.close()
        ends = time.monotonic() + SEARCH_SECONDS
        while time.monotonic() < ends:
            ready, _, _ = select.select([process.stdout, self.connection], [], [], 1.0)
            if self.connection in ready and not self.connection.recv(1, socket.MSG_PEEK):
                return
            if process.stdout in ready:
                if not (found := process.stdout.read(1 << 16)):
                    return
                self.wfile.write(found)
        self.wfile.write(encoded({"error": f"the search was ended after {SEARCH_SECONDS:.0f} s"}) + b"\n")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._send(status, "application/json", encoded({"error": reason}))

    def _send(self, status: HTTPStatus, content_type: str, content: bytes) -> None:
        self._head(status, content_type, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: HTTPStatus, content_type: str, length: int | None) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: the terminal shows only the address."""


def opened(paths: Sequence[Path], port: int, cache: Path | None) -> ViewServer:
    """Returns a server for some run folders.

    Raises:
        OSError: If the port is not free.
    """
    return ViewServer([ViewedRun(path, cache) for path in paths], port)
