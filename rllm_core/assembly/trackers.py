"""Constructs the trackers that a run file names."""

from __future__ import annotations

from rllm_core import providers
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.plugins import PluginManager
from rllm_core.plugins.blame import located
from rllm_core.tracker import Tracker


def construct(config: RunConfig, plugins: PluginManager) -> dict[str, Tracker]:
    """Constructs the trackers of a run file, by name.

    Raises:
        ConfigError: If a tracker is named twice, or rejects its settings.
        PluginError: If a tracker cannot be imported or constructed.
    """
    chosen: dict[str, Tracker] = {}
    for name in config.training.trackers:
        if name in chosen:
            raise ConfigError(f"training.trackers names {name!r} twice; leave one out")
        provided = plugins.select(providers.TrackerProvider, name)
        tracker_class: type[Tracker] = plugins.load(provided)
        try:
            chosen[name] = tracker_class(config.plugins.get(name))
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a SystemExit raised by a library is a failure of the tracker
            what = located(error, provided.plugin.package)
            raise PluginError(
                f"tracker {name!r} ({provided.plugin.label}) cannot be set up: {what}; "
                "fix it, or remove it from training.trackers"
            ) from error
    return chosen
