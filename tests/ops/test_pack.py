"""The packers' laws, one test each; density against offline best-fit-decreasing."""

import json
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.accumulator import check_accumulator, drain
from zephon_mm.errors import ConfigError
from zephon_mm.ops.pack import PackConfig, make_packer
from zephon_mm.packed import Block, Sequence, extents_of
from zephon_mm.records import FileBlob, ImageSlot, Record, SampleRef, record_of
from zephon_mm.report import summary

CASES = Path(__file__).parents[1] / "fixtures" / "cases"


def record(row: int, text: int, images: tuple[int, ...] = (), *, trained: bool = True) -> Record:
    """A record of images, each with a start and an end token, then `text` tokens of text.

    An image has other numbers of tokens and of patches.
    """
    slots: list[ImageSlot] = []
    uncut: list[tuple[int, int]] = []
    at = 0
    for size in images:
        blob, patches = FileBlob("/x", row, 1), 1 + 5 * size % 11
        slots.append(ImageSlot(blob, at + 1, size, (3, 2, 2), patches=patches))
        uncut.append((at, at + size + 2))
        at += size + 2
    mask = np.zeros(at + text, dtype=np.bool_)
    mask[at:] = trained
    ids = np.zeros(at + text, dtype=np.int32)
    return record_of(SampleRef(0, 0, row), ids, mask, tuple(slots), tuple(uncut))


def texts(lengths: list[int]) -> list[Record]:
    return [record(row, length) for row, length in enumerate(lengths)]


def pack(records: list[Record], **options: Any) -> tuple[list[Sequence], list[tuple[str, int]]]:
    """Return all sequences, and (reason, row) of every report."""
    reports: list[tuple[str, int]] = []
    packer = make_packer(PackConfig(**options), lambda why, it: reports.append((why, it.ref.row)))
    return drain(packer, records), reports


streams = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 12), max_size=3).map(tuple)), max_size=80
).map(lambda rows: [record(i, text, images) for i, (text, images) in enumerate(rows)])
limits = st.fixed_dictionaries(
    {
        "max_length": st.integers(8, 64),
        "max_images": st.none() | st.integers(0, 4),
        "max_patches": st.none() | st.integers(1, 30),
        "overlong": st.sampled_from(["drop", "truncate", "split"]),
        "lookahead": st.sampled_from([1, 3, 512]),
        "algorithm": st.sampled_from(["best_fit", "knapsack", "wrap"]),
        "order": st.sampled_from(["any", "keep"]),
    }
).filter(lambda options: (options["algorithm"], options["order"]) != ("knapsack", "keep"))


@given(records=streams, options=limits)
def test_no_sequence_exceeds_its_limits(records: list[Record], options: dict[str, Any]) -> None:
    for sequence in pack(records, **options)[0]:
        assert 1 <= sequence.num_tokens <= options["max_length"]
        assert options["max_images"] is None or sequence.num_images <= options["max_images"]
        assert options["max_patches"] is None or sequence.num_patches <= options["max_patches"]


@given(records=streams, options=limits)
def test_every_record_lands_once_or_is_reported(
    records: list[Record], options: dict[str, Any]
) -> None:
    sequences, reports = pack(records, **options)
    ends: dict[int, int] = {}
    pieces = [piece for sequence in sequences for piece in sequence.pieces]
    for piece in sorted(pieces, key=lambda one: one.start):
        row = piece.record.ref.row
        assert piece.start == ends.get(row, 0) < piece.stop  # nothing twice or left out
        ends[row] = piece.stop
    reasons = dict((row, reason) for reason, row in reports)
    assert len(reasons) == len(reports)
    for item in records:
        row = item.ref.row
        if reasons.get(row, "split") == "split":
            assert ends[row] == item.num_tokens
            assert row not in reasons or options["overlong"] == "split"
        elif reasons[row] == "truncated":
            assert 0 < ends[row] < item.num_tokens
            assert options["overlong"] == "truncate"
        else:
            assert row not in ends


