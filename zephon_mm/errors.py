"""Exceptions raised by zephon_mm. This module imports nothing from the package.

    ZephonError
      ConfigError         the user's configuration cannot work; raised before any worker starts
      DatasetError        a dataset as a whole cannot be used: shard missing, damaged, changed
      SampleError         one stored sample is defective; names it, carries a countable reason
      DataQualityError    more samples are defective than `max_error_rate` allows
      StaleIndexError     an index does not fit the data that it was made of
      CheckpointError     a checkpoint does not belong to this pipeline
      RunnerError         the machinery that runs tasks failed
        WorkerCrashed     a worker died natively (a signal of its own, or an exit code) on a task
        WorkerLost        a task's workers were killed or overdue too often

Every message says what was found, what was expected, and what to change.
"""


class ZephonError(Exception):
    """Base class of every error that zephon_mm raises on purpose."""


class ConfigError(ZephonError, ValueError):
    """The configuration cannot work. Raised at construction, before any worker starts."""


class DatasetError(ZephonError):
    """A dataset as a whole cannot be used: a shard is missing, damaged or has changed."""


class SampleError(ZephonError):
    """One stored sample is defective: proved on complete bytes, so every rank agrees.

    Args:
        reason: A short slug that metrics count, such as `no_image`, `empty_text`, `not_an_image`,
            `truncated_image`, `too_many_pixels`, `overlong`.
        message: What was found, what was expected, what to change.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        """Return the message with its reason in front."""
        return f"[{self.reason}] {self.message}"


class DataQualityError(ZephonError):
    """More samples are defective than `max_error_rate` allows."""


class StaleIndexError(ZephonError):
    """A sample is not what the index says of it: data or code changed under the same name."""


class CheckpointError(ZephonError):
    """A checkpoint does not belong to this pipeline, or a part of it is missing."""


class RunnerError(ZephonError):
    """The machinery that runs tasks failed."""


class WorkerCrashed(RunnerError):
    """A worker died by itself while it ran a task: a signal such as SIGSEGV, or an exit code."""


class WorkerLost(RunnerError):
    """A task could not be finished: its workers were killed or overdue too often."""
