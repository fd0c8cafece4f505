"""Speed and learning, measured: ``python -m benchmarks.NAME``. What the figures mean is in docs/benchmarks.md."""
