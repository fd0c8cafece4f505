"""Workers that break the protocol, each in one way: ``python noncompliant_workers.py NAME``."""

import sys
import time

import standalone_worker as good

write, handle, portable = good.write, good.handle, good.portable
call, answered, episode, run = good.Rollout.call, good.Rollout.answered, good.Rollout.episode, good.Rollout.run


def changed(**changes):
    """Lets the worker write messages of a type with other fields; of None, not at all."""

    def other(messages):
        said = []
        for message in messages:
            change = changes.get(message["type"], {})
            said += [] if change is None else [{**message, **change}]
        write(said)

    good.write = other


def opens_anything(message, *rest):
    fixed = {"version": 1, "workflow": "rllm_devkit.reference:Reference"} if message["type"] == "open" else {}
    return handle({**message, **fixed}, *rest)


def sends_everything(self, conversation):
    conversation.said = []
    return call(self, conversation)


def keeps_too_much(self, conversation):
    asked = call(self, conversation)
    asked["kept"] = len(conversation.said)
    return asked


def repeats_tools(self, conversation):
    return {**call(self, conversation), "tools": conversation.tools}


def trusts_tools(self, conversation):
    before, asked = conversation.offered, call(self, conversation)
    conversation.offered = before
    return asked


def assumes_tools(self, conversation):
    asked, conversation.offered = call(self, conversation), conversation.tools
    return asked


def takes_late_answers(self, message):
    if message["call"] not in self.waiting:
        raise RuntimeError("no call waits for this")
    return answered(self, message)


def without_tokens(self, message):
    conversation = self.waiting[message["call"]][0]
    conversation.tokens = []
    return answered(self, message)


def without_cancel(message, *rest):
    return handle(message, *rest) if message["type"] != "cancel" else iter(())


def one_conversation(self, start, kept=good.Rollout.__init__, shared={}):  # noqa: B006 - that is the mistake
    kept(self, start)
    if start["data"].get("reward"):
        self.conversations["main"] = shared.setdefault("main", self.conversations["main"])


def settles_early(message, *rest):
    if message["type"] in ("start", "answer"):
        settles_early.frames += 1
        write([{"type": "settled", "frames": settles_early.frames + 1}])
    return handle(message, *rest)


settles_early.frames = 0


def floats(value):
    if isinstance(value, dict):
        return {key: floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [floats(item) for item in value]
    return float(value) if type(value) is int and abs(value) >= 2**63 else value


def strict(message, *rest):
    if "news" in message:
        raise KeyError("news")
    return handle(message, *rest)


def prints(self, kept=print):
    if self.start["data"]["do"][0][0] == "print":
        kept(self.start["data"]["do"][0][1], flush=True)
    return run(self)


class Impatient:
    """Takes what one read returns for all that was asked for."""

    def read(self, size):
        return sys.stdin.buffer.raw.read(size)


class Stdin:
    buffer = Impatient()


def reads_once():
    stdout, stderr = sys.stdout, sys.stderr
    good.sys = type("sys", (), {"stdin": Stdin, "stdout": stdout, "stderr": stderr, "byteorder": sys.byteorder})


def never_exits(kept=good.main):
    kept()
    time.sleep(3600)


BROKEN = {
    "other version": lambda: changed(ready={"version": 2}),
    "silent": lambda: changed(opened=None),
    "opens anything": lambda: setattr(good, "handle", opens_anything),
    "no reward": lambda: setattr(good.Rollout, "episode", lambda self: {**episode(self), "trajectories": []}),
    "sends everything": lambda: setattr(good.Rollout, "call", sends_everything),
    "without tokens": lambda: setattr(good.Rollout, "answered", without_tokens),
    "keeps too much": lambda: setattr(good.Rollout, "call", keeps_too_much),
    "equal seeds": lambda: setattr(good, "derive_seed", lambda *parts: parts[0]),
    "repeats tools": lambda: setattr(good.Rollout, "call", repeats_tools),
    "trusts tools": lambda: setattr(good.Rollout, "call", trusts_tools),
    "assumes tools": lambda: setattr(good.Rollout, "call", assumes_tools),
    "no call": lambda: changed(failed={"call": None}),
    "one reason": lambda: changed(failed={"reason": "error"}),
    "late answers": lambda: setattr(good.Rollout, "answered", takes_late_answers),
    "no cancel": lambda: setattr(good, "handle", without_cancel),
    "no cancelling": lambda: changed(cancelling=None),
    "mixes": lambda: setattr(good.Rollout, "__init__", one_conversation),
    "settles early": lambda: setattr(good, "handle", settles_early),
    "miscounts": lambda: changed(settled={"frames": 1}),
    "never settles": lambda: changed(settled=None),
    "floats": lambda: setattr(good, "portable", floats),
    "strict": lambda: setattr(good, "handle", strict),
    "reads once": reads_once,
    "prints": lambda: setattr(good.Rollout, "run", prints),
    "no closed": lambda: changed(closed=None),
    "never exits": lambda: setattr(good, "main", never_exits),
}

if __name__ == "__main__":
    BROKEN[sys.argv[1]]()
    good.main()
