"""The draft's loss and every gradient against the formulas of SEMANTICS.md section 1, written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.draft import DraftInputs, Eagle3, VocabMap
from lightning_spec.loss.draft import HardCrossEntropy, SoftCrossEntropy


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """x [heads, D], rotated by explicit 2x2 rotations of the pairs (d, d + D/2)."""
    half = x.shape[-1] // 2
    # The engine's frequencies are float32 numbers; angles and their products are exact here.
    exponent = torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1]
    angle = position * (1.0 / (theta**exponent)).double()
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def valid(x: DraftInputs, start: int, length: int, t: int, i: int) -> bool:
    span = range(start + t + 1, start + t + 1 + i + 1)
    return t + 1 + i <= length - 1 and all(bool(x.sampled[s]) and not bool(x.stop[s]) for s in span)


def dense(
    draft: Eagle3, x: DraftInputs, totals: list[int] | None = None, hard: bool = False
) -> tuple[Tensor, dict[str, float]]:
    """Loss and per-pass means by loops over documents, anchors and passes: one explicit softmax a query."""
    cfg = draft.config
    assert cfg is not None
    p = dict(draft.named_parameters())
    eps, theta, dim = cfg.norm_eps, cfg.rope.theta, cfg.head_dim
    group = cfg.num_heads // cfg.num_kv_heads
    head = p["lm_head.weight"] if cfg.own_head else x.policy_head
    ids = draft.target_ids()
    names = ["midlayer", *(f"layers.{n}" for n in range(1, cfg.num_layers))]
    starts = [sum(x.lengths[:d]) for d in range(len(x.lengths))]

    def embedding(row: int) -> Tensor:
        return p["embed_tokens.weight"][x.tokens[row]] if cfg.own_embedding else x.embeddings[row]

    def fuse(a: Tensor) -> Tensor:
        if cfg.norm_before_fc:
            a = rms(a, p["input_norm.weight"], eps)
        if cfg.fc_norm:
            parts = a.split(cfg.policy_hidden_size)
            a = torch.cat([rms(part, p[f"fc_norm.{n}.weight"], eps) for n, part in enumerate(parts)])
        return p["fc.weight"] @ a

    rows: list[list[Tensor]] = [[] for _ in range(draft.num_passes)]
    agreed: list[list[bool]] = [[] for _ in range(draft.num_passes)]
    accepted: list[list[bool]] = [[] for _ in range(draft.num_passes)]
    overlap: list[list[float]] = [[] for _ in range(draft.num_passes)]
    for start, length in zip(starts, x.lengths, strict=True):
        keys: dict[tuple[int, int, int], Tensor] = {}  # (layer, row, pass)
        values: dict[tuple[int, int, int], Tensor] = {}
        h: dict[int, Tensor] = {}
        alive = dict.fromkeys(range(length), True)
        for i in range(draft.num_passes):
            for t in range(length - 1):
                if t + 1 + i > length - 1:
                    continue
                state = fuse(x.features[start + t]) if i == 0 else h[t]
                if i > 0 and draft.recycle == "detach":
                    state = state.detach()
                for layer, name in enumerate(names):
                    if layer == 0:
                        normed = rms(state, p[f"{name}.hidden_norm.weight"], eps)
                        e = rms(embedding(start + t + 1 + i), p[f"{name}.input_layernorm.weight"], eps)
                        c, residual = torch.cat([e, normed]), normed if cfg.norm_before_residual else state
                    else:
                        c, residual = rms(state, p[f"{name}.input_layernorm.weight"], eps), state
                    q, k, v = (
                        (p[f"{name}.self_attn.{which}_proj.weight"] @ c).view(-1, dim) for which in ("q", "k", "v")
                    )
                    q = rotate(q, t + i, theta)
                    keys[layer, t, i], values[layer, t, i] = rotate(k, t + i, theta), v
                    seen = [(layer, s, 0) for s in range(t + 1)] + [(layer, t, j) for j in range(1, i + 1)]
                    ks = torch.stack([keys[one] for one in seen]).repeat_interleave(group, 1)
                    vs = torch.stack([values[one] for one in seen]).repeat_interleave(group, 1)
                    weights = torch.einsum("hd,nhd->nh", q, ks).mul(dim**-0.5).softmax(0)
                    attended = torch.einsum("nh,nhd->hd", weights, vs).flatten()
                    y = residual + p[f"{name}.self_attn.o_proj.weight"] @ attended
                    m = rms(y, p[f"{name}.post_attention_layernorm.weight"], eps)
                    gate, up = p[f"{name}.mlp.gate_proj.weight"] @ m, p[f"{name}.mlp.up_proj.weight"] @ m
                    state = y + p[f"{name}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
                out = rms(state, p["norm.weight"], eps)
                h[t] = out if cfg.norm_output else state
                if not valid(x, start, length, t, i):
                    continue
                z = head @ out
                teacher = (x.policy_head @ x.hidden[start + t + 1 + i]).detach()
                p_full = teacher.softmax(-1)
                p_draft = p_full if ids is None else teacher[ids].softmax(-1)
                label = start + t + 2 + i
                if not hard:
                    rows[i].append(-(p_draft * z.log_softmax(-1)).sum())
                elif t + 2 + i < length and bool(x.sampled[label]):
                    rows[i].append(-z.log_softmax(-1)[int(x.tokens[label])])
                else:
                    rows[i].append(0.0 * z.sum())
                top = int(z.argmax()) if ids is None else int(ids[z.argmax()])
                alive[t] &= top == int(teacher.argmax())
                agreed[i].append(top == int(teacher.argmax()))
                accepted[i].append(alive[t])
                q_full = z.softmax(-1) if ids is None else torch.zeros_like(p_full).index_put((ids,), z.softmax(-1))
                overlap[i].append(float(torch.minimum(p_full, q_full).detach().sum()))
    loss = torch.zeros((), dtype=torch.float64)
    means: dict[str, float] = {}
    for i in range(draft.num_passes):
        n = len(rows[i])
        if n:
            loss = loss + draft.pass_weights[i] * torch.stack(rows[i]).sum() / (totals[i] if totals else n)
        means[f"draft/loss_{i}"] = float(torch.stack(rows[i]).detach().mean()) if n else 0.0
        for key, what in (("agree", agreed), ("accept", accepted), ("alpha", overlap)):
            means[f"draft/{key}_{i}"] = sum(what[i]) / n if n else 0.0
    return loss, means


def totals_of(draft: Eagle3, x: DraftInputs) -> dict[str, Tensor]:
    return draft.counts(x)  # type: ignore[arg-type]  (reads the same field names)


def grads(loss: Tensor, draft: Eagle3) -> dict[str, Tensor]:
    parameters = dict(draft.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n].double() - b[n].double()).abs().max() / (b[n].double().abs().max() + 1e-3)) for n in b)


def reduced(ids: list[int]) -> VocabMap:
    return VocabMap(torch.tensor(ids), 23)


# Documents: prompt of two rows, a second turn with tool tokens in between, a stop in the middle and at an end, and
# documents too short for any or for all passes.
LENGTHS = [9, 1, 6, 2, 5]
SAMPLED = [0, 0, 1, 1, 1, 0, 0, 1, 1] + [1] + [0, 1, 1, 1, 1, 1] + [0, 1] + [0, 0, 0, 0, 1]
STOP = [0, 0, 0, 0, 1, 0, 0, 0, 1] + [0] + [0, 0, 0, 0, 0, 0] + [0, 1] + [0, 0, 0, 0, 0]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_passes": 1},
    "two_passes": {"num_passes": 2},
    "three_passes": {"num_passes": 3},
    "seven_passes": {"num_passes": 7, "pass_weights": "decay"},
    "detached": {"num_passes": 4, "recycle": "detach"},
    "own_all": {"num_passes": 3, "own_head": True, "own_embedding": True},
    "wider_than_policy": {"num_passes": 3, "own_head": True, "own_embedding": True, "hidden_size": 24},
    "reduced_vocabulary": {"num_passes": 3, "draft_vocab_size": 5},
    "norm_before_residual": {"num_passes": 3, "norm_before_residual": True},
    "norm_before_fc": {"num_passes": 3, "norm_before_fc": True},
    "fc_norm": {"num_passes": 3, "fc_norm": True},
    "norm_output": {"num_passes": 3, "norm_output": True},
    "one_kv_head": {"num_passes": 3, "num_kv_heads": 1, "head_dim": 6},
    "two_layers": {"num_passes": 4, "num_layers": 2},
    "three_layers_all_norms": {
        "num_passes": 3,
        "num_layers": 3,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
        "pass_weights": [1.0, 0.5, 0.0],
    },
}


MODES = ["stream", "ring"]
"""ring with one rank: all rows at once, the plain way."""


def build(variant: dict[str, Any], shape: Any, dtype: torch.dtype = torch.float64, mode: Any = "stream") -> Eagle3:
    draft = Eagle3(**variant, chunk_rows=5)
    draft.set_attention(mode)
    if "draft_vocab_size" in variant:
        draft.use_vocab_map(reduced([1, 4, 5, 11, 22]))
    draft.build(shape, dtype=dtype, seed=3)
    with torch.no_grad():
        # Norm weights of 1 would hide a norm that is applied twice or not at all.
        g = torch.Generator().manual_seed(5)
        for name, p in draft.named_parameters():
            if "norm" in name:
                p.mul_(1 + 0.3 * torch.randn(p.shape, generator=g).to(p.dtype))
    return draft


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("masked", [False, True], ids=["all_sampled", "turns_and_stops"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_gradients_and_metrics_equal_the_formulas(
    name: str, masked: bool, mode: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft = build(VARIANTS[name], make_shape(), mode=mode)
    x = make_inputs(LENGTHS, sampled=SAMPLED if masked else None, stop=STOP if masked else None)
    out = draft(x, SoftCrossEntropy(), totals_of(draft, x))
    want, means = dense(draft, x)
    assert abs(float(out.loss) - float(want)) < 1e-10
    assert worst(grads(out.loss, draft), grads(want, draft)) < 1e-10
    got = {metric: float(num) / float(den) if float(den) else 0.0 for metric, (num, den, _) in out.metrics.items()}
    assert got == pytest.approx(means, abs=1e-10)


@pytest.mark.parametrize("name", ["three_passes", "own_all"])
@pytest.mark.parametrize("mode", MODES)
def test_hard_cross_entropy_is_taken_to_the_rollout_s_own_token_of_each_pass(
    name: str, mode: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft = build(VARIANTS[name], make_shape(), mode=mode)
    x = make_inputs(LENGTHS, sampled=SAMPLED, stop=STOP)
    out = draft(x, HardCrossEntropy(), totals_of(draft, x))
    want, means = dense(draft, x, hard=True)
    assert abs(float(out.loss) - float(want)) < 1e-10
    assert worst(grads(out.loss, draft), grads(want, draft)) < 1e-10
    got = {metric: float(num) / float(den) for metric, (num, den, _) in out.metrics.items() if "loss" not in metric}
    assert got == pytest.approx({metric: value for metric, value in means.items() if "loss" not in metric}, abs=1e-10)


@pytest.mark.parametrize("name", ["seven_passes", "two_layers", "reduced_vocabulary", "own_all"])
@pytest.mark.parametrize("mode", MODES)
def test_float32_is_within_1e_5_of_the_formulas(
    name: str, mode: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    wide, narrow = (build(VARIANTS[name], make_shape(), dtype, mode) for dtype in (torch.float64, torch.float32))
    with torch.no_grad():
        for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
            a.copy_(b)
    x64, x32 = (make_inputs(LENGTHS, sampled=SAMPLED, stop=STOP, dtype=d) for d in (torch.float64, torch.float32))
    out = narrow(x32, SoftCrossEntropy(), totals_of(narrow, x32))
    want, _ = dense(wide, x64)
    assert abs(float(out.loss) - float(want)) < 1e-5 * float(want)
    assert worst(grads(out.loss, narrow), grads(want, wide)) < 1e-5


@pytest.mark.parametrize("passes", range(1, 8))
@pytest.mark.parametrize("mode", MODES)
def test_n_passes_means_n_passes(
    passes: int, mode: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft = build({"num_passes": passes}, make_shape(), mode=mode)
    x = make_inputs([12])
    totals = totals_of(draft, x)
    out = draft(x, SoftCrossEntropy(), totals)
    want = [11 - i for i in range(passes)]  # row t takes part in pass i while x_{t+1+i} exists
    assert [int(totals[f"draft_pass_{i}"]) for i in range(passes)] == want
    assert [int(out.metrics[f"draft/loss_{i}"][1]) for i in range(passes)] == want
    assert {name for name in out.metrics if name.startswith("draft/loss")} == {f"draft/loss_{i}" for i in range(passes)}


@pytest.mark.parametrize("mode", MODES)
def test_many_ended_rows_are_compacted_without_changing_the_result(
    mode: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    lengths = [2] * 6 + [3] * 5 + [10]  # most rows end after a pass or two
    for variant in ({"num_passes": 5}, {"num_passes": 5, "num_layers": 2}):
        draft = build(variant, make_shape(), mode=mode)
        x = make_inputs(lengths)
        out = draft(x, SoftCrossEntropy(), totals_of(draft, x))
        want, _ = dense(draft, x)
        assert abs(float(out.loss) - float(want)) < 1e-10
        assert worst(grads(out.loss, draft), grads(want, draft)) < 1e-10
