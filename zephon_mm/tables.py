"""TOML tables: checked against the signature of the code that takes their settings, and written.

Laws (tests/test_recipe.py):
    1. A table's known keys, their types and which are needed are read off a signature, so that a
       setting is declared once, where it is used.
    2. An unknown key is an error that names the nearest known one; a wrong type is one that says
       what is expected. `true` is no number; an integer is a number.
    3. `tomllib.loads(dump(tables)) == tables`.

Imports: errors. Used by: recipe.
"""

import difflib
import inspect
import json
import os
import re
from collections import abc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from zephon_mm.errors import ConfigError

Table = dict[str, Any]

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    os.PathLike: "a path",
}
_CONTROL = {code: f"\\u{code:04x}" for code in (*range(32), 127)}
_ESCAPES = str.maketrans(_CONTROL | {ord('"'): '\\"', ord("\\"): "\\\\"})


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting: its type, as in an annotation, and whether it must be given."""

    hint: Any
    required: bool = False


def knobs_of(owner: Callable[..., Any], *without: str) -> dict[str, Knob]:
    """Return what a class or function takes by name, but for some."""
    hints = get_type_hints(owner.__init__ if inspect.isclass(owner) else owner)
    return {
        name: Knob(hints[name], parameter.default is parameter.empty)
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in (*without, "self")
    }


def checked(table: Mapping[str, Any], knobs: Mapping[str, Knob], base: Path = Path()) -> Table:
    """Return the settings of a table; paths relative to `base` become absolute.

    Raises:
        ConfigError: A key is unknown or missing, or a value is of another type.
    """
    for name, value in table.items():
        if name not in knobs:
            raise ConfigError(unknown(name, knobs, "key"))
        if not _fits(value, knobs[name].hint):
            expected = _words(knobs[name].hint)
            raise ConfigError(f"{name} must be {expected}, got {_shown(value)}")
    for name, knob in knobs.items():
        if knob.required and name not in table:
            raise ConfigError(f"the key {name} is missing; it is {_words(knob.hint)}")
    return {
        name: _absolute(value, base) if _is_path(knobs[name].hint) else value
        for name, value in table.items()
    }


def check_types(owner: Callable[..., Any], where: str, **values: Any) -> None:
    """Check values that code passed against the annotations of what takes them.

    Args:
        owner: A class or function.
        where: What the message begins with.
        **values: Parameter name -> value. Numbers of NumPy pass for Python's.

    Raises:
        ConfigError: A value is of another type.
    """
    knobs = knobs_of(owner)
    for name, value in values.items():
        hint = knobs[name].hint
        plain = value.item() if isinstance(value, np.number) else value
        if plain is None and NoneType in get_args(hint):
            continue
        if not _fits(plain, hint):
            raise ConfigError(f"{where}: {name} must be {_words(hint)}, got {value!r}")


def unknown(name: str, known: Collection[str], what: str) -> str:
    """Return a message that names the known names nearest to an unknown one."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {what} {name!r}{hint} Known: {', '.join(sorted(known))}"


def dump(tables: Mapping[str, Any]) -> str:
    """Return the text of a TOML file: plain values first, then one section for each table.

    Args:
        tables: str, bool, int, float, lists and mappings of these; lists of mappings become
            `[[name]]` sections at the top and inline tables further down.
    """
    lines = [_line(name, value) for name, value in tables.items() if not _is_section(value)]
    for name, value in tables.items():
        if _is_section(value):
            title = _key(name)
            for table in [value] if isinstance(value, Mapping) else value:
                heading = f"[{title}]" if isinstance(value, Mapping) else f"[[{title}]]"
                lines += ["", heading, *(_line(key, one) for key, one in table.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def _is_section(value: Any) -> bool:
    is_list = isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value)
    return isinstance(value, Mapping) or bool(is_list)


def _line(key: str, value: Any) -> str:
    return f"{_key(key)} = {_value(value)}"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value.translate(_ESCAPES)}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(_line(key, one) for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)  # of int and float, also inf and nan, Python's text is TOML's


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the parts of a union that TOML can write; it has no null and no functions."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(part for part in parts if part is not NoneType and not _is_function(part))


def _is_function(hint: Any) -> bool:
    return (get_origin(hint) or hint) is abc.Callable


def _is_path(hint: Any) -> bool:
    return any(
        (get_origin(part) or part) is os.PathLike or any(map(_is_path, get_args(part)))
        for part in _choices(hint)
    )


def _absolute(value: Any, base: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(one, base) for one in value]
    if "://" in value:
        return value
    return os.path.normpath(base / os.path.expanduser(value))


def _fits(value: Any, hint: Any) -> bool:
    return any(_fits_one(value, part) for part in _choices(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is os.PathLike:
        return isinstance(value, str)
    if kind is tuple and Ellipsis not in parts:
        sized = isinstance(value, list) and len(value) == len(parts)
        return sized and all(map(_fits, value, parts))
    if kind in (list, tuple, abc.Sequence):
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    if kind in (dict, abc.Mapping):
        return isinstance(value, dict)
    return type(value) is kind


def _words(hint: Any) -> str:
    return " or ".join(dict.fromkeys(map(_words_of_one, _choices(hint))))


def _words_of_one(hint: Any) -> str:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return " or ".join(_value(part) for part in parts)
    if kind is tuple and Ellipsis not in parts:
        return f"a list [{', '.join(map(_words, parts))}]"
    if kind in (list, tuple, abc.Sequence):
        return f"a list, each {_words(parts[0])}"
    if kind in (dict, abc.Mapping):
        return "a table {...}"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
