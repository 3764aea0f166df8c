"""Checks of a merged configuration against the classes it configures, before anything is parsed or built.

jsonargparse refuses unknown keys too, but late and in the words of its type unions. This walk knows the file and line
of each key and says which key was meant.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
from collections import abc
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from lightning_spec.compose import nearest
from lightning_spec.errors import ConfigError, MissingExtraError


class KeyCheck:
    """Walks a configuration along the type hints of the classes it names.

    Args:
        origin: "file:line" of each dotted key, for errors.
    """

    def __init__(self, origin: Mapping[str, str]) -> None:
        self.origin = origin

    def where(self, key: str) -> str:
        if key not in self.origin:
            # The parser's messages leave `init_args` out.
            key = next((k for k in self.origin if k.replace(".init_args", "") == key.replace(".init_args", "")), key)
        below = f"{key}."
        place = self.origin.get(key) or next((p for k, p in self.origin.items() if k.startswith(below)), None)
        return f"{key} ({place})" if place else key

    def roots(self, values: Mapping[str, Any], roots: Mapping[str, Any]) -> None:
        """Check every top-level key. `roots` gives the type of each: a class, or Any for what is not walked."""
        for name, value in values.items():
            if _plain(name) not in roots:
                raise ConfigError(
                    "unknown key", found=name, needed=nearest(str(name), roots, "one of"), key=self.where(str(name))
                )
            self.value(value, roots[_plain(name)], str(name))

    def value(self, value: Any, hint: Any, key: str) -> None:
        """Check one value against its type hint; values that are not mappings or lists are left to the parser."""
        options = _options(hint)
        if isinstance(value, str) and value.lstrip().startswith("#"):
            # The parser reads every string as YAML once more, where this is a comment: it would become null.
            raise ConfigError(
                "a text that starts with # would be read as a comment",
                found=value,
                needed="another spelling; in a regular expression [#]",
                key=self.where(key),
            )
        if isinstance(value, Mapping):
            self._mapping(value, options, key)
        elif isinstance(value, list):
            self._list(value, options, key)
        elif _is_class_path(value) and str not in options and any(_is_component(option) for option in options):
            self.component(value, {}, options, key, key)

    def _mapping(self, value: Mapping[str, Any], options: list[Any], key: str) -> None:
        if any(o is Any or get_origin(o) in (dict, Mapping) or o is dict for o in options):
            return
        classes = [o for o in options if inspect.isclass(o) and not _is_scalar(o)]
        if "class_path" in value:
            for name in value:
                if name not in ("class_path", "init_args", "dict_kwargs"):
                    raise ConfigError(
                        "unknown key beside class_path",
                        found=name,
                        needed=f"init_args: {{{name}: ...}}",
                        key=self.where(f"{key}.{name}"),
                    )
            self.component(value["class_path"], value.get("init_args") or {}, options, key, f"{key}.class_path")
            return
        if len(classes) == 1:
            if _is_component(classes[0]) and inspect.isabstract(classes[0]) and "init_args" not in value:
                raise ConfigError(
                    "a class is needed here",
                    found=f"keys {sorted(map(str, value))}",
                    needed="class_path and init_args",
                    key=self.where(key),
                )
            if set(value) <= {"init_args"}:
                return
            self.arguments(classes[0], value, key)
        elif not classes and value and not any(get_origin(o) in (list, tuple) for o in options):
            raise ConfigError(
                "a mapping where a plain value is needed",
                found=dict(value),
                needed=" or ".join(_name(o) for o in options),
                key=self.where(key),
            )

    def _list(self, value: list[Any], options: list[Any], key: str) -> None:
        lists = [o for o in options if _is_list(o)]
        if not lists and Any not in options:
            one = f"; a single `- class_path` under `{key.split('.')[-1]}:` needs no dash" if value else ""
            raise ConfigError(
                "a list where one value is needed",
                found=value,
                needed=" or ".join(_name(o) for o in options) + one,
                key=self.where(key),
            )
        for option in lists:
            inner = get_args(option)
            if get_origin(option) is tuple and inner and inner[-1] is not Ellipsis and len(inner) != len(value):
                raise ConfigError("wrong length", found=value, needed=f"{len(inner)} values", key=self.where(key))
            if inner:
                for index, item in enumerate(value):
                    self.value(item, inner[0], f"{key}.{index}")
            return

    def component(self, path: Any, init_args: Any, options: list[Any], key: str, path_key: str) -> None:
        """Check a `class_path` and its `init_args`: the class exists, is of the kind needed, and takes these keys."""
        kind = self._import(path, options, path_key)
        bases = tuple(o for o in options if inspect.isclass(o) and not _is_scalar(o))
        if inspect.isclass(kind) and bases and not issubclass(kind, bases):
            twin = "; `pytorch_lightning` and `lightning` do not mix"
            twin = twin if kind.__module__.startswith("pytorch_lightning") else ""
            raise ConfigError(
                "the class is of another kind",
                found=path,
                needed=" or ".join(f"a {base.__name__}" for base in bases) + twin,
                key=self.where(path_key),
            )
        if not isinstance(init_args, Mapping):
            raise ConfigError(
                "init_args holds the arguments by name",
                found=init_args,
                needed="a mapping",
                key=self.where(f"{key}.init_args"),
            )
        self.arguments(kind, init_args, f"{key}.init_args")

    def _import(self, path: Any, options: list[Any], key: str) -> Any:
        if not isinstance(path, str):
            raise ConfigError("class_path names a class", found=path, needed="a dotted path", key=self.where(key))
        if "." not in path:
            known = {c.__name__: c for base in options if inspect.isclass(base) for c in _subclasses(base)}
            if path in known:
                return known[path]
            raise ConfigError(
                "no such class", found=path, needed=nearest(path, known, "a dotted path"), key=self.where(key)
            )
        module_name, _, name = path.rpartition(".")
        try:
            module = importlib.import_module(module_name)
        except MissingExtraError:
            raise
        except ImportError as error:
            if error.name is not None and not module_name.startswith(error.name):
                raise ConfigError(
                    f"{module_name} needs a package that is not installed",
                    found=f"no module {error.name}",
                    needed=f"pip install {error.name}",
                    key=self.where(key),
                ) from error
            raise ConfigError(
                "no such module",
                found=path,
                needed=nearest(module_name, _known_modules(options), "a class that Python can import"),
                key=self.where(key),
            ) from None
        if not hasattr(module, name):
            offered = [n for n, v in vars(module).items() if inspect.isclass(v) and not n.startswith("_")]
            raise ConfigError(
                "no such class",
                found=path,
                needed=nearest(name, offered, f"a class of {module_name}"),
                key=self.where(key),
            )
        return getattr(module, name)

    def arguments(self, kind: Any, values: Mapping[str, Any], key: str) -> None:
        """Check the names of a class's arguments, and walk into their values."""
        known, open_ended = parameters(kind)
        for name, value in values.items():
            hint = known.get(_plain(name))
            if hint is None and not open_ended:
                raise ConfigError(
                    f"unknown key of {_name(kind)}",
                    found=name,
                    needed=nearest(str(name), known, "one of"),
                    key=self.where(f"{key}.{name}"),
                )
            if hint is not None:
                self.value(value, hint, f"{key}.{name}")


