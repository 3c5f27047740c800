"""The curriculum: which samples come next, in which shares.

Imports: work.mixture. Used by: pipeline, recipe, users.
"""

from zephon_mm.work.mixture import MeasureRows, StaticMixtureWorkSource, TokenEstimation

__all__ = ["MeasureRows", "StaticMixtureWorkSource", "TokenEstimation"]
