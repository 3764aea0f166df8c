"""Objectives of the policy: the GRPO family and supervised fine-tuning. The mathematics is in pure functions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.loss.aggregate import Aggregation, Split, document_mean, document_sum, loss_counts, token_weights
from lightning_spec.loss.kl import KLEstimator, k3, kl_estimate

Level = Literal["token", "sequence"]
Reduction = Literal["mean", "sum", "max"]
Metrics = dict[str, tuple[Tensor, Tensor, Reduction]]

# |log ratio| beyond this is cut before exp: exp(20) is already far outside any clip range, and stays finite in float32.
RATIO_CLAMP = 20.0


@dataclass(slots=True)
class PolicyLossOutput:
    """`loss`: scalar; summed over the step's micro-batches and ranks it is the objective.
    `metrics`: name -> (numerator, denominator, reduction), as `MetricBag.add` takes them. The same names always."""

    loss: Tensor
    metrics: Metrics


def surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clipped surrogate loss: -min(r A, clip(r, 1 - low, 1 + high) A), PPO (arXiv 1707.06347) with DAPO's two clips.

    With `dual_clip` c the loss of a negative advantage is at most -c A (arXiv 1912.09729, eq. 5).

    Args:
        log_ratio: [n] log(policy / behaviour).  advantages: [n].

    Returns:
        (loss [n], ratio [n], clipped_low [n] bool, clipped_high [n] bool); clipped: the gradient was cut on that side.
    """
    ratio = log_ratio.clamp(-RATIO_CLAMP, RATIO_CLAMP).exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(free, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    low = (ratio < 1.0 - clip_low) & (advantages < 0)
    high = (ratio > 1.0 + clip_high) & (advantages > 0)
    return loss, ratio, low, high


def importance_weights(
    old_logprobs: Tensor,
    engine_logprobs: Tensor,
    document: Tensor,
    cap: float,
    level: Level,
    split: Split | None = None,
) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: w = min(exp(old - engine), cap), which corrects for the engine's other kernels.

    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025). Level "sequence": the
    ratio of the whole sampled sequence (the sum of its log-ratios), the same for all of its tokens.

    Returns:
        (w [n], capped [n] bool), without gradient; w is finite for any log-probs that are not NaN.
    """
    log_ratio = (old_logprobs - engine_logprobs).detach()
    if level == "sequence":
        log_ratio = document_sum(log_ratio, document, split)
    return log_ratio.clamp(max=math.log(cap)).exp(), log_ratio > math.log(cap)


class PolicyLoss(ABC):
    """An objective over the log-probs of sampled tokens. Named in YAML by class path.

    Attributes:
        temperature: divides the logits of every log-prob this loss is given.
        needs_entropy: wants `entropy`.
        needs_old: uses `old_logprobs`, which must be given once the weights differ from those that sampled.
        needs_reference: wants `ref_logprobs`.
    """

    temperature: float = 1.0
    needs_entropy: bool = False
    needs_old: bool = False
    needs_reference: bool = False

    def set_sampling_temperature(self, temperature: float) -> None:
        """Told once, before training, what the engine samples with."""
        del temperature

    def counts(self, loss_mask: Tensor, document: Tensor) -> dict[str, Tensor]:
        """Sums of this micro-batch that become the step's normalisers: see `loss_counts`."""
        return loss_counts(loss_mask, document)

    @abstractmethod
    def __call__(
        self,
        logprobs: Tensor,
        *,
        mask: Tensor,
        document: Tensor,
        advantages: Tensor,
        engine_logprobs: Tensor,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        totals: Mapping[str, Tensor],
        split: Split | None = None,
    ) -> PolicyLossOutput:
        """The micro-batch's share of the step's objective. Only rows in `mask` are read.

        Args:
            logprobs: [T] row-aligned, with gradient.
            mask: [T] bool.  document: [T] int64.
            advantages, engine_logprobs: [T].
            old_logprobs: [T], the trainer's at the weights that sampled; None: the current weights are those.
            ref_logprobs, entropy: [T] or None.
            totals: `counts` summed over the step.
            split: given where the T rows are this rank's part of the micro-batch; the ranks' shares then sum to the
                micro-batch's.
        """


