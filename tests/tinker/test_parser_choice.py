"""Choice of the parser in an environment without the cookbook, as in most that train through the SDK."""

from __future__ import annotations

import importlib
import sys

import pytest

from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError


def test_the_default_says_what_to_install_or_what_to_choose_instead(plugins, model):
    overrides = [
        f"model.path={model}",
        "tinker.base_url=http://127.0.0.1:9",
        "tinker.service=skyrl",
        "optimizer.max_grad_norm=1e6",
        "algorithm.entropy_coefficient=0",
    ]
    assembly = assemble(load_run_config("sort", plugins, overrides=overrides, backend="tinker"), plugins)
    assert assembly.config.parser == "tinker"
    expected = r"run: pip install 'rllm-tinker\[cookbook\]' .* set parser = \"chat_template\" or \"renderer\""
    with pytest.raises(ConfigError, match=expected):
        assembly.parser()


def test_the_rest_of_the_extra_is_named_alike(monkeypatch):
    monkeypatch.delitem(sys.modules, "rllm_tinker.parser", raising=False)
    monkeypatch.setitem(sys.modules, "rllm_renderers.encoding", None)
    with pytest.raises(ConfigError, match=r"rllm_renderers.* is not installed; run: .*rllm-tinker\[cookbook\]"):
        importlib.import_module("rllm_tinker.parser")
