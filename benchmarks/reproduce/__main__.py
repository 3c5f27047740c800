"""Write a table of the suite, with a plot: `python -m benchmarks.reproduce NAME [--short]`.

`all` writes every one, and `REPORT.md`, which has them on a page with machine, versions and date;
`make bench` is its short form, of less than ten minutes on two quiet cores. `peers` joins where
`PEERS_PYTHON` names the Pythons of the other loaders, see `benchmarks.peers`.

Imports: benchmarks.{reproduce.*, peers.table}. Writes benchmarks/results, benchmarks/data_cache
and demo_out/data.
"""

import argparse
import os
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers import table as peers
from benchmarks.reproduce import elastic, losses, rates, restores
from zephon_mm.cli.demo_data import make_demo_data

ROOT = Path(__file__).parents[2]
TRAINED = {"losses": losses.run, "elastic": elastic.run}  # on a recipe
TIMED = {"rates": rates.run, "price": rates.price, "texts": rates.texts, "restores": restores.run}
if os.environ.get("PEERS_PYTHON"):
    TIMED["peers"] = peers.run
CONFIG, DATA = ROOT / "configs" / "tiny_vlm.toml", ROOT / "benchmarks" / "data_cache"
PACKAGES = ("zephon_mm", "torch", "torchvision", "transformers", "numpy", "pillow")


def machine() -> list[str]:
    """Return what the figures depend on, a line each."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return [
        f"date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"machine: {len(os.sched_getaffinity(0))} CPUs, {model}, {memory} GiB, "
        f"{platform.system()} {platform.release()}",
        f"load before: {os.getloadavg()[0]:.1f} (timed figures need a quiet machine)",
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in PACKAGES),
    ]


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reproduce", description=__doc__)
    add = parser.add_argument
    add("name", choices=[*TRAINED, *TIMED, "all"])
    add("--short", action="store_true", help="less of everything: to see that it works")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    head = machine()
    if not (ROOT / "demo_out" / "data").exists():
        make_demo_data(ROOT / "demo_out" / "data")
    parts = []
    for name, measure in (TRAINED | TIMED).items():
        if args.name not in (name, "all"):
            continue
        began = time.monotonic()
        result = measure(CONFIG if name in TRAINED else DATA, short=args.short)
        result.write(name, args.out)
        parts.append(result.markdown(name))
        print(f"{parts[-1]}\n{name}: {time.monotonic() - began:.0f} s\n", flush=True)
    if args.name == "all":
        form = "short form, to see that it works" if args.short else "full form"
        text = "\n".join([f"# Benchmarks, {form}\n", *(f"- {line}" for line in head), "", *parts])
        (args.out / "REPORT.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
