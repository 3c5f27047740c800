from zephon_mm.batch import Batch as Batch
from zephon_mm.errors import ZephonError as ZephonError
from zephon_mm.io import Dataset as Dataset
from zephon_mm.pipeline import Pipeline as Pipeline

__all__ = ["Batch", "Dataset", "Pipeline", "ZephonError"]
