"""An MCP server in plain JSON Lines, with an older protocol version and tools that fail in every way."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

SCHEMA = {"type": "object", "properties": {}}
running = most_running = 0


def main():
    if "ignore_end" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    names = [argument.partition("=")[2] for argument in sys.argv if argument.startswith("tool=")]
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        match request["method"]:
            case "initialize":
                said = {
                    "protocolVersion": request["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "plain", "version": "1"},
                }
            case "tools/list":
                said = page(names or ["pid"], request.get("params", {}).get("cursor"))
            case "tools/call":
                tool, arguments = request["params"]["name"], request["params"]["arguments"]
                if tool == "hang":
                    continue
                if tool == "slow":
                    global running, most_running
                    running += 1
                    most_running = max(most_running, running)
                    threading.Timer(arguments.get("seconds", 0), answer_late, [request["id"], arguments]).start()
                    continue
                said = call(tool, arguments, request["params"].get("_meta"))
            case _:
                said = None
        answer(request["id"], said, -32601)
    while "ignore_end" in sys.argv:
        signal.pause()


def page(names, cursor):
    """Lists two tools per page."""
    start = int(cursor or 0)
    tools = [{"name": name, "inputSchema": SCHEMA} for name in names[start : start + 2]]
    return {"tools": tools} | ({"nextCursor": str(start + 2)} if start + 2 < len(names) else {})


def call(tool, arguments, meta):
    match tool:
        case "pid":
            return text(str(os.getpid()))
        case "meta":
            return text(json.dumps(meta))
        case "place":
            folder = Path.cwd()
            return text(json.dumps([str(folder), [path.name for path in folder.iterdir()], dict(os.environ)]))
        case "picture":
            return {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}, *text("shown")["content"]]}
        case "link":
            return {"content": [{"type": "resource_link", "uri": "file:///etc/passwd", "name": "x"}]}
        case "structured":
            return {"content": [], "structuredContent": {"a": 1}}
        case "long":
            return text("x" * 100_000)
        case "fails":
            return text("it failed") | {"isError": True}
        case "refuses":
            return None
        case "die":
            print(f"bye {os.environ.get('SECRET_OF_TEST')}", file=sys.stderr, flush=True)
            os._exit(3)
        case "nonsense":
            return {"content": "no list"}
    raise AssertionError(tool)


def text(what):
    return {"content": [{"type": "text", "text": what}]}


def answer_late(number, arguments):
    global running
    while "until" in arguments and not Path(arguments["until"]).exists():
        time.sleep(0.02)
    running -= 1
    answer(number, text(f"{os.getpid()} {most_running}"), 0)


def answer(number, said, code):
    result = {"result": said} if said is not None else {"error": {"code": code, "message": "not here"}}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": number, **result}) + "\n")
    sys.stdout.flush()


main()
