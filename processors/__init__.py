"""Processors: from encoded images and text fields to what a model takes. Pure, without I/O."""

from zephon_mm.processors.naflex import NaFlexProcessor
from zephon_mm.processors.qwen import QwenVLProcessor
from zephon_mm.processors.qwenvideo import QwenVLVideoProcessor
from zephon_mm.processors.siglip import SigLIPProcessor
from zephon_mm.processors.siglipvideo import SigLIPVideoProcessor
from zephon_mm.processors.tiles import AnyResProcessor, TileProcessor

__all__ = [
    "AnyResProcessor",
    "NaFlexProcessor",
    "QwenVLProcessor",
    "QwenVLVideoProcessor",
    "SigLIPProcessor",
    "SigLIPVideoProcessor",
    "TileProcessor",
]
