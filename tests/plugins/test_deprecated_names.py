"""Tests that names that moved still work, with a warning that names the new one."""

from __future__ import annotations

import pytest

from rllm_core import providers


@pytest.mark.parametrize("record", providers.KINDS)
def test_a_record_class_has_its_old_name(record: type[providers.Provider]) -> None:
    old = record.__name__.removesuffix("Provider")
    with pytest.warns(DeprecationWarning, match=rf"rllm_core\.providers\.{old} is now {record.__name__}"):
        assert getattr(providers, old) is record


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Workflows'"):
        providers.Workflows  # noqa: B018
