from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import rllm_renderers

from rllm_core.parser import BaseParser

HEAVY = ("jinja2", "numpy", "pydantic", "renderers", "torch", "transformers")


def loaded_after(statement):
    code = f"import sys\n{statement}\nprint(*sorted(set(sys.modules) & set({HEAVY})))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_the_entry_point_is_this_module():
    [found] = [point for point in entry_points(group="rllm_core") if point.name == "renderers"]
    assert found.load() is rllm_renderers


@pytest.mark.parametrize(("name", "config"), [("chat_template", "ChatTemplateConfig"), ("renderer", "RendererConfig")])
def test_the_record_leads_to_the_parser(name, config):
    [record] = [record for record in rllm_renderers.parsers() if record.name == name]
    module, _, parser_name = record.load.partition(":")
    parser = getattr(importlib.import_module(module), parser_name)
    assert issubclass(parser, BaseParser)
    assert parser.name == record.name
    assert record.config == f"{module}:{config}"


def test_listing_parsers_imports_no_library():
    assert loaded_after("import rllm_renderers; rllm_renderers.parsers()") == []


@pytest.mark.parametrize("module", ["chat_template", "renderer"])
def test_checking_a_run_file_imports_no_transformers(module):
    assert loaded_after(f"import rllm_renderers.{module}") == ["jinja2", "numpy", "pydantic"]
