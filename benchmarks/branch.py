"""Time and peak memory of one EAGLE-3 forward and backward by the attention it uses.

    python -m benchmarks.branch [--quick] [--json FILE] [--rows-from FRACTION]

The real draft (`Eagle3`) and its real loss run with several attentions in the same place:
    causal   the trunk alone, by PyTorch's causal attention: the floor, since a draft has to look back somehow
    branch   ours, all rows of a pass at once
    stream   ours, chunk after chunk of rows through all passes (the default engine)
    dense    the usual way: keys of all passes concatenated, one dense mask, PyTorch's masked attention
    eager    the same in matmuls with the diagonal logits appended, as public trainers have it without flex attention
Hidden 256, 4 heads, T = 4096, N = 7, vocabulary 4096, float32, 2 threads. Loss and gradients of branch, stream, dense
and eager are compared on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Case, machine, measure, parser, ratio, table, write_json
from benchmarks.cp_steps import make_shape
from lightning_spec.draft import attention
from lightning_spec.draft.base import DraftInputs
from lightning_spec.draft.eagle3 import Eagle3
from lightning_spec.loss.draft import SoftCrossEntropy

KINDS = ("causal", "branch", "stream", "dense", "eager")


def causal(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    branch_k: Sequence[Tensor],
    branch_v: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """One document, no branch: `scaled_dot_product_attention(is_causal=True)`. Rows start at 0."""
    count = q.shape[0]
    q, k, v = (x[:count].transpose(0, 1)[None] for x in (q, trunk_k, trunk_v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def dense(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    branch_k: Sequence[Tensor],
    branch_v: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """Keys [T + i R] concatenated; the mask [R, T + i R] is causal, then i diagonals."""
    total, count = trunk_k.shape[0], q.shape[0]
    index = torch.arange(total) if rows is None else rows
    mask = torch.zeros(count, total + len(branch_k) * count, dtype=torch.bool)
    mask[:, :total] = torch.arange(total) <= index[:, None]
    for j in range(len(branch_k)):
        mask[:, total + j * count : total + (j + 1) * count].fill_diagonal_(True)
    k, v = torch.cat((trunk_k, *branch_k)), torch.cat((trunk_v, *branch_v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def eager(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    branch_k: Sequence[Tensor],
    branch_v: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """Scores [H, R, T + i]: masked matmul, i diagonal columns, one softmax."""
    total, group = trunk_k.shape[0], q.shape[1] // trunk_k.shape[1]
    index = torch.arange(total) if rows is None else rows
    mask = torch.zeros(q.shape[0], total).masked_fill(torch.arange(total) > index[:, None], float("-inf"))

    def wide(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 1).transpose(0, 1)

    query = q.transpose(0, 1) * q.shape[-1] ** -0.5
    scores = [query @ wide(trunk_k).transpose(1, 2) + mask]
    scores += [(query * wide(k)).sum(-1, keepdim=True) for k in branch_k]
    weights = torch.cat(scores, -1).softmax(-1)
    out = weights[..., :total] @ wide(trunk_v)
    for j, v in enumerate(branch_v):
        out = out + weights[..., total + j : total + j + 1] * wide(v)
    return out.transpose(0, 1)


def make(kind: str, tokens: int, prompt: int, passes: int, kv_heads: int) -> Callable[[], dict[str, Any]]:
    """Draft, inputs and attention of one case; returns one forward and backward."""
    if tokens > 64:  # libraries load and threads start now, not inside the measured peak
        make(kind, 64, 0, passes, kv_heads)()
    attentions = {"causal": causal, "dense": dense, "eager": eager}
    if kind in attentions:
        vars(attention)["branch_attention"] = attentions[kind]
    shape = make_shape(tokens, 256, 4, kv_heads, 64, 1024, 4096)
    draft = Eagle3(num_passes=passes, num_heads=4, num_kv_heads=kv_heads, intermediate_size=1024, own_head=True)
    draft.build(shape, seed=0)
    draft.set_attention("stream" if kind == "stream" else "ring")
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    head = normal(4096, 256) / 16
    ids = torch.randint(4096, (tokens,), generator=generator)
    positions = torch.arange(tokens)
    inputs = DraftInputs(
        features=normal(tokens, 3 * 256),
        embeddings=head[ids],
        hidden=normal(tokens, 256),
        tokens=ids,
        positions=positions,
        lengths=[tokens],
        sampled=positions >= prompt,
        stop=torch.zeros(tokens, dtype=torch.bool),
        policy_head=head,
        policy_embedding=head,
    )
    loss = SoftCrossEntropy()
    totals = {f"draft_pass_{i}": float(tokens) for i in range(passes)}

    def run() -> dict[str, Any]:
        draft.zero_grad(set_to_none=True)
        out = draft(inputs, loss, totals)
        out.loss.backward()
        norm = sum(float(p.grad.double().square().sum()) for p in draft.parameters() if p.grad is not None) ** 0.5
        return {"loss": float(out.loss.detach()), "gradient_norm": norm}

    return run


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--tokens", type=int, help="T (default 4096, quick 512)")
    options.add_argument("--prompt", type=int, default=0, help="rows of the prompt, which carry no loss (default 0)")
    options.add_argument("--passes", type=int, default=7, help="N (default 7)")
    options.add_argument("--kv-heads", type=int, default=4, help="kv heads of the draft (default 4)")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    chosen = options.parse_args()
    chosen.tokens = chosen.tokens or (512 if chosen.quick else 4096)
    if chosen.quick:
        chosen.rounds = min(chosen.rounds, 2)
    arguments = {name: getattr(chosen, name) for name in ("tokens", "prompt", "passes", "kv_heads")}
    cases = [Case(kind, "benchmarks.branch:make", {"kind": kind, **arguments}) for kind in chosen.kinds]
    results = measure(cases, rounds=chosen.rounds, threads=chosen.threads)
    print(machine(chosen.threads))
    print(f"EAGLE-3 forward and backward, {arguments}")
    print(table(results, chosen.kinds[0]))
    by_name = {result.name: result for result in results}
    ours = by_name.get("branch")
    for name in ("stream", "dense", "eager"):
        if ours is not None and name in by_name:
            for key, value in by_name[name].extra.items():
                if abs(value - ours.extra[key]) > 1e-4 * abs(value):
                    raise SystemExit(f"branch and {name} disagree in {key}: {ours.extra[key]} and {value}")
    base = results[0]
    ratios = {
        r.name: {
            "wall": ratio(r.wall, base.wall),
            "cpu": ratio(r.cpu, base.cpu),
            "peak": r.peak_mib / base.peak_mib if base.peak_mib else None,
        }
        for r in results
    }
    write_json(chosen.json, "branch", chosen, results=results, ratios_to=base.name, ratios=ratios)


if __name__ == "__main__":
    main()
