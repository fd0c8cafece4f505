"""Speed and learning, measured. Each module runs as ``python -m benchmarks.NAME``; docs/benchmarks.md explains the figures."""
