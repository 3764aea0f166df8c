"""SpecGRPO: joins the policy's loss and the draft's loss in one LightningModule.

The strategy drives it: it asks for micro-batches and counts, reduces the counts over the ranks that split the data, and
for each micro-batch calls `policy_step` on every chunk of the policy and `draft_step` where the draft lives. The
micro-batches' losses *sum* to the step's objective, so nothing downstream rescales them. The draft sees the policy only
through detached tensors: with the same rollouts the policy's weights are bit-identical with draft training on and off.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spec.attention.context import Context
from lightning_spec.attention.exchange import gather_rows
from lightning_spec.batch import PackedBatch, StepBatch, pack, pack_documents, with_scores
from lightning_spec.draft import Draft, DraftInputs
from lightning_spec.errors import ConfigError
from lightning_spec.loss import DraftLoss, PolicyLoss, SoftCrossEntropy, linear_logprobs
from lightning_spec.metrics import MetricBag
from lightning_spec.models import PolicyAndDraft
from lightning_spec.optim import OptimConfig
from lightning_spec.policy import PolicyModel, PolicySource, TapRecorder, head_weight, unwrap, vocab_shard
from lightning_spec.share import Share
from lightning_spec.steps import DraftFeatures, DraftStep, PolicyStep


class SpecGRPO(PolicyAndDraft):
    """A policy trained with reinforcement learning or supervised, and its draft distilled beside it.

    Args:
        policy: the policy's checkpoint folder.
        policy_loss: objective of the policy (`lightning_spec.loss.GRPO`, `SupervisedLoss`), or null: the policy is
            frozen and only the draft learns (distillation).
        policy_optim: optimiser of the policy; null exactly where policy_loss is null.
        draft: the drafter (`lightning_spec.draft.Eagle3`), or null to train the policy alone.
        draft_loss: objective of the draft, soft cross-entropy to the policy's distribution by default.
        draft_optim: optimiser of the draft; null keeps the draft as it is (it is still served and measured).
        temperature: sampling temperature of the rollouts. Every log-prob that is compared with the engine's is taken at
            this temperature; the command line links it to `rollout.sampling.temperature`.
        logprob_chunk: rows per chunk of the log-prob computation; null picks it from the vocabulary's size.
    """

    def __init__(
        self,
        policy: PolicySource,
        policy_loss: PolicyLoss | None = None,
        policy_optim: OptimConfig | None = None,
        draft: Draft | None = None,
        draft_loss: DraftLoss | None = None,
        draft_optim: OptimConfig | None = None,
        temperature: float = 1.0,
        logprob_chunk: int | None = None,
    ) -> None:
        if (policy_loss is None) != (policy_optim is None):
            raise ConfigError(
                "the policy's loss and optimiser go together",
                found=f"policy_loss={type(policy_loss).__name__}, policy_optim={type(policy_optim).__name__}",
                needed="both, or neither to freeze the policy",
                key="model.policy_optim",
            )
        if draft is None and draft_optim is not None:
            raise ConfigError(
                "a draft optimiser without a draft", found="draft=None", needed="a draft class", key="model.draft"
            )
        if policy_loss is None and draft_optim is None:
            raise ConfigError(
                "nothing would be trained",
                found="policy_loss=None, draft_optim=None",
                needed="a policy loss, or a draft with an optimiser",
                key="model.policy_loss",
            )
        if not temperature > 0:
            raise ConfigError(
                "training needs a positive sampling temperature",
                found=temperature,
                needed="a number above 0 (greedy rollouts have no exploration and no log-probs to correct)",
                key="rollout.sampling.temperature",
            )
        if policy_loss is not None:
            policy_loss.set_sampling_temperature(temperature)
        super().__init__(policy, draft)
        self.policy_loss = policy_loss
        self.policy_optim = policy_optim
        self.draft_loss = draft_loss if draft_loss is not None else SoftCrossEntropy()
        self.draft_optim = draft_optim
        self.temperature = temperature
        self.logprob_chunk = logprob_chunk
        self.context = Context.single()
        """The ranks that share this one's micro-batches (context parallelism); the strategy says."""
        self._validation = MetricBag()

    @property
    def trains_policy(self) -> bool:
        return self.policy_loss is not None

    @property
    def trains_draft(self) -> bool:
        return self.draft is not None and self.draft_optim is not None

    # ---- what Lightning calls ---------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Policy version: optimiser steps done."""
        return int(self.trainer.global_step) if self._trainer is not None else 0

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """Never reached: the strategy runs the whole step. Lightning wants the method to exist."""
        raise self._needs_megatron()

    def validation_step(self, batch: StepBatch, batch_idx: int) -> None:
        """Never reached, as `training_step`."""
        raise self._needs_megatron()

    def _needs_megatron(self) -> ConfigError:
        return ConfigError(
            "this strategy cannot train the module",
            found=type(self.trainer.strategy).__name__,
            needed="class_path: strategies.MegatronStrategy",
            key="trainer.strategy",
        )

    def configure_optimizers(self) -> Any:
        make = getattr(self.trainer.strategy, "make_optimizer", None)
        if make is None:
            raise self._needs_megatron()
        return make(policy=self.policy_optim, draft=self.draft_optim, total_steps=max(1, int(self.trainer.max_steps)))

    # ---- what the strategy calls ------------------------------------------------------------------------------------

    def micro_batches(self, batch: StepBatch, token_budget: int) -> list[PackedBatch]:
        return pack(batch.rollouts, token_budget)

    def counts(self, micro: Sequence[PackedBatch]) -> dict[str, Tensor]:
        """Local sums of the step that become global normalisers. Every rank returns the same keys, also for no data."""
        totals: dict[str, Tensor] = {}
        for one in micro or [pack_documents([], [])]:
            found: dict[str, Tensor] = {}
            if self.policy_loss is not None:
                found |= self.policy_loss.counts(one.loss_mask, one.document)
            if self.draft is not None:
                found |= self.draft.counts(one)
            for name, value in found.items():
                value = value.detach().to("cpu", torch.float64)
                totals[name] = totals[name] + value if name in totals else value
        return totals

    def policy_step(self, chunk: nn.Module, micro: PackedBatch, totals: dict[str, Tensor]) -> PolicyStep:
        """Forward of one chunk of the policy, with taps, and on the last virtual stage the policy's loss.

        Under context parallelism `micro` is the whole micro-batch on every rank that shares it, and each rank computes
        its rows: losses and sums of metrics are its shares.
        """
        policy = unwrap(chunk)
        share = Share.of(micro, self.context, split=policy.post_process)
        # One recorder a micro-batch: its hooks are gone before anything else runs the policy.
        recorder = TapRecorder(policy, self.draft.aux_layer_ids) if self.draft is not None else None
        with recorder or nullcontext(), torch.set_grad_enabled(self.trains_policy and torch.is_grad_enabled()):
            hidden = self._hidden(chunk, share)
            taps = recorder.take_parts() if recorder is not None else None
        if not policy.post_process:
            return PolicyStep(hidden, MetricBag(), taps, None)
        metrics = MetricBag()
        loss = hidden.new_zeros((), dtype=torch.float32)
        if self.policy_loss is not None:
            loss = loss + self._policy_term(policy, hidden, share, totals, metrics)
        return PolicyStep(loss, metrics, taps, hidden.detach())

    def draft_step(
        self, draft: nn.Module, micro: PackedBatch, features: DraftFeatures, totals: dict[str, Tensor], *, train: bool
    ) -> DraftStep:
        """The draft's passes and loss on one micro-batch's features, on every rank that shares it."""
        assert self.draft is not None
        inputs = DraftInputs(
            features=features.features,
            embeddings=features.embeddings,
            hidden=features.hidden,
            tokens=micro.tokens,
            positions=micro.positions,
            lengths=micro.lengths,
            sampled=micro.sampled,
            stop=micro.stop,
            policy_head=features.head,
            policy_embedding=features.embedding,
            vocab=features.vocab,
            shard=Share.shard_of(micro, self.context),
            seed=micro.seed,
            document_seeds=micro.document_seeds or None,
            special=features.special,
        )
        with torch.set_grad_enabled(self.trains_draft and train):
            out = draft(inputs, self.draft_loss, totals)
        metrics = MetricBag()
        for name, (num, den, reduction) in out.metrics.items():
            metrics.add(name, num, den, reduction)
        return DraftStep(out.loss, metrics)

    @staticmethod
    def _hidden(chunk: nn.Module, share: Share) -> Tensor:
        return chunk(share.rows.tokens, share.rows.positions, share.rows.lengths, share.shard)

    def _policy_term(
        self, policy: PolicyModel, hidden: Tensor, share: Share, totals: dict[str, Tensor], metrics: MetricBag
    ) -> Tensor:
        assert self.policy_loss is not None
        micro = share.rows
        logprobs, entropy = self._logprobs(policy, hidden, micro, entropy=self.policy_loss.needs_entropy)
        out = self.policy_loss(
            logprobs,
            mask=micro.loss_mask,
            document=micro.document,
            advantages=micro.advantages,
            engine_logprobs=micro.engine_logprobs,
            old_logprobs=micro.old_logprobs,
            ref_logprobs=micro.ref_logprobs,
            entropy=entropy,
            totals=totals,
            split=share.split,
        )
        for name, (num, den, reduction) in out.metrics.items():
            metrics.add(name, num, den, reduction)
        return out.loss.to(torch.float32)

    def _logprobs(
        self, policy: PolicyModel, hidden: Tensor, micro: PackedBatch, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        labels = torch.where(micro.loss_mask, micro.labels, torch.full_like(micro.labels, -1))
        return linear_logprobs(
            hidden,
            head_weight(policy),
            labels,
            temperature=self.policy_loss.temperature if self.policy_loss is not None else self.temperature,
            chunk=self.logprob_chunk,
            entropy=entropy,
            vocab=vocab_shard(policy),
        )

    @torch.no_grad()
    def score(self, chunk: nn.Module, micro: PackedBatch) -> Tensor:
        """Row-aligned log-probs of the sampled tokens [T] at the sampling temperature, without a graph; on a virtual
        stage that is not the last, the residual stream.

        Ranks that share the micro-batch call it together, and each gets all T rows.
        """
        policy = unwrap(chunk)
        share = Share.of(micro, self.context, split=False)
        hidden = self._hidden(chunk, share)
        if not policy.post_process:
            return hidden
        logprobs, _ = self._logprobs(policy, hidden, share.rows, entropy=False)
        return logprobs if share.shard is None else gather_rows(logprobs, share.shard)

    def step_done(self, metrics: MetricBag, batch: StepBatch) -> None:
        """Log one optimiser step; `metrics` is reduced over all ranks and holds the batch's own too."""
        values: dict[str, Any] = metrics.values()
        # Lightning's own step counter is 0-based in the logger and 1-based in file names; this forces one meaning.
        values["step"] = float(self.trainer.global_step + 1)
        self.log_dict(values, on_step=True, on_epoch=False, batch_size=max(1, len(batch.rollouts)), rank_zero_only=True)

    def validation_done(self, metrics: MetricBag) -> None:
        """Collect one validation batch; `metrics` is reduced over all ranks."""
        self._validation.update(metrics)

    def on_validation_epoch_start(self) -> None:
        self._validation = MetricBag()

    def on_validation_epoch_end(self) -> None:
        values: dict[str, Any] = {
            name if name.startswith("val/") else f"val/{name}": value
            for name, value in self._validation.values().items()
        }
        values["step"] = float(self.trainer.global_step)
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1, rank_zero_only=True)

    # ---- log-probs of the weights that sampled, and of the reference ------------------------------------------------

    def prepare_rollouts(self, batches: list[StepBatch], updates_per_rollout: int) -> list[StepBatch]:
        """Attach the trainer's own log-probs at rollout weights, and the reference policy's, where the loss needs them.

        With one update per rollout phase the first are the current log-probs themselves, and nothing is computed.
        """
        loss = self.policy_loss
        if loss is None or not loss.needs_old:
            return batches
        if updates_per_rollout > 1:
            batches = [self._with_scores(b, "old_logprobs") for b in batches]
        if loss.needs_reference:
            with self.reference_weights():
                batches = [self._with_scores(b, "ref_logprobs") for b in batches]
        return batches

    def _with_scores(self, batch: StepBatch, name: str) -> StepBatch:
        return with_scores(batch, name, self.trainer.strategy.score(self, batch))  # type: ignore[attr-defined]
