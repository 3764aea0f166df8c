"""What the strategy tells policy and draft of their attention, and which heads it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_spec.attention.context import Context
from lightning_spec.errors import ConfigError
from lightning_spec.policy import PolicyModel
from strategies.attention import AttentionChoice


class Draft:
    """Keeps what it is told."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        self.config: Any = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads)
        self.told: Any = None

    def set_attention(self, mode: str, memory_limit: int | None = None) -> None:
        self.told = (mode, memory_limit)


def module(heads: int = 4, kv_heads: int = 2, draft: Any = None) -> Any:
    policy = PolicyModel.__new__(PolicyModel)
    nn.Module.__init__(policy)
    policy.shape = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads)  # type: ignore[assignment]
    return SimpleNamespace(policy=policy, draft=draft)


def test_module_policy_and_draft_learn_how_they_attend() -> None:
    one = module(draft=Draft(2, 2))
    context = Context(None, 0, 2)
    AttentionChoice("ulysses", "stream", 0.5).apply(one, context)
    assert one.context is context
    assert one.policy.split_attention == "ulysses"
    assert one.draft.told == ("stream", 2**29)


def test_without_a_limit_none_is_told_and_without_a_draft_nobody_is() -> None:
    one = module(draft=Draft(2, 2))
    AttentionChoice().apply(one, Context.single())
    assert one.draft.told == ("auto", None)
    AttentionChoice().apply(module(), Context.single())


def test_a_draft_without_heads_has_nothing_that_ulysses_must_divide() -> None:
    draft = Draft(3, 1)
    for config in (None, SimpleNamespace(), SimpleNamespace(num_heads=3)):
        draft.config = config
        AttentionChoice(draft_attention="ulysses").apply(module(draft=draft), Context(None, 0, 2))
    assert draft.told == ("ulysses", None)


def test_a_draft_that_knows_no_ulysses_says_so_whatever_its_heads() -> None:
    class Refusing(Draft):
        def set_attention(self, mode: str, memory_limit: int | None = None) -> None:
            raise ConfigError("none such", found=mode, needed="ring", key="mine")

    with pytest.raises(ConfigError, match="none such"):
        AttentionChoice(draft_attention="ulysses").apply(module(draft=Refusing(3, 1)), Context(None, 0, 2))


@pytest.mark.parametrize(
    ("choice", "made", "key"),
    [
        (AttentionChoice(policy_attention="ulysses"), module(6, 3), "policy_attention"),
        (AttentionChoice(draft_attention="ulysses"), module(draft=Draft(3, 1)), "draft_attention"),
    ],
)
def test_heads_that_ulysses_cannot_divide_are_refused_with_the_key(
    choice: AttentionChoice, made: Any, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choice.apply(made, Context(None, 0, 2))
    assert caught.value.key == f"trainer.strategy.init_args.{key}"
    choice.apply(made, Context.single())
