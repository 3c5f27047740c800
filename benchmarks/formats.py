r"""The same batches from 4,000 photographs in every format: `python -m benchmarks.formats`.

Each format is written shard by shard from the WebDataset of `benchmarks.data`, and read by a packed
and shuffled pipeline. The writers are pyarrow and pylance, and for MDS and LitData the libraries of
other Pythons, where they are given, as they do not go together with this one:

    python -m benchmarks.formats --mds-python /tmp/mds/bin/python \
        --litdata-python /tmp/lit/bin/python

Where they are not, and with `--convert` for all, `zephon-mm convert` writes. Exit status 1 if any
format's batches differ.

Imports: the package, benchmarks.{data, pipeline}, but nothing of these where it writes in another
Python. Writes beside the photographs.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FORMATS = ("webdataset", "parquet", "lance", "mds", "litdata")


def shards(source: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each tar file: `jpg` bytes and `txt`."""
    for path in sorted(source.glob("*.tar")):
        rows: dict[str, dict[str, Any]] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                file = tar.extractfile(member)
                data = file.read() if file else b""
                rows.setdefault(key, {})[field] = data.decode() if field == "txt" else data
        yield list(rows.values())


def write_parquet(source: Path, target: Path) -> None:
    """Write a file for each shard, images as Hugging Face has them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number, rows in enumerate(shards(source)):
        images = [{"bytes": row["jpg"], "path": None} for row in rows]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        columns = {"image": pa.array(images, kind), "text": [row["txt"] for row in rows]}
        pq.write_table(pa.table(columns), target / f"{number:05}.parquet")


def write_lance(source: Path, target: Path) -> None:
    """Write a fragment for each shard."""
    import lance
    import pyarrow as pa

    for rows in shards(source):
        images = pa.array([row["jpg"] for row in rows], pa.large_binary())
        table = pa.table({"image": images, "text": [row["txt"] for row in rows]})
        lance.write_dataset(table, target, mode="append")


def write_mds(source: Path, target: Path) -> None:
    """Write a shard for each shard; images are opened from files, or they would be encoded anew."""
    from PIL import Image
    from streaming import MDSWriter

    columns = {"jpg": "jpeg", "txt": "str"}
    with MDSWriter(out=str(target), columns=columns, size_limit=1 << 31) as writer:
        for number, rows in enumerate(shards(source)):
            if number:
                writer.flush_shard()
                writer._reset_cache()
            for row, name in zip(rows, _files(rows), strict=True):
                writer.write({"jpg": Image.open(name), "txt": row["txt"]})


def write_litdata(source: Path, target: Path) -> None:
    """Write a chunk for each shard."""
    from litdata.streaming.writer import BinaryWriter
    from PIL import Image

    found = list(shards(source))
    writer = BinaryWriter(str(target), chunk_size=len(found[0]))
    for number, (row, name) in enumerate(
        (row, name) for rows in found for row, name in zip(rows, _files(rows), strict=True)
    ):
        writer[number] = {"jpg": Image.open(name), "txt": row["txt"]}
    writer.done()
    writer.merge()


def _files(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the name of a file with each row's image."""
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            path = Path(folder, f"{number}.jpg")
            path.write_bytes(row["jpg"])
            yield str(path)
            path.unlink()


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "parquet": write_parquet,
    "lance": write_lance,
    "mds": write_mds,
    "litdata": write_litdata,
}


def make(fmt: str, source: Path, target: Path, python: str) -> None:
    """Write a format unless it is there: by its library in a Python, or else by `convert`."""
    if target.exists():
        return
    if not python:
        words = ["-m", "zephon_mm.cli.main", "convert", str(source), str(target), "--to", fmt]
        subprocess.run([sys.executable, *words], check=True)
        return
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    subprocess.run([python, "-P", __file__, "write", fmt, str(source), str(partial)], check=True)
    partial.rename(target)


def main() -> int:
    """Parse the command line, print a line for each format."""
    from benchmarks.digests import digest
    from benchmarks.photos import parsed

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--convert", action="store_true", help="write all with zephon-mm convert")
    parser.add_argument("--mds-python", default="", help="a Python with mosaicml-streaming")
    parser.add_argument("--litdata-python", default="", help="a Python with litdata")
    args = parsed(parser)
    pythons = {"mds": args.mds_python, "litdata": args.litdata_python}
    found = set()
    for fmt in FORMATS:
        python = "" if args.convert else pythons.get(fmt, sys.executable)
        writer = "its library" if python or fmt == "webdataset" else "convert"
        place = args.data
        if fmt != "webdataset":
            by = "library" if python else "converted"
            place = args.data.with_name(f"{args.data.name}-{fmt}-{by}")
            make(fmt, args.data, place, python)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as cache:
            sha = digest(place, "process", 2, args.batches, cache)
        found.add(sha)
        seconds = time.perf_counter() - began
        print(f"{fmt:10} by {writer:11}  {sha[:32]}  {seconds:6.1f} s", flush=True)
    print("all equal" if len(found) == 1 else "DIFFERENT")
    return 0 if len(found) == 1 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        WRITERS[sys.argv[2]](Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(main())
