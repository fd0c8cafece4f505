"""Workflow ``textarena``: games for one or several players, with scripted players or self-play."""
