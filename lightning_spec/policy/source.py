"""Where a run's policy comes from, as the configuration says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class PolicySource:
    """Where the policy comes from.

    Args:
        path: a Hugging Face folder. With weights they are loaded; with a config.json alone the policy starts from
            random weights drawn with `init_seed`.
        init_seed: seed of a policy that starts from random weights.
        recompute: recompute each layer's activations in the backward pass instead of keeping them.
    """

    path: str
    init_seed: int = 0
    recompute: bool = False

    def megatron_options(self) -> dict[str, Any]:
        if not self.recompute:
            return {}
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
