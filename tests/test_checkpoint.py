"""States merge into what one rank would have written; every disagreement is named."""

import json
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.memory import Recipe
from zephon_mm.checkpoint import (
    FORMAT,
    check_allow,
    check_fingerprint,
    check_format,
    gather_checkpoint,
    merge_checkpoints,
)
from zephon_mm.errors import CheckpointError, ConfigError


def part(rank: int, lanes: dict[str, list[Any]], **changes: Any) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "delivered": 8,
        "next_lane": 0,
        "dealt": [],
        "num_lanes": 4,
        "dp_degree": 2,
        "dp_rank": rank,
        "complete": False,
        "lanes": lanes,
        "constants": None,
        "fingerprint": {"seed": 1},
    } | changes


ENTRY = {"name": "mixture", "delivered": 4, "window": 2, "old": {"a": 1.0}, "new": {"b": 1.0}}
FIRST = part(0, {"0": [0, [0, 4, 0], 2], "10": [1, [2, 4, 8], 0]})
SECOND = part(1, {"2": [0, [1, 4, 0], 2], "10": [1, [2, 4, 8], 0]})


@pytest.mark.parametrize("parts", [[FIRST, SECOND], [SECOND, FIRST], [FIRST, SECOND, FIRST]])
def test_parts_merge_in_any_order_and_lanes_come_sorted(parts: list[dict[str, Any]]) -> None:
    whole = merge_checkpoints(parts)
    assert whole == FIRST | {
        "lanes": FIRST["lanes"] | SECOND["lanes"],
        "complete": True,
        "dp_rank": 0,
    }
    assert list(whole["lanes"]) == ["0", "2", "10"]
    assert json.loads(json.dumps(whole)) == whole
    assert merge_checkpoints([json.loads(json.dumps(one)) for one in parts]) == whole


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "no parts to merge"),
        ([FIRST], r"parts of ranks \[1\] are missing, of dp_degree = 2"),
        ([FIRST, {"lanes": {}}], r"part 1 is not a checkpoint.*format is None, expected 'zephon"),
        ([FIRST, part(1, {}, delivered=9)], "ranks 0 and 1 disagree on delivered: 8 and 9"),
        ([FIRST, part(1, {}, num_lanes=8)], "ranks 0 and 1 disagree on num_lanes: 4 and 8"),
        ([FIRST, part(1, {}, fingerprint={"seed": 2})], "ranks 0 and 1 disagree on fingerprint"),
        ([FIRST, part(1, {}, lineage=[ENTRY])], r"disagree on lineage: \[\] and \[{'name'"),
        (
            [FIRST, part(1, {"0": [0, [0, 4, 0], 3]})],
            r"rank 1 has lane 0 at \[0, \[0, 4, 0\], 3\], another rank has it at .*, 2\]",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_named(
    parts: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoints(parts)


@pytest.mark.parametrize("state", [None, [], "x", {}, {"format": "zephon_mm checkpoint 0"}])
def test_what_is_no_checkpoint_is_told_what_was_found(state: object) -> None:
    with pytest.raises(CheckpointError, match=r"not a checkpoint of this version.*Pass what"):
        check_format(state)


values = st.recursive(
    st.none() | st.integers(2, 5) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)
fingerprints = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


@given(fingerprints, fingerprints)
def test_a_fingerprint_fits_itself_alone(saved: dict[str, Any], current: dict[str, Any]) -> None:
    check_fingerprint(saved, json.loads(json.dumps(saved)))
    if json.dumps(saved, sort_keys=True) != json.dumps(current, sort_keys=True):
        with pytest.raises(CheckpointError, match="another recipe"):
            check_fingerprint(saved, current)


def test_every_difference_is_named_and_nothing_else() -> None:
    saved = {"seed": 1, "sequences": [{"pack": {"max_length": 64}}], "same": [1, 2], "gone": 3}
    now = {"seed": 2, "sequences": [{"pack": {"max_length": 32}}], "same": [1, 2], "new": None}
    with pytest.raises(CheckpointError) as caught:
        check_fingerprint(saved, now)
    lines = str(caught.value).splitlines()
    assert [line.strip() for line in lines[1:-1]] == [
        "gone: 3 in the state, 'absent' now",
        "new: 'absent' in the state, None now",
        "seed: 1 in the state, 2 now",
        "sequences.0.pack.max_length: 64 in the state, 32 now",
    ]


def test_gathering_over_a_group_of_one_is_merging() -> None:
    alone = part(0, {"0": [0, [0, 4, 0], 2]}, dp_degree=1, complete=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert gather_checkpoint(alone, dist.group.WORLD) == merge_checkpoints([alone])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "damage",
    [
        {"delivered": None},
        {"lanes": []},
        {"lanes": {"0": [1, 2]}},
        {"fingerprint": "x"},
        {"complete": 1},
        {"lineage": None},
        {"lineage": [ENTRY | {"window": None}]},
        {"lineage": [ENTRY | {"name": "seed"}]},
    ],
)
def test_a_damaged_state_is_named(recipe: Recipe, damage: dict[str, Any]) -> None:
    with recipe.build() as pipeline:
        state = pipeline.checkpoint()
    with pytest.raises(CheckpointError, match=rf"damaged: .*{next(iter(damage))[:4]}"):
        recipe.build(state={**state, **damage})


def test_a_state_that_lacks_a_field_is_damaged_but_for_a_lineage(recipe: Recipe) -> None:
    with recipe.build() as pipeline:
        state = pipeline.checkpoint()
    for name in state.keys() - {"format", "next_lane"}:
        absent = {field: value for field, value in state.items() if field != name}
        if name == "lineage":
            assert recipe.build(state=absent).checkpoint() == merge_checkpoints([state])
            continue
        with pytest.raises(CheckpointError, match=rf"damaged: its '{name}' is 'absent'"):
            merge_checkpoints([absent])


def test_parts_keep_their_lineage_and_old_ones_have_none() -> None:
    parts = [part | {"lineage": [ENTRY]} for part in (FIRST, SECOND)]
    assert merge_checkpoints(parts)["lineage"] == [ENTRY]
    assert merge_checkpoints([FIRST | {"lineage": []}, SECOND])["lineage"] == []


def test_what_is_allowed_is_returned_and_what_is_not_is_refused_with_a_hint() -> None:
    saved: dict[str, Any] = {
        "source": {"datasets": [["a", "1"]], "weights": [1.0], "seed": 0},
        "schemas": ["x"],
        "tokens": {"image_processor": {"size": 4, "torch": "2"}, "backend": 1},
    }
    now = json.loads(json.dumps(saved))
    now["source"]["datasets"].append(["b", "2"])
    now["source"]["weights"] = [0.5, 0.5]
    now["schemas"].append("y")
    now["tokens"]["image_processor"]["torch"] = "3"
    mixture = (
        {"source.weights.0": 1.0},
        {"schemas.1": "y", "source.datasets.1.0": "b", "source.datasets.1.1": "2"}
        | {"source.weights.0": 0.5, "source.weights.1": 0.5},
    )
    pixels = ({"tokens.image_processor.torch": "2"}, {"tokens.image_processor.torch": "3"})
    both = {"mixture": mixture, "pixels": pixels}
    assert check_fingerprint(saved, now, ["pixels", "mixture"]) == both
    with pytest.raises(CheckpointError, match=r"allow=\['pixels'\]\) would accept .*torch\.$"):
        check_fingerprint(saved, now, ["mixture"])
    for change in (
        {"schemas": ["z", "y"]},
        {"source": now["source"] | {"seed": 1}},
        {"source": now["source"] | {"datasets": [["a", "3"], ["b", "2"]]}},
        {"tokens": {"image_processor": {"size": 5, "torch": "3"}, "backend": 1}},
        {"tokens": {"image_processor": {"size": 4, "torch": "3"}, "backend": 2}},
    ):
        with pytest.raises(CheckpointError, match=r"freely\.$"):
            check_fingerprint(saved, now | change, ["pixels", "mixture"])


def test_names_that_cannot_be_allowed_are_errors() -> None:
    assert check_allow("mixture") == ["mixture"]
    with pytest.raises(ConfigError, match=r"unknown change 'pixel'; .* Known: mixture, pixels"):
        check_allow(["mixture", "pixel"])
