"""A plugin that needs a newer version of a dependency than there is."""

from click import not_yet_invented  # noqa: F401
