"""Tests the figures from raw trials, and the CPU seconds of the processes that belong to a side."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import rllm_verl

from benchmarks import verl, verl_workloads
from benchmarks.verl_processes import SIDE_VARIABLE, Measured, called, cpu_seconds, spent
from benchmarks.workloads import plugin_manager


def step(
    side: str,
    cpu: float,
    wall: float,
    *,
    workload: str = "sort",
    warm_up: bool = False,
    waiting: float = 0.0,
    lora: bool = False,
) -> dict[str, Any]:
    """Row in which the cluster's daemons used a quarter of the CPU seconds."""
    return {
        "kind": "step",
        "workload": workload,
        "side": side,
        "warm_up": warm_up,
        "wall_seconds": wall,
        "cpu_seconds_by_process": {"trainer": cpu / 2, "driver": cpu / 4},
        "cluster_cpu_seconds": {"raylet": cpu / 8, "gcs_server": cpu / 8},
        "waiting_cpu_seconds": {name: waiting for name in (*verl.SIDES, verl.UNCHECKED) if name != side},
        "lora": lora,
    }


def steps(side: str, cpu: list[float], **about: Any) -> list[dict[str, Any]]:
    return [step(side, seconds, 2 * seconds, **about) for seconds in cpu]


def test_a_step_costs_the_cpu_seconds_of_its_side_and_of_the_daemons() -> None:
    rows = [*steps("ours", [2.0, 3.0, 40.0]), *steps("main_ppo", [4.0, 4.0, 50.0])]
    found = verl.figures(rows)
    assert found["steps"] == 3
    assert found["seconds_per_step_over_main_ppo"] == 0.75
    assert found["seconds_per_step_over_main_ppo_wall"] == 0.75
    assert found["seconds_per_step_over_main_ppo_total"] == round(45 / 58, 3)
    assert found["ours_cpu_seconds"] == 3.0
    assert found["main_ppo_wall_seconds"] == 8.0
    assert found["main_ppo_cpu_seconds_by_process"] == {"trainer": 2.0, "driver": 1.0, "cluster": 1.0}


def test_neighbouring_steps_are_compared_so_that_a_slow_machine_cancels() -> None:
    rows = [*steps("ours", [1.1, 2.2, 8.8]), *steps("main_ppo", [1.0, 2.0, 8.0])]
    assert verl.figures(rows)["seconds_per_step_over_main_ppo"] == 1.1


def test_warm_up_counts_for_nothing() -> None:
    rows = [step(side, 100.0 if side == "ours" else 1.0, 1.0, warm_up=True) for side in verl.SIDES]
    rows += [*steps("ours", [2.0]), *steps("main_ppo", [2.0])]
    assert verl.figures(rows)["seconds_per_step_over_main_ppo_total"] == 1.0


def test_what_a_side_used_while_it_waited_is_said_but_not_counted() -> None:
    rows = [*steps("ours", [1.0, 1.0], waiting=0.25), *steps("main_ppo", [1.0, 1.0], waiting=0.5)]
    found = verl.figures(rows)
    assert found["ours_waiting_cpu_seconds"] == 0.5
    assert found["main_ppo_waiting_cpu_seconds"] == 0.25
    assert found["ours_cpu_seconds"] == 1.0


def test_workloads_are_not_mixed_up() -> None:
    rows = [*steps("ours", [1.0, 1.0]), *steps("main_ppo", [4.0, 4.0])]
    rows += [*steps("ours", [9.0], workload="endless"), *steps("main_ppo", [10.0], workload="endless")]
    found = verl.figures(rows)
    assert (found["seconds_per_step_over_main_ppo"], found["steps"]) == (0.25, 2)
    assert (found["seconds_per_step_over_main_ppo_long"], found["steps_long"]) == (0.9, 1)
    assert found["main_ppo_wall_seconds_long"] == 20.0


def test_checks_cost_what_a_step_without_them_does_not() -> None:
    ours = steps("ours", [2.0, 4.0, 4.0], lora=True)
    for row, seconds in zip(ours, (0.0, 0.0, 0.2), strict=True):
        row["check_cpu_seconds"] = seconds
    rows = [*ours, *steps("main_ppo", [4.0, 4.0, 5.0], lora=True), *steps(verl.UNCHECKED, [1.9, 3.8, 3.8], lora=True)]
    found = verl.figures(rows)
    assert found["canary_share"] == 0.02
    assert found["canary_share_paired"] == 0.05
    assert found["unchecked_cpu_seconds"] == 3.8
    assert found["lora_seconds_per_step_over_main_ppo"] == 0.8
    assert "seconds_per_step_over_main_ppo" not in found


def waited(mode: str, number: int, seconds: list[float]) -> dict[str, Any]:
    return {"kind": "run", "mode": mode, "round": number, "step_seconds": seconds, "staleness_mean": 0.75}


def test_asynchrony_is_compared_with_the_faster_synchronous_mode_once_the_pipeline_is_full() -> None:
    filling = [60.0] * verl.FILLING_STEPS
    rows = [
        waited(mode, number, [*filling, *(slow * seconds for seconds in rest)])
        for number, slow in ((0, 1.0), (1, 3.0))
        for mode, rest in (
            ("synchronous_colocated", [6.0, 6.0]),
            ("synchronous_separated", [5.0, 5.0]),
            ("asynchronous_separated", [1.0, 5.0]),
        )
    ]
    found = verl.figures(rows)
    assert found["async_over_sync_colocated"] == 0.5
    assert found["async_over_sync_separated"] == found["async_over_sync"] == 0.6
    assert found["asynchronous_separated_step_seconds"] == 6.0
    assert found["async_staleness_mean"] == 0.75
    assert "seconds_per_step_over_main_ppo" not in found


