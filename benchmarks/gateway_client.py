"""A minimal client of a gateway, and many of them at once.

    echo '{"calls": 4096, "urls": [...]}' | python -m benchmarks.gateway_client

Prints the number of answered calls, and how many answers repeat their own question.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


async def post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, base_url: str, messages: Sequence[Mapping[str, Any]]
) -> Any:
    """Posts a body and returns the message of the answer.

    Raises:
        RuntimeError: If there is none.
    """
    body = msgspec.json.encode({"model": "m", "messages": messages})
    _, _, host, path = base_url.split("/", 3)
    asked = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(asked.encode() + body)
    status, _, headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower().partition("\r\n")
    content = await reader.readexactly(int(headers.partition("content-length: ")[2].partition("\r\n")[0]))
    if " 200 " not in status:
        raise RuntimeError(f"{status}: {content.decode()}")
    return msgspec.json.decode(content)["choices"][0]["message"]


def question(number: int) -> str:
    """Returns the question of a call, which its answer repeats."""
    return f"question {number}"


async def ask(url: str, number: int) -> str:
    """Makes a call over its own connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split("/")[2].rpartition(":")[2]))
    try:
        answer = await post(reader, writer, url, [{"role": "user", "content": question(number)}])
        return str(answer["content"])
    finally:
        writer.close()


async def ask_all(calls: int, urls: Sequence[str]) -> dict[str, Any]:
    """Makes all calls at once, in turn to each address."""
    cpu = time.process_time()
    made = (ask(urls[number % len(urls)], number) for number in range(calls))
    answers = await asyncio.gather(*made, return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    return {
        "answered": calls - len(failed),
        "own_answers": sum(answer == question(number) for number, answer in enumerate(answers)),
        "first_failure": repr(failed[0])[:200] if failed else None,
        "client_cpu_seconds": time.process_time() - cpu,
    }


def main() -> None:
    """Makes the calls that standard input describes."""
    allow_many_connections()
    print(json.dumps(asyncio.run(ask_all(**json.load(sys.stdin)))))


def allow_many_connections() -> None:
    """Raises the limit of open files to its maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
