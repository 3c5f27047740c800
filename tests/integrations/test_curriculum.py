"""Weights from a server: kept in states, so that what was begun is planned without it."""

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.contracts.work_source import check_in_another_process, check_work_source
from tests.fixtures.memory import Recipe, digests, run_ranks, take
from tests.fixtures.servers import Answer, Server, running
from zephon_mm.batch import Batch
from zephon_mm.checkpoint import merge_checkpoints
from zephon_mm.errors import CheckpointError
from zephon_mm.integrations import curriculum
from zephon_mm.integrations.curriculum import HttpCurriculum

pytestmark = pytest.mark.filterwarnings("ignore:.* ranks on .* lanes measure each sample")
TRIES = len(curriculum.RETRY_DELAYS_S) + 1


class Weights(Server):
    """Answers by lane and window; `mood` is what it should not depend on."""

    mood = 0

    def answer(self, request: BaseHTTPRequestHandler) -> Answer:
        asked = {
            name: int(value) for name, (value,) in parse_qs(urlsplit(request.path).query).items()
        }
        weights = {"a": 1 + asked["window"] % 3 + self.mood, "b": 1 + asked["lane"], "other": 0}
        return Answer(200, {}, json.dumps(weights).encode())

    def asked(self) -> list[str]:
        return [request.path for request in self.requests]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(Recipe):
    """The recipe whose weights are a server's."""

    url: str = ""

    def source(self) -> Any:
        return HttpCurriculum(self.datasets, self.seed, self.url, timeout_s=0.5)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum, "RETRY_DELAYS_S", (0.0,) * (TRIES - 1))


@pytest.fixture
def server() -> Iterator[Weights]:
    with running(Weights()) as server:
        yield server


@pytest.fixture
def served(recipe: Recipe, server: Weights) -> Served:
    settings_of = {name: getattr(recipe, name) for name in Recipe.__dataclass_fields__}
    return Served(**{**settings_of, "global_batch_size": None}, url=server.url)


def saved(recipe: Recipe, *, after: int, more: int) -> tuple[Any, dict[int, str]]:
    """Return the state after so many batches, and the rows of those behind it."""
    with recipe.build(prefetch_batches=1) as pipeline:
        take(pipeline, after)
        state = json.loads(json.dumps(pipeline.checkpoint()))
        return state, digests(take(pipeline, more))


def test_it_keeps_the_contract_of_work_sources(served: Served, server: Weights) -> None:
    check_work_source(served.source().with_windows(2))
    check_in_another_process(served.source().with_windows(2))
    work = served.source()
    state = work.start(0, 1)
    server.mood = 1  # in a process the first answer stands
    assert work.start(0, 1) == state
    assert served.source().start(0, 1) != state


def test_pipelines_with_other_windows_may_share_it(served: Served, server: Weights) -> None:
    shared = served.source()
    sources = {chunks: shared.with_windows(chunks) for chunks in (1, 3)}
    start = shared.start(0, 1)
    for chunks, work in sources.items():
        state, asked = start, []
        for _ in range(4):
            state = work.next(state, 4)[1]
            asked.append(state[0] != start[0])
        assert asked == {1: [True, True, False, True], 3: [False, False, True, True]}[chunks]
    server.requests.clear()
    assert shared.with_windows(2).start(0, 1) == start  # nobody is asked twice
    assert server.asked() == []


def test_shares_are_those_that_the_server_says(served: Served) -> None:
    work = served.source().with_windows(4)
    state = work.start(2, 3)
    for window in range(6):
        counts = [0, 0]
        for _ in range(4):
            chunk, state = work.next(state, 100)
            for dataset in chunk.refs[:, 0].tolist():
                counts[dataset] += 1
        wanted = 400 * (1 + window % 3) / (4 + window % 3)
        assert abs(counts[0] - wanted) <= 4


def test_any_topology_gives_the_batches_of_one_rank(served: Served) -> None:
    expected = run_ranks(served, dp=1, microbatch=1, sequences=48)
    for dp, microbatch in [(2, 1), (3, 2), (4, 3)]:
        assert run_ranks(served, dp=dp, microbatch=microbatch, sequences=48) == expected


