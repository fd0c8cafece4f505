"""Sloppy and hostile plugins as text, one module each, written to a folder without pip."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hostile_site import distribution

BEGINNING = """\
from rllm_core import hookimpl
from rllm_core.providers import CommandProvider, TrackerProvider, WorkflowProvider
"""
PROVIDES_ONE = """
@hookimpl
def workflows():
    return [WorkflowProvider(name="{name}", load="misfits.{module}:Anything", summary="Of a misfit.")]
"""


@dataclass(frozen=True)
class Misfit:
    """Plugin that misbehaves in one way.

    Attributes:
        source: Source of its module, after two lines of imports.
        error: Regular expression for the error when the plugin is broken; "" if it loads.
        changed: Shared state that its import changes.
        dies: Whether it ends the process that imports it.
    """

    source: str
    error: str = ""
    changed: str = ""
    dies: bool = False


MISFITS = {
    "raises": Misfit(
        "def deep():\n    raise RuntimeError('no flux')\n\ndeep()", r"raises\.py:4: RuntimeError: no flux$"
    ),
    "exits": Misfit("import sys\nsys.exit('bye')", r"exits\.py:4: SystemExit: bye$"),
    "syntax": Misfit("def broken(:", r"syntax\.py:3: SyntaxError: invalid syntax"),
    "undeclared": Misfit(
        "import misfit_not_there",
        r"undeclared\.py:3: ModuleNotFoundError: No module named 'misfit_not_there'; no requirement of rllm-misfits "
        r"provides module 'misfit_not_there'; install a package that does, and report this to its authors$",
    ),
    "forgotten": Misfit("import misfits.forgotten_file", r"forgotten\.py:3: ModuleNotFoundError: [^;]*$"),
    "other-api": Misfit("from click import not_yet", r"other_api\.py:3: ImportError: cannot import name [^;]*$"),
    "circles": Misfit("def again():\n    again()\n\nagain()", r"circles\.py:4: RecursionError: maximum recursion"),
    "own-kind": Misfit(
        "class Odd(BaseException):\n    pass\n\nraise Odd('of its own kind')", r"own_kind\.py:6: Odd: of its own kind$"
    ),
    "group": Misfit(
        "def deep():\n    raise KeyError('one')\n\ntry:\n    deep()\nexcept KeyError as error:\n"
        "    raise ExceptionGroup('several', [error])",
        r"group\.py:4: ExceptionGroup: several",
    ),
    "hook-raises": Misfit(
        "@hookimpl\ndef workflows():\n    return [WorkflowProvider(name=n, load='a:b', summary=missing) for n in 'ab']",
        r"hook_raises\.py:5: NameError: name 'missing' is not defined$",
    ),
    "no-records": Misfit(
        "@hookimpl\ndef workflows():\n    return [{'name': 'x'}]", r"is not a WorkflowProvider record$"
    ),
    "misspelt": Misfit("@hookimpl\ndef workflow():\n    return []", r"did you mean 'workflows'\?$"),
    "bad-name": Misfit(
        "@hookimpl\ndef workflows():\n    return [WorkflowProvider(name='Not A Name', load='a:b', summary='')]",
        r"bad_name\.py:5: ValueError: workflow name 'Not A Name' must match",
    ),
    "no-hooks": Misfit("HOOKS = 0", r"it implements no hook"),
    "clears": Misfit("import os\nos.environ.clear()" + PROVIDES_ONE, changed="os.environ ("),
    "shallow": Misfit("import sys\nsys.setrecursionlimit(200)" + PROVIDES_ONE, changed="the recursion limit"),
    "walks-off": Misfit("import os\nos.chdir('/')" + PROVIDES_ONE, changed="the working directory"),
    "deaf": Misfit(
        "import signal\nfor number in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(number, signal.SIG_IGN)"
        + PROVIDES_ONE,
        changed="the handlers of SIGINT, SIGTERM",
    ),
    "abroad": Misfit(
        "import locale\nhere = locale.setlocale(locale.LC_CTYPE)\n"
        "locale.setlocale(locale.LC_CTYPE, 'C' if here != 'C' else 'C.UTF-8')" + PROVIDES_ONE,
        changed="the locale",
    ),
    "strict": Misfit("import warnings\nwarnings.simplefilter('error')" + PROVIDES_ONE, changed="the warnings filters"),
    "mute": Misfit("import warnings\nwarnings.resetwarnings()" + PROVIDES_ONE, changed="the warnings filters"),
    "first": Misfit("import sys\nsys.path.insert(0, '/nowhere/first')" + PROVIDES_ONE, changed="sys.path"),
    "only": Misfit("import sys\nsys.path[:] = ['/nowhere/only']" + PROVIDES_ONE, changed="sys.path"),
    "renames": Misfit("import sys\nsys.argv[:] = ['nothing']" + PROVIDES_ONE, changed="sys.argv"),
    "leaves": Misfit(
        "import threading\nreleased = threading.Event()\n"
        "threading.Thread(target=released.wait, name='waits').start()" + PROVIDES_ONE
    ),
    "no-attributes": Misfit(
        "class Anything:\n    pass\n\ndef __getattr__(name):\n    raise RuntimeError('no ' + name)" + PROVIDES_ONE,
        r"no_attributes\.py:7: RuntimeError: no RLLM_CORE_API$",
    ),
    "dies": Misfit("import os\nos._exit(7)", r"its import ended the process \(exit code 7\)$", dies=True),
    "crashes": Misfit(
        "import ctypes\nctypes.string_at(0)",
        r"its import ended the process \(signal SIGSEGV\); it was in <module> \(misfits/crashes\.py:4\)$",
        dies=True,
    ),
    "crashes-deeply": Misfit(
        "import ctypes\n\ndef deep(left):\n    deep(left - 1) if left else ctypes.string_at(0)\n\ndeep(200)",
        r"its import ended the process \(signal SIGSEGV\); it was in deep \(misfits/crashes_deeply\.py:6\)$",
        dies=True,
    ),
    "aborts": Misfit(
        "import os\n\ndef deep():\n    os.abort()\n\ndeep()",
        r"its import ended the process \(signal SIGABRT\); it was in deep \(misfits/aborts\.py:6\)$",
        dies=True,
    ),
    "spins": Misfit(
        "while True:\n    pass",
        r"its import did not end within [\d.]+ s; it was in <module> \(misfits/spins\.py:[34]\)$",
        dies=True,
    ),
    "holds": Misfit(  # the interpreter, like a long computation in C, but without its CPU time
        "import ctypes\nmutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)\n"
        "libc.pthread_mutex_lock(mutex)\nlibc.pthread_mutex_lock(mutex)",
        r"its import did not end within [\d.]+ s",
        dies=True,
    ),
}
SURVIVORS = sorted(name for name, misfit in MISFITS.items() if not misfit.dies)
CHANGERS = sorted(name for name, misfit in MISFITS.items() if misfit.changed)

VICTIM = """
import os
import sys
import warnings

