"""The map from a reduced draft vocabulary to the policy's: target id = draft id + d2t[draft id]."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_spec.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class VocabMap:
    """`target_ids` int64 [Vd]: the policy's id of each draft id, unique and inside the policy's vocabulary."""

    target_ids: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        key = "model.draft.init_args.vocab_map"
        if ids.dim() != 1 or ids.dtype != torch.int64 or not 0 < ids.numel() <= self.vocab_size:
            raise ConfigError(
                "bad draft vocabulary map",
                found=f"{ids.dtype} of shape {tuple(ids.shape)}",
                needed=f"int64 [at most {self.vocab_size}]",
                key=key,
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ConfigError(
                "the draft vocabulary map leaves the policy's vocabulary",
                found=f"target ids {low}..{high}",
                needed=f"0..{self.vocab_size - 1}",
                key=key,
            )
        if ids.unique().numel() != ids.numel():
            raise ConfigError(
                "two draft ids stand for one target id",
                found=f"{ids.numel() - ids.unique().numel()} repeats",
                needed="unique target ids",
                key=key,
            )

    @property
    def size(self) -> int:
        return self.target_ids.numel()

    @property
    def d2t(self) -> Tensor:
        """int64 [Vd], offsets as the engine wants them."""
        return self.target_ids - torch.arange(self.size)

    @property
    def t2d(self) -> Tensor:
        """bool [V], whether a target id has a draft id."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.target_ids] = True
        return mask

    @classmethod
    def from_d2t(cls, d2t: Tensor, vocab_size: int) -> VocabMap:
        return cls(d2t.to(torch.int64) + torch.arange(d2t.numel()), vocab_size)

    @classmethod
    def from_counts(
        cls, counts: Sequence[int] | Tensor | Mapping[int, int], size: int, vocab_size: int, always: Sequence[int] = ()
    ) -> VocabMap:
        """The `size` most frequent tokens, ascending by id; ties go to the lower id. `always` (stop tokens) come first.

        Args:
            counts: how often each target id was generated, by id.
        """
        if not 0 < size <= vocab_size or len(set(always)) > size:
            raise ConfigError(
                "bad draft vocabulary size",
                found=size,
                needed=f"at least {max(1, len(set(always)))}, at most {vocab_size}",
                key="model.draft.init_args.draft_vocab_size",
            )
        table = [0.0] * vocab_size
        pairs = counts.items() if isinstance(counts, Mapping) else enumerate(torch.as_tensor(counts).tolist())
        for token, count in pairs:
            if not 0 <= int(token) < vocab_size:
                raise ConfigError(
                    "a counted token is not in the policy's vocabulary",
                    found=token,
                    needed=f"0..{vocab_size - 1}",
                    key="model.draft.init_args.vocab_map",
                )
            table[int(token)] = float(count)
        for token in always:
            table[token] = float("inf")
        order = sorted(range(vocab_size), key=lambda token: (-table[token], token))
        return cls(torch.tensor(sorted(order[:size]), dtype=torch.int64), vocab_size)

    @classmethod
    def from_file(cls, path: str | Path, size: int | None, vocab_size: int) -> VocabMap:
        """Read a map: a safetensors file with `d2t`, or JSON with `target_ids` (a list) or `counts` ({id: count})."""
        path = Path(path)
        key = "model.draft.init_args.vocab_map"
        if not path.is_file():
            raise ConfigError("no such vocabulary map", found=str(path), needed="a .json or .safetensors file", key=key)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors = load_file(path)
            if "d2t" not in tensors:
                raise ConfigError(
                    "the vocabulary map has no d2t", found=sorted(tensors), needed="a tensor d2t", key=key
                )
            return cls.from_d2t(tensors["d2t"], vocab_size)
        data = json.loads(path.read_text())
        if isinstance(data, dict) and "target_ids" in data:
            return cls(torch.tensor(data["target_ids"], dtype=torch.int64), vocab_size)
        if isinstance(data, dict) and "counts" in data and size is not None:
            counts = {int(token): int(count) for token, count in dict(data["counts"]).items()}
            return cls.from_counts(counts, size, vocab_size, tuple(data.get("always", ())))
        raise ConfigError(
            "the vocabulary map is not understood",
            found=sorted(data) if isinstance(data, dict) else type(data).__name__,
            needed="target_ids, or counts together with draft_vocab_size",
            key=key,
        )