def test_a_resume_replays_the_answers_that_the_state_has(served: Served, server: Weights) -> None:
    recipe = replace(served, lanes=2, chunk_size=12, chunks_per_window=8)
    state, rows = saved(recipe, after=80, more=20)
    begun = {int(lane): window for lane, (window, _, _) in state["lanes"].items()}
    assert max(begun.values()) >= 1
    server.requests.clear()
    server.mood = 9  # it changed its mind
    with recipe.build(prefetch_batches=1, state=state) as pipeline:
        found = digests(take(pipeline, 20))
    assert found == rows
    for path in server.asked():  # of windows that begin later, or never in these batches
        asked = parse_qs(urlsplit(path).query)
        assert int(asked["window"][0]) > begun[int(asked["lane"][0])]


def test_what_was_begun_is_delivered_without_the_server(served: Served, server: Weights) -> None:
    recipe = replace(served, lanes=1, chunk_size=20, chunks_per_window=10)
    state, rows = saved(recipe, after=2, more=60)
    gone = replace(recipe, url="http://127.0.0.1:9/")
    found: list[Batch] = []
    told = pytest.raises(ConnectionError, match="window=1 gave no weights")
    with gone.build(prefetch_batches=1, state=state) as pipeline, told:
        found.extend(pipeline)  # keeps those before the error
    assert len(found) > 20
    assert digests(found).items() <= rows.items()


def test_a_fault_is_tried_again(served: Served, server: Weights) -> None:
    expected = run_ranks(served, dp=1, microbatch=2, sequences=24)
    for fault in (500, 503, "reset", "truncate", "reset in body"):
        server.faults.extend([fault] * (TRIES - 1))
        assert run_ranks(served, dp=1, microbatch=2, sequences=24) == expected
        assert not server.faults


def test_a_server_that_is_silent_is_tried_again(served: Served, server: Weights) -> None:
    state = served.source().start(0, 4)
    server.faults.append("hang")  # longer than timeout_s
    assert served.source().start(0, 4) == state
    assert not server.faults


@pytest.mark.parametrize("fault", [500, 404, "reset"])
def test_then_it_is_an_error_that_names_the_url(
    served: Served, server: Weights, fault: Any
) -> None:
    server.faults.extend([fault] * TRIES)
    told = rf"{server.url}\?lane=\d&window=0 gave no weights of \['a', 'b'\] in {TRIES} tries"
    with served.build() as pipeline, pytest.raises(ConnectionError, match=told):
        take(pipeline, 1)


def test_an_answer_that_is_no_mixture_is_an_error_that_names_the_url(
    recipe: Recipe, served: Served
) -> None:
    class Wrong(Server):
        body = b""

        def answer(self, request: BaseHTTPRequestHandler) -> Answer:
            return Answer(200, {}, self.body)

    with running(Wrong()) as wrong:
        for body in (
            *(b"", b"{}", b'{"a": 0, "b": 0}', b'["a", "b"]', b"3", b'{"a": 1, "b": null}'),
            *(b'{"a": -1, "b": 2}', b'{"a": 1e999, "b": 2}', b"[" * 100_000),
            *(
                b'{"a": 1' + b"0" * 400 + b', "b": 2}',
                b'{"a": NaN, "b": 2}',
                b'{"a": 1, "b": 2, "c": 3}',
            ),
        ):
            wrong.body = body
            with pytest.raises(ConnectionError, match="gave no weights"):
                replace(served, url=wrong.url).source().start(0, 1)


def test_ranks_that_were_told_different_things_do_not_merge(
    served: Served, server: Weights
) -> None:
    parts = []
    for rank in range(2):  # both ranks plan all lanes
        with served.build(dp=2, rank=rank, microbatch=3, prefetch_batches=1) as pipeline:
            take(pipeline, 2)
            parts.append(pipeline.checkpoint())
        server.mood += 1
    with pytest.raises(CheckpointError, match="did not run the same recipe"):
        merge_checkpoints(parts)


def test_a_copy_asks_on_its_own(served: Served, server: Weights) -> None:
    work = served.source()
    copy = pickle.loads(pickle.dumps(work))
    assert copy.start(3, 4) == work.start(3, 4)
    assert len(server.asked()) == 2
