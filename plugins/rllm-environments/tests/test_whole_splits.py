"""No question of a whole validation split is in the whole training split, for every dataset of reasoning-gym."""

from __future__ import annotations

import pytest
from rllm_environments.reasoning_gym import child, datasets
from rllm_environments.reasoning_gym.workflow import ReasoningGymConfig, ReasoningGymWorkflow

USED = [name for name in datasets.variants() if not datasets.findings(name)["refused"]]
# Of a whole split of the default size, these generators take between a minute and hours.
SLOW = ["countdown", "futoshiki", "intermediate_integration", "knight_swap", "puzzle24", "zebra_puzzles"]
SIZES_OF_SLOW = {"train_size": 40, "validation_size": 8}


def questions(workflow, split):
    return {" ".join(child.pose(task.data)[1].casefold().split()) for task in workflow.tasks(split)}


@pytest.mark.slow
# The programs of codeio start threads that fail.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", USED)
def test_whole_splits_share_no_question(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some generators write files
    sizes = SIZES_OF_SLOW if name in SLOW or datasets.findings(name)["slow"] else {}
    workflow = ReasoningGymWorkflow(ReasoningGymConfig(environment=name, **sizes), found=datasets.findings(name))
    train, validation = (questions(workflow, split) for split in ("train", "validation"))
    assert train
    assert validation
    assert not train & validation
