"""The benchmark suite. Each module runs as `python -m benchmarks.NAME`."""
