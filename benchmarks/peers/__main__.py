r"""zephon_mm beside other loaders, in one run: `python -m benchmarks.peers`.

    benchmarks/peers/setup.sh /tmp/peers  # once
    PEERS_PYTHON=/tmp/peers/one/bin/python:/tmp/peers/two/bin/python python -m benchmarks.peers

Rows: texts fetched and batched; images of 20 to 30 KB with texts, likewise; and the full pipeline,
which reads photographs with captions, decodes and resizes them to 384 px, tokenises, and packs to
4,096 tokens, or pads where a loader has no packer. Each contender reads the same samples in a
format of its own kind, with two workers, does the same work on them (`work`), and is run in turn
with the others. A loader that cannot do a row, or is not installed, says so.

Imports: benchmarks.peers.table. Writes peers.md, .csv and .png in benchmarks/results, and
benchmarks/data_cache/peers (8 GB for all).
"""

import argparse
from pathlib import Path

from benchmarks.peers.runs import PEERS
from benchmarks.peers.table import COUNTS, Plan, compare


def main() -> None:
    """Parse the command line and run."""
    here, plan = Path(__file__).parents[1], Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=list(COUNTS), default=plan.rows)
    add("--only", nargs="+", choices=list(PEERS), default=plan.names)
    add("--rounds", type=int, default=plan.rounds)
    add("--seconds", type=float, default=plan.seconds, help="a window; the full row's: 4 times")
    add("--steps", type=int, default=plan.steps, help="batches to compare over ranks; 0: none")
    add("--data", type=Path, default=here / "data_cache" / "peers")
    add("--out", type=Path, default=here / "results")
    args = parser.parse_args()
    plan = Plan(args.rows, args.only, args.rounds, args.seconds, steps=args.steps)
    result = compare(args.data, plan)
    result.write("peers", args.out)
    print(result.markdown("peers"))


if __name__ == "__main__":
    main()
