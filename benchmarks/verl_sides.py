"""Backend ``verl`` and verl's own ``main_ppo``, each in a process that waits between steps (see `sides`).

``ours`` is ``rllm-core train --backend verl``, and ``unchecked`` the same without checks after weight syncs.
``main_ppo`` is the unmodified ``python -m verl.trainer.main_ppo``, with the same tasks in the same order and the same
reward (`benchmarks.verl_peer`). It has one worker for agent loops and one for rewards, because more workers only add
processes here. Neither side validates or saves between steps.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO
from unittest import mock

from rllm_renderers.chat_template import ChatTemplateParser
from rllm_verl.proofs import Proofs

from benchmarks.core_side import train_gated
from benchmarks.peer_environments import ROOT
from benchmarks.sides import Gate, SideError, serve
from benchmarks.trials import Row
from benchmarks.verl_processes import CLUSTER, SIDE_VARIABLE, Measured
from benchmarks.verl_workloads import Workload, check_settings, main_ppo_settings
from benchmarks.workloads import WORKFLOWS, prompt_of

START_SECONDS = 900.0
PROMPTS_COMPARED = 16
STARTING_SYNCS = 2
"""First weight syncs of a run, during which processes still start."""


# --------------------------------------------------------------------------------------------------------------------
# main_ppo


def train_main_ppo(workload: Workload, gate: Gate) -> Row:
    """Runs verl's own loop; this process only forwards turns."""
    # One step more than is timed: after its last step, the loop fetches no prompts and so does not wait.
    workload = replace(workload, steps=workload.steps + 1)
    _check_prompts(workload)
    with tempfile.TemporaryDirectory(prefix="turns-") as temporary:
        folder = Path(temporary)
        arguments = main_ppo_settings(workload, folder)
        check_settings(workload, arguments)
        _write_dataset(workload, folder / "train.parquet")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(folder / "turns"))
            listening.listen()
            with (
                _running([sys.executable, "-m", "verl.trainer.main_ppo", *arguments]) as process,
                _connected(listening, process) as turns,
            ):
                for line in turns:
                    step = int(line)
                    if step:
                        gate.step_ended(step)
                    else:
                        gate.open_first()
                    turns.write("go\n")
                    turns.flush()
                if process.wait(START_SECONDS):
                    raise SideError(f"main_ppo ended with exit code {process.returncode}")
    return {}


def _check_prompts(workload: Workload) -> None:
    """Checks that both sides read the same tokens; otherwise the comparison would be invalid."""
    from transformers import AutoTokenizer

    tokenizer, parser = (
        AutoTokenizer.from_pretrained(workload.model),
        ChatTemplateParser.from_model(workload.model),
    )
    if list(parser.get_stop_token_ids()) != [tokenizer.eos_token_id]:
        raise ValueError("the sides use different stop tokens")
    for task in workload.tasks[:PROMPTS_COMPARED]:
        messages = prompt_of(workload.name, task)
        theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if theirs != list(parser.render(messages)):
            raise ValueError(f"the sides tokenize {messages} differently")


def _write_dataset(workload: Workload, file: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(
        [
            {
                "data_source": WORKFLOWS[workload.name],
                "prompt": prompt_of(workload.name, task),
                "reward_model": {"style": "rule", "ground_truth": task.data.get("answer", "")},
                "extra_info": {"index": index},
            }
            for index, task in enumerate(workload.tasks)
        ]
    ).to_parquet(str(file))


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def _connected(listening: socket.socket, process: subprocess.Popen[bytes]) -> Iterator[IO[str]]:
    """Yields the connection to the dataset, once main_ppo has started."""
    listening.settimeout(1.0)
    for _ in range(int(START_SECONDS)):
        if process.poll() is not None:
            raise SideError(f"main_ppo ended with exit code {process.returncode} before its first step")
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        with connection, connection.makefile("rw", encoding="utf-8") as turns:
            yield turns
            return
    raise SideError(f"main_ppo did not start within {START_SECONDS:g} s")


# --------------------------------------------------------------------------------------------------------------------
# Both sides


def train_ours(workload: Workload, gate: Gate) -> Row:
    """Runs ``rllm-core train``."""
    checks = Measured((os.environ[SIDE_VARIABLE], CLUSTER), skipped=STARTING_SYNCS)
    gate.measured = lambda: {"check_cpu_seconds": checks.take()}
    with mock.patch.object(Proofs, "check", checks.wrap(Proofs.check)):
        return train_gated(workload.config, workload.plugins, gate)


SIDES = {"ours": train_ours, "unchecked": train_ours, "main_ppo": train_main_ppo}


def train(request: Row, gate: Gate) -> Row:
    """Trains one side; the request has its name and the fields of `Workload`."""
    name = request.pop("side")
    return SIDES[name](Workload(**request), gate)


if __name__ == "__main__":
    serve(train)