@given(records=streams, options=limits, cuts=st.lists(st.integers(0, 80), max_size=4))
def test_blocks_are_packed_as_their_records_are(
    records: list[Record], options: dict[str, Any], cuts: list[int]
) -> None:
    options |= {"algorithm": "best_fit" if options["algorithm"] == "wrap" else "knapsack"}
    expected, reports = pack(records, **options | {"order": "any"})
    found: list[tuple[str, int]] = []
    packer: Any = make_packer(
        PackConfig(**options | {"order": "any"}), lambda why, it: found.append((why, it.ref.row))
    )
    borders = sorted({0, *(cut for cut in cuts if cut < len(records)), len(records)})
    sequences = []
    for start, stop in pairwise(borders):
        block = block_of(records[start:stop])
        sequences += packer.push_block(block, 0, len(block))
    sequences += packer.flush()
    assert found == reports
    assert [places(one) for one in sequences] == [places(one) for one in expected]
    for one, other in zip(sequences, expected, strict=True):
        for name in ("num_tokens", "num_images", "num_patches", "num_valid_tokens"):
            assert getattr(one, name) == getattr(other, name)


class Extents(list[Record]):
    """What a block asks for more than counts."""

    def extents(self, at: int) -> list[int]:
        return extents_of(self[at])


def block_of(records: list[Record]) -> Block:
    counts = [
        (r.num_tokens, r.num_images, r.num_valid_tokens, r.num_patches, 0, at)
        for at, r in enumerate(records)
    ]
    refs = np.array([record.ref for record in records], dtype=np.int64)
    return Block(refs, np.array(counts, dtype=np.int64).T, [Extents(records)])


def places(sequence: Sequence) -> list[tuple[int, int, int]]:
    return [(piece.record.ref.row, piece.start, piece.stop) for piece in sequence.pieces]


@given(records=streams, options=limits)
def test_an_image_is_never_cut(records: list[Record], options: dict[str, Any]) -> None:
    for sequence in pack(records, **options)[0]:
        for piece in sequence.pieces:
            for start, stop in piece.record.uncut:
                assert (
                    stop <= piece.start
                    or piece.stop <= start
                    or (piece.start <= start and stop <= piece.stop)
                )


@given(records=streams, options=limits)
def test_pieces_keep_the_order_of_arrival(records: list[Record], options: dict[str, Any]) -> None:
    for sequence in pack(records, **options)[0]:
        rows = places(sequence)
        assert rows == sorted(set(rows))


@given(records=streams, options=limits, algorithm=st.sampled_from(["best_fit", "wrap"]))
def test_order_keep_keeps_the_order(
    records: list[Record], options: dict[str, Any], algorithm: str
) -> None:
    options |= {"algorithm": algorithm, "order": "keep"}
    sequences = pack(records, **options)[0]
    rows = [place for sequence in sequences for place in places(sequence)]
    assert rows == sorted(rows)
    if algorithm == "best_fit":  # a sequence ends where the next piece does not fit
        pieces = [sequence.pieces for sequence in sequences]
        for held, (first, *_) in pairwise(pieces):
            more = Sequence((*held, first))
            names = ("max_length", "max_images", "max_patches")
            sizes = (more.num_tokens, more.num_images, more.num_patches)
            limits = zip(names, sizes, strict=True)
            assert any(options[name] is not None and size > options[name] for name, size in limits)


@pytest.mark.parametrize("max_patches", [None, 20])
@pytest.mark.parametrize(
    ("algorithm", "order"),
    [("best_fit", "any"), ("best_fit", "keep"), ("knapsack", "any"), ("wrap", "any")],
)
def test_packers_keep_the_contract_of_accumulators(
    algorithm: Any, order: Any, max_patches: int | None
) -> None:
    records = [record(i, 3 + i % 17, (5,) * (i % 3)) for i in range(100)]
    config = PackConfig(64, algorithm, max_images=5, max_patches=max_patches, order=order)
    check_accumulator(lambda: make_packer(config), records)


