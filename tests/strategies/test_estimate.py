"""The estimate at the start of fit: what it says, what it refuses, and that a laptop is not refused by mistake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_spec.draft import DFlash, Draft, DraftModel, Eagle3
from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import ParallelSizes
from lightning_spec.shapes import PolicyShape
from strategies import estimate
from strategies.estimate import longest_micro_batch, policy_activations, report
from tests.module.reading_draft import Reading

GIB = 2**30


def shape(layers: int = 8) -> PolicyShape:
    return PolicyShape.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 65536,
        }
    )


def module(passes: int = 4) -> Any:
    draft = Eagle3(num_passes=passes, own_head=True, chunk_rows=64)
    draft.build(shape())
    return SimpleNamespace(
        draft=draft,
        policy=nn.Linear(64, 64),
        shape=shape(),
        trains_policy=True,
        trains_draft=True,
        source=SimpleNamespace(recompute=False),
    )


def strategy(limit: int | None = None, budget: int = 4096, context: int = 1, free: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(
        token_budget=budget,
        precision="fp32",
        distributed_optimizer=False,
        root_device=torch.device("cpu"),
        sizes=ParallelSizes(context_parallel=context),
        pipeline=SimpleNamespace(rank=0, size=1),
        replica=SimpleNamespace(size=context, gather=lambda mine: [mine]),
        global_rank=0,
        stages=SimpleNamespace(layers=lambda module: (module.shape.num_layers,)),
        attention=SimpleNamespace(memory_limit=limit),
        data=SimpleNamespace(size=1),
        tokens=SimpleNamespace(gather=lambda mine: [mine, *free]),
    )


def trainer(zero: bool = True, **more: Any) -> Any:
    return SimpleNamespace(is_global_zero=zero, num_devices=1, callbacks=[], datamodule=None, **more)


def test_the_table_names_every_part_and_what_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    report(strategy(context=2), module(), trainer())
    text = capsys.readouterr().out
    for part in (
        "4,096 tokens over 2 rank(s)",
        "optimiser",
        "rough",
        "stream",
        "ring",
        "ulysses",
        "sends",
        "free memory",
    ):
        assert part in text
    assert next(line for line in text.splitlines() if "<- used" in line).lstrip().startswith("draft step, stream")


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    report(strategy(), module(), trainer(zero=False))
    assert not capsys.readouterr().out


def test_ulysses_is_not_listed_where_heads_do_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    report(strategy(context=4), module(), trainer())
    assert "ulysses" not in capsys.readouterr().out


def test_what_exceeds_a_given_limit_is_refused_and_what_would_fit_is_named() -> None:
    limit = int(0.5 * GIB)
    with pytest.raises(ConfigError, match="does not fit into memory") as refused:
        report(strategy(limit=limit, budget=65536), module(), trainer())
    message = str(refused.value)
    assert "memory_limit_gib" in message
    tokens = int(message.split("of at most ")[1].split(" tokens")[0])
    report(strategy(limit=limit, budget=tokens), module(), trainer(zero=False))
    size = int(message.split("context_parallel ")[1].split(" ")[0])
    report(strategy(limit=limit, budget=65536, context=size), module(), trainer(zero=False))
    with pytest.raises(ConfigError):
        report(strategy(limit=limit, budget=tokens + 2), module(), trainer(zero=False))
    with pytest.raises(ConfigError, match="more memory"):
        report(strategy(limit=1000), module(), trainer(zero=False))
    assert "recompute: true" in message
    one = module()
    one.source.recompute = True
    report(strategy(limit=limit, budget=65536), one, trainer(zero=False))


def test_a_given_limit_is_taken_at_its_word_and_a_guessed_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    report(strategy(limit=GIB), module(), trainer())
    need = None
    for size in range(1, 2000):  # the least limit in MiB that is accepted
        try:
            report(strategy(limit=size << 20), module(), trainer(zero=False))
        except ConfigError:
            continue
        need = size << 20
        break
    assert need is not None
    with pytest.raises(ConfigError):
        report(strategy(limit=int(need / 1.3)), module(), trainer(zero=False))
    monkeypatch.setattr(estimate, "_cgroup", lambda: int(need / 1.3))
    report(strategy(), module(), trainer(zero=False))
    monkeypatch.setattr(estimate, "_cgroup", lambda: int(need / 2))
    with pytest.raises(ConfigError, match="free memory of the host"):
        report(strategy(), module(), trainer(zero=False))


def test_auto_gets_the_memory_that_is_left_and_ranks_agree_on_it() -> None:
    limits = []
    for free in ((3 * GIB,), (2 * GIB,), (2 * GIB, 3 * GIB)):
        one = module()
        report(strategy(free=free), one, trainer(zero=False))
        limits.append(one.draft.memory_limit)
        assert one.draft.attention == "auto"
    # The host that runs the tests has more than this free.
    assert limits[1] == limits[2] < limits[0]


def test_a_frozen_draft_and_a_frozen_policy_need_nothing_for_activations(capsys: pytest.CaptureFixture[str]) -> None:
    one = module()
    one.trains_draft = one.trains_policy = False
    report(strategy(), one, trainer())
    text = capsys.readouterr().out
    assert "draft step" not in text
    assert next(line for line in text.splitlines() if "rough" in line).split()[-2:] == ["0.00", "GiB"]


def test_the_step_of_a_draft_that_the_model_does_not_know_is_left_out_and_its_weights_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = module()
    states = []
    for draft in (Reading(), one.draft):
        draft.build(shape())
        one.draft = draft
        report(strategy(), one, trainer())
        text = capsys.readouterr().out
        assert ("draft step" in text) == (draft.work(8, 8, 1, 4) is not None)
        states.append(estimate._states(one, "draft", strategy()))
    width = shape().hidden_size
    assert states[0] == width * width * (4 + 4 + 8)
    assert states[1] > states[0]


@pytest.mark.parametrize("kind", [DFlash, DraftModel])
def test_a_draft_without_passes_is_counted_and_refused_like_one_with(
    kind: type[Draft], capsys: pytest.CaptureFixture[str]
) -> None:
    one = module()
    one.draft = kind(**({"mask_token_id": 1, "block_size": 4} if kind is DFlash else {}))
    one.draft.build(shape())
    report(strategy(), one, trainer())
    assert "draft step" in capsys.readouterr().out
    limit = int(0.25 * GIB)
    with pytest.raises(ConfigError, match="does not fit into memory") as refused:
        report(strategy(limit=limit, budget=65536), one, trainer())
    tokens = int(str(refused.value).split("of at most ")[1].split(" tokens")[0])
    report(strategy(limit=limit, budget=tokens), one, trainer(zero=False))
    with pytest.raises(ConfigError):
        report(strategy(limit=limit, budget=tokens + 2), one, trainer(zero=False))
    one.trains_draft = False
    report(strategy(limit=limit, budget=tokens + 2), one, trainer(zero=False))


def test_modules_that_it_does_not_know_pass() -> None:
    report(strategy(limit=1), SimpleNamespace(policy=nn.Linear(2, 2)), trainer())


def test_a_rollout_longer_than_the_budget_decides() -> None:
    one = trainer()
    one.datamodule = SimpleNamespace(max_prompt_tokens=512)
    assert longest_micro_batch(4096, one) == 4096
    one.callbacks = [SimpleNamespace(), SimpleNamespace(sampling=SimpleNamespace(max_tokens=8192))]
    assert longest_micro_batch(4096, one) == 8704


def test_policy_activations_fall_with_ranks_and_recomputation() -> None:
    whole = policy_activations(shape(32), 4096, 1, 2, False)
    assert policy_activations(shape(32), 4096, 4, 2, False) == whole // 4
    assert policy_activations(shape(32), 4096, 1, 2, True) < whole / 5
