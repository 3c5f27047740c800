"""SigLIP's videos: frames by time, each a picture of its own behind its time, pooled tokens.

Laws (tests/processors/test_siglipvideo.py):
    1. A frame is the one on the screen at the time asked for, to a millisecond, which is how
       Matroska rounds: at `fps`, or evenly from the first frame to the last.
    2. No frame comes twice, so that a clip shorter than asked for gives the frames that it has; the
       record shows how many.
    3. A frame's pixels are those that `SigLIPProcessor` makes of it as a picture.
    4. Part k is the same however the parts are spread over calls of `write`.

Cost: that of decoding, and 0.7 ms a frame to resize. Memory: a few frames.
Imports: errors, records, resize, siglip, video. Used by: the engine's tasks, through
`protocols.VideoProcessor`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.processors.resize import resize
from zephon_mm.processors.siglip import SigLIPProcessor
from zephon_mm.processors.video import decode_frames, decoder_versions, probe_video
from zephon_mm.records import MediaShape

_TICK_S = 0.001


@dataclass(frozen=True)
class SigLIPVideoProcessor:
    """Turns an encoded video into frames of (3, height, width) uint8.

    Args:
        image: What becomes of a frame; its `max_pixels` holds for frames too.
        fps: Frames sampled a second, from the first one on. Not used with `num_frames`.
        num_frames: Frames sampled, spread evenly over the time from the first to the last.
        max_frames: Where `fps` gives more, this many are spread evenly instead.
        pool: Side of the square of patches that the model pools to one token; squares at the right
            and bottom edges may hold fewer.
        timestamps: Whether each frame has its time in front, such as "<1.5 seconds>".

    Raises:
        ConfigError: A value that no video can be processed with.
    """

    image: SigLIPProcessor
    fps: float = 1.0
    num_frames: int | None = None
    max_frames: int = 32
    pool: int = 2
    timestamps: bool = True

    pad_to: ClassVar[None] = None
    grid_key: ClassVar[None] = None

    def __post_init__(self) -> None:
        count = self.max_frames if self.num_frames is None else self.num_frames
        if not (0 < self.fps < math.inf and 1 <= count <= self.max_frames and self.pool >= 1):
            raise ConfigError(
                f"expected a finite fps > 0, 1 <= num_frames <= max_frames and pool >= 1, got fps="
                f"{self.fps}, num_frames={self.num_frames}, max_frames={self.max_frames} and "
                f"pool={self.pool}"
            )

    @property
    def unit_shape(self) -> tuple[int, int, int]:
        """Shape of a frame's pixels: (3, height, width)."""
        return self.image.unit_shape

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self.image.patch_size

    def sample(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the numbers of the frames to take, ascending, each once.

        Args:
            times: (n,) seconds from the first frame, ascending.
        """
        count = self.num_frames or int((times[-1] + _TICK_S) * self.fps) + 1
        if self.num_frames or count > self.max_frames:
            asked = np.linspace(0, times[-1], min(count, self.max_frames))
        else:
            asked = np.arange(count) / self.fps
        return np.unique(np.searchsorted(times, asked + _TICK_S, side="right") - 1)

    def measure(self, file: BinaryIO) -> MediaShape:
        """Return the shape and tokens of a frame, and the texts in front of the frames.

        Args:
            file: The video, seekable.

        Raises:
            SampleError: As `video.probe_video`.
        """
        times = probe_video(file, max_pixels=self.image.max_pixels).times
        shown = times[self.sample(times)].tolist()
        parts = tuple(f"<{time:.1f} seconds>" if self.timestamps else "" for time in shown)
        height, width = (side // self.image.patch_size for side in self.image.height_width)
        tokens = math.ceil(height / self.pool) * math.ceil(width / self.pool)
        return MediaShape(tokens, self.unit_shape, parts)

    def write(self, file: BinaryIO, first: int, out: NDArray[np.uint8]) -> None:
        """Decode and resize sampled frames `[first, first + len(out))` into `out`.

        Args:
            file: The video, seekable.
            first: The first of them, counted among those that are sampled.
            out: (n, 3, height, width) uint8, C-contiguous and writable.

        Raises:
            SampleError: As `video.decode_frames`. `out` may then hold anything.
        """
        header = probe_video(file, max_pixels=self.image.max_pixels)
        numbers = self.sample(header.times)[first : first + len(out)]
        for pixels, place in zip(decode_frames(file, numbers, header), out, strict=True):
            resize(pixels, place, resample=self.image.resample, backend=self.image.backend)

    def normalize(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Map frames to the model's range, as `SigLIPProcessor` does."""
        return self.image.normalize(pixels, dtype)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the pixels depend on, JSON-serialisable."""
        return {
            "kind": "siglip_video",
            "image": self.image.fingerprint(),
            "fps": self.fps,
            "num_frames": self.num_frames,
            "max_frames": self.max_frames,
            "pool": self.pool,
            "timestamps": self.timestamps,
            **decoder_versions(),
        }
