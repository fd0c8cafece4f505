"""Completions that never stop: a workflow, and a copy of the starter model that cannot sample its end-of-turn token.

The copy has the same weights. Its tokenizer has one token more than the model has logits, and the chat template ends
turns with that token. So every sampler continues until its token limit, at no extra cost for either side.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rllm_core import hookimpl, providers
from rllm_core.engine import Completer
from rllm_core.types import Episode, Task
from rllm_core.workflow import Split, Workflow

PROMPT_TOKENS = 32
TASKS = 512
LETTERS = "abcdefgh"
UNREACHABLE = "<|unreachable|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + UNREACHABLE + "{% endif %}{% endfor %}"
)


class EndlessWorkflow(Workflow):
    """Prompt: random letters, one token each. Reward: the share of the answer's characters with an even code.

    The reward differs between almost all completions, so no advantage is zero and neither side can skip work.
    """

    name: ClassVar[str] = "endless"

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns random words, different in each split."""
        rng = random.Random(split)
        words = ("".join(rng.choices(LETTERS, k=PROMPT_TOKENS)) for _ in range(TASKS))
        return [Task(task_id=f"{split}-{number}", data={"word": word}) for number, word in enumerate(words)]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Asks one question."""
        step = await completer.complete([{"role": "user", "content": task.data["word"]}])
        return self.episode(task, [step], reward=even_share(step.text))


def even_share(text: str) -> float:
    """Returns the share of characters with an even code."""
    return sum(ord(character) % 2 == 0 for character in text) / max(1, len(text))


@hookimpl
def workflows() -> list[providers.WorkflowProvider]:
    """The workflow above. Registered by the side that trains with the core."""
    return [providers.WorkflowProvider(name="endless", load=f"{__name__}:EndlessWorkflow", summary="Never stops.")]


def make_endless_model(starter: Path, folder: Path) -> Path:
    """Copies the starter model's weights to ``folder``, with the tokenizer that never stops."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(starter)
    tokenizer.add_special_tokens({"eos_token": UNREACHABLE})
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(starter)
    if tokenizer.eos_token_id < model.config.vocab_size:
        raise ValueError(f"the model can sample token {tokenizer.eos_token_id} ({model.config.vocab_size} logits)")
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
