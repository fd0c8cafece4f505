"""Runs SkyRL's Tinker API server and its engine; started by `server.TinkerServer` with the server environment's Python.

The package itself is unchanged. Differences from ``python -m skyrl.tinker.api``: the engine runs from this script
instead of through ``uv``; Python below 3.12 gets the ``TypedDict`` that pydantic requires; requests are logged; and
neither process outlives its parent.
"""

import argparse
import ctypes
import gc
import hashlib
import json
import os
import runpy
import signal
import sys
import time
import typing
from pathlib import Path

import typing_extensions

PR_SET_PDEATHSIG = 1


def die_with_parent():
    """Asks Linux to kill this process when the thread that started it ends, which may already have happened."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("the process that started this one is gone")


class RequestLog:
    """ASGI middleware: writes a line of JSON per completed request.

    ``[unix_seconds, method, path, status, client]``, where the client is a digest of its key; no file may hold the key.
    """

    def __init__(self, app, path):
        self.app = app
        self.file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the process lives

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        arrived = time.time()

        async def note(message):
            if message["type"] == "http.response.start":
                key = dict(scope["headers"]).get(b"x-api-key", b"")
                client = hashlib.sha256(key).hexdigest()[:16]
                line = [arrived, scope["method"], scope["path"], message["status"], client]
                self.file.write(json.dumps(line) + "\n")
            await send(message)

        return await self.app(scope, receive, note)


def engine():
    gc.disable()  # finds nothing while JAX and transformers are imported, and never need look at them again
    import skyrl.backends.jax  # noqa: F401 - the engine imports it later

    gc.freeze()
    gc.enable()
    sys.argv = ["skyrl.tinker.engine", *sys.argv[2:]]
    runpy.run_module("skyrl.tinker.engine", run_name="__main__")


def api():
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, add_model, config_to_argv

    def engine_command(_parent_command, config):
        return [sys.executable, __file__, "--engine", *config_to_argv(config)]

    api._build_uv_run_cmd_engine = engine_command
    parser = argparse.ArgumentParser()
    add_model(parser, EngineConfig)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--request-log", required=True)
    parser.add_argument("--newer-clients", action="store_true")
    arguments = vars(parser.parse_args())
    settings = {name: value for name, value in arguments.items() if name in EngineConfig.model_fields}
    api.app.state.engine_config = EngineConfig.model_validate(settings)
    app = api.app
    if arguments["newer_clients"]:
        from newer_clients import NewerClients

        app = NewerClients(app)
    app = RequestLog(app, arguments["request_log"])
    uvicorn.run(app, host="127.0.0.1", port=arguments["port"], log_level="warning")


if __name__ == "__main__":
    die_with_parent()
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict
    if sys.argv[1:2] == ["--engine"]:
        engine()
    else:
        api()
