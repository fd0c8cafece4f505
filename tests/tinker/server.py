"""A local Tinker-compatible server for tests and benchmarks: SkyRL's, on the CPU, with the starter model.

It runs in its own environment (``make tinker-server``), listens on the loopback interface only, and keeps its database,
checkpoints and logs in a scratch folder. It is not distributed.

SDK 0.38 uses another wire format; if it is installed, ``newer_clients.py`` translates.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-tinker-server" / "bin" / "python"
START_SECONDS = 600.0  # on a busy machine
STOP_SECONDS = 20.0
PATIENCE_SECONDS = 3.0  # well below the deadlines of clients
# All batches have the same shape, so that nothing is compiled twice. Stale clients lose their adapters soon, so that
# many short runs can share a server with few adapter slots.
ENGINE = {"max_lora_adapters": 20, "max_lora_rank": 8, "train_micro_batch_size": 16, "sample_max_num_sequences": 32}
LIMITS = {"session-timeout-sec": 25, "session-cleanup-interval-sec": 5}


def starter_model(cache: Path, task: str = "starter") -> Path:
    """Folder of a starter model of rllm-local, created in the server's environment, which has torch.

    Raises:
        RuntimeError: If that environment is missing, or cannot create the model.
    """
    return Path(_run("-m", "rllm_local.starter", "--task", task, cache=cache).strip().splitlines()[-1])


def _run(*arguments: str, cache: Path) -> str:
    if not PYTHON.exists():
        raise RuntimeError(f"{PYTHON} is missing: make tinker-server")
    done = subprocess.run(
        [PYTHON, *arguments],
        env=_environment(cache),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{PYTHON} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _environment(cache: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TINKER"))}
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "HF_HUB_OFFLINE": "1",
        "RLLM_CACHE_DIR": str(cache),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _has_newer_client() -> bool:
    """Whether the SDK of this environment uses the newer wire format."""
    return Version(metadata.version("tinker")) >= Version("0.25")


@dataclass
class TinkerServer:
    """A server that can be stopped, killed, stalled and restarted with the same port and database.

    Attributes:
        folder: Scratch folder for database, checkpoints and logs.
        model: Folder of the base model.
        cache: Folder of compiled programs, shared by all servers.
        port: Port on the loopback interface.
        engine: Settings of SkyRL's engine.
    """

    folder: Path
    model: Path
    cache: Path
    port: int = 0
    engine: dict[str, int] = field(default_factory=lambda: dict(ENGINE))
    _process: subprocess.Popen[bytes] | None = None
    _unloaded: set[str] = field(default_factory=set)

    @property
    def base_url(self) -> str:
        """URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def request_log(self) -> Path:
        """See `serve.RequestLog`."""
        return self.folder / "requests.jsonl"

    def start(self) -> None:
        """Starts the server and waits until its engine responds, which is well after the API does.

        Raises:
            RuntimeError: If the server ends, or is not ready in time.
        """
        self.spawn()
        self.wait_until_ready()

    def spawn(self) -> None:
        """Starts the server without waiting."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not PYTHON.exists():
            raise RuntimeError(f"{PYTHON} is missing: make tinker-server")
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        options = {
            "base-model": self.model,
            "port": self.port,
            "database-url": f"sqlite:///{self.folder / 'tinker.db'}",
            "checkpoints-base": self.folder / "checkpoints",
            "backend-config": json.dumps(self.engine),
            "request-log": self.request_log,
            **LIMITS,
        }
        command = [str(PYTHON), str(Path(__file__).with_name("serve.py")), *["--newer-clients"] * _has_newer_client()]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=_environment(self.cache), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait_until_ready(self) -> None:
        """Waits for the first token of the base model.

        Raises:
            RuntimeError: If the server ends, or no token arrives in time.
        """
        deadline = time.monotonic() + START_SECONDS
        asked: dict[str, Any] | None = None
        sample = {
            "base_model": str(self.model),
            "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 6, "seed": 0},
        }
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the Tinker server ended while starting:\n{self.log_tail()}")
            try:
                if asked is None:
                    asked = self._post("asample", sample, seconds=5)
                self._post("retrieve_future", {"request_id": asked["request_id"]}, seconds=60)
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        raise RuntimeError(f"the Tinker server was not ready within {START_SECONDS:g} s:\n{self.log_tail()}")

    def _post(self, path: str, body: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.base_url}/api/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def _models(self) -> set[str]:
        """All models ever created; after a restart, they exist in the database only."""
        with urllib.request.urlopen(f"{self.base_url}/api/v1/training_runs?limit=100000", timeout=60) as answer:
            return {run["training_run_id"] for run in json.load(answer)["training_runs"]}

    def unload_models(self) -> None:
        """Frees the adapter slots of all models; the server itself does so only for clients that sent a heartbeat."""
        models = self._models()
        for model in sorted(models - self._unloaded):
            asked = self._post("unload_model", {"model_id": model}, seconds=60)
            self._post("retrieve_future", {"request_id": asked["request_id"]}, seconds=60)
        self._unloaded |= models

    @property
    def pids(self) -> list[int]:
        """Process ids of API and engine, while they are alive."""
        if self._process is None or self._process.poll() is not None:
            return []
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return [self._process.pid, *map(int, children)]

    def kill(self) -> None:
        """Ends the server immediately, like a crash."""
        self._unloaded |= self._models()
        self._kill()

    def _kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(STOP_SECONDS)
        self._process = None

    def stop(self) -> None:
        """Asks the server to end, and kills it if it does not."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._process = None

    def stall(self, *, is_stalled: bool) -> None:
        """Freezes the engine, or lets it continue."""
        _, engine = self.pids
        os.kill(engine, signal.SIGSTOP if is_stalled else signal.SIGCONT)

    def stall_in_a_sample(self, key: str) -> None:
        """Freezes the engine while a client with this key waits for a sample, which then never arrives.

        Raises:
            RuntimeError: If the client does not sample.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.stall(is_stalled=True)
            # The engine may have answered what arrived before: only a later request certainly has no answer.
            frozen, frozen_at = time.monotonic(), time.time()
            while time.monotonic() - frozen < PATIENCE_SECONDS:
                if self.requests(key=key, arrived_after=frozen_at)["asample"]:
                    return
                time.sleep(0.02)
            # The client has reached its lead limit and waits for training only.
            self.stall(is_stalled=False)
            time.sleep(0.1)
        raise RuntimeError(f"no sample was asked for within {START_SECONDS:g} s")

    def requests(self, since: int = 0, key: str | None = None, arrived_after: float = 0.0) -> Counter[str]:
        """Number of requests per path, from request ``since`` on.

        Only those by clients with ``key``, if given, and those that arrived after a time, in Unix seconds.
        """
        lines = [json.loads(line) for line in self.request_log.read_text(encoding="utf-8").splitlines()[since:]]
        client = None if key is None else hashlib.sha256(key.encode()).hexdigest()[:16]
        return Counter(
            path.rpartition("/")[2]
            for arrived, _, path, _, by in lines
            if client in (None, by) and arrived > arrived_after
        )

    def request_count(self) -> int:
        """Number of requests so far."""
        return len(self.request_log.read_text(encoding="utf-8").splitlines()) if self.request_log.exists() else 0

    def log_tail(self) -> str:
        """End of the server's log."""
        return (self.folder / "server.log").read_text(encoding="utf-8", errors="replace")[-3000:]
