from zephon_mm.processors.naflex import NaFlexProcessor as NaFlexProcessor
from zephon_mm.processors.qwen import QwenVLProcessor as QwenVLProcessor
from zephon_mm.processors.qwenvideo import QwenVLVideoProcessor as QwenVLVideoProcessor
from zephon_mm.processors.siglip import SigLIPProcessor as SigLIPProcessor
from zephon_mm.processors.siglipvideo import SigLIPVideoProcessor as SigLIPVideoProcessor
from zephon_mm.processors.tiles import AnyResProcessor as AnyResProcessor
from zephon_mm.processors.tiles import TileProcessor as TileProcessor

__all__ = [
    "AnyResProcessor",
    "NaFlexProcessor",
    "QwenVLProcessor",
    "QwenVLVideoProcessor",
    "SigLIPProcessor",
    "SigLIPVideoProcessor",
    "TileProcessor",
]