@given(lengths=st.lists(st.integers(1, 100), max_size=50), max_length=st.integers(1, 40))
def test_wrap_fills_every_sequence_but_the_last(lengths: list[int], max_length: int) -> None:
    sequences, reports = pack(texts(lengths), max_length=max_length, algorithm="wrap")
    assert not reports
    sizes = [sequence.num_tokens for sequence in sequences]
    full, rest = divmod(sum(lengths), max_length)
    assert sizes == [max_length] * full + [rest] * (rest > 0)


def test_wrap_moves_the_cut_before_an_image() -> None:
    sequences, _ = pack([record(0, 5), record(1, 3, (6,))], max_length=10, algorithm="wrap")
    cuts = [[(p.record.ref.row, p.start, p.stop) for p in s.pieces] for s in sequences]
    assert cuts == [[(0, 0, 5)], [(1, 0, 10)], [(1, 10, 11)]]


def test_wrap_applies_the_policy_to_an_image_that_no_sequence_holds() -> None:
    wide = record(0, 3, (2, 30))
    sequences, reports = pack([wide], max_length=16, algorithm="wrap")
    assert (sequences, reports) == ([], [("overlong", 0)])
    # What is left of it, an image alone, has nothing to train on.
    assert pack([wide], max_length=16, algorithm="wrap", overlong="truncate")[1] == reports
    before = wide._replace(trained_runs=((0, wide.num_tokens),))
    sequences, reports = pack([before], max_length=16, algorithm="wrap", overlong="truncate")
    assert [(p.start, p.stop) for p in sequences[0].pieces] == [(0, 4)]
    assert reports == [("truncated", 0)]


def test_truncating_takes_an_image_away_whole() -> None:
    long = record(0, 2, (4, 4))._replace(trained_runs=((0, 14),))
    for max_length, stop in ((13, 13), (12, 12), (11, 6), (6, 6)):
        sequences, reports = pack([long], max_length=max_length, overlong="truncate")
        assert [(p.start, p.stop) for s in sequences for p in s.pieces] == [(0, stop)]
        assert reports == [("truncated", 0)]
    assert pack([long], max_length=5, overlong="truncate") == ([], [("overlong", 0)])


@pytest.mark.parametrize("limit", [{"max_images": 0}, {"max_patches": 3}, {"max_length": 8}])
@pytest.mark.parametrize("how", [{}, {"algorithm": "knapsack"}, {"order": "keep"}])
def test_truncating_obeys_every_limit(limit: dict[str, int], how: dict[str, str]) -> None:
    slot = ImageSlot(FileBlob("/x", 0, 1), 5, 3, (3, 2, 2), patches=4)
    ids = np.zeros(10, dtype=np.int32)
    item = record_of(SampleRef(0, 0, 0), ids, ids == 0, (slot,), ((4, 9),))
    options: dict[str, Any] = {"max_length": 10, "overlong": "truncate"} | limit | how
    sequences, reports = pack([item], **options)
    assert [places(one) for one in sequences] == [[(0, 0, 4)]]
    assert reports == [("truncated", 0)]
    if "max_length" not in limit:  # which wrap cuts at
        wrapped = options | {"algorithm": "wrap"}
        assert pack([item], **wrapped) == (sequences, reports)


def test_a_truncated_record_without_loss_is_dropped() -> None:
    prompt = record(0, 30, trained=False)
    assert pack([prompt], max_length=16, overlong="truncate") == ([], [("overlong", 0)])
    assert pack(texts([2]), max_length=1, overlong="truncate") == ([], [("overlong", 0)])


