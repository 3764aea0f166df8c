"""SpecGRPO with the real strategy: what the draft may not touch, and what no layout may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spec import draft as drafts
from lightning_spec.batch import StepBatch
from lightning_spec.draft import MTP, Draft, DraftModel, Eagle3
from lightning_spec.errors import ConfigError
from lightning_spec.loss import GRPO, TotalVariation
from lightning_spec.module import SpecGRPO
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.policy import PolicySource
from tests.module.conftest import Recorded, Train, make_rollouts, quiet_trainer


def policy_weights(module: SpecGRPO) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.policy_tensors()}


DRAFTERS: dict[str, Callable[[], Draft]] = {
    "EAGLE-3": lambda: Eagle3(num_passes=3),
    "EAGLE-3 of two layers": lambda: Eagle3(num_passes=2, num_layers=2, own_head=True),
    "MTP": lambda: MTP(num_passes=2),
    "DFlash": lambda: drafts.DFlash(block_size=4, aux_layer_ids=[2, 4], mask_token_id=1, anchors_per_sequence=2),
    "DSpark": lambda: drafts.DSpark(
        block_size=3, aux_layer_ids=[2, 4], mask_token_id=1, markov_rank=4, confidence=True
    ),
    "draft model": lambda: DraftModel(num_layers=1),
}
OFF = {"draft": None, "draft_optim": None}
WILD = {"draft_loss": TotalVariation(), "draft_optim": OptimConfig(lr=1.0, clip_norm=0)}


@pytest.fixture(scope="module")
def without_draft() -> dict[str, torch.Tensor]:
    """The policy's weights after five steps without a draft; filled by the first test that needs it."""
    return {}


@pytest.mark.parametrize(
    "other",
    [
        *(pytest.param({"draft": make}, id=name) for name, make in DRAFTERS.items()),
        pytest.param({"draft_optim": None}, id="frozen draft"),
        pytest.param(WILD, id="wild draft"),
    ],
)
def test_policy_is_bit_identical_after_five_steps_whatever_the_draft_does(
    train: Train, without_draft: dict[str, torch.Tensor], other: dict[str, Any]
) -> None:
    """DESIGN.md decision 1."""
    if not without_draft:
        without_draft |= policy_weights(train(5, **OFF)[0])
    made = {key: value() if key == "draft" else value for key, value in other.items()}
    changed, _ = train(5, **made)
    theirs = policy_weights(changed)
    assert without_draft.keys() == theirs.keys()
    for name, weight in without_draft.items():
        assert torch.equal(weight, theirs[name]), name


def test_weights_of_both_move_and_only_of_what_is_trained(train: Train, make_module: Callable[..., SpecGRPO]) -> None:
    """LIGHTNING.md section 7, item 1: a guard for Lightning's private `_skip_backward`."""
    start, _ = train(1, policy_optim=OptimConfig(lr=1e-30), draft_optim=OptimConfig(lr=1e-30))
    both, _ = train(2)
    frozen, _ = train(2, draft_optim=None)
    for name, tensor in both.policy_tensors():
        assert not torch.equal(tensor, dict(start.policy_tensors())[name]), name
    assert both.draft is not None
    assert frozen.draft is not None
    assert start.draft is not None
    before = dict(start.draft.engine_tensors())
    assert all(not torch.equal(t, before[n]) for n, t in both.draft.engine_tensors())
    assert all(torch.equal(t, before[n]) for n, t in frozen.draft.engine_tensors())


@pytest.mark.parametrize(
    ("aggregation", "drafter"),
    [
        *(("token_mean", name) for name in DRAFTERS if name != "EAGLE-3 of two layers"),
        ("sequence_mean", "EAGLE-3"),
        ("constant", "EAGLE-3"),
    ],
)
def test_any_micro_batch_split_gives_the_same_gradients_and_losses(
    train: Train, aggregation: str, drafter: str
) -> None:
    """CASES F2 and B4, policy and draft: one document a micro-batch against all in one."""
    loss = {"policy_loss": GRPO(aggregation=aggregation, constant_length=16)}  # type: ignore[arg-type]
    found = []
    for budget in (1000, 1):
        torch.manual_seed(11)  # the run's
        found.append(train(1, token_budget=budget, draft=DRAFTERS[drafter](), **loss)[1])
    one, many = found
    assert one.gradients[0].keys() == many.gradients[0].keys()
    assert any(name.startswith("draft.") for name in one.gradients[0])
    for name, gradient in one.gradients[0].items():
        torch.testing.assert_close(gradient, many.gradients[0][name], rtol=1e-4, atol=1e-7, msg=name)
    for name, value in one.metrics[0].items():
        assert value == pytest.approx(many.metrics[0][name], rel=1e-4, abs=1e-6), name


def test_the_draft_of_a_frozen_policy_learns_and_the_policy_stays(train: Train, weighted_folder: Path) -> None:
    frozen = {"policy": PolicySource(str(weighted_folder)), "policy_loss": None, "policy_optim": None}
    module, collect = train(3, **frozen)
    again, _ = train(1, **frozen)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(module.policy_tensors(), again.policy_tensors(), strict=True)
    )
    assert collect.metrics[-1]["draft/grad_norm"] > 0
    assert not any(name.startswith("policy/grad") for name in collect.metrics[-1])


