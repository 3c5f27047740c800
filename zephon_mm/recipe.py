"""A pipeline as a TOML file: sections of settings, checked when the file is read.

    data_from = "zephon-mm demo --data-only"   # optional: what makes the data, if it is missing
    [[datasets]]         name path weight, and fmt schema missing cache_dir, and the reader's own
    [source]             of StaticMixtureWorkSource; token_estimation = true or {sample_rows = 64}
    [options]            of zephon_mm.options.Options
    [image_processor]    kind = "siglip" and its settings, or preset = "..."; left out for text
    [video_processor]    the same for videos; one of frames takes [image_processor] for its `image`
    [interleave]         of Pipeline.interleave; or [tokenize], of Pipeline.tokenize; or [pair], of
                         Pipeline.pair, which packs too
    [mix] [pack] [shuffle] [batch]     of Pipeline.mix, .pack_flat, .shuffle, .batch

Laws (tests/test_recipe.py):
    1. No key is declared here: names and types are those of the code that uses them.
    2. What is wrong is a ConfigError that names file, section and key, and what is allowed.
    3. Reading what `to_toml` wrote gives an equal recipe, wherever the file is.

Paths are relative to the file. Functions (`.map`, `.filter`, a schema) are not for recipes: add
them to the pipeline in Python.

Imports: io, meshes, ops, options, pipeline, stages, tables, work. Used by: cli, users.
"""

import inspect
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zephon_mm.engine.order import Topology, check_topology
from zephon_mm.engine.tasks import detect_schema
from zephon_mm.errors import ConfigError, DatasetError
from zephon_mm.io import Dataset, entries_of, reader_classes
from zephon_mm.meshes import without_mesh
from zephon_mm.ops.pack import PackConfig
from zephon_mm.options import Options
from zephon_mm.pipeline import Pipeline
from zephon_mm.processors.siglip import SigLIPProcessor
from zephon_mm.stages import ShuffleStage
from zephon_mm.tables import Knob, Table, checked, dump, knobs_of, unknown
from zephon_mm.work import StaticMixtureWorkSource, TokenEstimation

