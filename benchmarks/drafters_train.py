"""Two parts of benchmarks/drafters.py that train: a step's cost, and what training says of acceptance."""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_spec.batch import Completion, Prompt, Rollout, StepBatch


def make_draft(class_path: str, folder: str) -> Any:
    """The draft of a folder, not built yet."""
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)(path=folder)


# ---- the cost of a step ---------------------------------------------------------------------------------------------


def make_step(
    policy: str, class_path: str | None, draft: str | None, loss: str, prompt: int, completion: int, rollouts: int
) -> Callable[[], dict[str, Any]]:
    """A case of `benchmarks.common`: forward and backward of policy and draft over one step, without the optimiser.

    Args:
        policy, draft: folders. class_path: the draft's class; None trains the policy alone. loss: `soft` or `spark`.
        prompt, completion: tokens of each rollout. rollouts: of the step.
    """
    import lightning as L

    from lightning_spec.data import SizedLoader
    from lightning_spec.loss import GRPO, HardCrossEntropy, SoftCrossEntropy, TotalVariation, Weighted
    from lightning_spec.module import SpecGRPO
    from lightning_spec.optim import OptimConfig
    from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
    from lightning_spec.policy import PolicySource
    from lightning_spec.shapes import PolicyShape
    from strategies import MegatronStrategy

    torch.manual_seed(0)
    batch = StepBatch(_random_rollouts(PolicyShape.from_file(policy).vocab_size, prompt, completion, rollouts))

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> SizedLoader:
            return SizedLoader(1, lambda _: batch)

    module = SpecGRPO(
        PolicySource(policy),
        GRPO(),
        OptimConfig(lr=1e-9),
        draft=None if class_path is None or draft is None else make_draft(class_path, draft),
        draft_loss=Weighted([HardCrossEntropy(), TotalVariation()], [0.1, 0.9])
        if loss == "spark"
        else SoftCrossEntropy(),
        draft_optim=None if class_path is None else OptimConfig(lr=1e-9),
    )
    strategy: Any = MegatronStrategy(token_budget=4096)
    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, Data())
    strategy._make_steps()

    def run() -> dict[str, Any]:
        with cpu_stand_in():
            strategy._wrapped.zero()
            micro = strategy._micro_batches(batch)
            strategy._steps.run(micro, strategy._totals(micro), step=0, train=True)
        return {"micro_batches": len(micro)}

    return run


def _random_rollouts(vocabulary: int, prompt: int, completion: int, count: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    out = []
    for i in range(count):
        tokens = torch.randint(4, vocabulary, (prompt + completion,), generator=generator).tolist()
        answer = Completion(tuple(tokens[prompt:]), (-4.0,) * completion, "length")
        out.append(
            Rollout(
                Prompt(f"p{i // 4}", tuple(tokens[:prompt]), ""), answer, f"g{i // 4}", advantage=float(i % 2) - 0.5
            )
        )
    return out


# ---- what training says of acceptance -------------------------------------------------------------------------------


@dataclass
class Prediction:
    """Acceptance by position from training's own metric `draft/accept_i`, on greedy rollouts.

    `rows` is its mean over all rows of the completions, as training logs it; `walked` over the rows that an engine
    starts a draft from, which the metric itself decides.
    """

    rows: list[float] = field(default_factory=list)
    walked: list[float] = field(default_factory=list)
    drafts: int = 0


def predict(
    policy: Path,
    class_path: str,
    folder: Path,
    rollouts: Sequence[tuple[Sequence[int], Sequence[int]]],
    k: int,
    longest: int,
) -> Prediction:
    """Run the draft's training forward over greedy rollouts.

    Args:
        rollouts: (prompt, greedy completion), at least k + 1 tokens longer than what is looked at.
        k: proposals. longest: tokens of a completion that are looked at.
    """
    reader = _Reader(policy, class_path, folder)
    every, walked = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
    rows = drafts = 0
    for prompt, completion in rollouts:
        inputs = reader.inputs([*prompt, *completion], len(prompt))
        first = len(prompt) - 1
        behind = [reader.accepted(inputs, first + i, k) for i in range(longest + 1)]
        row = [a - b for a, b in itertools.pairwise(behind)]
        every += behind[0] - behind[longest]
        rows += longest
        # The first token comes with the prompt; a draft starts at the row before the last token.
        done = 1
        while done < longest:
            accepted = row[done - 1]
            walked += accepted
            drafts += 1
            done += int(accepted.round().sum()) + 1
    return Prediction((every / rows).tolist(), (walked / drafts).tolist(), drafts)


class _Reader:
    """A policy in transformers and a draft beside it."""

    def __init__(self, policy: Path, class_path: str, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        from lightning_spec.loss import SoftCrossEntropy
        from lightning_spec.rollout.reference_taps import Taps
        from lightning_spec.shapes import PolicyShape

        self.model = AutoModelForCausalLM.from_pretrained(str(policy), dtype=torch.float32, local_files_only=True)
        self.model.eval().requires_grad_(False)
        self.draft = make_draft(class_path, str(folder))
        self.draft.build(PolicyShape.from_file(policy))
        self.draft.eval().requires_grad_(False)
        self.taps = Taps(self.model, self.draft.aux_layer_ids, normed=False)
        self.hidden = Taps(self.model, (), normed=True)
        self.loss = SoftCrossEntropy()

    @torch.no_grad()
    def inputs(self, tokens: list[int], prompt: int) -> Any:
        """What the draft reads of one document; `sampled` starts behind the prompt."""
        from lightning_spec.draft.base import DraftInputs

        ids = torch.tensor(tokens)
        self.model(input_ids=ids[None])
        hidden, features = self.hidden.take(), self.taps.take()
        assert hidden is not None
        table = self.model.get_input_embeddings().weight
        special = torch.tensor(self.draft.embedding_ids, dtype=torch.int64)
        positions = torch.arange(len(tokens))
        return DraftInputs(
            features=hidden.new_zeros(len(tokens), 0) if features is None else features,
            embeddings=table[ids],
            hidden=hidden,
            tokens=ids,
            positions=positions,
            lengths=[len(tokens)],
            sampled=positions >= prompt,
            stop=torch.zeros(len(tokens), dtype=torch.bool),
            policy_head=self.model.get_output_embeddings().weight,
            policy_embedding=None,
            document_seeds=[0],
            special=table[special] if len(special) else None,
        )

    @torch.no_grad()
    def accepted(self, inputs: Any, row: int, k: int) -> Tensor:
        """float64 [k], how many of the rows from `row` on have i + 1 proposals that agree."""
        from dataclasses import replace

        late = replace(inputs, sampled=inputs.positions > row)
        totals: Any = defaultdict(lambda: torch.tensor(1.0, dtype=torch.float64))
        metrics = self.draft(late, self.loss, totals).metrics
        return torch.stack([metrics[f"draft/accept_{i}"][0].double().cpu() for i in range(k)])
