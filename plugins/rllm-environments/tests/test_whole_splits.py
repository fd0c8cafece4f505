"""No question of a whole validation split is in the whole training split, for every dataset of reasoning-gym."""

from __future__ import annotations

import pytest
from rllm_environments.reasoning_gym import child, datasets
from rllm_environments.reasoning_gym.workflow import ReasoningGymConfig, ReasoningGymWorkflow

USED = [name for name in datasets.variants() if not datasets.findings(name)["refused"]]
# Their generators take up to seconds per question.
SIZES_OF_SLOW = {"train_size": 40, "validation_size": 8}


def questions(workflow, split):
    return {" ".join(child.pose(task.data)[1].casefold().split()) for task in workflow.tasks(split)}


@pytest.mark.slow
@pytest.mark.parametrize("name", USED)
def test_whole_splits_share_no_question(name):
    sizes = SIZES_OF_SLOW if datasets.findings(name)["slow"] else {}
    workflow = ReasoningGymWorkflow(ReasoningGymConfig(environment=name, **sizes), found=datasets.findings(name))
    train, validation = (questions(workflow, split) for split in ("train", "validation"))
    assert train
    assert validation
    assert not train & validation
