"""Cannot be imported."""

raise RuntimeError("the abacus\nis broken")
