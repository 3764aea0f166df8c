from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from toy_module import ToyData, ToyModule, optim, rollouts, trainer

from lightning_spec.batch import StepBatch, pack
from lightning_spec.errors import ConfigError
from lightning_spec.optim import learning_rate_factor
from lightning_spec.parallel.cpu_stand_in import in_stand_in
from strategies import MegatronStrategy


def fit(
    module: ToyModule, steps: int = 4, budget: int = 20, strategy: dict[str, Any] | None = None, **data: Any
) -> Any:
    one = trainer(MegatronStrategy(token_budget=budget, **(strategy or {})), max_steps=steps)
    one.fit(module, ToyData(**data))
    return one


def weights(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    assert module is not None
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def fresh(policy: Any = None, draft: Any = None, **options: Any) -> ToyModule:
    module = ToyModule(policy, draft, **options)
    module.configure_model()
    return module


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(("policy", "draft"), [(True, True), (True, False), (False, True)])
def test_weights_move_where_there_is_an_optimizer_and_nowhere_else(policy: bool, draft: bool) -> None:
    module = fresh(optim() if policy else None, optim() if draft else None)
    before = weights(module.policy), weights(module.draft)
    fit(module, 2)
    assert moved(before[0], weights(module.policy)) == (set(before[0]) if policy else set())
    assert moved(before[1], weights(module.draft)) == (set(before[1]) if draft else set())


def test_steps_equal_plain_torch_adamw_with_clipping() -> None:
    """Four steps, so that gradients which survive a step, or are added twice, show."""
    policy, draft = optim(schedule="linear", warmup_steps=2), optim(clip_norm=0.3, lr=5e-3)
    module = fresh(policy, draft)
    mine = fresh(policy, draft)
    fit(module, 4)
    groups = []
    for model, config in ((mine.policy, policy), (mine.draft, draft)):
        params = list(model.parameters())
        decay = [{"params": [p for p in params if p.ndim > 1], "weight_decay": config.weight_decay}]
        decay += [{"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]
        adam = torch.optim.AdamW(decay, lr=config.lr, betas=config.betas, eps=config.eps)
        groups.append((params, config, adam))
    for step in range(4):
        micro = pack(rollouts(6, step + 1), 10_000)
        totals = mine.counts(micro)
        one = mine.policy_step(mine.policy, micro[0], totals)
        features = SimpleNamespace(hidden=one.hidden, embeddings=one.taps.embeddings)
        term = mine.draft_step(mine.draft, micro[0], features, totals, train=True)
        (one.output + term.loss).backward()
        for params, config, adam in groups:
            torch.nn.utils.clip_grad_norm_(params, config.clip_norm)
            for group in adam.param_groups:
                group["lr"] = config.lr * learning_rate_factor(config, step, 4)
            adam.step()
            adam.zero_grad()
    for name, tensor in weights(mine).items():
        torch.testing.assert_close(weights(module)[name], tensor, rtol=1e-5, atol=2e-6)


def test_the_cut_into_micro_batches_changes_nothing() -> None:
    logs = []
    for budget in (5, 20, 10_000):
        module = fresh(optim(), optim(), dtype=torch.float64)
        fit(module, 3, budget)
        logs.append(module.logged)
    for other in logs[1:]:
        for mine, theirs in zip(logs[0], other, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
    assert logs[0][0]["loss"] == pytest.approx(logs[1][0]["loss"], rel=1e-14)


def test_policy_is_bit_identical_with_draft_training_on_off_and_scaled() -> None:
    runs = []
    for draft_optim, scale in ((None, 1.0), (optim(), 1.0), (optim(lr=0.1), 1e3)):
        module = ToyModule(optim(clip_norm=0.1), draft_optim, draft=draft_optim is not None, draft_scale=scale)
        fit(module, 5)
        runs.append(weights(module.policy))
    for other in runs[1:]:
        assert moved(runs[0], other) == set()


def test_each_model_is_clipped_by_its_own_norm() -> None:
    logs = []
    for scale in (1.0, 1e4):
        module = fresh(optim(clip_norm=0.2), optim(clip_norm=0.5), draft_scale=scale)
        fit(module, 1)
        logs.append(module.logged[0])
    small, large = logs
    assert large["policy/grad_norm"] == small["policy/grad_norm"]
    assert large["policy/clip_factor"] == small["policy/clip_factor"] < 1.0
    assert large["draft/grad_norm"] == pytest.approx(1e4 * small["draft/grad_norm"], rel=1e-5)
    for name, limit in (("policy", 0.2), ("draft", 0.5)):
        assert small[f"{name}/clip_factor"] * small[f"{name}/grad_norm"] == pytest.approx(limit, rel=1e-4)


def test_a_non_finite_draft_gradient_skips_the_draft_only() -> None:
    module = fresh(optim(), optim(), draft_scale=float("inf"))
    before = weights(module.policy), weights(module.draft)
    fit(module, 2)
    assert moved(before[1], weights(module.draft)) == set()
    assert moved(before[0], weights(module.policy)) == set(before[0])
    assert [(log["policy/skipped_steps"], log["draft/skipped_steps"]) for log in module.logged] == [(0, 1), (0, 1)]


def test_learning_rates_follow_each_models_schedule_and_are_logged() -> None:
    policy = optim(schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    draft = optim(lr=3e-3, schedule="linear", total_steps=10)
    module = fresh(policy, draft)
    fit(module, 6)
    for step, log in enumerate(module.logged):
        assert log["policy/lr"] == pytest.approx(policy.lr * learning_rate_factor(policy, step, 6))
        assert log["draft/lr"] == pytest.approx(3e-3 * (1 - step / 10))


def test_every_rank_has_the_same_four_named_groups_also_when_frozen() -> None:
    module = fresh(None, optim())
    one = fit(module, 1)
    groups = one.optimizers[0].param_groups
    assert [g["name"] for g in groups] == ["policy/decay", "policy/no_decay", "draft/decay", "draft/no_decay"]
    assert [len(g["params"]) for g in groups] == [0, 0, 1, 1]
    assert [g["weight_decay"] for g in groups] == [0.0, 0.0, 0.1, 0.0]


def test_lightning_counts_one_optimizer_step_a_batch() -> None:
    assert fit(fresh(optim(), optim()), 4).global_step == 4


def test_a_step_without_any_micro_batch_changes_only_what_weight_decay_does() -> None:
    module = fresh(optim(weight_decay=0.0), optim(weight_decay=0.0))
    before = weights(module)
    module.counts = lambda micro: {"tokens": torch.tensor(1.0), "rows": torch.tensor(1.0)}  # type: ignore[method-assign]
    fit(module, 2, size=0)
    assert module.logged[0]["loss"] == 0.0
    assert moved(before, weights(module)) == set()


def test_validation_runs_forward_only_before_during_and_after_fit() -> None:
    module = fresh(optim(), optim())
    one = trainer(
        MegatronStrategy(token_budget=20), 4, limit_val_batches=1, val_check_interval=2, check_val_every_n_epoch=None
    )
    one.validate(module, ToyData(), verbose=False)
    before = module.validated[0]["nll"]
    one.fit(module, ToyData())
    one.validate(module, ToyData(), verbose=False)
    assert len(module.validated) == 4
    assert module.validated[-1] == module.validated[-2]
    assert module.validated[-1]["nll"] < before
    assert all(param.grad is None for param in module.parameters())


def test_score_gives_log_probs_of_every_micro_batch_without_a_graph() -> None:
    module = fresh(optim(), optim())
    one = fit(module, 1)
    batch = StepBatch(rollouts(5, 3))
    scored = one.strategy.score(module, batch)
    assert sum(len(micro.lengths) for micro, _ in scored) == 5
    for micro, logprobs in scored:
        expected = F.log_softmax(module.policy(micro.tokens) @ module.policy.head.weight.T, -1)
        torch.testing.assert_close(logprobs[:1], expected[0, micro.labels[:1]])
        assert not logprobs.requires_grad


def test_a_second_fit_in_the_same_process_trains_on() -> None:
    module = fresh(optim(), optim())
    fit(module, 2)
    before = weights(module)
    fit(module, 2)
    assert moved(before, weights(module)) == set(before)


def test_the_stand_in_ends_with_the_fit_and_with_an_exception() -> None:
    fit(fresh(optim()), 1)
    assert not in_stand_in()
    module = fresh(optim())
    module.policy_step = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        fit(module, 1)
    assert not in_stand_in()


def test_bf16_keeps_float32_main_weights_and_learns() -> None:
    module = fresh(optim(lr=1e-4), optim(lr=1e-4))
    reference = fresh(optim(lr=1e-4), optim(lr=1e-4))
    fit(module, 10, strategy={"precision": "bf16"})
    fit(reference, 10)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    masters = module.policy.mix.weight.main_param
    assert masters.dtype == torch.float32
    # Ten steps of 1e-4 are below bf16's resolution of most weights; the main weights have taken them all.
    torch.testing.assert_close(masters, reference.policy.mix.weight.detach(), atol=2e-3, rtol=1e-2)
    assert module.logged[-1]["nll"] == pytest.approx(reference.logged[-1]["nll"], rel=2e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_distributed_optimizer_takes_the_same_steps(precision: str) -> None:
    runs = []
    for distributed in (False, True):
        module = fresh(optim(), optim(clip_norm=0.3))
        fit(module, 5, strategy={"precision": precision, "distributed_optimizer": distributed})
        runs.append((module.logged, weights(module)))
    assert runs[0][0][-1] == pytest.approx(runs[1][0][-1], rel=1e-5)
    for name, tensor in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][name], tensor)


# ---- refusals


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel"),
        ({"virtual_pipeline": 2}, "virtual_pipeline"),
        ({"pipeline_parallel": 2, "draft_stage": 2}, "draft_stage"),
        ({"pipeline_parallel": 2, "draft_stage": "first"}, "draft_stage"),
        ({"pipeline_parallel": 2, "tap_transport": "pigeon"}, "tap_transport"),
        ({"pipeline_parallel": 2, "tap_rows": 0}, "tap_rows"),
        ({"context_parallel": 0}, "context_parallel"),
        ({"policy_attention": "stream"}, "policy_attention"),
        ({"draft_attention": "gather"}, "draft_attention"),
        ({"memory_limit_gib": 0}, "memory_limit_gib"),
        ({"expert_parallel": 0}, "expert_parallel"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"tensor_parallel": 1.5}, "tensor_parallel"),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"token_budget": 0}, "token_budget"),
        ({"token_budget": 2.5}, "token_budget"),
        ({"precision": "fp16"}, "precision"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_bad_strategy_settings_are_refused_with_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MegatronStrategy(**{"token_budget": 8, **options})
    assert caught.value.key == f"trainer.strategy.init_args.{key}"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches"),
        ({"gradient_clip_val": 1.0}, "trainer.gradient_clip_val"),
        ({"precision": "bf16-mixed"}, "trainer.precision"),
        ({"precision": "bf16-true"}, "trainer.precision"),
        ({"precision": "64-true"}, "trainer.precision"),
    ],
)
def test_trainer_settings_that_would_be_wrong_or_ignored_are_refused(options: dict[str, Any], key: str) -> None:
    one = trainer(MegatronStrategy(token_budget=8), **options)
    with pytest.raises(ConfigError) as caught:
        one.fit(fresh(optim()), ToyData())
    assert caught.value.key == key


def test_a_half_precision_model_is_refused_at_fp32() -> None:
    with pytest.raises(ConfigError, match="half precision"):
        fit(fresh(optim(), dtype=torch.bfloat16), 1)


def test_manual_optimization_is_refused() -> None:
    module = fresh(optim())
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="manual optimization"):
        fit(module, 1)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        fit(fresh(None, None), 1)


def test_a_shared_parameter_of_policy_and_draft_is_refused() -> None:
    module = fresh(optim(), optim())
    module.draft.fc.weight = module.policy.mix.weight
    with pytest.raises(ConfigError, match="share"):
        fit(module, 1)


def test_the_strategy_reports_its_data_ranks_to_lightning() -> None:
    class Look(L.Callback):
        seen: Any = None

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            strategy = trainer.strategy
            assert isinstance(strategy, MegatronStrategy)
            self.seen = (strategy.distributed_sampler_kwargs, strategy.is_distributed, strategy.launcher is not None)

    look = Look()
    trainer(MegatronStrategy(token_budget=8), 1, callbacks=[look]).fit(fresh(optim()), ToyData())
    assert look.seen == ({"num_replicas": 1, "rank": 0}, True, True)
