"""Policy and draft as one LightningModule holds them: built, identified, swapped for the reference, streamed out.

What they learn from, and how, is `lightning_spec.module`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.draft import Draft
from lightning_spec.errors import ConfigError
from lightning_spec.parallel.assemble import Assembler, drain
from lightning_spec.policy import (
    Policy,
    PolicyModel,
    PolicySource,
    chunks,
    embedding_weight,
    has_weights,
    head_weight,
    hf_tensors,
    initial_weight,
    local_tensors,
    policy_from_folder,
    vocab_shard,
    write_policy,
)
from lightning_spec.shapes import PolicyShape


class PolicyAndDraft(L.LightningModule):
    """This rank's parts of the policy and of its draft.

    Args:
        source: the policy's checkpoint folder.
        draft: the drafter, or None.
    """

    build_dtype = torch.float32
    """Of the models as they are built; the strategy casts them to its precision."""

    def __init__(self, source: PolicySource, draft: Draft | None) -> None:
        super().__init__()
        self.source = source
        self.shape = PolicyShape.from_file(source.path)
        self.policy: Policy | None = None
        """This rank's part of the policy."""
        self.draft = draft

    @property
    def trains_policy(self) -> bool:
        """Whether the policy's weights need gradients; False freezes them."""
        raise NotImplementedError

    @property
    def trains_draft(self) -> bool:
        """Whether the draft's weights do."""
        raise NotImplementedError

    # ---- building ----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build policy and draft; called by Lightning inside the strategy's context, on fit and on validate."""
        if self.policy is not None:
            return
        if not self.trains_policy and not has_weights(self.source.path):
            raise ConfigError(
                "a frozen policy needs weights",
                found=f"{self.source.path} has a config.json but no safetensors",
                needed="a folder with weights",
                key="model.policy.path",
            )
        if self.draft is not None:
            # First: a pipeline's layout may depend on what the draft costs.
            self.draft.build(self.shape, dtype=self.build_dtype)
        self.policy = self._new_policy()
        self.policy.requires_grad_(self.trains_policy)
        if self.draft is not None:
            if self._layout("hosts_draft", True):
                self.draft.init_from_policy(
                    self._starting("lm_head.weight"), self._starting("model.embed_tokens.weight")
                )
                self.draft.requires_grad_(self.trains_draft)
            else:
                self.draft.drop_parameters()

    def _new_policy(self) -> Policy:
        """This rank's part of the policy, with the weights that the run starts from."""
        options = {**self._layout("policy_layout", {}), **self.source.megatron_options()}
        return policy_from_folder(self.source.path, dtype=self.build_dtype, seed=self.source.init_seed, **options)

    def _layout(self, name: str, default: Any) -> Any:
        """What the strategy says of the layout; the default of one that has no say."""
        strategy = self.trainer.strategy if self._trainer is not None else None
        # By the class: an AttributeError inside the property must not be taken for its absence.
        return getattr(strategy, name) if hasattr(type(strategy), name) else default

    def _starting(self, name: str) -> Tensor:
        """A whole tensor of the policy that the run starts from, whatever part of it this rank holds."""
        return initial_weight(self.source.path, self.shape, name, self.source.init_seed, self.build_dtype)

    @property
    def last_chunk(self) -> PolicyModel:
        """The last of this rank's chunks of the policy; on the last pipeline stage the one with the head."""
        assert self.policy is not None
        return chunks(self.policy)[-1]

    # ---- what the draft reads of the policy's weights ----------------------------------------------------------------

    def draft_head(self) -> dict[str, Any]:
        """The policy's live head for `DraftFeatures`, on a rank that has it."""
        policy = self.last_chunk
        vocab = vocab_shard(policy)
        embedding = embedding_weight(policy).detach() if policy.pre_process and vocab is None else None
        return {"head": head_weight(policy).detach(), "vocab": vocab, "embedding": embedding}

    @torch.no_grad()
    def special_embeddings(self) -> Tensor | None:
        """The policy's live input embeddings [n, C] of the draft's `embedding_ids`, on a rank that has the embedding.

        None where the draft asks for none. Tensor-parallel ranks call it together: each adds what it has.
        """
        if self.draft is None or not self.draft.embedding_ids:
            return None
        assert self.policy is not None
        table, vocab = embedding_weight(self.policy), vocab_shard(self.policy)
        ids = torch.tensor(self.draft.embedding_ids, device=table.device)
        if vocab is None:
            return table[ids]
        here = (ids >= vocab.start) & (ids < vocab.stop)
        found = table.new_zeros(len(ids), table.shape[1])
        found[here] = table[ids[here] - vocab.start]
        dist.all_reduce(found, group=vocab.group)
        return found

    # ---- weights in and out ------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must have in common with the run that loads it."""
        shape = {
            name: getattr(self.shape, name)
            for name in (
                "model_type",
                "vocab_size",
                "hidden_size",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
            )
        }
        if self.shape.experts is not None:
            # Neither shows in the tensors' names and shapes.
            shape |= {name: getattr(self.shape.experts, name) for name in ("top_k", "norm_topk_prob")}
        draft = self.draft.fingerprint() if self.draft is not None else None
        return {"policy": shape, "draft": draft}

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Inside, the policy holds the weights that the run started from (`model.policy.path`)."""
        assert self.policy is not None
        live = {name: tensor.detach().clone() for name, tensor in self.policy.named_parameters()}
        reference = self._new_policy()
        try:
            with torch.no_grad():
                for (_, mine), (_, theirs) in zip(
                    self.policy.named_parameters(), reference.named_parameters(), strict=True
                ):
                    mine.copy_(theirs)
            del reference
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self.policy.named_parameters():
                    tensor.copy_(live[name])

    def policy_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's tensors under Hugging Face names, a bucket at a time.

        Every rank that holds a part of them iterates to the end; only those that speak for a replica get anything.
        """
        assert self.policy is not None
        assembler = self._assembler("policy")
        return hf_tensors(self.policy) if assembler is None else assembler.run(local_tensors(self.policy))

    def draft_tensors(self) -> Iterator[tuple[str, Tensor]] | None:
        """The draft's tensors under the engine's names, or None without a draft; as `policy_tensors`."""
        if self.draft is None:
            return None
        assembler = self._assembler("draft")
        return self.draft.engine_tensors() if assembler is None else assembler.run(self.draft.local_tensors())

    def _assembler(self, name: str) -> Assembler | None:
        make = self._layout("assembler", None)
        return None if make is None else make(name)

    def export_policy(self, folder: str | Path) -> Path:
        """Write the policy as a Hugging Face folder. Collective as `policy_tensors` is; the first rank writes."""
        assert self.policy is not None
        tensors = self.policy_tensors()
        try:
            if self._writes:
                dtype = chunks(self.policy)[0].config.params_dtype
                write_policy(folder, self.shape, dtype, tensors, tokenizer_from=self.source.path)
        finally:
            drain(tensors)
        return Path(folder)

    def export_draft(self, folder: str | Path) -> Path | None:
        """Write the draft as a folder that the engine loads; None without a draft. Collective as `export_policy`."""
        if self.draft is None:
            return None
        tensors = self.draft_tensors()
        try:
            if self._writes:
                self.draft.export(folder, tensors)
        finally:
            drain(tensors)
        return Path(folder)

    @property
    def _writes(self) -> bool:
        """Whether this rank is the one that writes what all have in common."""
        return self._trainer is None or self.trainer.is_global_zero
