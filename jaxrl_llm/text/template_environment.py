"""The Jinja that chat templates are written for: `transformers`' settings, in a sandbox.

Its documentation of chat templates names what a template may use. A template comes out of a downloaded file, so it runs
in Jinja's immutable sandbox, on plain data.
"""

import functools
import json
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


@functools.lru_cache(maxsize=16)  # a pure function, and compiling costs more than rendering
def compile_template(source: str) -> jinja2.Template:
    """The template, with the blocks, filters and functions that model authors write for.

    `strftime_now` is left to who renders, who knows the time. Raises jinja2.TemplateError.
    """
    return _environment().from_string(source)


@functools.lru_cache(maxsize=16)
def template_texts(source: str) -> frozenset[str]:
    """Every text written out in the template's expressions: what it can look for in a message."""
    return frozenset(
        node.value for node in _environment().parse(source).find_all(nodes.Const) if isinstance(node.value, str)
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    filters: dict[str, Any] = environment.filters
    names: dict[str, Any] = environment.globals
    filters["tojson"] = _tojson
    names["raise_exception"] = _raise_exception
    return environment


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, by which a template marks what the assistant wrote: its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt. (Jinja's own filter writes it for HTML.)"""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))
