"""Jinja as `transformers` sets it up for chat templates, with `{% generation %}` made visible.

Law (tests/processors/test_jinja.py): what is rendered is what `apply_chat_template` renders.

A module of its own, imported when a conversation is rendered first: Jinja takes 15 ms to load.

Cost: to compile, some ms a template, once. Imports: errors, jinja2. Used by: template.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zephon_mm.errors import ConfigError, SampleError


def rendered(source: str, edges: tuple[str, str], names: Mapping[str, Any]) -> str:
    """Return what a template writes.

    Args:
        source: Jinja text.
        edges: What is written in front of and behind the inside of a `{% generation %}`.
        names: What the template may use.

    Raises:
        SampleError: `template`: it fails on these.
        ConfigError: It is no Jinja.
    """
    try:
        return _compiled(source, edges).render(names)
    except (TemplateError, TypeError) as error:
        raise SampleError("template", f"the chat template fails: {error}") from error


class _Generation(Extension):
    """`{% generation %}`: puts marks around a block."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks: tuple[str, str] = self.environment.edges  # type: ignore[attr-defined]
        edges = [nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in marks]
        return [edges[0], *body, edges[1]]


@lru_cache(maxsize=16)
def _compiled(source: str, edges: tuple[str, str]) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.extend(edges=edges)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"the chat template is no Jinja that can be read: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return JSON as it is, where Jinja's own filter escapes what HTML knows."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