def _check_aggregation(aggregation: str, constant_length: int | None) -> None:
    _one_of(aggregation, Aggregation, "aggregation")
    if aggregation == "constant" and (constant_length is None or constant_length < 1):
        raise ConfigError(
            "aggregation `constant` divides by a length", found=constant_length, needed="constant_length of at least 1",
            key="policy_loss.init_args.constant_length",
        )  # fmt: skip


def _one_of(value: str, options: Any, name: str) -> None:
    if value not in get_args(options):
        raise ConfigError(
            f"unknown {name}", found=value, needed=f"one of {get_args(options)}", key=f"policy_loss.init_args.{name}"
        )


def _in_range(value: float | None, low: float, high: float, name: str, needed: str) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{name} is out of range", found=value, needed=needed, key=f"policy_loss.init_args.{name}")


def _mean_over(values: Tensor) -> tuple[Tensor, Tensor, Reduction]:
    values = values.detach().to(torch.float64)
    return values.sum(), torch.tensor(float(values.numel()), dtype=torch.float64), "mean"


def _largest(values: Tensor) -> tuple[Tensor, Tensor, Reduction]:
    values = values.detach().to(torch.float64)
    top = values.max() if values.numel() else values.new_zeros(())
    return top, torch.ones((), dtype=torch.float64), "max"


def _total(value: Tensor) -> tuple[Tensor, Tensor, Reduction]:
    return value.detach().to(torch.float64), torch.ones((), dtype=torch.float64), "sum"


