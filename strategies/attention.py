"""Tells module, policy and draft which ranks share their micro-batches, and how they attend over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from lightning_spec.attention.context import Context
from lightning_spec.attention.ulysses import check_ulysses
from lightning_spec.draft.base import AttentionMode
from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import strategy_key
from lightning_spec.policy import PolicyChunks, PolicyModel
from lightning_spec.policy.core_attention import SplitAttention


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """How the ranks of a context-parallel group attend; see `MegatronStrategy`'s arguments of the same names."""

    policy_attention: SplitAttention = "ring"
    draft_attention: AttentionMode = "auto"
    memory_limit_gib: float | None = None

    def __post_init__(self) -> None:
        for field, options in (("policy_attention", SplitAttention), ("draft_attention", AttentionMode)):
            if (found := getattr(self, field)) not in get_args(options):
                raise ConfigError(
                    f"unknown {field}", found=found, needed=f"one of {get_args(options)}", key=strategy_key(field)
                )
        if self.memory_limit_gib is not None and not self.memory_limit_gib > 0:
            raise ConfigError(
                "bad memory_limit_gib",
                found=self.memory_limit_gib,
                needed="GiB above 0, or null for no limit",
                key=strategy_key("memory_limit_gib"),
            )

    @property
    def memory_limit(self) -> int | None:
        """In bytes."""
        return None if self.memory_limit_gib is None else int(self.memory_limit_gib * 2**30)

    def apply(self, module: Any, context: Context, tensor_parallel: int = 1) -> None:
        """Set a module up whose models are built.

        Args:
            tensor_parallel: ranks that split the policy's heads.

        Raises:
            ConfigError: heads that ulysses cannot divide.
        """
        policy, draft = getattr(module, "policy", None), getattr(module, "draft", None)
        module.context = context
        if isinstance(policy, PolicyModel | PolicyChunks):
            if self.policy_attention == "ulysses":
                _check_heads(policy.shape, context.size * tensor_parallel, "policy_attention")
            policy.split_attention = self.policy_attention
        if draft is not None and hasattr(draft, "set_attention"):
            # First: a draft that knows no such attention says so, whatever its heads.
            draft.set_attention(self.draft_attention, self.memory_limit)
            if self.draft_attention == "ulysses":
                _check_heads(getattr(draft, "config", None), context.size, "draft_attention")


def _check_heads(model: Any, size: int, field: str) -> None:
    """`model` has the heads; one without them has nothing to divide."""
    if hasattr(model, "num_heads") and hasattr(model, "num_kv_heads"):
        check_ulysses(model.num_heads, model.num_kv_heads, size, strategy_key(field))
