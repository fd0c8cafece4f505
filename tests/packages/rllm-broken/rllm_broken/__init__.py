"""A plugin whose module raises."""

raise RuntimeError("the flux capacitor\nis empty")
