"""A module that cannot be imported."""

raise RuntimeError("the abacus\nis broken")
