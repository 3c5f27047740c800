"""Qwen-VL's videos: frames by rate, two to a patch, with their times.

Laws (tests/processors/test_qwenvideo.py):
    1. The chosen frames, the grid, with and without the cap on a frame, and the patches of given
       frames, uint8 and normalised, equal those of transformers' Qwen2VLVideoProcessor and
       Qwen3VLVideoProcessor.
    2. Qwen3-VL: each temporal patch is a part, behind the mean of its frames' true times.
       Qwen2.5-VL: one part; the time from one temporal patch to the next is in the grid.
    3. A clip too short for a temporal patch, which transformers refuses, repeats its frame.

Frames are chosen by number, not by time, as the models' authors do; where the rate varies, the
times in front of the parts are right all the same.

Cost: that of decoding. Memory: one frame. Imports: errors, records, qwen, video. Used by: the
engine's tasks, through `protocols.VideoProcessor`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from zephon_mm.errors import ConfigError
from zephon_mm.processors.image import Pixels
from zephon_mm.processors.qwen import QwenVLProcessor, smart_resize
from zephon_mm.processors.resize import Backend
from zephon_mm.processors.video import VideoHeader, decode_frames, decoder_versions, probe_video
from zephon_mm.records import MediaShape

Model = Literal["qwen2.5-vl", "qwen3-vl"]
Numbers = NDArray[np.int64]

# Least and most pixels: of a frame (2.5), and of all frames of a clip (3).
_PRESETS: dict[Model, tuple[int, int]] = {
    "qwen2.5-vl": (128 * 28 * 28, 768 * 28 * 28),
    "qwen3-vl": (4096, 24 * 1024 * 1024),
}
# transformers' `max_video_tokens`: 0.9 of these are shared by the temporal patches of a clip (2.5),
# these are the most that a frame has (3).
_MOST_TOKENS: dict[Model, int] = {"qwen2.5-vl": 128_000, "qwen3-vl": 768}
_CLOCK_S = 0.001  # of WebM and MKV; that of other containers is finer


def frame_rate(times: NDArray[np.float64]) -> float:
    """Return the mean number of frames a second.

    Time stamps are rounded to the container's clock, and 10 s of 30 frames a second must not become
    9.99 s and lose a sampled frame: a whole rate, or one of television (30000/1001), that explains
    the last time stamp is taken.

    Args:
        times: (n,) seconds from the first frame, ascending.

    Returns:
        24, as in transformers, where one frame tells nothing.
    """
    steps, span = len(times) - 1, float(times[-1])
    if span <= 0:
        return 24.0
    found = steps / span
    whole, television = round(found), round(found * 1.001) * 1000 / 1001
    nominal = min((whole, television), key=lambda rate: abs(rate - found))
    explained = nominal > 0 and abs(steps / nominal - span) <= _CLOCK_S
    return float(nominal) if explained else max(round(found, 6), 1e-6)


@dataclass(frozen=True)
class QwenVLVideoProcessor:
    """Turns an encoded video into patches, as Qwen2.5-VL or Qwen3-VL wants it.

    Args:
        frame: How a frame becomes patches. Its `min_pixels` and `max_pixels` are those of a frame
            for Qwen2.5-VL, and of all sampled frames together for Qwen3-VL.
        model: Whose rules hold.
        fps: Frames sampled a second.
        min_frames: Sampled where the video has as many.
        max_frames: Longer videos are sampled more sparsely.
        cap_pixels_per_frame: Bound a frame of Qwen3-VL too, and all frames of Qwen2.5-VL together,
            as the models' authors do (qwen-vl-utils). False is what transformers 5.24 does unless
            it is told: a short clip then costs up to as many tokens as a long one.

    Raises:
        ConfigError: A value that no video can be processed with.
    """

    frame: QwenVLProcessor
    model: Model = "qwen3-vl"
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = True

    pad_to: ClassVar[None] = None
    grid_key: ClassVar[str] = "video_grid_thw"

    def __post_init__(self) -> None:
        if self.model not in _PRESETS:
            raise ConfigError(f"model={self.model!r} is none of {', '.join(_PRESETS)}")
        least = self.frame.temporal_patch_size
        if self.fps <= 0 or not least <= self.min_frames <= self.max_frames:
            raise ConfigError(
                f"expected fps above 0 and {least} (a temporal patch) <= min_frames <= max_frames, "
                f"got {self.fps}, {self.min_frames} and {self.max_frames}"
            )

    @classmethod
    def preset(
        cls, name: Model, *, max_pixels: int | None = None, backend: Backend = "torchvision"
    ) -> Self:
        """Return the processor of the published checkpoints of a model.

        Args:
            name: "qwen2.5-vl" or "qwen3-vl".
            max_pixels: Replaces theirs: of a frame (2.5), of all frames of a clip (3). If it is
                below their least pixels, those too.
            backend: As in `QwenVLProcessor`.

        Raises:
            ConfigError: There is no such preset.
        """
        frame = QwenVLProcessor.preset(name, backend=backend)
        least, most = _PRESETS[name]
        most = most if max_pixels is None else max_pixels
        return cls(replace(frame, min_pixels=min(least, most), max_pixels=most), name)

    @property
    def unit_shape(self) -> tuple[int]:
        """Values of a patch."""
        return self.frame.unit_shape

    @property
    def merge_size(self) -> int:
        """Patches along a side of the square that becomes one token."""
        return self.frame.merge_size

    @property
    def tokens_per_second(self) -> float | None:
        """For `mrope.mrope_positions`; that of all published checkpoints of Qwen2.5-VL."""
        return 2.0 if self.model == "qwen2.5-vl" else None

    def sample(self, total: int, rate: float) -> Numbers:
        """Return the numbers of the frames to take, ascending.

        Args:
            total: Frames of the video, at least 1.
            rate: Its frames a second.
        """
        patch = self.frame.temporal_patch_size
        count = total / rate * self.fps
        if self.model == "qwen3-vl":
            count = min(max(int(count), self.min_frames), self.max_frames, total)
            return np.linspace(0, total - 1, count).round().astype(np.int64)
        most = min(self.max_frames, total) // patch * patch
        whole = max(int(min(max(count, self.min_frames), most)) // patch * patch, 1)
        # Theirs is this range of float32, which may run over the end by one number: cut.
        return torch.arange(0, total, total / whole)[:whole].numpy().astype(np.int64)

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of patches of every frame.

        Args:
            frames: How many are sampled.
            height: Of a frame, upright, in pixels.
            width: Likewise.

        Raises:
            SampleError: As `QwenVLProcessor.grid`.
        """
        patch, factor, clip = self.frame.temporal_patch_size, self.frame.factor, (1, 1)
        if self.model == "qwen3-vl":
            clip = (frames, round(frames / patch) * patch)
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
        limits = (self.frame.min_pixels, self._most_pixels(frames))
        size = smart_resize(height, width, factor=factor, limits=limits, clip=clip)
        return size[0] // self.frame.patch_size, size[1] // self.frame.patch_size

    def _most_pixels(self, frames: int) -> int:
        """Return the upper limit of `smart_resize`."""
        most, least = self.frame.max_pixels, int(self.frame.min_pixels * 1.05)
        if not self.cap_pixels_per_frame:
            return most
        pixels = _MOST_TOKENS[self.model] * self.frame.factor**2
        if self.model == "qwen3-vl":
            return max(min(pixels, most // frames), least) * frames
        share = int(pixels * 0.9) * self.frame.temporal_patch_size // frames
        return max(min(most, share), least)

    def measure(self, file: BinaryIO) -> MediaShape:
        """Return what the video becomes, from its time stamps, without decoding.

        Args:
            file: The video, seekable.

        Raises:
            SampleError: As `video.probe_video` and `QwenVLProcessor.grid`.
        """
        header, numbers, (rows, cols) = self._plan(file)
        steps = header.times[numbers].reshape(-1, self.frame.temporal_patch_size)
        tokens = rows * cols // self.frame.merge_size**2
        if self.model == "qwen3-vl":
            texts = tuple(f"<{time:.1f} seconds>" for time in steps.mean(axis=1))
            return MediaShape(tokens, (rows * cols, *self.unit_shape), texts, (1, rows, cols))
        seconds = steps.shape[1] / (numbers.size / header.times.size * frame_rate(header.times))
        # As bits, since positions are whole parts of multiples of it: microseconds would move
        # positions of 4 % of all clips (seen).
        grid = (len(steps), rows, cols, int(np.float32(seconds).view(np.int32)))
        shape = (len(steps) * rows * cols, *self.unit_shape)
        return MediaShape(tokens * len(steps), shape, grid=grid)

    def write(self, file: BinaryIO, first: int, out: Pixels) -> None:
        """Decode parts `[first, first + len(out))` into `out`; of Qwen2.5-VL, all.

        Args:
            file: The video, seekable.
            first: The first part; 0 for Qwen2.5-VL.
            out: (parts, patches, values) uint8 or, for Qwen2.5-VL, (patches, values); C-contiguous.

        Raises:
            SampleError: As `video.decode_frames`. `out` may then hold anything.
        """
        header, numbers, grid = self._plan(file)
        patch = self.frame.temporal_patch_size
        steps = out.reshape(-1, grid[0] * grid[1], *self.unit_shape)
        wanted = numbers[first * patch : (first + len(steps)) * patch]
        for place, pixels in enumerate(decode_frames(file, wanted, header)):
            step, frame = divmod(place, patch)
            self.frame.place(pixels, steps[step], grid, slice(frame, frame + 1))

    def normalize(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Map patches to the model's range, as `QwenVLProcessor.normalize`."""
        return self.frame.normalize(pixels, dtype)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that the pixels depend on, JSON-serialisable."""
        found = {"kind": "qwen-vl-video", **asdict(self), "frame": self.frame.fingerprint()}
        return {**found, **decoder_versions()}

    def _plan(self, file: BinaryIO) -> tuple[VideoHeader, Numbers, tuple[int, int]]:
        """Return the header, the frames to take, in whole temporal patches, and the grid."""
        header = probe_video(file, max_pixels=self.frame.decode_limit_px)
        numbers = self.sample(len(header.times), frame_rate(header.times))
        patch = self.frame.temporal_patch_size
        grid = self.grid(max(len(numbers), patch), header.height_px, header.width_px)
        return header, np.pad(numbers, (0, -len(numbers) % patch), mode="edge"), grid
