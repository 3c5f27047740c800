"""Processors: from encoded images and text fields to what a model takes. Pure, without I/O.

Each is imported when it is first used: FFmpeg is loaded where there are videos. Type checkers read
`__init__.pyi`.
"""

from importlib import import_module

_HOMES = {
    "AnyResProcessor": "tiles",
    "NaFlexProcessor": "naflex",
    "QwenVLProcessor": "qwen",
    "QwenVLVideoProcessor": "qwenvideo",
    "SigLIPProcessor": "siglip",
    "SigLIPVideoProcessor": "siglipvideo",
    "TileProcessor": "tiles",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
