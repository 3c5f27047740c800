"""Elastic, deterministic data loading for vision-language models."""

from zephon_mm.batch import Batch
from zephon_mm.errors import ZephonError
from zephon_mm.io import Dataset
from zephon_mm.pipeline import Pipeline

__all__ = ["Batch", "Dataset", "Pipeline", "ZephonError"]
