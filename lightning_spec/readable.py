"""The parser's errors in the form of ours: what was found, what is needed, which key."""

from __future__ import annotations

import re
from typing import Any

from lightning_spec.compose import nearest
from lightning_spec.errors import ConfigError
from lightning_spec.keys import KeyCheck


def readable(error: Exception, origin: dict[str, str]) -> ConfigError:
    """One of the parser's errors in the form of ours: what was found, what is needed, which key."""
    text = re.sub(r"\b(?:fit|validate|export)\.(?=[a-z])", "", str(error))
    if linked := re.search(r'Linked "([^"]+)" must be given via "([^"]+)"', text):
        key, source = linked.groups()
        return ConfigError("the value follows from another key", found=key, needed=f"`{source}`", key=at(key, origin))
    if missing := re.search(r"arguments are required: (.+)", text):
        names = missing.group(1).split(", ")
        return ConfigError("keys are missing", found="no value", needed=f"values for {', '.join(names)}", key=names[0])
    # Keys nest: each is relative to the one before, down to the first value that was refused.
    wanted = re.compile(r"Expected (?:an? )?(?:typing\.)?(?:<class ')?([^\n]+?)'?>?\. Got value: ([^\n]*)")
    first = wanted.search(text)
    keys = re.findall(r'[Kk]ey "([^"]+)"', text[: first.start()] if first else text)
    key = ".".join(keys) or "command line"
    if first and keys:
        needed = " or ".join(dict.fromkeys(want for want, _ in wanted.findall(text)))
        return ConfigError("the value is of the wrong kind", found=first.group(2), needed=needed, key=at(key, origin))
    given = re.findall(r"Given value: ([^\n]*)", text)
    if "dot import path" in text and keys:
        return ConfigError("a class is needed here", found=given[-1], needed="class_path, or null", key=at(key, origin))
    lines = [line.strip(" -") for line in text.splitlines() if line.strip(" -")]
    if "not accepted" in text or "unrecognized" in text or "does not accept" in text:
        return ConfigError(
            "unknown option", found=lines[0].rpartition(": ")[2], needed="an option of --help", key="command line"
        )
    return ConfigError(
        lines[0][:200] if lines else type(error).__name__,
        found=given[-1] if given else lines[-1][:300],
        needed="a value that the key takes",
        key=at(key, origin),
    )


def interpolation_error(error: Exception, values: dict[str, Any], origin: dict[str, str]) -> ConfigError:
    """A `${name}` that leads nowhere, with the nearest name that is there."""
    text = str(error).splitlines()[0]
    name = re.findall(r"resolved to '(?:fit|validate|export)\.([^']+)'", text)
    key = re.findall(r"full_key: (?:fit|validate|export)\.(\S+)", str(error))
    return ConfigError(
        "an interpolation leads nowhere",
        found=f"${{{name[0]}}}" if name else text,
        needed=nearest(name[0], _names(values), "a key of the configuration") if name else "a key that is there",
        key=at(key[0], origin) if key else "command line",
    )


def _names(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        found.append(f"{prefix}{name}")
        if isinstance(value, dict):
            found += _names(value, f"{prefix}{name}.")
    return found


def at(key: str, origin: dict[str, str]) -> str:
    return KeyCheck(origin).where(key)
