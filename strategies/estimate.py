"""At the start of `fit`: what a rank is going to need, and a refusal of what cannot fit.

The draft step is the cost model's (`lightning_spec.attention.cost`, within a tenth of measured peaks; of drafts without
passes `draft/step_memory.py`, within a third), weights and optimiser are counted, the policy's activations are a rough
count of what its layers keep. Wrong by less than a half, so only an explicit `memory_limit_gib` is taken at its word; a
limit read from the machine refuses at half as much again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_spec.attention.cost import DraftWork, Mode, estimate, fitting_chunk, prefer
from lightning_spec.draft.base import AttentionMode
from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import ParallelSizes
from lightning_spec.shapes import PolicyShape

_GIB = 2**30
_MODES: tuple[Mode, ...] = ("stream", "ring", "ulysses")
_TRUST = 1.5
"""A machine's own memory is exceeded only when the estimate is this many times as large."""
KEY = "trainer.strategy.init_args"


@dataclass(frozen=True, slots=True)
class Limit:
    size: int
    """Bytes that one rank may take."""
    where: str
    given: bool
    """Whether the user set it."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank holds in a step, in bytes."""

    states: int
    """Weights, gradients, optimiser."""
    shape: PolicyShape
    recompute: bool
    trains_policy: bool
    draft: DraftWork | None
    """Of the largest micro-batch; None where no draft with passes is trained, or not on this rank."""
    asked: AttentionMode
    layers: int
    """Of the policy, on this rank."""
    held: float = 1.0
    """Micro-batches whose activations it keeps at a time: those that its stage is ahead of its backward."""
    tensor: int = 1
    """Ranks that split each layer."""
    other_draft: Callable[[int, int, int], int | None] | None = None
    """`Draft.step_memory` of a draft without passes that is trained here."""

    def activations(self, tokens: int, context: int, b: int) -> int:
        """The policy's."""
        if not self.trains_policy:
            return 0
        kept = policy_activations(self.shape, tokens, context, b, self.recompute, self.layers)
        return int(kept * self.held / self.tensor)

    def mode(self, work: DraftWork, left: int) -> Mode:
        return prefer(work, left) if self.asked == "auto" else self.asked

    def total(self, tokens: int, context: int, b: int, limit: int) -> int:
        """Everything, with micro-batches of `tokens` over `context` ranks."""
        others = self.states + self.activations(tokens, context, b)
        if self.draft is None:
            return others + ((self.other_draft and self.other_draft(tokens, context, b)) or 0)
        work = replace(self.draft, tokens=tokens, rows=tokens, context=context)
        return others + estimate(work, self.mode(work, max(1, limit - others))).peak

    def what_fits(self, tokens: int, context: int, b: int, limit: int) -> str:
        """Changes that would fit `limit`, in words."""
        options = []
        wider = next(
            (2**n for n in range(1, 11) if 2**n > context and self.total(tokens, 2**n, b, limit) <= limit), None
        )
        if wider is not None:
            options.append(f"context_parallel {wider}")
        fewer = bisect_right(range(1, tokens), limit, key=lambda n: self.total(n, context, b, limit))
        if fewer:
            options.append(f"micro-batches (token_budget and rollouts) of at most {fewer} tokens")
        if (
            self.trains_policy
            and not self.recompute
            and replace(self, recompute=True).total(tokens, context, b, limit) <= limit
        ):
            options.append("model.policy.recompute: true")
        left = limit - self.states - self.activations(tokens, context, b)
        rows = None if self.draft is None or left < 1 else fitting_chunk(self.draft, left)
        if (
            self.draft is not None
            and rows is not None
            and rows < self.draft.chunk_rows
            and self.asked in ("auto", "stream")
        ):
            options.append(f"model.draft.init_args.chunk_rows {rows}")
        return " or ".join(options) or "more memory, or smaller models"


def report(strategy: Any, module: Any, trainer: Any) -> None:
    """Print the estimate of the rank that needs most, and tell the draft how much memory is left to it. All ranks call
    it, with models built. Nothing is said of modules and drafts that the model does not know.

    Raises:
        ConfigError: the step cannot fit; it names what would.
    """
    draft: Any = getattr(module, "draft", None)
    shape = getattr(module, "shape", None)
    if not isinstance(shape, PolicyShape) or getattr(module, "policy", None) is None:
        return
    tokens, size = longest_micro_batch(strategy.token_budget, trainer), strategy.sizes.context_parallel
    limit, b = memory_limit(strategy, trainer), 2 if strategy.precision == "bf16" else 4
    trusted = int(limit.size * (1.0 if limit.given else _TRUST))
    trained = draft is not None and module.trains_draft and draft.resident
    work = draft.work(tokens, tokens, size, b) if trained else None
    other = draft.step_memory if trained and work is None else None
    stages, place = strategy.stages.layers(module), strategy.pipeline
    layers = sum(stages[place.rank :: place.size])
    rank = Rank(
        states=sum(_states(module, name, strategy) for name in ("policy", "draft")),
        shape=shape,
        recompute=bool(getattr(getattr(module, "source", None), "recompute", False)),
        trains_policy=module.trains_policy,
        draft=work,
        asked="auto" if work is None else draft.attention,
        layers=layers,
        held=held_micro_batches(strategy.sizes, strategy.pipeline.rank),
        tensor=strategy.sizes.tensor_parallel,
        other_draft=other,
    )
    activations = rank.activations(tokens, size, b)
    lines = [
        f"Memory of one rank, estimated for micro-batches of {tokens:,} tokens over {size} rank(s):",
        _line("weights, gradients, optimiser", rank.states),
        _line("policy activations (rough)", activations),
    ]
    if work is not None:
        left = max(1, trusted - rank.states - activations)
        draft.set_attention(draft.attention, left)
        lines += _modes(work, rank.mode(work, left))
    step = None if other is None else other(tokens, size, b)
    if step is not None:
        lines.append(_line("draft step", step))
    lines.append(_line(limit.where, limit.size))
    need, number, lines = max(
        strategy.replica.gather((rank.total(tokens, size, b, trusted), strategy.global_rank, lines)),
        key=lambda one: (one[0], -one[1]),
    )
    if trainer.is_global_zero:
        if strategy.replica.size > 1:
            lines[0] = lines[0].replace("one rank", f"rank {number}, which needs most")
        print("\n".join(lines), flush=True)
    if need > trusted:
        raise ConfigError(
            "a training step does not fit into memory",
            found=f"about {need / _GIB:.2f} GiB on rank {number} for micro-batches of {tokens} tokens",
            needed=f"at most {limit.size / _GIB:.2f} GiB ({limit.where}): {rank.what_fits(tokens, size, b, trusted)}",
            key=f"{KEY}.memory_limit_gib" if limit.given else f"{KEY}.token_budget",
        )


