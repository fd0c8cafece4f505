"""Runs an agent in a container without a network, and relays its calls to the gateway's Unix socket.

Run this script inside the container; it needs only Python: ``python relay.py COMMAND...``. It listens at the address in
``OPENAI_BASE_URL``, so the agent's environment is the same as outside, and exits with the command's code.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16


def main() -> int:
    """Relays connections while the command runs, and returns its exit code."""
    command = sys.argv[1:]
    path, url = os.environ.get("RLLM_GATEWAY_SOCKET"), urlsplit(os.environ.get("OPENAI_BASE_URL", ""))
    if not command or not path or url.port is None:
        print(
            "usage: python relay.py COMMAND..., with RLLM_GATEWAY_SOCKET and OPENAI_BASE_URL of the rollout in the "
            "environment (agent.unix_socket = true)",
            file=sys.stderr,
        )
        return 2
    listening = socket.create_server(("127.0.0.1", url.port))
    threading.Thread(target=_accept, args=(listening, path), daemon=True).start()
    code = subprocess.run(command, check=False).returncode
    return code if code >= 0 else 128 - code


def _accept(listening: socket.socket, path: str) -> None:
    while True:
        client, _ = listening.accept()
        gateway = socket.socket(socket.AF_UNIX)
        try:
            gateway.connect(path)
        except OSError:
            client.close()
            gateway.close()
            continue
        for source, target in ((client, gateway), (gateway, client)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
    except OSError:  # one side has hung up
        pass
    finally:
        # Shut down both directions: that ends the other thread, and tells the gateway that its client has hung up.
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR if one is source else socket.SHUT_WR)
            except OSError:
                pass


if __name__ == "__main__":
    sys.exit(main())
