"""Tests the porting page: every name of rLLM and verl in `SEEDS` is on it, and every name of ours on it exists."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import pytest
from generate import first_party_plugins, keys, sections
from pages import ROOT, Page, exists

PAGE = Page(ROOT / "docs" / "porting-from-rllm.md")
HERE = re.compile(r"`([^`]+)`")
# Public names of rLLM #435, #481 and #591 and of verl #5184; members of a class are prefixed with its name.
SEEDS = {
    "rollouts and workflows": (
        "AgentFlow",
        "GatewayManager",
        "MCPEnvironment",
        "Step",
        "Step.chat_completions",
        "Step.metadata",
        "Step.model_output",
        "Step.model_post_init",
        "Step.thought",
        "Task",
        "Task.instruction",
        "Trajectory",
        "Trajectory.steps",
        "agent_sdk_engine",
        "agent_workflow_engine",
        "countdown",
        "countdown_transform",
        "data_source",
        "ground_truth",
        "instruction.md.tpl",
        "instruction_field",
        "math_opsd_workflow",
        "nums",
        "prepare_countdown_data",
        "question",
        "rllm-model-gateway",
        "solver_judge",
        "taco",
        "target",
        "timeout_handler",
        "tool_base",
        "unified_workflow_engine",
    ),
    "rollout engines": (
        "ModelOutput",
        "ModelOutput.content",
        "ModelOutput.reasoning",
        "RolloutEngine",
        "RolloutEngine.assemble_model_output",
        "RolloutEngine.chat_parser",
        "RolloutEngine.get_model_response",
        "RolloutEngine.get_token_output_from_token_input",
        "RolloutEngine.is_validation",
        "RolloutEngine.sleep",
        "RolloutEngine.supports_token_in_token_out",
        "RolloutEngine.tokenizer",
        "RolloutEngine.validate",
        "RolloutEngine.wake_up",
        "TokenInput",
        "close_gate",
        "needs_weight_sync_gate",
        "open_gate",
        "wait_for_drain",
        "wait_for_gate",
    ),
    "parsers": (
        "BaseParser",
        "BaseParser.bridge_to_next_turn",
        "BaseParser.get_stop_token_ids",
        "BaseParser.parse_completion",
        "BaseParser.render",
        "ChatTemplateParser",
        "DefaultRenderer",
        "ParsedCompletion",
        "ParserSession",
        "RendererParser",
        "TinkerChatTemplateParser",
        "VerlEngine.parser",
        "bypass_render_with_parser",
        "parser_backend",
        "renderers",
        "rllm.parser_backend",
    ),
    "algorithms": (
        "CustomPPOLoss",
        "algorithm.rollout_correction.bypass_mode",
        "bypass_recomputing_logprobs",
        "norm_adv_by_std_in_grpo",
        "old_log_prob",
        "stepwise_advantage",
    ),
    "loop": (
        "BackendProtocol",
        "BufferedEpisodeGroup",
        "EpisodeGroupAccumulator",
        "MetricsAggregator",
        "SyncCoordinator",
        "SyncCoordinator.pause",
        "SyncCoordinator.resume",
        "SyncCoordinator.throttle",
        "TrajectoryGroupBuffer",
        "UnifiedTrainer",
        "marked_timer",
        "on_epoch_end",
        "on_epoch_start",
        "on_policy_updated",
        "partial_rollout",
        "update_weights",
    ),
    "backends": (
        "ActorConfig",
        "AgentLoopManager",
        "EngineWorker",
        "FullyAsyncAgentLoopManager",
        "FullyAsyncRayPPOTrainer",
        "SeparateRayPPOTrainer",
        "TinkerEngine",
        "VerlBackend",
        "VerlEngine",
        "fully_async_policy.fully_async_main",
        "fully_async_policy.ray_trainer",
        "global_batch_info",
        "load_balancer",
        "local_trigger_step",
        "omega_conf_to_dataclass",
        "ppo_loss",
        "save_model_to_cpu",
        "separation.ray_trainer",
        "separation.utils",
        "tinker_backend",
        "trainer.use_legacy_worker_impl",
        "transform",
    ),
    "supervised": (
        "RLLMSFTDataset",
        "SFTTrainer",
        "create_sft_dataset",
        "cumulative",
        "custom_cls",
        "data.rllm.tokenize_and_mask_method",
        "hf_template",
        "max_samples",
        "processor",
        "stepwise",
        "tokenize_and_mask",
    ),
    "extras and modules": (
        "buffer",
        "completer",
        "dev",
        "metrics",
        "protocol",
        "rllm.agents.agent",
        "rllm.engine.rollout",
        "rllm.engine.rollout.types",
        "rllm.experimental.rollout",
        "rllm.parser",
        "rllm.parser.base",
        "rllm.parser.chat_template_parser",
        "rllm.parser.renderer_parser",
        "rllm.parser.tinker_parser",
        "rllm.types",
        "rollout_engine",
        "tinker",
        "tinker_engine",
        "unified_trainer",
        "verl",
        "verl_backend",
        "verl_engine",
    ),
}


class Row(NamedTuple):
    """Row of the tables.

    Attributes:
        theirs: Names in the first column.
        here: Second column.
        note: Third column, without the comment that marks a row.
    """

    theirs: list[str]
    here: str
    note: str

    @property
    def ours(self) -> list[str]:
        return HERE.findall(f"{self.here} {self.note}")


def rows() -> list[Row]:
    lines = [line for line in PAGE.section("Name by name").splitlines() if re.match(r"\| (?!rLLM |---)", line)]
    cells = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]
    assert {len(row) for row in cells} == {3}
    return [Row(HERE.findall(theirs), here, re.sub("<!--.*?-->", "", note).strip()) for theirs, here, note in cells]


ROWS = rows()


@pytest.mark.parametrize("area", SEEDS)
def test_every_name_of_the_seeds_has_a_row(area: str) -> None:
    assert [name for name in SEEDS[area] if not any(name in row.theirs for row in ROWS)] == []


def test_no_name_has_two_rows() -> None:
    assert [name for name, times in Counter(name for row in ROWS for name in row.theirs).items() if times > 1] == []


def test_a_row_has_a_counterpart_or_a_reason() -> None:
    for row in ROWS:
        assert row.theirs, row
        assert row.here, row
        assert row.note or row.here != "none", row


def test_names_of_ours_exist() -> None:
    named = {name for row in ROWS for name in row.ours if re.fullmatch(r"rllm_\w+(\.\w+)*", name)}
    assert len(named) > 50
    assert [name for name in sorted(named) if not exists(name)] == []


def test_keys_exist() -> None:
    found = list(sections(first_party_plugins()))
    known = {f"{path}.{name}" for path, _, model in found for name, _, _ in keys(model)}
    known |= {f"[{path}]" for path, _, _ in found}
    ours = [name.replace(".NAME]", "]") for row in ROWS for name in row.ours if not name.startswith("rllm_")]
    named = {name for name in ours if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+|\[[a-z_.]+\]", name)}
    assert len(named) > 20
    assert sorted(named - known) == []