_REQUIRED = ("datasets", "source", "batch")
_TOKENS = ("interleave", "tokenize", "pair")
Check = Callable[[Table, Path], Table]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked recipe. Two are equal if they mean the same, wherever their files are.

    `tables` is section -> key -> value as in TOML, with absolute paths.
    """

    tables: Mapping[str, Any]
    file: Path = field(compare=False)

    def pipeline(
        self,
        *,
        microbatch_size: int | None = None,
        global_batch_size: int | None = None,
        **options: Any,
    ) -> Pipeline:
        """Return a new pipeline; the arguments take the place of the recipe's settings.

        Raises:
            ConfigError: Data or tokenizer are missing, or a setting is impossible.
            DatasetError: A dataset is damaged or empty.
        """
        given = {"microbatch_size": microbatch_size, "global_batch_size": global_batch_size}
        sizes = {name: size for name, size in given.items() if size is not None}
        tables = {**self.tables, "batch": self.tables["batch"] | sizes}
        pipeline = Pipeline(self._source())
        with _at(self.file, "options"):
            pipeline.options(**tables.get("options", {}) | without_mesh(options))
        self._add_tokens(pipeline)
        for section, stage in _STAGES.items():
            if section in tables:
                with _at(self.file, section):
                    stage(pipeline, **tables[section])
        return pipeline

    def to_toml(self) -> str:
        """Return the recipe as the text of a TOML file."""
        return dump(self.tables)

    def _source(self) -> StaticMixtureWorkSource:
        datasets, mixture = [], {}
        for number, table in enumerate(self.tables["datasets"], start=1):
            settings = dict(table)
            mixture[table["name"]] = settings.pop("weight")
            with _at(self.file, "datasets", number):
                self._check_exists("path", settings["path"])
                dataset = Dataset.from_path(**settings)
                if "tokenize" not in self.tables:
                    detect_schema(dataset)  # an unknown one is told here, with its section
                datasets.append(dataset)
        with _at(self.file, "source"):
            settings = dict(self.tables["source"])
            settings["token_estimation"] = _token_estimation(settings.get("token_estimation"))
            return StaticMixtureWorkSource(datasets, mixture, **settings)

    def _add_tokens(self, pipeline: Pipeline) -> None:
        tables = self.tables
        if "tokenize" in tables:
            with _at(self.file, "tokenize"):
                self._check_exists("tokenizer_id", tables["tokenize"]["tokenizer_id"])
                pipeline.tokenize(**tables["tokenize"])
            return
        with _at(self.file, "image_processor"):
            image = _processor(tables.get("image_processor"))
        with _at(self.file, "video_processor"):
            video = _processor(tables.get("video_processor"), image)
        name = "pair" if "pair" in tables else "interleave"
        with _at(self.file, name):
            self._check_exists("tokenizer", tables[name]["tokenizer"])
            videos = {} if name == "pair" else {"video_processor": video}
            getattr(pipeline, name)(image_processor=image, **videos, **tables[name])

    def _check_exists(self, key: str, value: Any) -> None:
        """Find a missing file here, where it is known what makes it; patterns are the reader's."""
        for path in value if isinstance(value, list) else [value]:
            if not os.path.isabs(path) or re.search(r"[{*?\[]", path) or os.path.exists(path):
                continue
            command = self.tables.get("data_from")
            advice = f"run `{command}` to make it" if command else "correct the path"
            raise ConfigError(f"{key}: there is no {path}: {advice}")


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read and check a recipe; its data need not be there yet.

    Raises:
        ConfigError: The file cannot be read, or something in it cannot work.
    """
    file = Path(path)
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"recipe {file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"recipe {file} is not a TOML file: {error}") from error
    _check_sections(tables, file)
    base = file.absolute().parent
    found: Table = {"data_from": tables["data_from"]} if "data_from" in tables else {}
    parts = enumerate(tables["datasets"], start=1)
    found["datasets"] = [_dataset(table, file, base, number) for number, table in parts]
    for section, check in _CHECKS.items():
        if section in tables:
            with _at(file, section):
                found[section] = check(tables[section], base)
    return Recipe(found, file)


def _check_sections(tables: Table, file: Path) -> None:
    """Check which sections there are and whether they are tables."""
    for name, value in tables.items():
        if name not in ("data_from", *_SECTIONS):
            raise ConfigError(f"{file}: {unknown(name, ('data_from', *_SECTIONS), 'section')}")
        parts = value if name == "datasets" else [value]
        form = str if name == "data_from" else dict
        if not isinstance(parts, list) or not all(isinstance(part, form) for part in parts):
            raise ConfigError(f"{file}: {name} must be {_WORDS.get(name, f'a section [{name}]')}")
    for name in _REQUIRED:
        if not tables.get(name):
            raise ConfigError(f"{file}: {_WORDS.get(name, f'the section [{name}]')} is missing")
    if len(given := [name for name in _TOKENS if name in tables]) != 1:
        raise ConfigError(f"{file}: give one of [{'], ['.join(_TOKENS)}], found {given}")
    if ("pack" in tables) == (given == ["pair"]):
        raise ConfigError(
            f"{file}: the section [pack] is {'not for [pair]' if 'pack' in tables else 'missing'}"
        )
    unused = {"tokenize": ("image_processor", "video_processor"), "pair": ("video_processor",)}
    for name in unused.get(given[0], ()):
        if name in tables:
            raise ConfigError(f"{file}: [{given[0]}] reads no {name[:5]}: remove [{name}]")


_WORDS = {"datasets": "a section [[datasets]] for each dataset", "data_from": "text, a command"}


@contextmanager
def _at(file: Path, section: str, number: int = 0) -> Iterator[None]:
    """Put file and section in front of an error's message."""
    where = f"[[{section}]] number {number}" if number else f"[{section}]"
    try:
        yield
    except (ConfigError, DatasetError) as error:
        raise type(error)(f"{file}: {where}: {error}") from error


# What each section takes, and the checks that need no data.


