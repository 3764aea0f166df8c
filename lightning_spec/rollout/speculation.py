"""Which speculation an engine runs, as configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_spec.errors import ConfigError
from lightning_spec.rollout.adaptive import AdaptiveConfig

Method = Literal["none", "eagle3", "eagle", "draft_model", "ngram", "suffix", "medusa", "mtp", "dflash", "dspark"]
METHODS: tuple[str, ...] = (
    "none",
    "eagle3",
    "eagle",
    "draft_model",
    "ngram",
    "suffix",
    "medusa",
    "mtp",
    "dflash",
    "dspark",
)
WITHOUT_WEIGHTS = ("none", "ngram", "suffix")
"""Methods that propose from the text alone: no draft is loaded."""
KEY = "rollout.engine.speculation"


@dataclass(frozen=True)
class Speculation:
    """Settings of speculative decoding, checked before any engine starts.

    Args:
        method: who proposes; `none` turns speculation off.
        num_speculative_tokens: k, tokens proposed per verification step.
        by_batch_size: (first, last, k) rows, inclusive: k by the number of running requests, 0 turns drafting off for
            that range. Rows must start at 1 and follow each other without gaps.
        adaptive: measure while tokens are generated whether proposals pay, and switch them off (and on again) by batch
            size. Off by default: samples stay draws from the policy either way, but which ones come out follows from
            when a switch was made, and so from the clock; without it a seed repeats its run.
        probes: how `adaptive` measures.
        draft_sample_method: `greedy` proposes the draft's argmax; `probabilistic` samples from it and verifies with the
            probability ratio. Both leave the sampled distribution unchanged.
        prompt_lookup_min, prompt_lookup_max: n-gram lengths that `ngram` looks up.
        extra: further keys of vLLM's speculative_config, as they are.
    """

    method: Method = "eagle3"
    num_speculative_tokens: int = 3
    by_batch_size: list[list[int]] | None = None
    adaptive: bool = False
    probes: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                "unknown speculation method", found=self.method, needed=f"one of {METHODS}", key=f"{KEY}.method"
            )
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                "bad num_speculative_tokens",
                found=self.num_speculative_tokens,
                needed="at least 1 (method: none turns speculation off)",
                key=f"{KEY}.num_speculative_tokens",
            )
        if self.by_batch_size is not None:
            self._check_rows(self.by_batch_size)
        if self.draft_sample_method not in (None, "greedy", "probabilistic"):
            raise ConfigError(
                "unknown draft_sample_method",
                found=self.draft_sample_method,
                needed="greedy or probabilistic",
                key=f"{KEY}.draft_sample_method",
            )
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if value is not None and (self.method != "ngram" or value < 1):
                raise ConfigError(
                    f"bad {name}", found=value, needed="at least 1, with method ngram", key=f"{KEY}.{name}"
                )
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise ConfigError(
                "prompt_lookup_min is above prompt_lookup_max",
                found=f"{low} > {high}",
                needed="min <= max",
                key=f"{KEY}.prompt_lookup_min",
            )
        taken = {"method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
        if clash := sorted(taken & set(self.extra)):
            raise ConfigError(
                "extra repeats a key that has a field of its own",
                found=clash,
                needed="the field",
                key=f"{KEY}.extra",
            )

    def _check_rows(self, rows: list[list[int]]) -> None:
        key, expected = f"{KEY}.by_batch_size", 1
        if not rows:
            raise ConfigError("by_batch_size is empty", found=rows, needed="null or at least one row", key=key)
        for row in rows:
            if len(row) != 3 or not all(isinstance(value, int) for value in row):
                raise ConfigError("bad row", found=row, needed="[first, last, k], three integers", key=key)
            first, last, k = row
            if first != expected or last < first:
                raise ConfigError(
                    "rows leave a gap or overlap", found=row, needed=f"a row that starts at {expected}", key=key
                )
            if not 0 <= k <= self.num_speculative_tokens:
                raise ConfigError(
                    "k of a row is out of range", found=k, needed=f"0..{self.num_speculative_tokens}", key=key
                )
            expected = last + 1

    @property
    def on(self) -> bool:
        return self.method != "none"

    @property
    def needs_draft(self) -> bool:
        """Whether a draft checkpoint has to be loaded (and can be refitted)."""
        return self.method not in WITHOUT_WEIGHTS

    def to_vllm(self, draft: str | None, max_num_seqs: int) -> dict[str, Any] | None:
        """vLLM's `speculative_config`, or None when speculation is off."""
        if not self.on:
            return None
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.num_speculative_tokens}
        if draft is not None:
            config["model"] = draft
        if self.by_batch_size is not None:
            rows = [tuple(row) for row in self.by_batch_size]
            first, last, k = rows[-1]
            # vLLM looks every batch size up: the last row is stretched to the largest batch.
            rows[-1] = (first, max(last, max_num_seqs), k)
            config["num_speculative_tokens_per_batch_size"] = rows
        elif self.adaptive:
            # The table that adaptive speculation rewrites is there only with rows.
            config["num_speculative_tokens_per_batch_size"] = [(1, max_num_seqs, self.num_speculative_tokens)]
        for name in ("draft_sample_method", "prompt_lookup_min", "prompt_lookup_max"):
            if (value := getattr(self, name)) is not None:
                config[name] = value
        if self.method == "ngram":
            config.setdefault("prompt_lookup_min", min(2, config.get("prompt_lookup_max", 4)))
            config.setdefault("prompt_lookup_max", max(4, config["prompt_lookup_min"]))
        return {**config, **self.extra}
