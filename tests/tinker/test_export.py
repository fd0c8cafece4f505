"""``export-model`` of a run on the server: its adapters give the log-probabilities of the last validation."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rllm_tinker.export import ADAPTER_CONFIG, export
from server import PYTHON, TinkerServer

from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import RunConfig
from rllm_core.errors import RunError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder import checkpoint

STEPS = 2
SHORT = (f"training.steps={STEPS}", "training.validation_rollouts=16", f"training.validate_every_steps={STEPS}")
GREATEST_GAP = 1e-5


@pytest.mark.every_sdk
def test_an_export_gives_the_log_probabilities_of_the_last_validation(
    server: TinkerServer, start_run, plugins: PluginManager, tmp_path: Path
) -> None:
    run = start_run(server, *SHORT, "training.trajectories_per_step=16")
    assert run.wait() == 0, run.printed()
    folder = tmp_path / "model"
    folder.mkdir()
    export(backend_folder(run.path), config_of(run.path, plugins), folder)
    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert settings["base_model_name_or_path"] == str(server.model)
    assert "q_proj" in settings["target_modules"]
    assert {"adapter_model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    script = Path(__file__).with_name("greatest_gap.py")
    done = subprocess.run([PYTHON, script, run.path, folder], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["rollouts"] == 16
    assert found["gap"] < GREATEST_GAP

    manifest = backend_folder(run.path) / "tinker.json"
    state = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(state | {"path": state["path"] + "-gone"}))
    with pytest.raises(RunError, match="-gone"):
        export(backend_folder(run.path), config_of(run.path, plugins), folder)


def test_without_a_server_the_address_is_named(model: Path, run_config, tmp_path: Path) -> None:
    (tmp_path / "tinker.json").write_text(json.dumps({"path": "tinker://a/weights/b", "base_model": str(model)}))
    nowhere = TinkerServer(tmp_path, model, tmp_path, port=9)
    with pytest.raises(RunError, match=r"nothing answers at tinker.base_url = 'http://127.0.0.1:9'"):
        export(tmp_path, run_config(nowhere), tmp_path)


def backend_folder(run: Path) -> Path:
    return checkpoint.complete(run / "checkpoints")[-1] / "backend"


def config_of(run: Path, plugins: PluginManager) -> RunConfig:
    return load_run_config(str(run / "run.toml"), plugins)
