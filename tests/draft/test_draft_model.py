"""A language model draft in training, against transformers' own models in float64, document by document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spec.draft import DraftInputs, DraftModel
from lightning_spec.draft.layers import DecoderLayer
from lightning_spec.draft.lm_run import states
from lightning_spec.loss.draft import LK, DraftLoss, SoftCrossEntropy
from lightning_spec.shapes import PolicyShape
from tests.float64 import in_float64

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 20, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.4,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 6},
    "llama, tied, llama3 rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "llama, biases, yarn": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN, "num_hidden_layers": 1
    },
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
}  # fmt: skip

# A prompt of two rows, a second turn after tool tokens, stops in the middle and at the end, documents of one and two
# rows, one that starts sampled.
LENGTHS = [9, 1, 6, 2, 5]
SAMPLED = [0, 0, 1, 1, 1, 0, 0, 1, 1] + [1] + [1, 1, 1, 1, 1, 1] + [0, 1] + [0, 0, 0, 0, 1]
STOP = [0, 0, 0, 0, 1, 0, 0, 0, 1] + [0] + [0, 0, 0, 0, 0, 0] + [0, 1] + [0, 0, 0, 0, 0]
SCORED = [2, 3, 7, 11, 12, 13, 14, 15, 22]
"""Rows whose token was sampled, has not ended generation and has a row before it in its document."""


Pair = Callable[..., tuple[Any, DraftModel]]


@pytest.fixture
def pair(tmp_path: Path, make_shape: Callable[..., PolicyShape]) -> Pair:
    """make(family) -> (transformers model in float64, the draft with its weights)."""

    def make(family: str = "qwen3", **options: Any) -> tuple[Any, DraftModel]:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = SIZES | FAMILIES[family]
        kind = settings.pop("model_type")
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="sdpa")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", ".bias")):
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
        model.save_pretrained(tmp_path)
        draft = DraftModel(path=str(tmp_path), **options)
        draft.build(make_shape(), dtype=torch.float64)
        return in_float64(model.eval()), draft

    return make


def documents(x: DraftInputs, values: Tensor) -> tuple[Tensor, ...]:
    return values.split(x.lengths)


def hf_logits(model: Any, x: DraftInputs) -> Tensor:
    return torch.cat([model(tokens[None]).logits[0] for tokens in documents(x, x.tokens)])


def dense(model: Any, x: DraftInputs, rows: list[int], total: float, passes: int) -> tuple[Tensor, dict[str, float]]:
    """Loss and means by proposal, written out row by row."""
    z, teacher = hf_logits(model, x), (x.hidden @ x.policy_head.T).detach()
    p = teacher.softmax(-1)
    each = -(p * z.log_softmax(-1)).sum(-1)
    agree = z.argmax(-1) == teacher.argmax(-1)
    alpha = torch.minimum(p, z.softmax(-1)).sum(-1)
    first = {row - int(x.positions[row]) for row in rows}
    means: dict[str, float] = {}
    # Anchor t proposes from the rows t + 1, t + 2, ... as long as each of them is scored.
    anchors = [row - 1 for row in rows]
    for i in range(passes):
        deep = [t for t in anchors if all(t + 1 + j in rows and t + 1 + j not in first for j in range(i + 1))]
        n = max(len(deep), 1)
        means[f"draft/loss_{i}"] = sum(float(each[t + 1 + i]) for t in deep) / n
        means[f"draft/agree_{i}"] = sum(bool(agree[t + 1 + i]) for t in deep) / n
        means[f"draft/alpha_{i}"] = sum(float(alpha[t + 1 + i]) for t in deep) / n
        means[f"draft/accept_{i}"] = sum(all(bool(agree[t + 1 + j]) for j in range(i + 1)) for t in deep) / n
    return each[rows].sum() / total, means


def means_of(metrics: Any) -> dict[str, float]:
    return {name: float(num / den.clamp(min=1)) for name, (num, den, _) in metrics.items()}


def gradients(draft: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    draft.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}


@pytest.fixture
def x(make_inputs: Callable[..., DraftInputs]) -> DraftInputs:
    return make_inputs(LENGTHS, sampled=[bool(s) for s in SAMPLED], stop=[bool(s) for s in STOP])


def run(draft: DraftModel, x: DraftInputs, loss: DraftLoss | None = None, totals: Any = None) -> Any:
    return draft(x, loss or SoftCrossEntropy(), draft.counts(x) if totals is None else totals)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_metrics_and_every_gradient_equal_transformers(family: str, pair: Pair, x: DraftInputs) -> None:
    model, draft = pair(family, num_proposals=4)
    every = torch.arange(sum(LENGTHS))
    mine = states(draft, x, every, every) @ draft.head().T
    torch.testing.assert_close(mine, hf_logits(model, x), rtol=0, atol=1e-10)
    assert float(draft.counts(x)["draft_rows"]) == len(SCORED)  # type: ignore[arg-type]
    out = run(draft, x, totals={"draft_rows": torch.tensor(17.0)})
    want, means = dense(model, x, SCORED, 17.0, 4)
    torch.testing.assert_close(out.loss, want, rtol=0, atol=1e-10)
    found = means_of(out.metrics)
    assert found.keys() == means.keys()
    assert found == pytest.approx(means, abs=1e-10)
    mine_grads, theirs = gradients(draft, out.loss), gradients(model, want)
    assert mine_grads.keys() == theirs.keys() == dict(draft.named_parameters()).keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine_grads[name], gradient, rtol=0, atol=1e-10, msg=name)
        assert gradient.abs().max() > 1e-6, name


@pytest.mark.parametrize("family", ["llama, biases, yarn", "qwen3"])
def test_recomputed_layers_give_the_same_bits_and_run_twice(
    family: str, pair: Pair, x: DraftInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[DecoderLayer] = []
    enter = DecoderLayer.enter

    def counted(self: DecoderLayer, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(self)
        return enter(self, hidden, embedding)

    monkeypatch.setattr(DecoderLayer, "enter", counted)
    _, draft = pair(family)
    results = []
    for again in (False, True):
        draft.recompute = again
        calls.clear()
        state = torch.get_rng_state()
        out = run(draft, x, LK())
        results.append((out.loss.detach(), gradients(draft, out.loss)))
        assert len(calls) == len(draft.decoder_layers()) * (2 if again else 1)
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(gradient, results[1][1][name]) for name, gradient in results[0][1].items())


def test_teacher_rows_that_serving_never_predicts_from_have_no_part_in_it(pair: Pair, x: DraftInputs) -> None:
    """CASES A1, A4: the first scored row is that of the first sampled token, the last one that of the last before a
    stop."""
    _, draft = pair("llama")
    loss = float(run(draft, x).loss)
    for row in range(sum(LENGTHS)):
        hidden = x.hidden.clone()
        hidden[row] += 1.0
        changed = float(run(draft, replace(x, hidden=hidden)).loss) != loss
        assert changed == (row in SCORED), row


def test_masked_padding_does_not_change_loss_or_gradient(
    pair: Pair, x: DraftInputs, make_inputs: Callable[..., DraftInputs]
) -> None:
    """CASES A2."""
    _, draft = pair()
    more = make_inputs(
        [*LENGTHS, 23], sampled=[*map(bool, SAMPLED), *[False] * 23], stop=[*map(bool, STOP), *[False] * 23]
    )
    total = sum(LENGTHS)
    for name in ("hidden", "tokens"):
        getattr(more, name)[:total] = getattr(x, name)
    more.policy_head = x.policy_head
    first, second = run(draft, x), run(draft, more)
    assert float(draft.counts(x)["draft_rows"]) == float(draft.counts(more)["draft_rows"])  # type: ignore[arg-type]
    assert means_of(first.metrics) == pytest.approx(means_of(second.metrics), abs=1e-12)
    a, b = gradients(draft, first.loss), gradients(draft, second.loss)
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-12) for name in a)


@pytest.mark.parametrize(
    ("lengths", "sampled"),
    [([], []), ([1], [True]), ([4, 3], [False] * 7), ([1, 1, 1], [True] * 3), ([5], [True] + [False] * 4)],
    ids=["no rows", "one token", "nothing sampled", "documents of one token", "only the first token sampled"],
)
def test_without_a_scored_row_loss_and_gradients_are_0(
    lengths: list[int], sampled: list[bool], pair: Pair, make_inputs: Callable[..., DraftInputs]
) -> None:
    """CASES A3."""
    _, draft = pair(num_proposals=5)
    x = make_inputs(lengths, sampled=sampled)
    assert float(draft.counts(x)["draft_rows"]) == 0  # type: ignore[arg-type]
    out = run(draft, x)
    found = gradients(draft, out.loss)
    assert float(out.loss) == 0.0
    assert found.keys() == dict(draft.named_parameters()).keys()
    assert all(float(g.abs().max()) == 0.0 for g in found.values())
    assert all(float(num) == float(den) == 0.0 for num, den, _ in out.metrics.values())
    assert len(out.metrics) == 20


def test_more_proposals_than_tokens_change_metrics_only(pair: Pair, x: DraftInputs) -> None:
    _, short = pair(num_proposals=1)
    _, long = pair(num_proposals=40)
    assert float(run(short, x).loss) == float(run(long, x).loss)
    assert means_of(run(long, x).metrics)["draft/loss_0"] == means_of(run(short, x).metrics)["draft/loss_0"]
    assert float(run(long, x).metrics["draft/loss_39"][1]) == 0.0


def test_rows_past_the_draft_s_last_position_are_not_scored(pair: Pair, x: DraftInputs) -> None:
    model, draft = pair(max_positions=4)
    rows = [row for row in SCORED if int(x.positions[row]) < 4]
    assert rows != SCORED
    want, means = dense(model, x, rows, float(len(rows)), 3)
    out = run(draft, x)
    torch.testing.assert_close(out.loss, want, rtol=0, atol=1e-10)
    assert means_of(out.metrics) == pytest.approx(means, abs=1e-10)


def test_documents_of_a_pack_do_not_see_each_other(pair: Pair, x: DraftInputs) -> None:
    """CASES B4."""
    _, draft = pair()
    every = torch.arange(sum(LENGTHS))
    before = states(draft, x, every, every)
    tokens = x.tokens.clone()
    tokens[: LENGTHS[0]] = (tokens[: LENGTHS[0]] + 1) % 23
    after = states(draft, replace(x, tokens=tokens), every, every)
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])
    assert not torch.equal(before[: LENGTHS[0]], after[: LENGTHS[0]])


def test_no_gradient_reaches_the_policy_and_a_frozen_draft_has_no_graph(pair: Pair, x: DraftInputs) -> None:
    _, draft = pair("qwen2, tied")
    live = replace(x, hidden=x.hidden.clone().requires_grad_(), policy_head=x.policy_head.clone().requires_grad_())
    run(draft, live).loss.backward()
    assert live.hidden.grad is None
    assert live.policy_head.grad is None
    assert not run(draft.requires_grad_(False), x).loss.requires_grad
    with torch.no_grad():
        assert float(run(draft, x).loss) > 0


class Labels(SoftCrossEntropy):
    """A loss that wants the rollout's own tokens, and notes them."""

    needs_labels = True

    def __call__(self, *arguments: Any, labels: Tensor | None = None, **named: Any) -> Any:
        self.labels = labels
        return super().__call__(*arguments, labels=labels, **named)


def test_labels_are_the_tokens_sampled_next_in_the_same_document(pair: Pair, x: DraftInputs) -> None:
    loss = Labels()
    run(pair()[1], x, loss)
    # Rows 2, 3 | 7 of the first document, 11 .. 15 of the third (15 is its last), 22 of the last (its last).
    following = [3, 4, 8, 12, 13, 14, 15, None, None]
    assert loss.labels is not None
    assert loss.labels.tolist() == [-1 if row is None else int(x.tokens[row]) for row in following]


def test_float32_and_bfloat16_drafts_follow_the_float64_one(pair: Pair, x: DraftInputs) -> None:
    _, draft = pair()
    want = float(run(draft, x).loss)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        draft.to(dtype)
        narrow = replace(x, hidden=x.hidden.to(dtype), policy_head=x.policy_head.to(dtype))
        out = run(draft, narrow)
        assert float(out.loss) == pytest.approx(want, rel=tolerance)
        out.loss.backward()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in draft.parameters())
        draft.zero_grad(set_to_none=True)
