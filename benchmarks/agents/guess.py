"""An agent that guesses a number with the model of an OpenAI-compatible endpoint, and does not know of training."""

import re

import aiohttp


async def play(secret: int, base_url: str) -> str:
    messages, echo = [{"role": "user", "content": "1-5?"}], ""
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                [choice] = (await response.json())["choices"]
            found = re.fullmatch(f"{echo}([0-9]{{1,4}})", choice["message"]["content"].strip())
            if found is None or choice["finish_reason"] == "length":
                return "invalid"
            if (guess := int(found[1])) == secret:
                return "found"
            said = "higher" if guess < secret else "lower"
            messages, echo = [*messages, choice["message"], {"role": "user", "content": said}], f"{guess}{said}"
    return "missed"
