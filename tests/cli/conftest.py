"""Parsing a configuration as the command does, without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def parse() -> Callable[..., Any]:
    """parse(command, *arguments) -> the command's configuration."""
    from lightning_spec.command import build

    def go(command: str, *arguments: str) -> Any:
        return build(command, arguments, execute=False).config[command]

    return go
