"""A worker written from docs/worker-protocol.md alone, with the reference workflow. It imports nothing of rllm-core.

Its rollouts are generators. A rollout yields what it says, and is sent the answers of its calls. Everything runs in one
loop, without threads.
"""

import hashlib
import os
import struct
import sys
import time
from array import array

import msgspec

REASON_CANCELLED = {"reason": "cancelled", "message": "cancelled"}


class CallFailed(Exception):
    """A call has no step."""


class Ended(Exception):
    """The workflow ends on purpose."""


def derive_seed(*parts):
    digest = hashlib.blake2b(repr(list(parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def portable(value):
    """Replaces integers of more than 64 bits."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item) for item in value]
    big = type(value) is int and not -(2**63) <= value < 2**64
    return msgspec.msgpack.Ext(1, str(value).encode()) if big else value


def ints(data):
    values = array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return list(values)


class Conversation:
    def __init__(self, path, seed):
        self.path, self.seed, self.forks = path, seed, 0
        self.messages, self.tools, self.limit, self.stop_texts = [], None, None, []
        self.said, self.offered, self.tokens, self.named = [], "unknown", [], []

    def fork(self):
        self.forks += 1
        return Conversation([*self.path, self.forks], derive_seed(self.seed, "fork", self.forks))

    def branch(self, name, step, said, tokens):
        if name is None:
            self.forks += 1
            name = self.forks
        last = {"type": "fork", "name": name, "after": step, "repeat": self.named.count(name)}
        self.named.append(name)
        branch = Conversation([*self.path, last], derive_seed(self.seed, "fork", name))
        branch.messages, branch.said, branch.tokens = list(said), list(said), list(tokens)
        return branch


class Rollout:
    def __init__(self, start):
        self.number, self.start = start["rollout"], start
        self.calls, self.waiting, self.steps, self.caught = 0, {}, [], []
        self.conversations = {"main": Conversation([], start["seed"])}
        self.said = {}  # step -> messages and answer
        self.ids = {}  # id(response) -> step; the steps keep the responses alive
        self.rewards, self.generator = {}, self.run()

    def call(self, conversation):
        self.calls += 1
        messages, said = list(conversation.messages), conversation.said
        same = (at for at, (mine, known) in enumerate(zip(messages, said, strict=False)) if mine != known)
        kept = next(same, min(len(messages), len(said)))
        call = {
            "type": "call", "rollout": self.number, "call": self.calls, "conversation": conversation.path, "kept": kept,
            "messages": [self.ids.get(id(message), message) for message in messages[kept:]],
        }  # fmt: skip
        if conversation.tools != conversation.offered:
            call["tools"] = conversation.tools
        if conversation.limit is not None:
            call["max_response_tokens"] = conversation.limit
        if conversation.stop_texts:
            call["stop_texts"] = conversation.stop_texts
        conversation.offered = "unknown"
        self.waiting[self.calls] = (conversation, messages)
        return call

    def answered(self, message):
        """Takes an answer, and returns what became of the call; None if it was given up."""
        asked = self.waiting.pop(message["call"], None)
        if asked is None:
            return None
        if message["type"] == "call_failed":
            failed = CallFailed(message["message"])
            failed.call = message["call"]
            return message["call"], failed
        (conversation, messages), step = asked, message["step"]
        prompt = conversation.tokens[: step["kept"]] + ints(step["prompt"])
        completion = ints(step["completion"])
        conversation.tokens = prompt + completion
        conversation.said, conversation.offered = [*messages, step["response"]], conversation.tools
        self.ids[id(step["response"])] = step["step"]
        self.said[step["step"]] = conversation.said
        return message["call"], (step, [prompt, completion])

    def ask(self, names, catches=False):
        asked = [self.conversations[name] for name in names]
        calls = [self.call(conversation) for conversation in asked]
        for call in calls:
            yield call
        answers = {}
        while len(answers) < len(calls):
            number, answer = yield None
            answers[number] = answer
            if isinstance(answer, CallFailed):
                if not catches:
                    raise answer
                self.caught.append(str(answer))
                return
        for conversation, call in zip(asked, calls, strict=True):
            step, tokens = answers[call["call"]]
            conversation.messages.append(step["response"])
            self.steps.append((step, tokens))

    def run(self):
        for name, *arguments in self.start["data"]["do"]:
            of = self.conversations.get(arguments[0]) if arguments and isinstance(arguments[0], str) else None
            if name == "ask":
                yield from self.ask(arguments)
            elif name == "try":
                yield from self.ask(arguments, catches=True)
            elif name == "give_up":
                call = self.call(of)
                del self.waiting[call["call"]]
                yield call
                yield {"type": "give_up", "rollout": self.number, "call": call["call"]}
            elif name == "wait":
                while True:
                    yield None
            elif name == "say":
                of.messages.append(arguments[1])
            elif name == "quote":
                of.messages.append(self.steps[arguments[1]][0]["response"])
            elif name == "keep":
                del of.messages[arguments[1] :]
            elif name == "tools":
                of.tools = arguments[1]
            elif name == "limit":
                of.limit = arguments[1]
            elif name == "fork":
                self.conversations[arguments[1]] = of.fork()
            elif name == "stop":
                of.stop_texts = arguments[1]
            elif name == "branch":
                step, (prompt, completion) = self.steps[arguments[2]]
                said = self.said[step["step"]]
                self.conversations[arguments[1]] = of.branch(arguments[3], step["step"], said, prompt + completion)
            elif name == "reward":
                self.rewards[arguments[0]] = arguments[1]
            elif name == "print":
                print(arguments[0], file=sys.stderr)
            elif name == "compute":
                time.sleep(arguments[0])
            elif name == "fail":
                raise RuntimeError(arguments[0])
            elif name == "end":
                ended = Ended(arguments[1])
                ended.reason = arguments[0]
                raise ended

    def episode(self):
        start, data = self.start, self.start["data"]
        seen = {
            "task_id": start["task_id"], "is_validation": start.get("is_validation", False),
            "max_response_tokens": start.get("sampling", {}).get("max_response_tokens"), "caught": self.caught,
            "seeds": {name: conversation.seed for name, conversation in self.conversations.items()},
            "tokens": [tokens for _, tokens in self.steps],
        }  # fmt: skip
        changes = [{"reward": self.rewards[at]} if at in self.rewards else {} for at in range(len(self.steps))]
        steps = [
            {"type": "returned_step", "step": step["step"], "changes": changed}
            for (step, _), changed in zip(self.steps, changes, strict=True)
        ]
        trajectory = {"type": "trajectory", "steps": steps, "fields": {"reward": data.get("reward")}}
        fields = {"task_id": start["task_id"], "metadata": {"seen": seen, "echo": data.get("echo")}}
        return {"type": "ended", "rollout": self.number, "trajectories": [trajectory], "fields": fields}

    def advance(self, answer=None):
        """Goes on until it waits; yields what it says."""
        failed = None
        try:
            said = self.generator.send(answer)
            while said is not None:
                yield said
                said = next(self.generator)
            return
        except StopIteration:
            yield self.episode()
            return
        except CallFailed as error:
            failed = {"reason": "error", "message": str(error), "call": error.call}
        except Ended as error:
            failed = {"reason": error.reason, "message": str(error)}
        except Exception as error:
            failed = {"reason": "error", "message": f"{type(error).__name__}: {error}"}
        yield {"type": "failed", "rollout": self.number, **failed}


def handle(message, rollouts, state):
    kind, number = message["type"], message.get("rollout")
    if kind == "open":
        if message["version"] != 1 or message["workflow"] != "rllm_devkit.reference:Reference":
            yield {"type": "broken", "message": f"there is no {message['workflow']} here, and only version 1"}
            return
        state["says_settled"] = message.get("says_settled", False)
        yield {"type": "opened"}
    elif kind == "close":
        yield {"type": "closed"}
        state["closed"] = True
    elif kind == "start":
        rollouts[number] = Rollout(message)
        yield from rollouts[number].advance()
    elif number in rollouts and kind == "cancel":
        yield {"type": "cancelling", "rollout": number, "waits_at": "instruction"}
        yield {"type": "failed", "rollout": number, **REASON_CANCELLED}
    elif number in rollouts and kind in ("answer", "call_failed"):
        answer = rollouts[number].answered(message)
        if answer is not None:
            yield from rollouts[number].advance(answer)


def write(messages):
    content = msgspec.msgpack.encode(portable(messages))
    sys.stdout.buffer.write(struct.pack(">I", len(content)) + content)
    sys.stdout.buffer.flush()


def main():
    decode = msgspec.msgpack.Decoder(ext_hook=lambda code, data: int(bytes(data))).decode
    rollouts, state, frames = {}, {"says_settled": False, "closed": False}, 0
    write([{"type": "ready", "version": 1, "program": "a worker of its own", "pid": os.getpid()}])
    while not state["closed"] and len(length := sys.stdin.buffer.read(4)) == 4:
        frames += 1
        said = []
        for message in decode(sys.stdin.buffer.read(struct.unpack(">I", length)[0])):
            for answer in handle(message, rollouts, state):
                if answer["type"] in ("ended", "failed"):
                    del rollouts[answer["rollout"]]
                said.append(answer)
        if state["says_settled"] and not state["closed"]:
            said.append({"type": "settled", "frames": frames})
        if said:
            write(said)


if __name__ == "__main__":
    main()
