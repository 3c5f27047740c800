"""The fair packer's laws: those of packers, and that each dataset leaves as it came."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.accumulator import check_accumulator, drain
from zephon_mm.ops.fair import FairPacker, make_fair_packer
from zephon_mm.ops.fit import ignore
from zephon_mm.ops.pack import PackConfig, make_packer
from zephon_mm.packed import Block, Sequence
from zephon_mm.records import FileBlob, ImageSlot, Record, SampleRef, record_of

WINDOW, MAX_LENGTH = 2_000, 1_024


def record(dataset: int, row: int, text: int, images: int = 0) -> Record:
    """A record of `images` images of 3 tokens and 5 patches, each uncut, then a text."""
    at = 5 * images
    slots = [
        ImageSlot(FileBlob("/x", row, 1), 5 * one + 1, 3, (3, 2, 2), patches=5)
        for one in range(images)
    ]
    uncut = tuple((5 * one, 5 * one + 5) for one in range(images))
    mask = np.arange(at + text) >= at
    ids = np.zeros(at + text, dtype=np.int32)
    return record_of(SampleRef(dataset, 0, row), ids, mask, tuple(slots), uncut)


streams = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 3)), max_size=80
).map(lambda rows: [record(one[0], row, *one[1:]) for row, one in enumerate(rows)])
limits = st.fixed_dictionaries(
    {
        "max_length": st.integers(20, 64),
        "max_images": st.none() | st.integers(0, 4),
        "max_patches": st.none() | st.integers(5, 30),
        "overlong": st.sampled_from(["drop", "truncate", "split"]),
        "lookahead": st.sampled_from([1, 3, 512]),
        "algorithm": st.sampled_from(["best_fit", "knapsack"]),
    }
)


@given(records=streams, options=limits)
def test_it_keeps_to_the_limits_and_every_record_lands_or_is_reported_as_by_its_base(
    records: list[Record], options: dict[str, Any]
) -> None:
    config = PackConfig(**options)
    made: list[tuple[Counter[Any], list[Any]]] = []
    for make in (make_packer, make_fair_packer):
        told: list[Any] = []
        packer: Any = make(config, lambda why, it, told=told: told.append((why, it.ref)))
        sequences = drain(packer, records)
        pieces = [(one.record.ref, one.start, one.stop) for s in sequences for one in s.pieces]
        for sequence in sequences:
            assert 1 <= sequence.num_tokens <= config.max_length
            assert sequence.num_images <= config.room.images
            assert sequence.num_patches <= config.room.patches
        made.append((Counter(pieces), told))
    assert made[0] == made[1]


@given(records=streams.filter(lambda one: len(one) > 1))
def test_it_keeps_the_contract_of_accumulators(records: list[Record]) -> None:
    config = PackConfig(256)
    check_accumulator(lambda: make_fair_packer(config, ignore), records)


@given(records=streams, options=limits)
def test_rows_of_blocks_are_packed_as_records_are(
    records: list[Record], options: dict[str, Any]
) -> None:
    config = PackConfig(**options | {"overlong": "drop"})
    refs = np.array([one.ref for one in records], dtype=np.int64).reshape(-1, 3)
    counts = [(r.num_tokens, r.num_images, r.num_valid_tokens, r.num_patches) for r in records]
    columns = np.zeros((6, len(records)), dtype=np.int64)
    columns[:4] = np.array(counts, dtype=np.int64).reshape(-1, 4).T
    block, packer = Block(refs, columns, [_Store(records)]), make_fair_packer(config, ignore)
    found: list[Sequence] = []
    for row in range(len(records)):
        found += packer.push_block(block, row, row + 1)
    found += packer.flush()
    assert refs_of(found) == refs_of(drain(make_fair_packer(config, ignore), records))


class _Store:
    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def extents(self, at: int) -> list[int]:
        raise AssertionError("lengths are all that is needed")


def refs_of(sequences: list[Sequence]) -> list[list[SampleRef]]:
    return [[piece.record.ref for piece in sequence.pieces] for sequence in sequences]


def stream(kinds: dict[int, tuple[float, Any]], count: int) -> list[Record]:
    """Return records of which each dataset has its share of tokens at any time."""
    rng = random.Random(5)
    given_tokens = dict.fromkeys(kinds, 0.0)
    records = []
    for row in range(count):
        dataset = min(kinds, key=lambda one: given_tokens[one] / kinds[one][0])
        tokens = min(kinds[dataset][1](rng), MAX_LENGTH)
        given_tokens[dataset] += tokens
        records.append(record(dataset, row, tokens))
    return records


UNEQUAL = {
    "halves": {0: (0.5, lambda rng: 700), 1: (0.5, lambda rng: 60)},
    "tails": {
        0: (0.5, lambda rng: int(rng.lognormvariate(5, 1)) + 1),
        1: (0.3, lambda rng: rng.randint(5, 15)),
        2: (0.2, lambda rng: rng.randint(100, 1_000)),
    },
}


def behind(sequences: list[Sequence], shares: dict[int, float]) -> float:
    """Return by how many sequences a dataset was off its share of what had left, at most."""
    left = dict.fromkeys(shares, 0)
    worst = 0.0
    for sequence in sequences:
        for piece in sequence.pieces:
            left[piece.record.ref.dataset] += piece.num_tokens
        total = sum(left.values())
        worst = max(worst, *(abs(left[one] - share * total) for one, share in shares.items()))
    return worst / MAX_LENGTH


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.parametrize("algorithm", ["best_fit", "knapsack"])
def test_datasets_leave_in_the_shares_in_which_they_come(name: str, algorithm: str) -> None:
    config = PackConfig(MAX_LENGTH, algorithm)
    records = stream(UNEQUAL[name], WINDOW)
    shares = {one: share for one, (share, _) in UNEQUAL[name].items()}
    fair = drain(make_fair_packer(config, ignore), records)
    plain = drain(make_packer(config), records)
    assert behind(fair, shares) < 2.5
    assert behind(plain, shares) > 2 * behind(fair, shares)
    assert len(fair) <= 1.02 * len(plain)


def test_packers_that_keep_the_order_are_fair_already() -> None:
    for options in ({"algorithm": "wrap"}, {"order": "keep"}):
        config = PackConfig(MAX_LENGTH, **options)
        made = make_fair_packer(config, ignore)
        assert not isinstance(made, FairPacker)
        shares = {one: share for one, (share, _) in UNEQUAL["tails"].items()}
        assert behind(drain(made, stream(UNEQUAL["tails"], WINDOW)), shares) < 2.5
