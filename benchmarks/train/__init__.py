"""A training run on a recipe: `python -m benchmarks.train`, alone or under torchrun."""