def parameters(kind: Any) -> tuple[dict[str, Any], bool]:
    """Names and type hints that a class takes (its bases' too where it passes **kwargs on), and whether it takes more.

    A class of ours whose `**kwargs` go to its base's constructor is closed; a foreign one with `**kwargs` is open.
    """
    if dataclasses.is_dataclass(kind) and inspect.isclass(kind):
        hints = _hints(kind)
        return {f.name: hints.get(f.name, Any) for f in dataclasses.fields(kind) if f.init}, False
    known: dict[str, Any] = {}
    chain = inspect.getmro(kind) if inspect.isclass(kind) else (kind,)
    for one in chain:
        make = one.__dict__.get("__init__") if inspect.isclass(one) else one
        if make is None or make is object.__init__:
            continue
        signature = inspect.signature(inspect.unwrap(make))
        hints = _hints(inspect.unwrap(make))
        more = False
        for name, parameter in signature.parameters.items():
            if name == "self":
                continue
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                more = True
            elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                known.setdefault(name, hints.get(name, Any))
        if not more:
            return known, False
    return known, True


def _hints(thing: Any) -> dict[str, Any]:
    try:
        return get_type_hints(thing)
    except Exception:  # a hint that only a type checker can resolve: the parser decides about the value
        return {}


def _options(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [one for part in get_args(hint) for one in _options(part)]
    if get_origin(hint) is not None and str(get_origin(hint)) == "<class 'typing.Annotated'>":
        return _options(get_args(hint)[0])
    return [hint]


def _plain(name: Any) -> str:
    return str(name).removesuffix("+")


def _is_scalar(kind: Any) -> bool:
    return kind in (str, int, float, bool, bytes, type(None), complex) or _name(kind) in ("Path", "timedelta")


def _is_list(option: Any) -> bool:
    """list, tuple, Sequence, Iterable: whatever a YAML list can become."""
    origin = get_origin(option) or option
    return inspect.isclass(origin) and origin in (list, tuple, set, abc.Sequence, abc.Iterable, abc.Collection)


def _is_component(option: Any) -> bool:
    return inspect.isclass(option) and not _is_scalar(option) and not dataclasses.is_dataclass(option)


def _is_class_path(value: Any) -> bool:
    return isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))


def _subclasses(base: type) -> set[type]:
    below: list[type] = base.__subclasses__()
    return {base}.union(*(_subclasses(one) for one in below))


def _known_modules(options: list[Any]) -> set[str]:
    found = {c.__module__ for base in options if inspect.isclass(base) for c in _subclasses(base)}
    return found | {n for n in sys.modules if n.startswith(("lightning_spec.", "callbacks", "strategies"))}


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
