"""A small stand-in for SpecGRPO that follows the strategy's protocol, with data of a known order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_spec.batch import Completion, PackedBatch, Prompt, Rollout, StepBatch, pack
from lightning_spec.metrics import MetricBag
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.placement import Placement

VOCAB = 17


def optim(**changes: Any) -> OptimConfig:
    return OptimConfig(**{"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 1.0, "eps": 1e-3, **changes})


class Whole(nn.Module):
    def placements(self) -> dict[str, list[Placement]]:
        return {name: [Placement.whole(name, tuple(param.shape))] for name, param in self.named_parameters()}


class ToyPolicy(Whole):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        from megatron.core.enums import ModelType
        from megatron.core.transformer import TransformerConfig

        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=width, num_attention_heads=1)
        self.model_type = ModelType.encoder_or_decoder
        self.embed = nn.Embedding(VOCAB, width, dtype=dtype)
        self.mix = nn.Linear(width, width, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, VOCAB, bias=False, dtype=dtype)

    def set_input_tensor(self, _: Any) -> None:
        pass

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.norm(x + torch.tanh(self.mix(x)))


class ToyDraft(Whole):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width, dtype=dtype)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return ((self.fc(embedded) - hidden) ** 2).sum()


class ToyModule(L.LightningModule):
    def __init__(
        self,
        policy_optim: OptimConfig | None,
        draft_optim: OptimConfig | None = None,
        *,
        draft: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        width: int = 12,
        noise: float = 0.0,
        draft_scale: float = 1.0,
        name: str = "toy",
    ) -> None:
        super().__init__()
        self.policy_optim, self.draft_optim = policy_optim, draft_optim
        self.policy: nn.Module | None = None
        self.draft: nn.Module | None = None
        self.setting = SimpleNamespace(
            draft=draft, seed=seed, dtype=dtype, width=width, noise=noise, draft_scale=draft_scale, name=name
        )
        self.logged: list[dict[str, float]] = []
        self.validated: list[dict[str, float]] = []

    def configure_model(self) -> None:
        if self.policy is not None:
            return
        s = self.setting
        with torch.random.fork_rng():
            torch.manual_seed(s.seed)
            self.policy = ToyPolicy(s.width, s.dtype)
            if s.draft:
                torch.manual_seed(s.seed + 1)
                self.draft = ToyDraft(s.width, s.dtype)

    def configure_optimizers(self) -> Any:
        return self.trainer.strategy.make_optimizer(
            policy=self.policy_optim, draft=self.draft_optim, total_steps=self.trainer.max_steps
        )

    def fingerprint(self) -> dict[str, Any]:
        return {"policy": {"width": self.setting.width}, "draft": self.setting.name if self.setting.draft else None}

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        raise AssertionError("the strategy runs the step")

    def validation_step(self, batch: StepBatch, batch_idx: int) -> None:
        raise AssertionError("the strategy runs the step")

    def micro_batches(self, batch: StepBatch, token_budget: int) -> list[PackedBatch]:
        return pack(batch.rollouts, token_budget)

    def counts(self, micro: Sequence[PackedBatch]) -> dict[str, Tensor]:
        return {
            "tokens": sum((one.loss_mask.sum().double() for one in micro), torch.zeros((), dtype=torch.float64)),
            "rows": sum(
                (torch.tensor(float(len(m.tokens))).double() for m in micro), torch.zeros((), dtype=torch.float64)
            ),
        }

    def policy_step(self, policy: nn.Module, micro: PackedBatch, totals: dict[str, Tensor]) -> Any:
        metrics = MetricBag()
        hidden = policy(micro.tokens)
        logits = hidden @ self.policy.head.weight.T
        nll = F.cross_entropy(logits, micro.labels.clamp_min(0), reduction="none")
        loss = torch.where(micro.loss_mask, nll, 0.0 * nll).sum() / totals["tokens"]
        if self.setting.noise:
            loss = loss * (1.0 + self.setting.noise * torch.rand(()))
        metrics.add("nll", nll.detach()[micro.loss_mask].sum(), micro.loss_mask.sum())
        metrics.add("documents", len(micro.lengths), reduction="sum")
        embedded = self.policy.embed(micro.tokens).detach()
        taps = SimpleNamespace(features={0: embedded}, embeddings=embedded)
        return SimpleNamespace(output=loss, metrics=metrics, taps=taps, hidden=hidden.detach())

    def draft_head(self) -> dict[str, Any]:
        return {"head": self.policy.head.weight.detach()}

    def special_embeddings(self) -> None:
        return None

    def draft_step(
        self, draft: nn.Module, micro: PackedBatch, features: Any, totals: dict[str, Tensor], *, train: bool
    ) -> Any:
        with torch.set_grad_enabled(train):
            term = self.setting.draft_scale * draft(features.hidden, features.embeddings) / totals["rows"]
        metrics = MetricBag()
        metrics.add("draft_loss", term.detach(), reduction="sum")
        return SimpleNamespace(loss=term, metrics=metrics)

    def score(self, policy: nn.Module, micro: PackedBatch) -> Tensor:
        logits = policy(micro.tokens) @ self.policy.head.weight.T
        return logits.log_softmax(-1).gather(-1, micro.labels.clamp_min(0)[:, None])[:, 0]

    def step_done(self, metrics: MetricBag, batch: StepBatch) -> None:
        self.logged.append(metrics.values())

    def validation_done(self, metrics: MetricBag) -> None:
        self.validated.append(metrics.values())


def rollouts(count: int, seed: int, longest: int = 9) -> list[Rollout]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    out = []
    for i in range(count):
        prompt = tuple(draw(0, VOCAB) for _ in range(draw(1, 4)))
        answer = tuple(draw(0, VOCAB) for _ in range(draw(1, longest)))
        out.append(Rollout(Prompt(f"{seed}-{i}", prompt, ""), Completion(answer, (0.0,) * len(answer), "stop"), f"{i}"))
    return out


class ToyData(L.LightningDataModule):
    """`per_epoch` step batches an epoch; the position is saved and restored. Data ranks take every size-th rollout."""

    def __init__(self, per_epoch: int = 5, size: int = 6, uneven: bool = False) -> None:
        super().__init__()
        self.per_epoch, self.size, self.uneven = per_epoch, size, uneven
        self.drawn = 0

    def train_dataloader(self) -> Any:
        return _Sized(self)

    def val_dataloader(self) -> Any:
        return _Once(StepBatch(self._mine(rollouts(self.size, 999))))

    def _mine(self, everything: list[Rollout]) -> list[Rollout]:
        data = self.trainer.strategy.data
        if self.uneven and data.size > 1:
            # The last rank gets nothing at all.
            return everything if data.rank == 0 else []
        return everything[data.rank :: data.size]

    def batches(self) -> Iterator[StepBatch]:
        while True:
            self.drawn += 1
            yield StepBatch(self._mine(rollouts(self.size, self.drawn)))
            if self.drawn % self.per_epoch == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class _Sized:
    def __init__(self, data: ToyData) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.per_epoch

    def __iter__(self) -> Iterator[StepBatch]:
        torch.rand(())  # what torch's own loader does: a new iterator draws from the global generator
        return self.data.batches()


class _Once:
    """A loader of one batch; a plain list would be taken for a list of loaders."""

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[StepBatch]:
        return iter([self.batch])


def trainer(strategy: Any, max_steps: int = 3, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": max_steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
    }
    return L.Trainer(strategy=strategy, **{**settings, **options})