class GRPO(PolicyLoss):
    """Group-relative policy optimisation and its relatives.

    loss_t = w_t surrogate(rho_t, A_t) + kl_coef KL_t - entropy_coef H_t, with rho = exp(logp - old),
    w = min(exp(old - engine), importance_cap).

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high] (DAPO's clip-higher if unequal).
        dual_clip: bound of the loss of negative advantages, above 1; None: unbounded (arXiv 1912.09729).
        aggregation: "token_mean", "sequence_mean" or "constant"; see `loss.aggregate.Aggregation`.
        constant_length: the length that "constant" divides by, usually the completion limit.
        kl_coef: weight of the KL to the reference policy; 0: no reference is needed.
        kl_estimator: "k1", "k2", "k3"; see `loss.kl`.
        kl_clamp: largest log-ratio that k3 takes the exponential of.
        entropy_coef: weight of the entropy bonus.
        log_entropy: measure the entropy even when it is not in the loss.
        importance_cap: C of the truncated importance correction of the engine's log-probs; None: no correction.
        importance_level: "token", or "sequence" for the ratio of whole sequences.
        ratio_level: "token", or "sequence" for GSPO's length-normalised sequence ratio (arXiv 2507.18071, eq. 7).

    Raises:
        ConfigError: an option out of range.
    """

    needs_old = True

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        aggregation: Aggregation = "token_mean",
        constant_length: int | None = None,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        kl_clamp: float = 10.0,
        entropy_coef: float = 0.0,
        log_entropy: bool = True,
        importance_cap: float | None = 2.0,
        importance_level: Level = "token",
        ratio_level: Level = "token",
    ) -> None:
        _in_range(clip_low, 0.0, 1.0, "clip_low", "0 <= clip_low <= 1")
        _in_range(clip_high, 0.0, math.exp(RATIO_CLAMP) - 1.0, "clip_high", "0 <= clip_high, finite")
        _in_range(dual_clip, math.nextafter(1.0, 2.0), 1e30, "dual_clip", "above 1, or null")
        _in_range(kl_clamp, 1e-3, 80.0, "kl_clamp", "0.001 <= kl_clamp <= 80 (exp(88) overflows float32)")
        _in_range(kl_coef, 0.0, 1e30, "kl_coef", "at least 0")
        _in_range(entropy_coef, -1e30, 1e30, "entropy_coef", "a finite number")
        _in_range(importance_cap, 1e-30, 1e30, "importance_cap", "above 0, or null")
        _check_aggregation(aggregation, constant_length)
        _one_of(kl_estimator, KLEstimator, "kl_estimator")
        _one_of(importance_level, Level, "importance_level")
        _one_of(ratio_level, Level, "ratio_level")
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.aggregation: Aggregation = aggregation
        self.constant_length = constant_length
        self.kl_coef, self.kl_clamp = kl_coef, kl_clamp
        self.kl_estimator: KLEstimator = kl_estimator
        self.entropy_coef = entropy_coef
        self.importance_cap = importance_cap
        self.importance_level: Level = importance_level
        self.ratio_level: Level = ratio_level
        self.needs_reference = kl_coef != 0.0
        self.needs_entropy = entropy_coef != 0.0 or log_entropy

    def set_sampling_temperature(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(
        self,
        logprobs: Tensor,
        *,
        mask: Tensor,
        document: Tensor,
        advantages: Tensor,
        engine_logprobs: Tensor,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        totals: Mapping[str, Tensor],
        split: Split | None = None,
    ) -> PolicyLossOutput:
        # Only supervised rows from here on: whatever stands in the others (NaN included) cannot leak, and sums over
        # no rows at all are zeros that still hang on the graph.
        rows = mask.nonzero().squeeze(1)
        logp, document, advantages = logprobs[rows], document[rows], advantages[rows]
        old = logp.detach() if old_logprobs is None else old_logprobs[rows].detach()
        engine = engine_logprobs[rows].detach()
        weight = token_weights(document, totals, self.aggregation, self.constant_length, logp.dtype, split)

        token_log_ratio = logp - old
        by_token = self.ratio_level == "token"
        log_ratio = token_log_ratio if by_token else document_mean(token_log_ratio, document, split)
        pg, ratio, low, high = surrogate(log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
        importance = capped = None
        if self.importance_cap is not None:
            importance, capped = importance_weights(
                old, engine, document, self.importance_cap, self.importance_level, split
            )
            pg = pg * importance
        pg_loss = (weight * pg).sum()
        loss = pg_loss
        with torch.no_grad():
            gap = (old - engine).abs()
            metrics: Metrics = {
                "policy/pg_loss": _total(pg_loss),
                "policy/kl_old": _mean_over(k3(token_log_ratio)),
                "policy/clip_low": _mean_over(low),
                "policy/clip_high": _mean_over(high),
                "policy/ratio": _mean_over(ratio),
                "policy/ratio_max": _largest(ratio),
                "policy/engine_gap": _mean_over(gap),
                "policy/engine_gap_max": _largest(gap),
            }
            if importance is not None and capped is not None:
                metrics["policy/importance"] = _mean_over(importance)
                metrics["policy/importance_capped"] = _mean_over(capped)
        if self.needs_reference:
            ref = _rows_of(ref_logprobs, rows, "ref_logprobs")
            kl = kl_estimate(logp, ref.detach(), self.kl_estimator, self.kl_clamp)
            loss = loss + self.kl_coef * (weight * kl).sum()
            metrics["policy/kl_ref"] = _mean_over(kl)
        if self.needs_entropy:
            h = _rows_of(entropy, rows, "entropy")
            if self.entropy_coef != 0.0:
                loss = loss - self.entropy_coef * (weight * h).sum()
            metrics["policy/entropy"] = _mean_over(h)
        metrics["policy/loss"] = _total(loss)
        return PolicyLossOutput(loss, metrics)


def _rows_of(values: Tensor | None, rows: Tensor, name: str) -> Tensor:
    if values is None:
        # A micro-batch without supervised rows may come without them, and logs the same metric names all the same.
        if rows.numel():
            raise ValueError(f"this loss needs `{name}` for its {rows.numel()} supervised rows")
        return torch.zeros(0, device=rows.device)
    return values[rows]


class SupervisedLoss(PolicyLoss):
    """Maximum likelihood of the labels in the mask: warm start, and fine-tuning on worked answers. Temperature 1.

    Args:
        aggregation: "token_mean", "sequence_mean" or "constant", as for GRPO.
        constant_length: the length that "constant" divides by.
    """

    def __init__(self, aggregation: Aggregation = "token_mean", constant_length: int | None = None) -> None:
        _check_aggregation(aggregation, constant_length)
        self.aggregation: Aggregation = aggregation
        self.constant_length = constant_length

    def __call__(
        self,
        logprobs: Tensor,
        *,
        mask: Tensor,
        document: Tensor,
        advantages: Tensor | None = None,
        engine_logprobs: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        totals: Mapping[str, Tensor],
        split: Split | None = None,
    ) -> PolicyLossOutput:
        rows = mask.nonzero().squeeze(1)
        logp, document = logprobs[rows], document[rows]
        weight = token_weights(document, totals, self.aggregation, self.constant_length, logp.dtype, split)
        loss = -(weight * logp).sum()
        return PolicyLossOutput(loss, {"policy/loss": _total(loss), "policy/nll": _mean_over(-logp)})