def test_pck_01_overlong_documents_are_split_cut_or_dropped_as_declared() -> None:
    case = json.loads((CASES / "PCK-01" / "token_lengths.json").read_text())
    records, size = texts(case["docs"]), case["seq_len"]
    overlong = [row for row, length in enumerate(case["docs"]) if length > size]

    sequences, reports = pack(records, max_length=size)
    assert reports == [("overlong", row) for row in overlong]
    assert sorted(s.num_tokens for s in sequences) == [12, 32, 32]

    sequences, reports = pack(records, max_length=size, overlong="truncate")
    assert reports == [("truncated", row) for row in overlong]
    assert sum(s.num_tokens for s in sequences) == sum(min(n, size) for n in case["docs"])

    sequences, reports = pack(records, max_length=size, algorithm="wrap")
    assert not reports
    assert sum(s.num_tokens for s in sequences) == sum(case["docs"])

    sequences, reports = pack(records, max_length=size, overlong="split")
    assert reports == [("split", row) for row in overlong]
    assert sum(s.num_tokens for s in sequences) == sum(case["docs"])


def test_pck_07_a_sequence_without_trained_tokens_says_so() -> None:
    prompts = [record(row, 5, trained=False) for row in range(3)]
    (sequence,), _ = pack(prompts, max_length=15)
    assert (sequence.num_tokens, sequence.num_valid_tokens) == (15, 0)


def test_pck_09_images_are_part_of_the_packing_cost() -> None:
    records = [record(0, 1, (1, 1, 1)), record(1, 1, (1, 1)), record(2, 1, (1,) * 5)]
    sequences, reports = pack(records, max_length=100, max_images=4)
    assert [s.num_images for s in sequences] == [3, 2]
    assert reports == [("too_many_images", 2)]


def test_patches_are_part_of_the_packing_cost() -> None:
    records = [record(0, 1, (1, 1, 1)), record(1, 1, (1, 1)), record(2, 1, (1,) * 5)]  # 6 each
    sequences, reports = pack(records, max_length=100, max_patches=24)
    assert [s.num_patches for s in sequences] == [18, 12]
    assert reports == [("too_many_patches", 2)]


def test_pck_12_documents_keep_their_order_and_what_is_wasted_is_known() -> None:
    lengths = [5, 4, 8, 1, 1, 9, 3, 7, 2, 6]
    sequences, reports = pack(texts(lengths), max_length=10, order="keep")
    found = [[row for row, _, _ in places(sequence)] for sequence in sequences]
    assert found == [[0, 1], [2, 3, 4], [5], [6, 7], [8, 9]]
    assert not reports
    counters = {"sequences": len(sequences), "tokens": sum(s.num_tokens for s in sequences)}
    told = summary(counters, elapsed_s=1.0, max_length=10, defects=[])
    assert (told["wasted_tokens"], told["density"]) == (4, pytest.approx(0.92))


def offline(lengths: list[int], max_length: int) -> int:
    """Sequences that best-fit-decreasing needs when it knows all lengths."""
    free: list[int] = []
    count = 0
    for length in sorted(lengths, reverse=True):
        at = bisect_left(free, length)
        count += at == len(free)
        insort(free, (free.pop(at) if at < len(free) else max_length) - length)
    return count


def log_uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.exp(rng.uniform(np.log(40), np.log(3000), count)).astype(int)


def uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(40, 3000, count)


def captioned_images(rng: np.random.Generator, count: int) -> np.ndarray:
    return 731 + rng.integers(20, 121, count)


def images_and_text(rng: np.random.Generator, count: int) -> np.ndarray:
    images = 731 * rng.integers(1, 5, count) + rng.integers(20, 400, count)
    return np.where(rng.random(count) < 0.5, images, log_uniform(rng, count))


@pytest.mark.slow
@pytest.mark.parametrize("draw", [log_uniform, uniform, captioned_images, images_and_text])
def test_streaming_is_nearly_as_tight_as_knowing_all_lengths(draw: Callable[..., Any]) -> None:
    needed = used = 0
    for seed in range(4):
        lengths = draw(np.random.default_rng(seed), 2048).tolist()
        needed += offline(lengths, 4096)
        used += len(pack(texts(lengths), max_length=4096)[0])
    assert needed / used >= 0.995