if "PATH" not in os.environ or os.getcwd() == "/" or sys.getrecursionlimit() < 1000 or sys.path[0].startswith("/now"):
    raise RuntimeError("somebody has changed what I need")
warnings.warn("an honest warning", ImportWarning)
"""

WORKFLOWS = """
from pydantic import field_validator

from rllm_devkit.scripted import ScriptedWorkflow, ScriptedWorkflowConfig


class FussyConfig(ScriptedWorkflowConfig):
    level: int = 1

    @field_validator("level")
    @classmethod
    def _check(cls, level):
        return isinstance(level, "int")


class Fussy(ScriptedWorkflow):
    config_model = FussyConfig


class Unbuilt(ScriptedWorkflow):
    def __init__(self, config=None):
        super().__init__(config)
        self.tools = {}["calculator"]


class Deaf(ScriptedWorkflow):
    def __init__(self):
        pass


class NoTasks(ScriptedWorkflow):
    def tasks(self, split):
        return [1 / 0]


class Fails(ScriptedWorkflow):
    async def run(self, task, completer):
        episode = await super().run(task, completer)
        if task.task_id.endswith("1"):
            raise LookupError("no such tool")
        return episode
"""
WORKFLOW_RECORDS = """
@hookimpl
def workflows():
    names = {"fussy": "Fussy", "unbuilt": "Unbuilt", "deaf-workflow": "Deaf", "no-tasks": "NoTasks", "fails": "Fails",
             "explodes": "Explodes"}
    inherited = dict.fromkeys(names, "rllm_devkit.scripted:ScriptedWorkflowConfig")
    sections = {**inherited, "fussy": "misfits.play:FussyConfig", "explodes": None}
    modules = {"explodes": "explodes"}
    return [
        WorkflowProvider(
            name=name, load=f"misfits.{modules.get(name, 'play')}:{of}", config=sections.get(name), summary=""
        )
        for name, of in names.items()
    ]


@hookimpl
def cli_commands():
    return [CommandProvider(name="stumble", load="misfits.command:stumble", summary="Raises.")]


@hookimpl
def trackers():
    return [TrackerProvider(name="leaky", load="misfits.leaky:Leaky", summary="Raises.")]


@hookimpl
def on_batch_end(metrics):
    raise ValueError("observed too much")
"""
EXPLODES = "import math\n\nmath.sqrt('x')\n"
COMMAND = "import click\n\n\n@click.command()\ndef stumble():\n    {}['step']\n"
LEAKY = """
from rllm_core.tracker import Tracker


class Leaky(Tracker):
    name = "leaky"

    def start(self, config, run_dir):
        pass

    def log(self, step, metrics):
        raise OSError("no room")

    def finish(self, status):
        pass
"""


def write_site(folder: Path) -> str:
    """Makes a folder for ``sys.path`` with all misfits and the plugins ``play`` and ``victim``; ``victim`` is last."""
    package = folder / "misfits"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    points = ["play = misfits.records"]
    (package / "records.py").write_text(BEGINNING + WORKFLOW_RECORDS, encoding="utf-8")
    for module, source in (
        ("play", WORKFLOWS),
        ("command", COMMAND),
        ("leaky", LEAKY),
        ("explodes", "import math\n\nmath.sqrt('x')\n"),
    ):
        (package / f"{module}.py").write_text(source, encoding="utf-8")
    for name, misfit in MISFITS.items():
        module = name.replace("-", "_")
        points.append(f"{name} = misfits.{module}")
        source = misfit.source.replace("{name}", f"of-{name}").replace("{module}", module)
        (package / f"{module}.py").write_text(BEGINNING + source, encoding="utf-8")
    distribution(folder, "rllm-misfits", "0.1", *points)
    (folder / "misfit_victim.py").write_text(
        VICTIM + BEGINNING + PROVIDES_ONE.replace("{name}", "of-victim").replace("{module}", "x"), encoding="utf-8"
    )
    distribution(folder, "rllm-victim", "0.1", "zz-victim = misfit_victim")
    return distribution(folder, "rllm-testing", "1.0", "testing = rllm_devkit.scripted_plugin")


def malformed(folder: Path) -> str:
    """Makes a folder with one distribution that is not a plugin and has an unreadable ``entry_points.txt``."""
    site = distribution(folder, "odd-thing", "3.0")
    (folder / "odd_thing-3.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\njust words\n")
    return site
