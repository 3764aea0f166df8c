"""Estimators of KL(policy || reference) from one sample a token (J. Schulman, "Approximating KL Divergence", 2020)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def k1(log_ratio: Tensor) -> Tensor:
    """-log(ref / policy): unbiased, high variance, may be negative. Its gradient has expectation 0 on policy."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """log(ref / policy)^2 / 2: biased, and its gradient on policy is the KL's own."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor, clamp: float = 10.0) -> Tensor:
    """ref / policy - 1 - log(ref / policy): unbiased and never negative. GRPO's estimator (arXiv 2402.03300, eq. 4).

    The log-ratio is clamped from above before exp, where it would overflow: beyond `clamp` the value is constant and
    the gradient 0. Below, where exp underflows harmlessly, nothing is cut.
    """
    log_ratio = log_ratio.clamp(max=clamp)
    return torch.expm1(log_ratio) - log_ratio


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator, clamp: float = 10.0) -> Tensor:
    """KL(policy || reference) a token, in nats; tokens sampled from the policy.

    Args:
        logprobs, ref_logprobs: [n], same shape; gradients flow to both.
        clamp: largest log(ref / policy) that k3 takes the exponential of.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return k1(log_ratio)
    if estimator == "k2":
        return k2(log_ratio)
    if estimator == "k3":
        return k3(log_ratio, clamp)
    raise ValueError(f"unknown KL estimator {estimator!r}")
