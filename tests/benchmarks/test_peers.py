"""The comparison with other loaders, run with those that are always here."""

import csv
import io
import os
import select
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import contenders
from benchmarks.peers import ours, work
from benchmarks.peers.measure import rate
from benchmarks.peers.runs import PEERS, Peer, start
from benchmarks.peers.table import COLUMNS, Bench, Plan, compare
from zephon_mm.processors import SigLIPProcessor

pytestmark = pytest.mark.slow
COUNTS = {"text": 4_800, "full": 48}


def test_everyone_decodes_to_our_pixels() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((500, 640), Image.Resampling.BICUBIC)
    picture.save(file := io.BytesIO(), "jpeg")
    found = np.empty((3, work.IMAGE_PX, work.IMAGE_PX), dtype=np.uint8)
    SigLIPProcessor(size=work.IMAGE_PX, patch_size=14).write(file.getvalue(), found)
    assert np.array_equal(work.picture(file.getvalue()).numpy(), found)


def test_the_table_has_a_line_for_each_row_and_loader(photographs: Path, tmp_path: Path) -> None:
    rows, names = ("text",), ("zephon_mm", "torch")
    plan = Plan(rows, names, 1, 0.1, warm_up=1, counts=COUNTS)
    compare(photographs, plan).write("peers", tmp_path)
    with (tmp_path / "peers.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert [(line["row"], line["loader"]) for line in lines] == [("text", name) for name in names]
    assert all(float(line["samples/s"]) > 0 == len(line["usable tokens/s"]) for line in lines)


def test_data_that_end_within_the_window_give_no_rate() -> None:
    with pytest.raises(ValueError, match="the data ended before the window did"):
        rate([[{"txt": b"a"}]] * 40, 5, 8)


def test_the_full_row_counts_tokens_and_compares_ranks(photographs: Path) -> None:
    plan = Plan(("full",), ("torch",), 1, 0.1, warm_up=1, steps=2, counts=COUNTS)
    bench = Bench(photographs, plan)
    (found,) = bench.rates()["full", "torch"]
    tokens = found["tokens_per_s"] / found["samples_per_s"]
    assert work.IMAGE_TOKENS < tokens < work.IMAGE_TOKENS + 400
    assert bench.elastic("torch") == ["4 of 4", "not offered", "not offered"]


def test_ours_are_the_same_documents(photographs: Path) -> None:
    photos, tokens = photographs / "photos", photographs / "tokenizer"
    rows = {row["txt"]: row["jpg"] for row in contenders.photographs(str(photographs / "any"))}
    task = work.Task(photos, full=True)
    (batch,) = islice(ours.zephon_mm(task).batches, 1)
    assert not list(photographs.rglob("measured")), "an index: others measure in each run"
    ids = batch.ids[batch.ids != work.PAD]
    documents = [work.token_ids(tokens, text) for text in rows]
    ends = (ids == work.END).nonzero().flatten() + 1
    found = [part.numpy() for part in ids.tensor_split(ends)[:-1]]
    for part, pixels in zip(found, batch.pixels, strict=True):
        (at,) = [n for n, ids in enumerate(documents) if np.array_equal(ids, part)]
        assert torch.equal(pixels, work.picture(list(rows.values())[at]))


def test_a_loader_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEERS_PYTHON", raising=False)
    missing = Peer("file", "no_such_module", "none", "records")
    (said,) = start(missing, ["json.tool"], limit_s=1.0)
    assert said.startswith("not installed: ModuleNotFoundError")


def test_what_a_contender_started_ends_with_it() -> None:
    code = "import subprocess\nprint([subprocess.Popen(['sleep', '600']).pid], flush=True)"
    (pid,) = start(PEERS["torch"], ["timeit", "-n1", "-r1", code], limit_s=60.0)
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # and it has been waited for
    with open(ended) as file:
        assert select.select([file], [], [], 60.0)[0]
