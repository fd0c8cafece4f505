"""Makes what the tests share importable."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("support")))

import pytest
from forked import Forks, forks

if find_spec("hypothesis"):  # some of the other environments have none
    from hypothesis import HealthCheck, settings

    # The same examples in every run, and no machine is too slow for them.
    settings.register_profile(
        "tests", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tests")


def pytest_sessionstart() -> None:
    """Lets Ctrl-C be Ctrl-C in a lane in the background, too, which a shell starts with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the compiled tests for the next process where PYTHONDONTWRITEBYTECODE is set, but not what tests write."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()  # until all tests are imported there is nothing to find
    try:
        return (yield)
    finally:
        gc.enable()
        sys.dont_write_bytecode = before


def pytest_collection_finish() -> None:
    """Exempts what pytest holds from garbage collections: every run begins with one, and that would walk all tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forking() -> Iterator[Forks]:
    """Starts commands and programs as forks of a process that has imported torch."""
    with forks() as made:
        yield made
