"""Stateless user functions: on documents in the workers, on sequences in the planner.

A user's exception keeps its type and traceback and gains a note with the operator's name. The
function must be pure: the same document gives the same answer in any process.

Imports: records. Used by: engine.tasks, pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from zephon_mm.packed import Sequence
from zephon_mm.records import Document


class DocumentOp(Protocol):
    """A stateless operator on documents; None drops the document."""

    def apply(self, document: Document) -> Document | None:
        """Return the new document, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Map:
    """`.map(fn)`: replaces every document by `fn(document)`."""

    fn: Callable[[Document], Document]

    def apply(self, document: Document) -> Document:
        """Return `fn(document)`.

        Raises:
            TypeError: `fn` returned something that is not a document.
        """
        result = call(".map", self.fn, document)
        if not isinstance(result, Document):
            raise TypeError(
                f".map({name_of(self.fn)}) must return a Document, got {type(result).__name__}; "
                "use .filter to drop documents"
            )
        return result


@dataclass(frozen=True, slots=True)
class Filter:
    """`.filter(fn)`: keeps the documents for which `fn(document)` is true."""

    fn: Callable[[Document], bool]

    def apply(self, document: Document) -> Document | None:
        """Return the document, or None when `fn` says no."""
        return document if call(".filter", self.fn, document) else None


@dataclass(frozen=True, slots=True)
class MapSequences:
    """`.map_sequence(fn)` as an accumulator: replaces every packed sequence by `fn(sequence)`."""

    fn: Callable[[Sequence], Sequence]

    def push(self, item: Sequence) -> list[Sequence]:
        """Return `[fn(sequence)]`.

        Raises:
            TypeError: `fn` returned something that is not a sequence.
        """
        result = call(".map_sequence", self.fn, item)
        if not isinstance(result, Sequence):
            raise TypeError(
                f".map_sequence({name_of(self.fn)}) must return a Sequence, got "
                f"{type(result).__name__}"
            )
        return [result]

    def flush(self) -> list[Sequence]:
        """Hold nothing."""
        return []


def call(operator: str, fn: Callable[..., Any], item: object) -> Any:
    """Call a user's function; its exception gains a note that names the operator."""
    try:
        return fn(item)
    except Exception as error:
        error.add_note(f"raised in {operator}({name_of(fn)})")
        raise


def name_of(fn: Callable[..., Any]) -> str:
    """Return how a user would recognise a function."""
    return str(getattr(fn, "__qualname__", repr(fn)))
