"""The format that data are stored in is no part of the recipe: all formats give the same bytes."""

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from moto.server import ThreadedMotoServer

from tests.fixtures.memory import WORDS, Recipe, run_ranks
from tests.fixtures.servers import Proxy, running
from zephon_mm.cli.demo_data import write_tokenizer
from zephon_mm.cli.main import main
from zephon_mm.io import Dataset

FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMATS = ("webdataset", "mds", "litdata", "parquet", "lance")
SHARDS = (20, 23, 17)
SEQUENCES = 24

pytestmark = pytest.mark.filterwarnings("ignore:a shuffle buffer of .* never fills")


def shards() -> Iterator[list[dict[str, Any]]]:
    """Yield captioned pictures, each a JPEG or a PNG, shard after shard."""
    rng, pixels, number = random.Random(3), np.random.Generator(np.random.Philox(key=3)), 0
    for size in SHARDS:
        rows = []
        for _ in range(size):
            shape = (rng.randint(16, 60), rng.randint(16, 60), 3)
            file = io.BytesIO()
            picture = PIL.Image.fromarray(pixels.integers(0, 256, shape, dtype=np.uint8))
            picture.save(file, fmt := rng.choice(["JPEG", "PNG"]))
            words = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
            text = f"{number} é {words}"
            rows.append({"id": number, "fmt": fmt, "image": file.getvalue(), "text": text})
            number += 1
        yield rows


def write_by_libraries(folder: Path) -> None:
    """Write the three formats whose libraries are here."""
    import lance

    (folder / "webdataset").mkdir(parents=True)
    (folder / "parquet").mkdir()
    tables = []
    for number, rows in enumerate(shards()):
        with webdataset.TarWriter(str(folder / "webdataset" / f"{number}.tar")) as tar:
            for row in rows:
                suffix = {"JPEG": "jpg", "PNG": "png"}[row["fmt"]]
                key = f"{row['id']:06}"
                tar.write({"__key__": key, suffix: row["image"], "txt": row["text"]})
        images = [{"bytes": row["image"], "path": f"{row['id']}.img"} for row in rows]
        columns = {"id": [row["id"] for row in rows], "text": [row["text"] for row in rows]}
        pq.write_table(pa.table({"image": images, **columns}), folder / f"parquet/{number}.parquet")
        binaries = pa.array([row["image"] for row in rows], pa.large_binary())
        tables.append(pa.table({"image": binaries, **columns}))
    for table in tables:
        lance.write_dataset(table, folder / "lance", mode="append")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same rows in five formats."""
    folder = tmp_path_factory.mktemp("formats")
    write_by_libraries(folder)
    for fmt in ("mds", "litdata"):
        assert main(["convert", str(folder / "parquet"), str(folder / fmt), "--to", fmt]) == 0
    return folder


def rows_of(
    path: Path | str,
    cache: Path,
    *,
    fmt: str | None = None,
    dp: int = 1,
    microbatch: int = 1,
    indexed: bool = False,
) -> dict[int, str]:
    """Return the row digests of a packed, shuffled run over a dataset."""
    dataset = Dataset.from_path("captions", path, fmt, cache_dir=cache, progress=False)
    recipe = Recipe(datasets=(dataset,), shuffle=3, global_batch_size=4)
    if indexed:
        with recipe.build() as pipeline:
            pipeline.build_index(progress=False)
    index = "fill" if indexed else "off"
    return run_ranks(recipe, dp=dp, microbatch=microbatch, sequences=SEQUENCES, index=index)


@pytest.mark.slow
def test_each_format_gives_the_same_rows_on_each_topology_with_an_index_and_without(
    places: Path, tmp_path: Path
) -> None:
    expected = rows_of(places / "webdataset", tmp_path)
    assert len(expected) == SEQUENCES
    for fmt in FORMATS:
        assert rows_of(places / fmt, tmp_path, dp=2, microbatch=2) == expected, fmt
        assert rows_of(places / fmt, tmp_path, microbatch=4, indexed=True) == expected, fmt


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixture",
    ["mds/zstd", "mds/gz", "litdata/plain", "litdata/zstd_batch"],
)
def test_what_a_real_library_wrote_gives_the_same_rows_in_every_other_format(
    fixture: str, tmp_path: Path
) -> None:
    source = FIXTURES / fixture
    expected = rows_of(source, tmp_path)
    for fmt in FORMATS:
        assert main(["convert", str(source), str(tmp_path / fmt), "--to", fmt]) == 0
        assert rows_of(tmp_path / fmt, tmp_path) == expected, fmt


@pytest.mark.slow
def test_each_format_gives_the_same_rows_from_s3(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rows_of(places / "webdataset", tmp_path / "here")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")  # for pylance
    try:
        with running(Proxy(*address)) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            proxy.put("formats")
            for path in filter(Path.is_file, places.rglob("*")):
                proxy.put(f"formats/{path.relative_to(places)}", path.read_bytes())
            for fmt in FORMATS:
                url = f"s3://formats/{fmt}"
                found = rows_of(url, tmp_path / "there", fmt=fmt, dp=2, microbatch=2)
                assert found == expected, fmt
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_index_plan_and_check_know_each_format(
    fmt: str, places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path / "tokenizer", [" ".join(WORDS)], vocab_size=300)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        [[datasets]]
        name = "captions"
        path = {json.dumps(str(places / fmt))}
        weight = 1.0
        cache_dir = {json.dumps(str(tmp_path))}
        [source]
        seed = 1
        [options]
        canonical_replicas = 2
        runner = "inline"
        [image_processor]
        kind = "siglip"
        size = 32
        patch_size = 16
        [interleave]
        tokenizer = {json.dumps(str(tmp_path / "tokenizer"))}
        image_token = "<|image_pad|>"
        [pack]
        max_length = 64
        [batch]
        microbatch_size = 2
        """
    )
    assert main(["inspect", str(places / fmt), "--check"]) == 0
    assert main(["plan", str(recipe), "-n", "4"]) == 0
    planned = capsys.readouterr().out.splitlines()[-4:]
    assert main(["index", str(recipe), "--quiet"]) == 0
    assert f"captions: {sum(SHARDS)} rows, {sum(SHARDS)} records" in capsys.readouterr().out
    assert main(["plan", str(recipe), "-n", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == planned
