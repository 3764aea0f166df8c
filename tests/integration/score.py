"""A trainer's process of its own: scores recorded completions with an exported policy, as the trainer does.

python -m tests.integration.score POLICY ROLLOUTS OUT
"""

from __future__ import annotations

import sys

import torch

from lightning_spec.batch import pack_documents
from lightning_spec.data import PromptData
from lightning_spec.loss import SupervisedLoss
from lightning_spec.module import SpecGRPO
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.policy import PolicySource
from tests.integration.conftest import sums, trainer


def main(policy: str, rollouts: str, out: str) -> None:
    torch.set_num_threads(1)
    module = SpecGRPO(PolicySource(policy), SupervisedLoss(), OptimConfig(lr=1e-30))
    one = PromptData(tokenizer=policy, source=sums(0), mode="worked", prompts_per_step=1, validation_size=0)
    trainer(1).fit(module, one)
    done = torch.load(rollouts, weights_only=False)
    batch = pack_documents(done, range(len(done)))
    assert module.policy is not None
    with cpu_stand_in():
        scored = module.score(module.policy, batch)
    torch.save(scored[batch.loss_mask], out)


if __name__ == "__main__":
    main(*sys.argv[1:])
