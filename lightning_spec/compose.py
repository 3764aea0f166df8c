"""YAML files that are composed: a file's `compose:` list is merged under it, so one `-c FILE` is a whole configuration.

    compose: [../base.yaml, ../model/demo.yaml]
    model: {draft: null}

Paths are relative to the file that names them; later ones win, and the file itself wins over all of them.

This module knows YAML and nothing else of the project, so that light commands start at once.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_spec.errors import ConfigError

COMPOSE = "compose"


@dataclass(slots=True)
class Composed:
    """A merged configuration. `origin` says for each dotted key which file and line gave it last."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def dump(self) -> str:
        return yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number (YAML 1.1 does not) and refuses a key that is given twice."""

    source = "?"

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise ConfigError(
                    "the key is given twice",
                    found=f"{key} on lines {seen[key]} and {line}",
                    needed="one of them",
                    key=f"{self.source}:{line}",
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse one file's text into its mapping and the "file:line" of each dotted key.

    Raises:
        ConfigError: not YAML, not a mapping, or a key given twice.
    """
    loader = _Loader(text)
    loader.source = source
    try:
        node = loader.get_single_node()
        values = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError("not valid YAML", found=error.problem, needed="YAML", key=where) from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(
            "a configuration file holds a mapping", found=type(values).__name__, needed="`key: value` lines", key=source
        )
    lines: dict[str, str] = {}
    if node is not None:
        _lines(node, "", source, lines)
    return values, lines


def _lines(node: yaml.Node, prefix: str, source: str, out: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            out[name] = f"{source}:{key.start_mark.line + 1}"
            _lines(value, f"{name}.", source, out)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _lines(value, f"{prefix}{index}.", source, out)


def merge(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Merge two configurations; `high` wins. Mappings merge key by key, everything else (lists too) is replaced.

    A class replaces another class whole: where `class_path` differs, the old `init_args` go with it. A key written
    `name+` appends its list to the list that is there.
    """
    if {"class_path"} <= low.keys() and "class_path" in high and low["class_path"] != high["class_path"]:
        return dict(high)
    out = dict(low)
    for key, value in high.items():
        if isinstance(key, str) and key.endswith("+") and isinstance(value, list):
            plain = key[:-1]
            if isinstance(out.get(plain), list):
                out[plain] = [*out[plain], *value]
                continue
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = merge(out[key], value)
        else:
            out[key] = value
    return out


def load(path: str | Path, _open: tuple[Path, ...] = ()) -> Composed:
    """Load a file with everything that its `compose:` list names.

    Raises:
        ConfigError: a file that is missing (names the nearest), a circle, a `compose:` that is not a list of paths.
    """
    path = Path(os.path.normpath(path))
    source = str(path)
    try:
        text = path.read_text()
    except OSError:
        raise ConfigError(
            "no such configuration file",
            found=source,
            needed=nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")], "an existing YAML file"),
            key=f"{_open[-1]}:compose" if _open else "--config",
        ) from None
    real = path.resolve()
    if real in _open:
        raise ConfigError(
            "configuration files compose each other in a circle",
            found=" -> ".join(p.name for p in (*_open, real)),
            needed="no circle",
            key=f"{source}:compose",
        )
    values, lines = parse_yaml(text, source)
    parts = values.pop(COMPOSE, None) or []
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(
            "bad compose list", found=parts, needed="a list of paths relative to this file", key=f"{source}:compose"
        )
    out = Composed()
    for part in parts:
        below = load(path.parent / part, (*_open, real))
        out = Composed(merge(out.values, below.values), out.origin | below.origin)
    return Composed(merge(out.values, values), out.origin | lines)


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """ "`x`" for the known word nearest to `word`, or `otherwise` with the known words."""
    names = sorted(set(known))
    if close := difflib.get_close_matches(word, names, n=1, cutoff=0.55):
        return f"`{close[0]}`"
    return f"{otherwise} ({', '.join(names)})" if names else otherwise
