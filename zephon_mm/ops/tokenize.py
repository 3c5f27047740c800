"""Measure plain text: one field of a sample becomes a record.

Imports: errors, protocols, records, ops.interleave, ops.tokenizer. Used by: engine, pipeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zephon_mm.errors import SampleError
from zephon_mm.ops.interleave import BlobSource, Interleave
from zephon_mm.ops.tokenizer import TextTokenizer
from zephon_mm.protocols import Sample
from zephon_mm.records import Document, Record, SampleRef, Text


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Turns a text field into records; has the same `measure` as `Interleave`.

    Args:
        tokenizer: Needs no image token.
        field: The field that holds the text.
        eos: Whether the end token closes a document.
    """

    tokenizer: TextTokenizer
    field: str = "text"
    eos: bool = True

    def __post_init__(self) -> None:
        Interleave(self.tokenizer, None, eos=self.eos)  # checks the end token

    def document(self, sample: Sample) -> Document:
        """Return the sample's text as a document; bytes are read as UTF-8.

        Raises:
            SampleError: The field is missing or is not text.
        """
        value = sample.get(self.field)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if not isinstance(value, str):
            found = f"has type {type(value).__name__}" if self.field in sample else "is missing"
            raise SampleError(
                "no_text",
                f"field {self.field!r} {found}, expected text; fields are {sorted(sample)}. Set "
                "field= to the one that holds the text.",
            )
        return Document((Text(value),), str(sample.get("__key__", "")))

    def measure(
        self, ref: SampleRef, document: Document, blobs: BlobSource, known: Any = ()
    ) -> Record:
        """Return the record of a document of text.

        Raises:
            SampleError: The text gives no tokens.
        """
        return Interleave(self.tokenizer, None, eos=self.eos).measure(ref, document, blobs)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything that records depend on, JSON-serialisable."""
        return {"tokenizer": self.tokenizer.fingerprint(), "field": self.field, "eos": self.eos}