def held_micro_batches(sizes: ParallelSizes, rank: int) -> float:
    """Micro-batches' worth of a rank's layers that it holds before their backward, in Megatron's schedules."""
    ahead = sizes.pipeline_parallel - rank
    if sizes.virtual_pipeline == 1:
        return float(ahead)
    passes = 2 * (ahead - 1) + (sizes.virtual_pipeline - 1) * sizes.pipeline_parallel + 1
    return passes / sizes.virtual_pipeline


def _modes(work: DraftWork, used: Mode) -> list[str]:
    lines = []
    for mode in _MODES:
        if mode == "ulysses" and (work.heads % work.context or work.kv_heads % work.context):
            continue
        cost = estimate(work, mode)
        sent = f", sends {cost.traffic / _GIB:.2f} GiB a micro-batch" if work.context > 1 else ""
        lines.append(_line(f"draft step, {mode}", cost.peak) + sent + ("  <- used" if mode == used else ""))
    return lines


def longest_micro_batch(budget: int, trainer: Any) -> int:
    """Tokens of the largest micro-batch: the budget, or one rollout that is longer (it gets one of its own)."""
    data = getattr(trainer, "datamodule", None)
    prompt = getattr(data, "max_prompt_tokens", 0) or 0
    completions = [
        int(getattr(getattr(callback, "sampling", None), "max_tokens", 0) or 0)
        for callback in getattr(trainer, "callbacks", ())
    ]
    completion = max(completions, default=0)
    return max(int(budget), prompt + completion if completion else 0)


def memory_limit(strategy: Any, trainer: Any) -> Limit:
    """`memory_limit_gib`, else the GPU's memory, else what the host has free for each of its ranks: the least of all
    ranks', so that they decide alike."""
    given = strategy.attention.memory_limit
    if given is not None:
        return Limit(int(given), "memory_limit_gib", True)
    if strategy.root_device.type == "cuda":
        size, where = torch.cuda.mem_get_info(strategy.root_device)[1], "memory of a GPU"
    else:
        allowed, ranks = _cgroup(), max(1, int(trainer.num_devices))
        free = psutil.virtual_memory().available
        size = (free if allowed is None else min(free, allowed)) // ranks
        where = "free memory of the host" + (f", for each of {ranks} ranks" if ranks > 1 else "")
    everywhere = (min(part) for part in strategy.replica.gather(strategy.tokens.gather(size)))
    return Limit(min(everywhere), where, False)


def policy_activations(
    shape: PolicyShape, tokens: int, context: int, b: int, recompute: bool, layers: int | None = None
) -> int:
    """Bytes that a decoder's layers keep of a rank's rows: norms, q, K/V, output, residuals, gated MLP.

    Args:
        layers: how many of them; None: all of the policy's.
    """
    rows = -(-tokens // context)
    q, kv = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
    count = shape.num_layers if layers is None else layers
    inner = max(shape.mlp_width(number) for number in range(shape.num_layers))
    layer = b * (4 * shape.hidden_size + 2 * q + kv + 4 * inner) + 8 * shape.hidden_size
    if recompute:
        return rows * (count * shape.hidden_size * b + layer)
    return rows * count * layer


def _states(module: Any, name: str, strategy: Any) -> int:
    """Bytes of a model's weights, gradients and Adam's states on one rank."""
    model = getattr(module, name, None)
    if model is None or not getattr(model, "resident", True):
        return 0
    half, ranks = strategy.precision == "bf16", 1
    if strategy.distributed_optimizer:
        ranks = strategy.tokens.size if name == "policy" else strategy.stages.draft_ranks.size
    total = 0
    for parameter in model.parameters():
        total += parameter.numel() * (2 if half else 4)
        if parameter.requires_grad:
            total += parameter.numel() * 4 + parameter.numel() * (12 if half else 8) // ranks
    return total


def _cgroup() -> int | None:
    """Bytes that a container's limit leaves, where there is one."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None


def _line(what: str, size: int) -> str:
    return f"  {what:44}{size / _GIB:9.2f} GiB"
