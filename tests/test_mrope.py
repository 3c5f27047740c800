"""M-RoPE of packed rows: equal to what transformers computes for each document alone."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen3VLConfig, Qwen3VLModel

from zephon_mm.mrope import mrope_positions

MERGE = 2
TEXT, IMAGE, VIDEO = 0, 1, 2
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
TOKENS = {"image_token_id": 61, "video_token_id": 62, "vision_start_token_id": 60}
SIGHT = {"depth": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 48, "patch_size": 4}


@cache
def model(name):
    """Return a tiny model with random weights."""
    torch.manual_seed(0)
    sight = {**SIGHT, "out_hidden_size": 32}
    if name == "qwen3-vl":
        sight |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        config = Qwen3VLConfig(text_config={**LAYERS, "head_dim": 8}, vision_config=sight, **TOKENS)
        return Qwen3VLModel(config).eval()
    sight |= {"tokens_per_second": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=LAYERS, vision_config=sight, **TOKENS)
    return Qwen2_5_VLModel(config).eval()


@dataclass
class Document:
    """Kinds of tokens, (first, count, grid) of vision runs, and what transformers asks for."""

    name: str
    kinds: list[int] = field(default_factory=list)
    runs: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    grids: dict[int, list] = field(default_factory=lambda: {IMAGE: [], VIDEO: []})
    seconds: list[float] = field(default_factory=list)

    def add_text(self, count):
        self.kinds += [TEXT] * count

    def add_vision(self, kind, grid, seconds=0.0):
        self.grids[kind].append(grid)
        steps, rows, cols = grid
        bits = int(np.float32(seconds).view(np.int32))
        if kind == VIDEO and self.name == "qwen3-vl":
            parts = [(1, rows, cols)] * steps
        else:
            parts = [(steps, rows, cols, bits) if self.name == "qwen2.5-vl" else grid]
        for part in parts:
            if self.kinds and self.kinds[-1] == kind:
                self.add_text(1)  # without a token in between, runs of a kind are one
            count = part[0] * rows * cols // MERGE**2
            self.runs.append((len(self.kinds), count, part))
            self.kinds += [kind] * count
        if kind == VIDEO:
            self.seconds.append(seconds)

    def inputs(self):
        """Return what the model is given for this document alone."""
        kinds = torch.tensor([self.kinds])
        found = {"input_ids": torch.tensor([[1, 61, 62]])[:, kinds[0]], "mm_token_type_ids": kinds}
        for kind, key in ((IMAGE, "image_grid_thw"), (VIDEO, "video_grid_thw")):
            if self.grids[kind]:
                found[key] = torch.tensor(self.grids[kind])
        return found

    def reference(self):
        """Return transformers' positions, (3, n)."""
        options = {}
        if self.name == "qwen2.5-vl":
            options["second_per_grid_ts"] = torch.tensor(self.seconds or [1.0])
        return model(self.name).get_rope_index(**self.inputs(), **options)[0][:, 0].numpy()


def packed(rows, *, spare=3):
    """Return position_ids, index and grids of rows of documents, padded, the index shuffled."""
    length = max(sum(len(one.kinds) for one in row) for row in rows) + spare
    position_ids = np.empty((len(rows), length), dtype=np.int64)
    found, starts = [], []
    for number, row in enumerate(rows):
        at = 0
        for one in row:
            starts.append((number, at, one))
            position_ids[number, at : at + len(one.kinds)] = np.arange(len(one.kinds))
            found += [(number, at + first, count, grid) for first, count, grid in one.runs]
            at += len(one.kinds)
        position_ids[number, at:] = np.arange(length - at)
    found = [found[i] for i in np.random.default_rng(len(found)).permutation(len(found))]
    width = max((len(grid) for *_, grid in found), default=3)
    index = np.array([run[:3] for run in found], dtype=np.int64).reshape(-1, 3)
    grids = np.array([run[3] for run in found], dtype=np.int64).reshape(-1, width)
    return position_ids, index, grids, starts


# A fraction of frames and rates: multiples of many of these are whole but for rounding.
seconds = st.builds(lambda frames, rate: frames / rate, st.integers(1, 400), st.integers(1, 120))
sides = st.integers(1, 5).map(lambda side: side * MERGE)
segments = st.one_of(
    st.tuples(st.just(TEXT), st.integers(1, 12)),
    st.tuples(st.just(IMAGE), st.tuples(st.just(1), sides, sides)),
    st.tuples(st.just(VIDEO), st.tuples(st.integers(1, 9), sides, sides), seconds),
)