def test_a_comparison_without_one_of_its_modes_has_no_figure() -> None:
    assert verl.figures([waited(mode, 0, [1.0] * 9) for mode in verl.MODES[1:]]) == {}


@pytest.mark.parametrize("lora_rank", [0, 8], ids=["all-weights", "adapters"])
@pytest.mark.parametrize("name", sorted(verl_workloads.SHAPES))
def test_main_ppo_is_told_what_our_run_file_says(name: str, lora_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = plugin_manager()
    plugins.register(rllm_verl, "verl")
    monkeypatch.setattr(verl_workloads, "plugin_manager", lambda: plugins)
    monkeypatch.setenv(SIDE_VARIABLE, "main_ppo")
    workload = verl_workloads.Workload(
        name, model="model", ray_address="127.0.0.1:1", steps=3, seed=0, lora_rank=lora_rank
    )
    config, settings = workload.config, workload.config.plugins["verl"]
    arguments = verl_workloads.main_ppo_settings(workload, Path("folder"))
    told = dict(argument.lstrip("+").split("=", 1) for argument in arguments)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    assert len(workload.tasks) == 3 * config.training.groups_per_step
    ours = {
        "data.train_batch_size": config.training.groups_per_step,
        f"{actor}.ppo_mini_batch_size": config.training.groups_per_step,
        f"{rollout}.n": config.training.rollouts_per_group,
        "data.max_response_length": config.rollout.max_response_tokens,
        f"{rollout}.max_model_len": settings.max_model_tokens,
        f"{rollout}.max_num_seqs": settings.max_batch_rows,
        f"{rollout}.max_num_batched_tokens": settings.max_batch_tokens,
        f"{actor}.ppo_max_token_len_per_gpu": settings.max_tokens_per_device,
        f"{actor}.optim.lr": config.optimizer.learning_rate,
        f"{actor}.optim.weight_decay": config.optimizer.weight_decay,
        f"{actor}.clip_ratio_high": config.algorithm.loss_options["clip_high"],
        "trainer.total_training_steps": config.training.steps,
    }
    assert {key: float(told[key]) for key in ours} == ours
    assert int(told.get("actor_rollout_ref.model.lora_rank", 0)) == lora_rank
    assert (settings.lora.rank if settings.lora else 0) == lora_rank
    assert told["actor_rollout_ref.model.path"] == config.model.path
    assert config.algorithm.proximal_policy == "forward"  # as main_ppo does unless set to bypass


BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


def test_cpu_seconds_are_those_of_the_processes_that_the_environment_names_and_of_children_that_ended() -> None:
    grandchild = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}], check=True)\n"
    child = f"{grandchild}print('burnt', flush=True)\ninput()\n"
    before = cpu_seconds()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, SIDE_VARIABLE: side},
        )
        for side, code in (("tested", child), ("other", "print('idle', flush=True)\ninput()\n"))
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        after = cpu_seconds()
    finally:
        for process in processes:
            process.communicate(b"\n", timeout=600)
    burnt, idle = (sum(spent(before, after, side).values()) for side in ("tested", "other"))
    assert burnt >= 0.29  # the kernel counts in hundredths of a second
    assert idle < burnt
    assert "tested" not in cpu_seconds()


@pytest.mark.slow
def test_only_what_a_side_uses_during_a_call_is_measured() -> None:
    loop = textwrap.indent(BURN + "print('burnt', flush=True)\n", "    ")
    child = f"for line in iter(input, 'end'):\n{loop}"
    with subprocess.Popen(
        [sys.executable, "-c", child],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, SIDE_VARIABLE: "measured"},
        text=True,
    ) as process:

        def burn() -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("burn\n")
            process.stdin.flush()
            process.stdout.readline()

        async def call() -> str:
            burn()
            return "done"

        measured = Measured(["measured"], skipped=1)
        wrapped = measured.wrap(call)
        for expected in (0.0, 0.3):  # the first is skipped
            assert asyncio.run(wrapped()) == "done"
            burn()
            assert measured.take() == pytest.approx(expected, abs=0.1)
        assert measured.take() == 0.0
        process.communicate("end\n", timeout=600)


def test_seconds_of_a_process_that_ended_move_to_the_one_that_waited_for_it() -> None:
    before = {"ours": {"ray::IDLE": 5.0, "raylet": 1.0}}
    after = {"ours": {"raylet": 6.5}}
    found = spent(before, after, "ours")
    assert found == {"ray::IDLE": -5.0, "raylet": 5.5}
    assert spent(before, after, "main_ppo") == {}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ([b"ray::PolicyWorker.update_actor", b"", b""], "ray::PolicyWorker"),
        ([b"ray::IDLE", b""], "ray::IDLE"),
        ([b"VLLM::EngineCore"], "VLLM::EngineCore"),
        ([b"/usr/bin/python3", b"-m", b"verl.trainer.main_ppo", b"a=b"], "verl.trainer.main_ppo"),
        ([b"/somewhere/raylet/raylet", b"--port=1"], "raylet"),
        ([b""], "ended"),
    ],
)
def test_processes_are_told_apart_by_their_titles(command: list[bytes], name: str) -> None:
    assert called(command) == name
