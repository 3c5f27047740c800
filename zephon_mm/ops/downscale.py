"""Documents over the limits of a sequence get smaller images, as large ones as will fit.

All images of a document become the same share of their sides, in steps of 1/64: see
`processors.shrink`. Videos and pictures cut into tiles stay as they are. What is too long even with
the smallest images is left for the packer to drop.

Laws (tests/ops/test_pack_downscale.py):
    1. A record is a function of the document and the limits. One that fits is not touched.
    2. No step larger than the one that was taken would fit.

Cost: a document that is too long is measured six times more. Imports: errors, protocols, records,
ops.{fit, interleave, pack, tokenize}. Used by: stages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from zephon_mm.errors import ConfigError
from zephon_mm.ops.fit import Room
from zephon_mm.ops.interleave import BlobSource, Interleave
from zephon_mm.records import Document, MediaShape, Record, SampleRef


@dataclass(frozen=True, slots=True)
class Downscale(Interleave):
    """As `Interleave`, with smaller images where a record is over the limits.

    Args:
        room: What a sequence holds; the images are not counted, since they get no fewer.
    """

    room: Room = field(kw_only=True)

    @classmethod
    def of(cls, stage: Any, room: Room) -> Self:
        """Return a stage that does what another does, and downscales.

        Raises:
            ConfigError: Its images cannot be smaller.
        """
        processor = getattr(stage, "image_processor", None)
        if not hasattr(processor, "shrink_steps"):
            raise ConfigError(
                "pack: overlong='downscale' needs images that can be smaller, those of "
                f"NaFlexProcessor or QwenVLProcessor; the image processor is {processor!r}. "
                "Choose 'drop', 'truncate' or 'split'."
            )
        settings = {one.name: getattr(stage, one.name) for one in fields(Interleave)}
        return cls(**settings, room=room)

    def measure(
        self,
        ref: SampleRef,
        document: Document,
        blobs: BlobSource,
        known: Sequence[MediaShape | None] = (),
    ) -> Record:
        """Return the record of a document; arguments and errors as for `Interleave`."""
        record = Interleave.measure(self, ref, document, blobs, known)
        if not self.room.lacking(record):
            return record
        processor: Any = self.image_processor
        settings = {one.name: getattr(self, one.name) for one in fields(Interleave)}
        settings["augment"] = None  # it changes no size
        fits, over = 0, processor.shrink_steps
        while over - fits > 1:
            step = (fits + over) // 2
            settings["image_processor"] = SimpleNamespace(
                measure=partial(processor.measure, step=step), patch_size=processor.patch_size
            )
            smaller = Interleave(**settings).measure(ref, document, blobs)
            if self.room.lacking(smaller):
                over = step
            else:
                fits, record = step, smaller
        return record

    def version(self, read: Callable[[int], bytes], shape: tuple[int, ...]) -> MediaShape:
        """Return the version of an image that has a shape; the full one where there is none.

        Args:
            read: As for `ImageProcessor.measure`.
            shape: Of the array.
        """
        processor: Any = self.image_processor
        full: MediaShape = processor.measure(read)
        versions = (processor.measure(read, n) for n in range(processor.shrink_steps, 0, -1))
        return next((one for one in versions if one.shape == shape), full)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that records depend on, JSON-serialisable."""
        return {**Interleave.fingerprint(self), "downscale": list(self.room)}
