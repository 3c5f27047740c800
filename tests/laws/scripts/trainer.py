"""A training loop as users write it: no guard, no close. `trainer.py RECIPE MODE`.

MODE `forever` trains until it is interrupted, `raise` fails after a batch, `digests` writes the row
digests of 40 batches as JSON. The first line that each writes lists the pids of its descendants.
"""

import json
import pickle
import sys
from pathlib import Path

import psutil

from tests.fixtures.memory import digests, take

recipe = pickle.loads(Path(sys.argv[1]).read_bytes())
pipeline = recipe.build(microbatch=2, runner="process", workers=2)
batches = iter(pipeline)
next(batches)
pids = [child.pid for child in psutil.Process().children(recursive=True)]
sys.stdout.write(json.dumps(pids) + "\n")
sys.stdout.flush()
if sys.argv[2] == "digests":
    del batches
    sys.stdout.write(json.dumps(digests(take(pipeline, 40))))
elif sys.argv[2] == "raise":
    raise RuntimeError("the training loop failed")
else:
    for batch in batches:
        batch.to_training()