def pictures(rng: np.random.Generator, count: int, tokens: int, patches: int) -> list[Record]:
    """Half documents of one to four images with a short text, half texts."""
    found = []
    for row, text in enumerate(log_uniform(rng, count).tolist()):
        images = int(rng.integers(1, 5)) if rng.random() < 0.5 else 0
        one = record(row, min(text, 400) if images else text, (tokens,) * images)
        slots = tuple(image._replace(patches=patches) for image in one.images)
        found.append(one._replace(images=slots))
    return found


def offline_twice(records: list[Record], max_length: int, max_patches: int) -> int:
    """Sequences that best-fit-decreasing needs with two budgets when it knows all documents."""
    needs = np.array([(r.num_tokens / max_length, r.num_patches / max_patches) for r in records])
    free = np.empty((0, 2))
    for need in needs[np.argsort(-needs.max(axis=1), kind="stable")]:
        left = free - need
        score = np.where((left >= 0).all(axis=1), left.sum(axis=1), np.inf)
        if not len(free) or np.isinf(score.min()):
            free = np.vstack((free, 1 - need))
        else:
            free[score.argmin()] = left[score.argmin()]
    return len(free)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "patches", "max_patches"),
    [(81, 729, 5000), (81, 729, 7500), (729, 729, 2916), (256, 1024, 12288)],
)
def test_two_budgets_are_filled_as_if_all_documents_were_known(
    tokens: int, patches: int, max_patches: int
) -> None:
    needed, used, searched = 0, 0, 0
    for seed in range(2):
        records = pictures(np.random.default_rng(seed), 1024, tokens, patches)
        options = {"max_length": 4096, "max_patches": max_patches}
        needed += offline_twice(records, 4096, max_patches)
        used += len(pack(records, **options)[0])
        searched += len(pack(records, algorithm="knapsack", **options)[0])
    assert needed / used >= 0.975
    assert used / searched >= 0.985


@pytest.mark.slow
@pytest.mark.parametrize("draw", [log_uniform, uniform, captioned_images, images_and_text])
def test_a_knapsack_is_no_worse_than_best_fit(draw: Callable[..., Any]) -> None:
    used = searched = 0
    for seed in range(2):
        records = texts(draw(np.random.default_rng(seed), 2048).tolist())
        used += len(pack(records, max_length=4096)[0])
        searched += len(pack(records, max_length=4096, algorithm="knapsack")[0])
    assert used / searched >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize("draw", [log_uniform, uniform, images_and_text])
def test_windows_cost_no_more_than_the_budget(draw: Callable[..., Any]) -> None:
    records = texts(draw(np.random.default_rng(7), 2 * 16384).tolist())
    at_once = len(pack(records, max_length=4096)[0])
    for window, loss in [(2048, 0.003), (16384, 0.0005)]:
        starts = range(0, len(records), window)
        used = sum(len(pack(records[at : at + window], max_length=4096)[0]) for at in starts)
        assert at_once / used >= 1 - loss, window


def test_the_first_sequence_does_not_wait_for_the_lookahead() -> None:
    packer = make_packer(PackConfig(max_length=4096, lookahead=512))
    records = texts(log_uniform(np.random.default_rng(0), 512).tolist())
    first = next(i for i, item in enumerate(records) if packer.push(item))
    assert first <= 64


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"lookahead": 0}, "lookahead must be at least 1"),
        ({"max_images": -1}, "max_images must be None or >= 0"),
        ({"max_patches": 0}, "max_patches must be at least 1, got 0"),
        ({"algorithm": "knapsack", "order": "keep"}, "order='keep' does not"),
        ({"algorithm": "worst_fit"}, "algorithm must be .* got 'worst_fit'"),
        ({"overlong": "keep"}, "overlong must be .* got 'keep'"),
    ],
)
def test_a_config_that_cannot_work_is_named(options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        PackConfig(**{"max_length": 8, **options})
