"""The errors of the project: each says what was found, what is needed, and which key to change."""

from __future__ import annotations

from typing import Any


class SpecError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(SpecError, ValueError):
    """Bad input that was noticed before work started.

    Args:
        what: one clause that names the fault ("the draft's vocabulary is larger than the policy's").
        found: the offending value, as the user gave it.
        needed: what would be accepted, in words or as a value.
        key: the dotted configuration key (or the file and field) to change.
    """

    def __init__(self, what: str, *, found: Any, needed: Any, key: str) -> None:
        self.what, self.found, self.needed, self.key = what, found, needed, key
        super().__init__(f"{what}: found {found!r}, needed {needed}; change `{key}`")

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments are lost by the default pickling of exceptions; this one crosses processes.
        return _rebuild_config_error, (type(self), self.what, self.found, self.needed, self.key)


def _rebuild_config_error(cls: type[ConfigError], what: str, found: Any, needed: Any, key: str) -> ConfigError:
    return cls(what, found=found, needed=needed, key=key)


class CheckpointError(SpecError):
    """A checkpoint that is torn, incomplete, or belongs to another run."""


class MissingExtraError(SpecError, ImportError):
    """An optional package is not installed; names the extra that brings it."""

    def __init__(self, package: str, extra: str, what_for: str) -> None:
        self.package, self.extra, self.what_for = package, extra, what_for
        super().__init__(f"{what_for} needs the package `{package}`: pip install 'lightning-spec[{extra}]'")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.package, self.extra, self.what_for)


class EngineError(SpecError):
    """The rollout engine failed; carries the engine's own traceback or its last output."""


class EngineTimeoutError(EngineError):
    """The rollout engine did not answer within its bound."""


class TapError(SpecError, RuntimeError):
    """The tap channel failed on some rank; the text names the rank, stage, step and micro-batch, and what happened."""
