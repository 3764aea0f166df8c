"""The plain statement of block drafters in training (SEMANTICS.md section 2): loops over documents, anchors, slots and
layers, one explicit softmax a query, autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spec.draft import DraftInputs
from lightning_spec.draft.block import BlockDraft


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """x [heads, D], rotated by explicit 2x2 rotations of the pairs (d, d + D/2)."""
    half = x.shape[-1] // 2
    # The engine's frequencies are float32 numbers; angles and their products are exact here.
    exponent = torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1]
    angle = position * (1.0 / (theta**exponent)).double()
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def valid_slots(x: DraftInputs, a: int, count: int, longest: int = 10**9) -> list[bool]:
    """Which of the `count` predicted slots of anchor a (a global row) are scored; slot s predicts x_{a+1+s}."""
    ends = [sum(x.lengths[: d + 1]) for d in range(len(x.lengths))]
    document = next(d for d, end in enumerate(ends) if a < end)
    start, end = ends[document] - x.lengths[document], ends[document]
    if a == start:
        return [False] * count
    found = []
    for s in range(count):
        label = a + 1 + s
        span = range(a, label + 1)
        found.append(
            label < end
            and label - start < longest
            and all(bool(x.sampled[n]) for n in span)
            and not any(bool(x.stop[n]) for n in span[:-1])
        )
    return found


def all_anchors(x: DraftInputs, count: int, longest: int = 10**9) -> list[int]:
    return [a for a in range(len(x.tokens)) if valid_slots(x, a, count, longest)[0]]


class Objective:
    """Loss of a row [V] from the policy's p and the draft's log q: a sum of soft CE, hard CE on the label, and TV."""

    def __init__(self, soft: float = 1.0, hard: float = 0.0, variation: float = 0.0) -> None:
        self.soft, self.hard, self.variation = soft, hard, variation

    def __call__(self, p: Tensor, log_q: Tensor, label: int) -> Tensor:
        overlap = torch.minimum(p, log_q.exp()).sum()
        return -self.soft * (p * log_q).sum() - self.hard * log_q[label] + self.variation * (1 - overlap)


def dense(
    draft: BlockDraft,
    x: DraftInputs,
    totals: Sequence[float] | None = None,
    *,
    anchors: Sequence[int] | None = None,
    objective: Objective | None = None,
    weigh: Callable[[Sequence[float], Sequence[float]], Sequence[float]] = lambda alpha, label: [1.0] * len(alpha),
    confidence_weight: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics.

    Args:
        totals: rows of each slot in the step; None: those of `x`.
        anchors: global rows; None: all valid ones.
        weigh: the weights of an anchor's valid slots from their sum min(p, q) and q(label).
    """
    cfg = draft.config
    assert cfg is not None
    p: dict[str, Tensor] = dict(draft.named_parameters())
    objective = objective or Objective()
    slots, blocks, dim = cfg.proposals, cfg.block_size, cfg.head_dim
    first = 1 if cfg.kind == "dflash" else 0
    group, eps, theta = cfg.num_heads // cfg.num_kv_heads, cfg.norm_eps, cfg.rope.theta
    starts = [sum(x.lengths[:d]) for d in range(len(x.lengths))]
    anchors = all_anchors(x, slots, cfg.max_positions) if anchors is None else anchors
    mask = (x.special[0] if x.special is not None else x.policy_embedding[cfg.mask_token_id]).double()  # type: ignore[index]

    def project(layer: int, name: str, c: Tensor) -> Tensor:
        return (p[f"layers.{layer}.self_attn.{name}_proj.weight"] @ c).view(-1, dim)

    def key(layer: int, c: Tensor, position: int) -> Tensor:
        return rotate(rms(project(layer, "k", c), p[f"layers.{layer}.self_attn.k_norm.weight"], eps), position, theta)

    fused = [rms(p["fc.weight"] @ row.double(), p["hidden_norm.weight"], eps) for row in x.features]
    position = [
        row - start for start, length in zip(starts, x.lengths, strict=True) for row in range(start, start + length)
    ]
    sums: dict[str, list[list[float]]] = {n: [[] for _ in range(slots)] for n in ("loss", "agree", "alpha", "accept")}
    terms, confidences = [], []
    trunk: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    count = [sum(valid_slots(x, a, slots, cfg.max_positions)[s] for a in anchors) for s in range(slots)]
    scale = [float(n) for n in (count if totals is None else totals)]
    for a in anchors:
        here, start = position[a], a - position[a]
        h = [x.embeddings[a].double()] + [mask] * (blocks - 1)
        for layer in range(cfg.num_layers):
            name, window, causal = f"layers.{layer}", cfg.windows[layer], cfg.causal[layer]
            c = [rms(one, p[f"{name}.input_layernorm.weight"], eps) for one in h]
            own = [(key(layer, one, here + o), project(layer, "v", one)) for o, one in enumerate(c)]
            new = []
            for o in range(blocks):
                seen = []
                for s in range(start, a):
                    if window is None or here + o - position[s] < window:
                        if (layer, s) not in trunk:
                            trunk[layer, s] = key(layer, fused[s], position[s]), project(layer, "v", fused[s])
                        seen.append(trunk[layer, s])
                for other in range(blocks):
                    if (other <= o or not causal) and (window is None or abs(other - o) < window):
                        seen.append(own[other])
                q = rms(project(layer, "q", c[o]), p[f"{name}.self_attn.q_norm.weight"], eps)
                q = rotate(q, here + o, theta)
                ks = torch.stack([k for k, _ in seen]).repeat_interleave(group, 1)
                vs = torch.stack([v for _, v in seen]).repeat_interleave(group, 1)
                weights = torch.einsum("hd,nhd->nh", q, ks).mul(dim**-0.5).softmax(0)
                attended = torch.einsum("nh,nhd->hd", weights, vs).flatten()
                y = h[o] + p[f"{name}.self_attn.o_proj.weight"] @ attended
                m = rms(y, p[f"{name}.post_attention_layernorm.weight"], eps)
                gate, up = p[f"{name}.mlp.gate_proj.weight"] @ m, p[f"{name}.mlp.up_proj.weight"] @ m
                new.append(y + p[f"{name}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
            h = new
        alive, found = True, []
        for s, good in enumerate(valid_slots(x, a, slots, cfg.max_positions)):
            if not good:
                break
            out = rms(h[s + first], p["norm.weight"], eps)
            z = x.policy_head.double() @ out
            read = [out]
            if cfg.markov_rank:
                before = p["markov_head.markov_w1.weight"][x.tokens[a + s]]
                z = z + p["markov_head.markov_w2.weight"] @ before
                read = [out, before] if cfg.confidence_with_markov else [out]
            teacher = (x.policy_head.double() @ x.hidden[a + s].double()).detach()
            prob, log_q, label = teacher.softmax(-1), z.log_softmax(-1), int(x.tokens[a + s + 1])
            each = objective(prob, log_q, label)
            alpha = float(torch.minimum(prob, log_q.exp()).detach().sum())
            alive = alive and int(z.argmax()) == int(teacher.argmax())
            values = (float(each), int(z.argmax()) == int(teacher.argmax()), alpha, alive)
            for metric, value in zip(sums, values, strict=True):
                sums[metric][s].append(float(value))
            if cfg.confidence:
                logit = p["confidence_head.proj.weight"][0] @ torch.cat(read) + p["confidence_head.proj.bias"][0]
                chance = logit.sigmoid()
                each = each - confidence_weight * (alpha * chance.log() + (1 - alpha) * (1 - chance).log())
                confidences.append((float(chance.detach()), alpha))
            found.append((each, alpha, float(log_q[label].exp())))
        slot_weights = weigh([alpha for _, alpha, _ in found], [q for _, _, q in found])
        terms += [w * each / scale[s] for s, (w, (each, _, _)) in enumerate(zip(slot_weights, found, strict=True))]
    loss = torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)
    means = {
        f"draft/{metric}_{s}": sum(values) / len(values) if values else 0.0
        for metric, each in sums.items()
        for s, values in enumerate(each)
    }
    if cfg.confidence:
        n = len(confidences)
        means["draft/confidence_brier"] = sum((c - a) ** 2 for c, a in confidences) / n if n else 0.0
        for b in range(10):
            errors = [c - a for c, a in confidences if b <= 10 * c < b + 1]
            means[f"draft/confidence_error_{b}"] = sum(errors) / n if n else 0.0
    return loss, means


def grads(loss: Tensor, draft: Any) -> dict[str, Tensor]:
    parameters = dict(draft.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max() / (b[n].double().abs().max() + 1e-3)) for n in b)
