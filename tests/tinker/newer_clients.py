"""Test support, not distributed: lets SDK 0.25 to 0.38 talk to SkyRL 0.3.0, which expects the JSON of SDK 0.24.

Differences in the wire format that this module translates:

* ``forward_backward`` arrives as protobuf (with ``forward_only`` instead of ``forward``), possibly compressed;
* results of sampling and ``forward_backward`` are sent as protobuf to clients that accept it, with NaN as the
  log-probability of a prompt's first token;
* the response to ``asample`` has an id per sequence;
* a single ``load_weights`` creates a model from a state. It names a session and a number, from which the client derives
  the model's id. This module first asks the server to create the model, then maps later requests to the server's id;
* a closed client finishes its session; the server itself drops silent sessions.

Runs in the server's environment, whose SDK has the protobuf classes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from starlette.requests import Request
from starlette.responses import Response
from tinker.proto import tinker_public_pb2 as wire

API = "/api/v1"
PROTOBUF = "application/x-protobuf"
MAX_BODY_BYTES = 1 << 30
ARRAYS = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64, wire.DTYPE_INT32: np.int32}
STOP_REASONS = {"stop": wire.STOP_REASON_STOP, "length": wire.STOP_REASON_LENGTH}


@dataclass
class Answer:
    """Response of the server."""

    status: int = 500
    body: bytes = b""

    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


class NewerClients:
    """ASGI middleware in front of SkyRL's application."""

    def __init__(self, app):
        self.app = app
        self.server_ids = {}

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        answer, media_type = await self._answer(request, await request.body())
        return await Response(answer.body, answer.status, media_type=media_type)(scope, receive, send)

    async def _answer(self, request, body):
        path = request.url.path
        if path.startswith(f"{API}/sessions/") and path.endswith("/finish"):
            return Answer(200, b"{}"), "application/json"
        if request.headers.get("content-type") == PROTOBUF:
            if request.headers.get("content-encoding") == "zstd":
                body = zstandard.ZstdDecompressor().decompress(body, max_output_size=MAX_BODY_BYTES)
            path, given = forward_backward(body)
        else:
            given = json.loads(body or b"{}")
        if given.get("model_id") in self.server_ids:
            given["model_id"] = self.server_ids[given["model_id"]]
        if path == f"{API}/load_weights" and given.get("model_id") is None:
            return await self._created_from(request, given), "application/json"
        answer = await self._ask(request, path, given)
        if answer.status == 200 and path == f"{API}/asample":
            promise = answer.json()
            names = [f"{promise['request_id']}:{number}" for number in range(given.get("num_samples", 1))]
            answer.body = json.dumps(promise | {"sample_sequence_ids": names}).encode()
        if answer.status == 200 and path == f"{API}/retrieve_future" and request.headers.get("accept") == PROTOBUF:
            encoded = result(answer.json())
            if encoded is not None:
                return Answer(200, encoded), PROTOBUF
        return answer, "application/json"

    async def _created_from(self, request, given):
        """Creates a model for a state, and loads the state."""
        state = await self._ask(request, f"{API}/weights_info", {"tinker_path": given["path"]})
        if state.status != 200:
            return state
        created = {
            "session_id": given["session_id"],
            "base_model": state.json()["base_model"],
            "lora_config": {"rank": state.json()["lora_rank"]},
        }
        promise = await self._ask(request, f"{API}/create_model", created)
        if promise.status != 200:
            return promise
        made = await self._ask(request, f"{API}/retrieve_future", {"request_id": promise.json()["request_id"]})
        if made.status != 200 or "model_id" not in made.json():
            return made
        model_id = made.json()["model_id"]
        self.server_ids[f"{given['session_id']}:train:{given['model_seq_id']}"] = model_id
        load = {"model_id": model_id, "path": given["path"], "optimizer": given.get("optimizer", False)}
        return await self._ask(request, f"{API}/load_weights", load)

    async def _ask(self, request, path, given):
        """Sends a request to the wrapped application."""
        body, answer, is_sent = json.dumps(given).encode(), Answer(), False
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

        async def receive():
            nonlocal is_sent
            if is_sent:
                return await request.receive()
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            if message["type"] == "http.response.start":
                answer.status = message["status"]
            else:
                answer.body += message.get("body", b"")

        scope = {**request.scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self.app(scope, receive, send)
        return answer


def forward_backward(body):
    """Path and JSON of a protobuf request."""
    given = wire.ForwardBackwardRequest.FromString(body)
    data = [
        {
            "model_input": {
                "chunks": [
                    {"type": "encoded_text", "tokens": np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()}
                    for chunk in datum.model_input
                ]
            },
            "loss_fn_inputs": {
                name: {"data": np.frombuffer(tensor.dense, ARRAYS[tensor.dtype]).tolist()}
                for name, tensor in datum.loss_fn_inputs.items()
            },
        }
        for datum in given.data
    ]
    settings = dict(given.loss_fn_config) or None
    name = "forward" if given.forward_only else "forward_backward"
    asked = {"data": data, "loss_fn": given.loss_fn, "loss_fn_config": settings}
    return f"{API}/{name}", {"model_id": given.model_id, "seq_id": given.seq_id, f"{name}_input": asked}


def result(found):
    """A result as protobuf; None if its type stays JSON."""
    if "sequences" in found:
        return sampled(found).SerializeToString()
    if "loss_fn_outputs" in found:
        return trained(found).SerializeToString()
    return None


def sampled(found):
    message = wire.SampleResponse()
    for sequence in found["sequences"]:
        logprobs = sequence.get("logprobs")
        message.sequences.add(
            stop_reason=STOP_REASONS[sequence["stop_reason"]],
            tokens=np.array(sequence["tokens"], np.int32).tobytes(),
            logprobs=None if logprobs is None else np.array(logprobs, np.float32).tobytes(),
        )
    if found.get("prompt_logprobs") is not None:
        message.prompt_logprobs = np.array([np.nan, *found["prompt_logprobs"]], np.float32).tobytes()
    return message


def trained(found):
    outputs = found["loss_fn_outputs"]
    message = wire.ForwardBackwardOutput(
        loss_fn_output_type=found["loss_fn_output_type"], metrics=found.get("metrics") or {}
    )
    record = message.loss_fn_outputs.add(num_datums=len(outputs))
    for name in outputs[0] if outputs else ():
        arrays = [np.array(output[name]["data"], np.float32) for output in outputs]
        record.fields[name].dtype = wire.DTYPE_FLOAT32
        record.fields[name].data = b"".join(array.tobytes() for array in arrays)
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
        record.fields[name].offsets = offsets.tobytes()
    return message
