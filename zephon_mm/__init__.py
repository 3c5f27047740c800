"""Elastic, deterministic data loading for vision-language models.

The public names are imported when they are first used, so that `zephon-mm --help` and the worker
processes do not wait for torch. Type checkers read `__init__.pyi`.
"""

from importlib import import_module

_HOMES = {
    "Batch": "zephon_mm.batch",
    "Dataset": "zephon_mm.io",
    "Pipeline": "zephon_mm.pipeline",
    "ZephonError": "zephon_mm.errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