def _dataset(table: Table, file: Path, base: Path, number: int) -> Table:
    with _at(file, "datasets", number):
        fmt = table.get("fmt")
        knobs = knobs_of(Dataset.from_path, "progress") | {"weight": Knob(float, required=True)}
        for reader in reader_classes(*([fmt] if isinstance(fmt, str) else [])).values():
            knobs |= knobs_of(reader, "path", "cache_dir", "progress")
        found = checked(table, knobs, base)
        if not (math.isfinite(found["weight"]) and found["weight"] >= 0):
            raise ConfigError(f"weight must be a finite number >= 0, got {found['weight']}")
        return found


def _source(table: Table, base: Path) -> Table:
    knobs = knobs_of(StaticMixtureWorkSource, "datasets", "mixture", "token_estimation")
    found = checked(table, knobs | {"token_estimation": Knob(bool | Mapping[str, Any])}, base)
    _token_estimation(found.get("token_estimation"))
    return found


def _token_estimation(value: bool | Table | None) -> TokenEstimation | None:
    if not value and not isinstance(value, dict):
        return None
    settings = value if isinstance(value, dict) else {}
    return TokenEstimation(**checked(settings, knobs_of(TokenEstimation)))


def _section(owner: Callable[..., Any], make: Callable[..., object] = dict) -> Check:
    """Return the check of a section whose keys are what `owner` takes and `make` accepts."""

    def check(table: Table, base: Path) -> Table:
        found = checked(table, knobs_of(owner), base)
        make(**found)
        return found

    return check


def _processor_table(table: Table, base: Path) -> Table:
    _processor(table)
    return table


def _processor(table: Table | None, image: Any = None) -> Any:
    """Return the processor that a section describes, one of frames with `image`; None without."""
    if table is None:
        return None
    entries = entries_of("zephon_mm.processors")
    kind = table.get("kind", "siglip")
    if not isinstance(kind, str) or kind not in entries:
        raise ConfigError(f"kind must be one of {', '.join(sorted(entries))}, got {kind!r}")
    owner = entries[kind].load()
    settings = {name: value for name, value in table.items() if name != "kind"}
    if "preset" in settings and hasattr(owner, "preset"):
        knobs = knobs_of(owner.preset, "name") | {"preset": Knob(str, required=True)}
        settings = checked(settings, knobs)
        return owner.preset(settings.pop("preset"), **settings)
    settings = checked(settings, knobs_of(owner, "image"))
    if "image" in inspect.signature(owner).parameters:
        settings["image"] = image or SigLIPProcessor()
    return owner(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def _tokens(owner: Callable[..., Any], name: str, *built: str) -> Check:
    """Return the check of a section that names a tokenizer; `built` are not in a recipe."""

    def check(table: Table, base: Path) -> Table:
        found = checked(table, knobs_of(owner, name, *built) | {name: Knob(str, required=True)})
        paths = {name, "template"} & found.keys()
        return found | {path: _tokenizer(found[path], base) for path in paths}

    return check


def _tokenizer(name: str, base: Path) -> str:
    """Return the path of a tokenizer's or template's folder or file, or a name as it is."""
    path = os.path.normpath(base / os.path.expanduser(name))
    is_path = name.startswith((".", "/", "~")) or os.path.exists(path)
    return path if is_path else name


def _topology(microbatch_size: int, global_batch_size: int | None = None, **others: Any) -> None:
    total = microbatch_size if global_batch_size is None else global_batch_size
    check_topology(Topology(1, 0, microbatch_size, total))


_CHECKS: dict[str, Check] = {
    "source": _source,
    "options": _section(Options, Options),
    "image_processor": _processor_table,
    "video_processor": _processor_table,
    "interleave": _tokens(Pipeline.interleave, "tokenizer", "image_processor", "video_processor"),
    "tokenize": _tokens(Pipeline.tokenize, "tokenizer_id"),
    "pair": _tokens(Pipeline.pair, "tokenizer", "image_processor"),
    "mix": _section(Pipeline.mix),
    "pack": _section(PackConfig, PackConfig),
    "shuffle": _section(Pipeline.shuffle, ShuffleStage),
    "batch": _section(Pipeline.batch, _topology),
}
_SECTIONS = ("datasets", *_CHECKS)
_STAGES: dict[str, Callable[..., Pipeline]] = {
    "mix": Pipeline.mix,
    "pack": Pipeline.pack_flat,
    "shuffle": Pipeline.shuffle,
    "batch": Pipeline.batch,
}
