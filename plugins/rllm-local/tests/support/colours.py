"""A workflow with images, as a file of a user."""

from __future__ import annotations

import base64
import io
from typing import Any, ClassVar

import PIL.Image

from rllm_core.engine import Completer
from rllm_core.types import Episode, Task
from rllm_core.workflow import Split, Workflow


def picture(colour: str) -> str:
    file = io.BytesIO()
    PIL.Image.new("RGB", (16, 16), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class Colours(Workflow):
    """Two images to name, one after the other; the reward is the share of correct names."""

    name: ClassVar[str] = "colours"

    def tasks(self, split: Split) -> list[Task]:
        return [
            Task(task_id=f"{split}-{a}-{b}", data={"shown": [a, b]}) for a in ("red", "blue") for b in ("red", "blue")
        ]

    async def run(self, task: Task, completer: Completer) -> Episode:
        messages: list[Any] = []
        steps = []
        for question, colour in zip(("what", "now"), task.data["shown"], strict=True):
            image = {"type": "image_url", "image_url": {"url": picture(colour)}}
            messages.append({"role": "user", "content": [image, {"type": "text", "text": question}]})
            steps.append(await completer.complete(messages))
            messages.append(steps[-1].response)
        named = [step.text.strip() == colour for step, colour in zip(steps, task.data["shown"], strict=True)]
        return self.episode(task, steps, reward=sum(named) / 2, is_correct=all(named))
