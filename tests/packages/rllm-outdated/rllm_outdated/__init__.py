"""A plugin that requires a newer version of a dependency than the installed one."""

from click import not_yet_invented  # noqa: F401
