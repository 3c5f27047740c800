"""Time to the first batch of a cold start: `python -m benchmarks.first_batch`.

Each try is a fresh process that imports transformers, as a training script does, and then builds
the README's pipeline and takes one batch; the clock starts after the imports. The shard index is
built anew each time. The process runner's workers start during that time.

Imports: the package, benchmarks.pipeline. Writes nothing.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import sys, time
from pathlib import Path
from transformers import AutoTokenizer, Qwen3ForCausalLM, SiglipVisionModel
from benchmarks.pipeline import build
began = time.perf_counter()
pipeline = build(Path(sys.argv[1]), sys.argv[2], 2, cache_dir=sys.argv[3])
batch = next(iter(pipeline))
print(time.perf_counter() - began)
pipeline.close()
"""


def first_batch_s(data: Path, runner: str) -> float:
    """Return seconds from building the pipeline to its first batch, in a process of its own."""
    with tempfile.TemporaryDirectory() as cache_dir:
        command = [sys.executable, "-c", SCRIPT, str(data), runner, cache_dir]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Parse the command line, print the median of the tries for each runner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("benchmarks/data_cache/photos"))
    parser.add_argument("--tries", type=int, default=5)
    args = parser.parse_args()
    for runner in ("thread", "process"):
        times = [first_batch_s(args.data, runner) for _ in range(args.tries)]
        shown = " ".join(f"{time:.2f}" for time in times)
        print(f"{runner:8} first batch: median {statistics.median(times):.2f} s of {shown}")


if __name__ == "__main__":
    main()
