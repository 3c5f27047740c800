"""Processors: from encoded images and text fields to what a model takes. Pure, without I/O."""

from zephon_mm.processors.siglip import SigLIPProcessor

__all__ = ["SigLIPProcessor"]