@st.composite
def documents(draw, name):
    document = Document(name)
    for kind, what, *seconds in draw(st.lists(segments, min_size=1, max_size=6)):
        if kind == TEXT:
            document.add_text(what)
        else:
            document.add_vision(kind, what, *seconds)
    return document


# Law 1: transformers' positions, document by document.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
@settings(max_examples=80)
@given(data=st.data())
def test_every_packed_document_has_its_own_positions(name, data):
    rows = data.draw(
        st.lists(st.lists(documents(name), min_size=1, max_size=4), min_size=1, max_size=3)
    )
    position_ids, index, grids, starts = packed(rows)
    speed = 2 if name == "qwen2.5-vl" else None
    found = mrope_positions(position_ids, index, grids, tokens_per_second=speed)
    assert found.shape == (3, *position_ids.shape)
    assert found.dtype == np.int64
    for row, at, document in starts:
        ours = found[:, row, at : at + len(document.kinds)]
        np.testing.assert_array_equal(ours, document.reference())


def test_text_alone_counts_on_and_so_does_padding():
    position_ids = np.array([[0, 1, 2, 0, 1, 0, 0]], dtype=np.int32)
    none = np.empty((0, 3), dtype=np.int64)
    found = mrope_positions(position_ids, none, none)
    np.testing.assert_array_equal(found, np.stack([position_ids] * 3))


def test_an_image_by_hand():
    """Two tokens of text, 2 x 3 tokens of image, text again; a second document behind it."""
    position_ids = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]])
    index, grids = np.array([[0, 2, 6]]), np.array([[1, 4, 6]])
    time, height, width = mrope_positions(position_ids, index, grids)[:, 0]
    assert time.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 0, 1]
    assert height.tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 0, 1]
    assert width.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 0, 1]


def test_arguments_are_left_alone():
    arguments = packed([[_mixed("qwen2.5-vl", 1)]])[:3]
    before = [argument.copy() for argument in arguments]
    mrope_positions(*arguments, tokens_per_second=2)
    assert all(map(np.array_equal, arguments, before))


# Law 2: with them, transformers' models keep packed documents apart.


def _mixed(name, seed):
    rng = np.random.default_rng(seed)
    document = Document(name)
    document.add_text(3 + seed)
    document.add_vision(IMAGE, (1, 4, 6))
    document.add_text(2)
    document.add_vision(VIDEO, (2, 4, 2 + 2 * int(rng.integers(1, 3))), 1.5)
    document.add_text(4)
    if seed % 2:
        document.add_vision(IMAGE, (1, 2, 4))
        document.add_text(1)
    return document


def _words(document, seed):
    """Return its inputs with random words and pixels."""
    generator = torch.Generator().manual_seed(seed)
    found = document.inputs()
    words = torch.randint(2, 60, found["input_ids"].shape, generator=generator)
    found["input_ids"] = torch.where(found["mm_token_type_ids"] == TEXT, words, found["input_ids"])
    for grid, key in (
        ("image_grid_thw", "pixel_values"),
        ("video_grid_thw", "pixel_values_videos"),
    ):
        count = int(found[grid].prod(dim=1).sum())
        found[key] = torch.randn(count, 3 * 2 * 4 * 4, generator=generator)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_packed_documents_give_the_hidden_states_of_each_alone(name):
    rows = [[_mixed(name, 1), _mixed(name, 2)], [_mixed(name, 3), _mixed(name, 4), _mixed(name, 5)]]
    position_ids, index, grids, starts = packed(rows)
    speed = 2 if name == "qwen2.5-vl" else None
    mrope = mrope_positions(position_ids, index, grids, tokens_per_second=speed)
    four = torch.from_numpy(np.concatenate([position_ids[None], mrope]))

    alone = [_words(document, seed) for seed, (_, _, document) in enumerate(starts)]
    input_ids = torch.ones(position_ids.shape, dtype=torch.int64)
    for (row, at, document), inputs in zip(starts, alone, strict=True):
        input_ids[row, at : at + len(document.kinds)] = inputs["input_ids"][0]
    keys = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
    joined = {key: torch.cat([inputs[key] for inputs in alone]) for key in keys}
    network = model(name)
    with torch.no_grad():
        together = network(input_ids, position_ids=four, use_cache=False, **joined)
        for (row, at, document), inputs in zip(starts, alone, strict=True):
            if name == "qwen2.5-vl":
                inputs["second_per_grid_ts"] = torch.tensor(document.seconds)
            wanted = network(**inputs, use_cache=False).last_hidden_state[0]
            found = together.last_hidden_state[row, at : at + len(document.kinds)]
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
