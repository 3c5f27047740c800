"""Read a video: which frames it has and when each shows, then the pixels of the frames asked for.

Laws (tests/processors/test_video.py and test_video_faults.py hold a test for each):
    1. Frame k is the k-th in order of presentation, at the file's own time, whatever headers say of
       counts and rates. What an edit list cuts off, or what refers to missing frames, is not one,
       nor is what comes again at a time that another frame has.
    2. Frame k has the same bytes by seeking, by reading on and in every process and CPU: decoding
       runs in one thread, and colours are converted with the flags of FFmpeg's own tests.
    3. Frames are upright (rotation, flips), RGB, 8 bits, with their range; alpha is on white.
    4. A defect is a SampleError: an MP4 that was cut, damage that the decoder sees from a key frame
       to the frame asked for. Other containers do not tell: cut, they have the frames that are
       left. An OSError of the file is passed on.
    5. Memory: a few frames, 8 bytes for each frame of the file, and FFmpeg's index (6 MB an hour).

Where a decoder gives no picture for a frame ("as before"), the one before it shows. Colours without
a matrix are BT.601, as everywhere in FFmpeg. As stored, as PyAV gives them to transformers, are:
- fields: yadif mixes neighbouring frames, which a seek does not have;
- HDR: the wheel lacks zscale, and swscale's own mapping takes 14 s a graph (seen). Greys of PQ are
  dull: white of 203 cd/m2 is 148, of 1000 cd/m2 192;
- pixels that are not square: players stretch 720 x 576 at 16:15 to 768 x 576; we do not.

Cost: to probe, 8 us a frame and, cached, 0.5 ms a megabyte; then, at 1280 x 720, 4 ms a frame from
the key frame on, and 5 for each that is asked for.
Imports: errors, image. Used by: siglipvideo, qwenvideo.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, BinaryIO, NamedTuple
from weakref import WeakKeyDictionary

import av
import numpy as np
from av import Packet, VideoFrame, VideoStream
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Discard, Disposition
from av.video.reformatter import Interpolation as Flag
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from zephon_mm.errors import SampleError
from zephon_mm.processors.image import MAX_PIXELS, Pixels

MAX_FRAMES = 2**20
"""Default limit of a video: 4.8 hours at 60 frames a second."""

# Only these are tried: FFmpeg would also take a picture, or a playlist that names other files.
_FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif"
_NO_FILM = Disposition.attached_pic | Disposition.timed_thumbnails
# Matrices (a, b, c, d) that turn counter-clockwise by 0, 90, 180, 270 degrees.
_QUARTERS = ((1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0))
# The flags under which FFmpeg's tests give the same bytes on every CPU; without them some SIMD
# paths are up to 3 levels off (seen). The last one interpolates colour instead of doubling pixels.
_EXACT = Flag.BILINEAR | Flag.ACCURATE_RND | Flag.BITEXACT | Flag.FULL_CHR_H_INT

_Open = tuple[InputContainer, VideoStream]


class VideoHeader(NamedTuple):
    """What a video holds.

    `width_px` and `height_px` are those of an upright frame. `times` are (n,) float64 seconds from
    the first frame, ascending. `clock` are (n,) int64, the same in the file's own units. `keys` are
    (k, 2) int64: when the frames show that decoding can start from, and where to seek for them.
    """

    width_px: int
    height_px: int
    times: NDArray[np.float64]
    clock: NDArray[np.int64]
    keys: NDArray[np.int64]


_PROBED: WeakKeyDictionary[BinaryIO, dict[tuple[int, int], VideoHeader]] = WeakKeyDictionary()


def probe_video(
    file: BinaryIO, *, max_pixels: int = MAX_PIXELS, max_frames: int = MAX_FRAMES
) -> VideoHeader:
    """Return a video's header. Only its first frame is decoded, to see how it is turned.

    While a file object lives its header is remembered: whoever measures and then decodes it reads
    it once.

    Args:
        file: The video, seekable, whose bytes stay the same.
        max_pixels: The most pixels that a frame may have, inclusive.
        max_frames: The most frames that the video may have, inclusive.

    Raises:
        SampleError: `not_a_video`, `no_video`, `no_codec`, `broken_video`, `too_many_pixels`,
            `too_many_frames`.
    """
    found, limits = _PROBED.setdefault(file, {}), (max_pixels, max_frames)
    if limits not in found:
        found[limits] = _probe(file, *limits)
    return found[limits]


def _probe(file: BinaryIO, max_pixels: int, max_frames: int) -> VideoHeader:
    clock, keys, count = array("q"), array("q"), 0
    size: tuple[int, int] | None = None
    with _opened(file) as (container, stream):
        _limit("pixels", stream.codec_context.width * stream.codec_context.height, max_pixels)
        for packet in container.demux(stream):
            if packet.size:
                _note(packet, clock, keys)
                count += 1
            _limit("frames", len(clock), max_frames)
            if size is None and keys:
                size = next(map(_size_of, packet.decode()), None)
        if container.format.name.startswith("mov") and count < len(stream.index_entries):
            raise _broken(f"it was cut after {count} of {len(stream.index_entries)} frames")
        if size is None or not clock:
            raise _broken(f"none of its {count} frames can be shown")
        counted, unit = _is_counted(container, stream), stream.time_base
    assert unit is not None
    shown, times = np.unique(np.frombuffer(clock, dtype=np.int64), return_counts=True)
    starts = np.frombuffer(keys, dtype=np.int64).reshape(-1, 2)
    starts = starts[:1] if counted else starts[np.argsort(starts[:, 0], kind="stable")]
    alone = ~np.isin(starts[:, 0], shown[times > 1])  # else a seek may find either frame
    alone[0] = True
    seconds = (shown - shown[0]) * unit.numerator / unit.denominator
    return VideoHeader(*size, seconds, shown, starts[alone])


def decode_frames(
    file: BinaryIO, numbers: Sequence[int] | NDArray[np.int64], header: VideoHeader | None = None
) -> Iterator[Pixels]:
    """Yield frames: (height, width, 3) uint8, upright, RGB, contiguous.

    Args:
        file: The video, seekable.
        numbers: Frames in order of presentation, from 0, ascending; repeats are allowed, and yield
            the same array again.
        header: What `probe_video` says of this file; None probes it.

    Raises:
        SampleError: As `probe_video`.
    """
    header = probe_video(file) if header is None else header
    wanted, times = np.unique(np.asarray(numbers, dtype=np.int64), return_counts=True)
    done = 0
    for sought in (True, False):  # where a seek misses, which happens, the file is read through
        with _opened(file) as opened:
            for picture in _pictures(opened, header, wanted[done:], sought=sought):
                yield from repeat(picture, int(times[done]))
                done += 1
        if done == len(wanted):
            return
    raise _broken(f"frame {wanted[done]} of {len(header.times)} does not decode")


def decoder_versions() -> dict[str, str]:
    """Return the versions that decoded frames depend on."""
    return {"av": av.__version__, "ffmpeg": av.ffmpeg_version_info}


def _pictures(
    opened: _Open, header: VideoHeader, wanted: NDArray[np.int64], *, sought: bool
) -> Iterator[Pixels]:
    """Yield the pixels of frames, up to the first for which reading began too late.

    Args:
        opened: The file, newly opened.
        header: As probed.
        wanted: Frames, each once, ascending.
        sought: Whether to seek where that skips frames.
    """
    converter = VideoReformatter()
    keys = np.searchsorted(header.keys[:, 0], header.clock[wanted], "right") - 1
    starts = np.searchsorted(header.clock, header.keys[:, 0])
    coming = _decoded(opened, header, 0)
    at, frame, ahead = -1, None, None
    for number, key in zip(wanted, keys, strict=True):
        if sought and starts[key] > at + 1:
            opened[0].seek(int(header.keys[key, 1]), stream=opened[1])
            coming = _decoded(opened, header, key)
            at, frame, ahead = starts[key] - 1, None, next(coming, None)
            if ahead is None or ahead[0] != starts[key]:
                return  # the seek went too far, or this is no place to start from
        while at < number and (ahead := ahead or next(coming, None)) and ahead[0] <= number:
            (at, frame), ahead = ahead, None
        if frame is None:
            return
        yield _pixels_of(frame, converter, header)


def _decoded(opened: _Open, header: VideoHeader, key: int) -> Iterator[tuple[int, VideoFrame]]:
    """Yield (number, frame) from a key frame on, if the file is not read from behind it."""
    key_time, number = header.keys[key, 0], -1
    counted = _is_counted(*opened)
    for packet in opened[0].demux(opened[1]):
        time = _time_of(packet) if packet.size else key_time
        if time < key_time:  # it may come behind its key frame, but would need an earlier one
            continue
        try:
            shown, failure = packet.decode(), None
        except FFmpegError as error:  # what was decoded before still comes, up to this frame
            shown, failure = opened[1].decode(None), error
        for frame in shown:
            if frame.is_corrupt:
                raise _broken(f"the frame after {number} of {len(header.clock)} is damaged")
            if failure and _time_of(frame) >= time:
                break
            found = int(np.searchsorted(header.clock, _time_of(frame), "right")) - 1
            number = number + 1 if counted else found
            yield number, frame
        if failure:
            raise failure


def _pixels_of(frame: VideoFrame, converter: VideoReformatter, header: VideoHeader) -> Pixels:
    """Return a frame's pixels, upright, RGB, composited on white."""
    if _size_of(frame) != header[:2]:
        raise _broken(f"its first frame has {header[:2]} pixels, a later one {_size_of(frame)}")
    clear = any(component.is_alpha for component in frame.format.components)
    rgb = "rgba" if clear else "rgb24"
    pixels = converter.reformat(frame, format=rgb, interpolation=_EXACT, threads=1).to_ndarray()
    if clear:
        alpha = pixels[..., 3:].astype(np.uint16)
        pixels = (pixels[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255
    swapped, across, down = _turns(frame)
    upright = pixels.transpose(1, 0, 2) if swapped else pixels
    return np.array(upright[::down, ::across], dtype=np.uint8, order="C")


@contextmanager
def _opened(file: BinaryIO) -> Iterator[_Open]:
    """Open a file's best video stream; what FFmpeg raises on its bytes becomes a SampleError."""
    file.seek(0)
    start, reason = file.read(16), "not_a_video"
    file.seek(0)
    try:
        options = {"format_whitelist": _FORMATS}
        with av.open(file, "r", container_options=options, metadata_errors="replace") as container:
            reason = "broken_video"
            yield container, _stream_of(container)
    except FFmpegError as error:
        if isinstance(error, MemoryError):  # memory is short, or damage asks for an absurd amount
            bytearray(2**28)  # raises in the first case
        raise SampleError(
            reason,
            f"FFmpeg says {error.args[1]!r} of a file that begins {start!r}, expected a whole "
            f"video ({_FORMATS}): remove the sample, or download it again",
        ) from error


def _stream_of(container: InputContainer) -> VideoStream:
    """Return the video to read, with a decoder of one thread; the others are not read at all."""
    films = [stream for stream in container.streams.video if not stream.disposition & _NO_FILM]
    best = container.streams.best("video")
    stream = next((film for film in films if film is best), films[0] if films else None)
    if stream is None:
        kinds = [other.type for other in container.streams]
        raise SampleError("no_video", f"found streams {kinds}, none of a film, expected a video")
    if not stream.codec_context:
        raise SampleError("no_codec", "the video is in a codec that this FFmpeg does not have")
    for other in set(container.streams) - {stream}:
        other.discard = Discard.all
    stream.codec_context.thread_count = 1  # more would hang a forked process, and change nothing
    return stream


def _limit(name: str, found: int, most: int) -> None:
    if found > most:
        message = f"found {found} {name}, expected at most {most}: cut it, or raise `max_{name}`"
        raise SampleError(f"too_many_{name}", message)


def _note(packet: "Packet[VideoStream]", clock: "array[int]", keys: "array[int]") -> None:
    """Append when a packet's frame shows; for a key frame, also where to seek for it."""
    time = _time_of(packet)
    if packet.is_corrupt:
        raise _broken(f"it was cut, or damaged, at {packet.pos} bytes")
    if packet.is_keyframe:
        keys.extend((time, time if packet.dts is None else packet.dts))
    if keys and time >= keys[0] and not packet.is_discard:  # an edit list cuts frames off
        clock.append(time)


def _time_of(frame: "Packet[VideoStream] | VideoFrame") -> int:
    """Return when a frame shows, in units of its stream; to decode is to show where that lacks."""
    time = frame.dts if frame.pts is None else frame.pts
    if time is None:
        raise _broken("its frames have no times")
    return time


def _is_counted(container: InputContainer, stream: VideoStream) -> bool:
    """Say whether frames are to be counted: AVI has times, but for these codecs not of showing."""
    return container.format.name == "avi" and stream.codec_context.name in ("h264", "hevc")


def _turns(frame: VideoFrame) -> tuple[bool, int, int]:
    """Return whether rows become columns, and then the steps (1, -1) along columns and rows.

    A point (x, y) is shown at (a x + c y, b x + d y), y downwards, with the matrix [a b .; c d .;
    . . .] of FFmpeg's libavutil/display.h. Other angles than right ones are not turned.
    """
    a, b, c, d = _QUARTERS[round(frame.rotation / 90) % 4]
    try:
        sides: Any = frame.side_data
    except ValueError:  # PyAV does not know every kind (18.1: EXIF, stereo views), and raises
        sides = ()
    if "DISPLAYMATRIX" in {one.type.name for one in sides}:  # it may also mirror
        a, b, _, c, d = np.frombuffer(sides["DISPLAYMATRIX"], dtype=np.int32)[:5].tolist()
    swapped = abs(b) > abs(a)
    across, down = (c, b) if swapped else (a, d)
    return swapped, -1 if across < 0 else 1, -1 if down < 0 else 1


def _size_of(frame: VideoFrame) -> tuple[int, int]:
    return (frame.height, frame.width) if _turns(frame)[0] else (frame.width, frame.height)


def _broken(found: str) -> SampleError:
    return SampleError("broken_video", f"the video is damaged: {found}; download it again")
