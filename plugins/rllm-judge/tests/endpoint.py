"""An OpenAI-compatible endpoint on this machine, which answers as a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Deed = Callable[[BaseHTTPRequestHandler], None]
Answer = Callable[[list[dict[str, Any]]], str | int | Deed]


@dataclass
class Endpoint:
    """What was asked, and how to answer: a text, a status with an error, or something else that it does.

    Attributes:
        answer: Returns the answer to the messages of a request.
        usage: Prompt and completion tokens of each reply.
        asked: Bodies of the requests so far.
        keys: Their keys.
        pause: Header that tells a client when to ask again.
    """

    answer: Answer
    usage: tuple[int, int] = (11, 7)
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    pause: tuple[str, str] = ("Retry-After-Ms", "1")


@contextmanager
def serving(answer: Answer, usage: tuple[int, int] = (11, 7)) -> Iterator[Endpoint]:
    """Serves an endpoint."""
    endpoint = Endpoint(answer, usage)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.asked.append(body)
            endpoint.keys.append(self.headers["Authorization"])
            said = endpoint.answer(body["messages"])
            if isinstance(said, str):
                self.reply(200, completion(body["model"], said, endpoint.usage))
            elif callable(said):
                said(self)
                self.close_connection = True
            else:
                self.reply(said, {"error": {"message": f"status {said}", "type": "x", "code": None}})

        def reply(self, status: int, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header(*endpoint.pause)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Writes nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()


def completion(model: str, text: str, usage: tuple[int, int]) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "reply",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)},
    }
