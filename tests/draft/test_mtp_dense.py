"""The MTP head's loss and every gradient against vLLM's mimo_mtp.py, written out in float64 with explicit softmaxes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.draft import MTP, DraftInputs
from lightning_spec.loss.draft import LK, SoftCrossEntropy

Shapes = Callable[..., Any]
Inputs = Callable[..., DraftInputs]
PREFIX = "model.mtp_layers.0."

# Prompts of two rows, a second turn with tool tokens, stops, a document whose first row is scored (it reads x_1 at
# position 0), and documents too short for any or for all passes.
LENGTHS = [9, 1, 6, 2, 5]
SAMPLED = [0, 0, 1, 1, 1, 0, 0, 1, 1] + [1] + [0, 1, 1, 1, 1, 1] + [0, 1] + [0, 0, 0, 0, 1]
STOP = [0, 0, 0, 0, 1, 0, 0, 0, 1] + [0] + [0, 0, 0, 0, 0, 0] + [0, 1] + [0, 0, 0, 0, 0]

VARIANTS: dict[str, dict[str, Any]] = {
    "one_pass": {"num_passes": 1},
    "three_passes": {"num_passes": 3},
    "seven_passes": {"num_passes": 7, "pass_weights": "decay"},
    "detached": {"num_passes": 4, "recycle": "detach"},
    "one_kv_head": {"num_passes": 3, "num_kv_heads": 1},
    "other_sizes": {"num_passes": 3, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 10},
    "residual": {"num_passes": 3, "reads": "residual"},
}
MODES = ["stream", "ring"]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1]
    angle = position * (1.0 / (theta**exponent)).double()
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def dense(draft: MTP, x: DraftInputs) -> tuple[Tensor, dict[str, float]]:
    """Loss and per-pass means by loops over documents, anchors and passes."""
    cfg = draft.config
    assert cfg is not None
    p = {name.removeprefix(PREFIX): tensor for name, tensor in draft.named_parameters()}
    eps, theta, heads, kv_heads = cfg.norm_eps, cfg.rope.theta, cfg.num_heads, cfg.num_kv_heads
    dim, passes = cfg.hidden_size // heads, draft.num_passes
    states = x.features if draft._given["reads"] == "residual" else x.hidden
    ce, agreed, accepted, overlap = ([[] for _ in range(passes)] for _ in range(4))  # type: ignore[var-annotated]
    start = 0
    for length in x.lengths:
        keys: dict[tuple[int, int], Tensor] = {}
        values: dict[tuple[int, int], Tensor] = {}
        recycled: dict[int, Tensor] = {}
        alive = [True] * length
        for i in range(passes):
            for t in range(length - 1 - i):
                h = states[start + t] if i == 0 else recycled[t]
                h = h.detach() if draft.recycle == "detach" else h
                e = x.embeddings[start + t + 1 + i] * (0.0 if t + i == 0 else 1.0)
                both = [rms(h, p["hidden_layernorm.weight"], eps), rms(e, p["token_layernorm.weight"], eps)]
                residual = p["input_proj.weight"] @ torch.cat(both)
                c = rms(residual, p["input_layernorm.weight"], eps)
                q, k, v = (
                    (p[f"self_attn.{n}_proj.weight"] @ c + p[f"self_attn.{n}_proj.bias"]).view(-1, dim) for n in "qkv"
                )
                q, keys[t, i], values[t, i] = rotate(q, t + i, theta), rotate(k, t + i, theta), v
                seen = [(s, 0) for s in range(t + 1)] + [(t, j) for j in range(1, i + 1)]
                ks, vs = (
                    torch.stack([d[one] for one in seen]).repeat_interleave(heads // kv_heads, 1)
                    for d in (keys, values)
                )
                weights = torch.einsum("hd,nhd->nh", q, ks).mul(dim**-0.5).softmax(0)
                y = residual + p["self_attn.o_proj.weight"] @ torch.einsum("nh,nhd->hd", weights, vs).flatten()
                m = rms(y, p["post_attention_layernorm.weight"], eps)
                gate, up = p["mlp.gate_proj.weight"] @ m, p["mlp.up_proj.weight"] @ m
                y = y + p["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
                recycled[t] = rms(y, p["final_layernorm.weight"], eps)
                span = range(start + t + 1, start + t + 2 + i)
                if not all(bool(x.sampled[s]) and not bool(x.stop[s]) for s in span):
                    continue
                z, teacher = x.policy_head @ recycled[t], x.policy_head @ x.hidden[start + t + 1 + i]
                ce[i].append(-(teacher.softmax(-1) * z.log_softmax(-1)).sum())
                hit = int(z.argmax()) == int(teacher.argmax())
                alive[t] &= hit
                agreed[i].append(hit)
                accepted[i].append(alive[t])
                overlap[i].append(float(torch.minimum(teacher.softmax(-1), z.softmax(-1)).detach().sum()))
        start += length
    loss = torch.zeros((), dtype=torch.float64)
    means: dict[str, float] = {}
    for i in range(passes):
        n = len(ce[i])
        if n:
            loss = loss + draft.pass_weights[i] * torch.stack(ce[i]).mean()
        means[f"draft/loss_{i}"] = float(torch.stack(ce[i]).detach().mean()) if n else 0.0
        for key, what in (("agree", agreed), ("accept", accepted), ("alpha", overlap)):
            means[f"draft/{key}_{i}"] = sum(what[i]) / n if n else 0.0
    return loss, means


def build(variant: dict[str, Any], shape: Any, mode: Any = "stream", dtype: torch.dtype = torch.float64) -> MTP:
    draft = MTP(**({"chunk_rows": 5} | variant))
    draft.set_attention(mode)
    draft.build(shape, dtype=dtype, seed=3)
    with torch.no_grad():
        # Norm weights of 1 and biases of 0 would hide one that is applied twice or not at all.
        g = torch.Generator().manual_seed(5)
        for name, p in draft.named_parameters():
            noise = 0.3 * torch.randn(p.shape, generator=g).to(p.dtype)
            p.add_(noise) if "norm" in name or "bias" in name else None
    return draft


def grads(loss: Tensor, draft: MTP) -> dict[str, Tensor]:
    parameters = dict(draft.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), found, strict=True)}


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max() / (b[n].double().abs().max() + 1e-3)) for n in b)


def run(draft: MTP, x: DraftInputs) -> tuple[float, dict[str, Tensor]]:
    loss = draft(x, SoftCrossEntropy(), draft.counts(x)).loss  # type: ignore[arg-type]
    return float(loss), grads(loss, draft)


def taps(variant: dict[str, Any]) -> int:
    return 1 if variant.get("reads") == "residual" else 0


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("masked", [False, True], ids=["all_sampled", "turns_and_stops"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_gradients_and_metrics_equal_the_formulas(
    name: str, masked: bool, mode: str, make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft = build(VARIANTS[name], make_shape(), mode)
    x = make_inputs(
        LENGTHS, sampled=SAMPLED if masked else None, stop=STOP if masked else None, taps=taps(VARIANTS[name])
    )
    out = draft(x, SoftCrossEntropy(), draft.counts(x))  # type: ignore[arg-type]
    want, means = dense(draft, x)
    assert abs(float(out.loss) - float(want)) < 1e-10
    assert worst(grads(out.loss, draft), grads(want, draft)) < 1e-10
    got = {metric: float(num) / float(den) if float(den) else 0.0 for metric, (num, den, _) in out.metrics.items()}
    assert got == pytest.approx(means, abs=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_float32_is_within_1e_5_of_the_formulas(mode: str, make_shape: Shapes, make_inputs: Inputs) -> None:
    wide, narrow = (build({"num_passes": 4}, make_shape(), mode, dtype) for dtype in (torch.float64, torch.float32))
    with torch.no_grad():
        for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
            a.copy_(b)
    x64, x32 = (
        make_inputs(LENGTHS, sampled=SAMPLED, stop=STOP, taps=0, dtype=d) for d in (torch.float64, torch.float32)
    )
    # Logits of a few units, as of trained models: at ten, rounding of four passes alone moves a probability by 1e-5.
    x64, x32 = (replace(x, policy_head=0.25 * x.policy_head) for x in (x64, x32))
    out = narrow(x32, SoftCrossEntropy(), narrow.counts(x32))  # type: ignore[arg-type]
    want, _ = dense(wide, x64)
    assert abs(float(out.loss) - float(want)) < 1e-5 * float(want)
    assert worst(grads(out.loss, narrow), grads(want, wide)) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_the_embedding_at_position_0_is_not_read_and_every_other_one_is(
    mode: str, make_shape: Shapes, make_inputs: Inputs
) -> None:
    """Row 0 stands at position 0 in pass 0, where it reads x_1: zero, before the norm. In pass 1 it reads x_2."""
    x = make_inputs([5, 4], taps=0)
    for passes, unread in ((1, [0, 1, 5, 6]), (2, [0, 1, 5, 6])):
        draft = build({"num_passes": passes}, make_shape(), mode)
        base = run(draft, x)
        same = []
        for row in range(9):
            y = copy.deepcopy(x)
            y.embeddings[row] += 1.0
            if run(draft, y)[0] == base[0]:
                same.append(row)
        assert same == unread


@pytest.mark.parametrize("mode", MODES)
def test_a_document_changes_nothing_of_its_neighbour_in_any_pass(
    mode: str, make_shape: Shapes, make_inputs: Inputs
) -> None:
    """CASES.md B4: packed equals alone, for loss and all gradients."""
    draft = build({"num_passes": 4, "chunk_rows": 3}, make_shape(), mode)
    x = make_inputs([7, 6], taps=0)
    totals = draft.counts(x)  # type: ignore[arg-type]
    both = draft(x, SoftCrossEntropy(), totals).loss
    rows = ("features", "embeddings", "hidden", "tokens", "positions", "sampled", "stop")
    parts = []
    for part, length in ((slice(0, 7), 7), (slice(7, 13), 6)):
        alone = replace(x, lengths=[length], **{name: getattr(x, name)[part] for name in rows})
        parts.append(draft(alone, SoftCrossEntropy(), totals).loss)
    assert abs(float(both) - float(parts[0] + parts[1])) < 1e-12
    assert worst(grads(both, draft), grads(parts[0] + parts[1], draft)) < 1e-10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", [SoftCrossEntropy(), LK()])
def test_nothing_of_the_policy_gets_a_gradient(mode: str, loss: Any, make_shape: Shapes, make_inputs: Inputs) -> None:
    """CASES.md A8: hidden states are read by the head and are the teacher; head and embedding are shared."""
    for reads in ("normed", "residual"):
        draft = build({"num_passes": 3, "reads": reads}, make_shape(), mode)
        x = make_inputs([9, 4], taps=taps({"reads": reads}))
        held = [t.requires_grad_() for t in (x.features, x.embeddings, x.hidden, x.policy_head)]
        draft(x, loss, draft.counts(x)).loss.backward()  # type: ignore[arg-type]
        assert all(t.grad is None for t in held)
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in draft.parameters())


@pytest.mark.parametrize(
    ("lengths", "sampled"), [([], None), ([1], None), ([6, 3], [0] * 9), ([2], [1, 0])],
    ids=["no_rows", "one_row", "empty_mask", "no_valid_anchor"],
)  # fmt: skip
def test_nothing_to_learn_is_a_zero_loss_with_zero_gradients_on_every_parameter(
    lengths: list[int], sampled: list[bool] | None, make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft = build({}, make_shape())
    loss, found = run(draft, make_inputs(lengths, sampled=sampled, taps=0))
    assert loss == 0.0
    assert all(bool((g == 0).all()) for g in found.values())
