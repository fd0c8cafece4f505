"""Prints the greatest difference between the log-probabilities of a run's last validation and those of its adapters.

``python greatest_gap.py RUN ADAPTERS``, in the environment of the server, which has torch and peft.
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM


def main(run, adapters):
    base = AutoModelForCausalLM.from_pretrained(PeftConfig.from_pretrained(adapters).base_model_name_or_path)
    policy = PeftModel.from_pretrained(base, adapters)
    lines = [json.loads(line) for line in (Path(run) / "trajectories.jsonl").read_text().splitlines()]
    last = max(line["step"] for line in lines)
    gaps = []
    for line in lines:
        if line["step"] != last or not line["episode"]["is_validation"]:
            continue
        [step] = line["episode"]["trajectories"][0]["steps"]
        ids, prompt_tokens = torch.tensor([*step["prompt_ids"], *step["completion_ids"]]), len(step["prompt_ids"])
        with torch.no_grad():
            logprobs = policy(ids[None]).logits[0, prompt_tokens - 1 : -1].log_softmax(-1)
        found = logprobs.gather(-1, ids[prompt_tokens:, None])[:, 0]
        gaps.append(float((found - torch.tensor(step["logprobs"])).abs().max()))
    print(json.dumps({"rollouts": len(gaps), "gap": max(gaps)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
