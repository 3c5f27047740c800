"""The tables of the suite, one module each: `python -m benchmarks.reproduce NAME|all [--short]`."""