def test_a_step_without_any_trainable_token_is_finite_and_moves_nothing(train: Train) -> None:
    """CASES A3, A13: every completion empty."""
    empty = [StepBatch([r for r in make_rollouts(0) if not r.completion.tokens] * 2)]
    module, collect = train(1, batches=empty)
    start, _ = train(1, policy_optim=OptimConfig(lr=1e-30), draft_optim=OptimConfig(lr=1e-30))
    assert collect.metrics[0]["loss"] == 0.0
    assert all(torch.isfinite(g).all() and not g.any() for g in collect.gradients[0].values())
    for (name, a), (_, b) in zip(module.policy_tensors(), start.policy_tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)


def test_clip_factors_of_policy_and_draft_ignore_each_other(train: Train, weighted_folder: Path) -> None:
    """CASES F5."""
    _, both = train(1)
    _, alone = train(1, draft=None, draft_optim=None)
    source = PolicySource(str(weighted_folder))
    _, frozen = train(1, policy=source, policy_loss=None, policy_optim=None)
    assert both.metrics[0]["policy/grad_norm"] == alone.metrics[0]["policy/grad_norm"]
    assert both.metrics[0]["draft/grad_norm"] == pytest.approx(frozen.metrics[0]["draft/grad_norm"], rel=1e-5)


def test_temperature_of_the_sampling_is_in_every_log_prob(make_module: Callable[..., SpecGRPO], tmp_path: Path) -> None:
    """CASES A10: log-probs at temperature 0.7 equal log_softmax(logits / 0.7) of transformers."""
    from transformers import AutoModelForCausalLM

    module = make_module(temperature=0.7)
    batch = StepBatch(make_rollouts(1))
    trainer = quiet_trainer(1)
    trainer.fit(module, Recorded([batch]))
    with cpu_stand_in():
        scored = module.prepare_rollouts([batch], updates_per_rollout=2)[0]
    hf = AutoModelForCausalLM.from_pretrained(module.export_policy(tmp_path / "policy"))
    for rollout in scored.rollouts:
        assert rollout.old_logprobs is not None
        assert len(rollout.old_logprobs) == len(rollout.completion.tokens)
        if not rollout.completion.tokens:
            continue
        row = torch.tensor([*rollout.prompt.tokens, *rollout.completion.tokens])
        with torch.no_grad():
            logits = hf(row[None]).logits[0]
        expected = (logits / 0.7).log_softmax(-1)[:-1].gather(1, row[1:, None])[len(rollout.prompt.tokens) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(rollout.old_logprobs), expected, rtol=0, atol=1e-4)


def test_the_ratio_uses_the_weights_that_sampled_when_a_phase_has_several_updates(train: Train) -> None:
    """CASES F3: with recorded old log-probs the ratio of a later update is not 1."""
    from dataclasses import replace

    rollouts = [replace(r, old_logprobs=tuple(x - 0.5 for x in r.completion.logprobs)) for r in make_rollouts(0)]
    _, collect = train(1, batches=[StepBatch(rollouts)])
    _, plain = train(1, batches=[StepBatch(make_rollouts(0))])
    assert plain.metrics[0]["policy/ratio"] == 1.0
    assert collect.metrics[0]["policy/ratio"] != pytest.approx(1.0, abs=1e-3)


def test_reference_weights_are_those_of_the_start_and_the_live_ones_come_back(train: Train) -> None:
    module, _ = train(3, policy_loss=GRPO(kl_coef=0.1), batches=[with_reference(seed) for seed in range(3)])
    start, _ = train(1, policy_optim=OptimConfig(lr=1e-30))
    live = policy_weights(module)
    with cpu_stand_in(), module.reference_weights():
        inside = policy_weights(module)
    for name, tensor in start.policy_tensors():
        torch.testing.assert_close(inside[name], tensor, rtol=0, atol=1e-6)
        assert torch.equal(live[name], dict(module.policy_tensors())[name])
        assert not torch.equal(live[name], inside[name]), name


def with_reference(seed: int) -> StepBatch:
    from dataclasses import replace

    return StepBatch([replace(r, ref_logprobs=r.completion.logprobs) for r in make_rollouts(seed)])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"policy_loss": None}, "model.policy_optim"),
        ({"policy_optim": None}, "model.policy_optim"),
        ({"draft": None}, "model.draft"),
        ({"policy_loss": None, "policy_optim": None, "draft_optim": None}, "model.policy_loss"),
        ({"temperature": 0.0}, "rollout.sampling.temperature"),
        ({"policy": PolicySource("/nowhere")}, "model.policy.path"),
    ],
)
def test_combinations_that_cannot_train_are_refused(
    make_module: Callable[..., SpecGRPO], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_module(**changes)
    assert caught.value.key == key


def test_a_strategy_that_cannot_run_the_step_is_refused(make_module: Callable[..., SpecGRPO]) -> None:
    import lightning as L

    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    module = make_module()
    module.configure_model = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"trainer\.strategy"):
        trainer.fit(module, Recorded([StepBatch(make_rollouts(0))]))
