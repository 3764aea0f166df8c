"""One rank of test_vocab_parallel_losses.py: `python vocab_worker.py OUT`, world as in launch.py.

Runs every claim on the same group and writes OUT/rank.json: for each claim the number of checks and what failed. Every
rank makes the same inputs and the result on one rank, and compares its part of the split one with it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spec.loss import (
    LK,
    DraftLoss,
    HardCrossEntropy,
    LowRank,
    SoftCrossEntropy,
    VocabShard,
    linear_logprobs,
    prepare_heads,
)
from tests.distributed.claims import Claims
from tests.distributed.vocab_examples import (
    LOSSES,
    TOLERANCE,
    Example,
    example,
    gradient_tolerance,
    randn,
    split_of,
)

# ---------------------------------------------------------------------------------------------------------- log-probs


def logprobs_case(claims: Claims, draw: random.Random, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    T, V, C = draw.choice([0, 1, draw.randint(2, 40)]), draw.choice([1, 2, 4, 50, draw.randint(3, 90)]), 5
    options: dict[str, Any] = {
        "temperature": draw.choice([1.0, 0.6]),
        "chunk": draw.choice([None, 1, 4, 7]),
        "entropy": draw.random() < 0.6,
    }
    about = f"T={T} V={V} {dtype} {options}"
    g = torch.Generator().manual_seed(draw.randint(0, 1 << 30))
    vocab = VocabShard.split(V, group)
    mine = slice(vocab.start, vocab.stop)
    hidden, weight = 3 * randn(g, T, C, dtype=dtype), randn(g, V, C, dtype=dtype)
    labels = torch.randint(-1 if draw.random() < 0.7 else 0, V, (T,), generator=g)
    if draw.random() < 0.15:
        labels.fill_(-1)
    up = randn(g, 2, T) * (torch.rand(2, T, generator=g) < 0.7)  # some rows get no gradient
    use = draw.choice([(1, 1), (1, 0), (0, 1)]) if options["entropy"] else (1, 0)

    def run(h: Tensor, w: Tensor, **more: Any) -> list[Tensor]:
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        lp, ent = linear_logprobs(h, w, labels, **options, **more)
        outputs = [out for out in (lp, ent) if out is not None]
        objective = sum((out * up[n].to(out.dtype)).sum() for n, out in enumerate(outputs) if use[n])
        assert isinstance(objective, Tensor)
        return [*(out.detach() for out in outputs), *torch.autograd.grad(objective, (h, w))]

    *wanted, d_hidden, d_weight = run(hidden.double(), weight.double())
    *found, dh, dw = run(hidden, weight[mine], vocab=vocab)
    for name, a, b in zip(("logprobs", "entropy"), found, wanted, strict=False):
        claims.close("logprobs", a, b, TOLERANCE[dtype], f"{name} {about}")
        claims.same_bits("logprobs bits", a, group, f"{name} {about}")
    claims.close("logprobs", dh, d_hidden, gradient_tolerance(dtype), f"d_hidden {about}")
    claims.close("logprobs", dw, d_weight[mine], gradient_tolerance(dtype), f"d_weight {about}")
    claims.same_bits("logprobs bits", dh, group, f"d_hidden {about}")
    claims.check("logprobs", (dh.dtype, dw.dtype) == (dtype, dtype), f"gradients of {dh.dtype}, {dw.dtype} {about}")


def logprobs(claims: Claims, group: dist.ProcessGroup) -> None:
    draw = random.Random("logprobs")
    for dtype, count in ((torch.float64, 30), (torch.float32, 12), (torch.bfloat16, 8)):
        for _ in range(count):
            logprobs_case(claims, draw, dtype, group)


# -------------------------------------------------------------------------------------------------------- draft losses


def compare(claims: Claims, claim: str, x: Example, loss: DraftLoss, group: dist.ProcessGroup, about: str) -> None:
    dtype = x.hidden.dtype
    hidden, head, t_hidden, t_head, weight = x.tensors(torch.float64)
    bias = None if x.bias is None else (x.bias[0].double(), x.bias[1].double())
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, head, *(bias or ()))]
    given = tuple(leaves[2:]) or None
    want = loss(*leaves[:2], t_hidden, t_head, weight, x.ids, x.teacher_rows, x.scored, labels=x.labels, bias=given)
    wanted = torch.autograd.grad(want.loss * 1.7, leaves)

    vocab, my_head, rows, my_ids = split_of(x, group)
    my_bias = () if x.bias is None else (x.bias[0], x.bias[1][rows])
    mine = [tensor.clone().requires_grad_() for tensor in (x.hidden, my_head, *my_bias)]
    t_head = x.teacher_head[vocab.start : vocab.stop]
    out = loss(
        *mine[:2], x.teacher_hidden, t_head, x.weight, my_ids, x.teacher_rows, x.scored, vocab,
        labels=x.labels, bias=tuple(mine[2:]) or None,
    )  # fmt: skip
    grads = torch.autograd.grad(out.loss * 1.7, mine)
    for name in ("loss", "each", "alpha", "label_prob"):
        found = getattr(out, name).detach()
        claims.close(claim, found, getattr(want, name).detach(), TOLERANCE[dtype], f"{name} {about}")
        claims.same_bits(f"{claim} bits", found, group, f"{name} {about}")
    for name in ("agree", "valid"):
        claims.check(claim, torch.equal(getattr(out, name), getattr(want, name)), f"{name} {about}")
    for number, (found, wish) in enumerate(zip(grads, wanted, strict=True)):
        name = ("d_hidden", "d_head", "d_rows", "d_table")[number]
        split = number % 2  # the head and the table
        claims.close(claim, found, wish[rows] if split else wish, gradient_tolerance(dtype), f"{name} {about}")
        claims.check(claim, found.dtype == dtype, f"{name} is {found.dtype} {about}")
        if not split:
            claims.same_bits(f"{claim} bits", found, group, f"{name} {about}")


def draft(claims: Claims, group: dist.ProcessGroup) -> None:
    draw = random.Random("draft")
    ranks = dist.get_world_size(group)
    for dtype, count in ((torch.float64, 12), (torch.float32, 6), (torch.bfloat16, 3)):
        for name, make in LOSSES.items():
            for _ in range(count):
                x = example(draw, dtype, ranks)
                options: dict[str, Any] = {
                    "teacher_temperature": draw.choice([1.0, 0.7]),
                    "out_of_vocab": draw.choice(["renormalise", "drop"]),
                    "chunk": draw.choice([None, 2, 5, 8]),
                }
                ids = None if x.ids is None else x.ids.tolist()
                about = f"{name} R={len(x.hidden)} V={len(x.teacher_head)} ids={ids} {dtype} {options}"
                compare(claims, "draft", x, make(**options), group, about)


def reduced_borders(claims: Claims, group: dist.ProcessGroup) -> None:
    """Maps that leave every rank but one empty, and one that gives each rank a part: V = 50, as for padded heads."""
    g = torch.Generator().manual_seed(5)
    ranks, size = dist.get_world_size(group), 50
    each = -(-size // ranks)
    maps = [torch.arange(size)[rank * each : (rank + 1) * each] for rank in range(ranks)]
    maps += [torch.tensor([0, each - 1, each, size - 1]), torch.tensor([size - 1]), torch.tensor([0])]
    for ids in maps:
        for drop in ("renormalise", "drop"):
            values = randn(g, 12, 4), randn(g, ids.numel(), 4), randn(g, 12, 6), randn(g, size, 6)
            labels, bias = torch.randint(-1, size, (12,), generator=g), (randn(g, 12, 2), randn(g, ids.numel(), 2))
            labels[:3] = ids[[0, -1, 0]]
            x = Example(*values, torch.ones(12), ids, None, None, labels, bias)
            for name, make in LOSSES.items():
                compare(
                    claims, "empty parts", x, make(out_of_vocab=drop, chunk=5), group, f"{name} {drop} {ids.tolist()}"
                )


def ties(claims: Claims, group: dist.ProcessGroup) -> None:
    """Equal logits on both sides of a border, of teacher and draft: the lowest id wins, as on one rank."""
    g = torch.Generator().manual_seed(9)
    size, each = 50, -(-50 // dist.get_world_size(group))
    for first, second in ((each - 1, each), (3, size - 1), (each, size - 2)):
        for reduced in (False, True):
            teacher_head, teacher_hidden = randn(g, size, 6).clamp(-1, 1), torch.ones(8, 6, dtype=torch.float64)
            teacher_head[[first, second]] = 2.0
            ids = torch.tensor(sorted({0, first, second, size - 1})) if reduced else None
            Vd = size if ids is None else ids.numel()
            head = randn(g, Vd, 4).clamp(-1, 1)
            names = torch.arange(size) if ids is None else ids
            head[torch.isin(names, torch.tensor([first, second]))] = 2.0
            hidden = torch.cat([torch.ones(4, 4), torch.zeros(4, 4)]).double()  # zeros: every token is as likely
            x = Example(hidden, head, teacher_hidden, teacher_head, torch.ones(8), ids, None, None)
            compare(claims, "ties", x, SoftCrossEntropy(chunk=3), group, f"{first} {second} {reduced}")
            out = SoftCrossEntropy()(*x.tensors(torch.float64), ids)
            claims.check("ties", bool(out.agree[:4].all()), "the example has no tie that agrees")
            # Only the higher of the two in the draft's vocabulary: the policy's token is then not in it.
            x = Example(
                hidden, head[1:2], teacher_hidden, teacher_head, torch.ones(8), torch.tensor([second]), None, None
            )
            compare(claims, "ties", x, SoftCrossEntropy(out_of_vocab="drop"), group, f"drop {first} {second}")
            claims.check(
                "ties", not SoftCrossEntropy(out_of_vocab="drop")(*x.tensors(torch.float64), x.ids).valid.any(), ""
            )


def poison(claims: Claims, group: dist.ProcessGroup) -> None:
    """Rows that are not scored, and unlabelled ones, may hold anything."""
    g = torch.Generator().manual_seed(3)
    weight = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0])
    hidden, teacher = randn(g, 5, 4), randn(g, 5, 6)
    hidden[1::2], teacher[1::2] = torch.nan, torch.inf
    x = Example(hidden, randn(g, 50, 4), teacher, randn(g, 50, 6), weight, None, None, None)
    compare(claims, "poison", x, LK(chunk=2), group, "draft")
    vocab = VocabShard.split(50, group)
    h = hidden.clone().requires_grad_()
    labels = torch.tensor([3, -1, 49, -1, 20])
    lp = linear_logprobs(h, x.head[vocab.start : vocab.stop], labels, vocab=vocab)[0]
    lp.sum().backward()
    assert h.grad is not None
    claims.check("poison", bool(torch.isfinite(lp).all() and torch.isfinite(h.grad).all()), "log-probs")


def prepared(claims: Claims, group: dist.ProcessGroup) -> None:
    """Sweeps with heads prepared once add up to one call over all rows, and have the bits of sweeps without."""
    draw, g = random.Random("prepared"), torch.Generator().manual_seed(6)
    for dtype in (torch.float64, torch.bfloat16):
        for _ in range(6):
            x = example(draw, dtype, dist.get_world_size(group))
            loss = LOSSES[draw.choice(list(LOSSES))](chunk=draw.choice([None, 4]))
            vocab, head, rows, ids = split_of(x, group)
            t_head = x.teacher_head[vocab.start : vocab.stop]
            taught = torch.arange(len(x.hidden)) if x.teacher_rows is None else x.teacher_rows
            heads = prepare_heads(head, t_head, ids, vocab, dtype=dtype)
            assert x.labels is not None
            bias = x.bias or (randn(g, len(x.hidden), 2, dtype=dtype), randn(g, len(x.head), 2, dtype=dtype))
            d_type, results = heads.draft.dtype, []
            for given in (heads, None):
                d_head, d_table = torch.zeros_like(heads.draft), torch.zeros(len(head), bias[1].shape[1]).to(d_type)
                d_rows = torch.zeros_like(bias[0], dtype=d_type)
                half = len(x.hidden) // 2
                swept = [
                    loss.sweep(
                        x.hidden[part], head, x.teacher_hidden, t_head, x.weight[part], ids, taught[part],
                        need_hidden=True, d_head=d_head, vocab=vocab, heads=given, labels=x.labels[part],
                        bias=LowRank(bias[0][part], bias[1][rows], d_rows[part], d_table),
                    )
                    for part in (slice(0, half), slice(half, None))
                ]  # fmt: skip
                hidden = torch.cat([s.d_hidden for s in swept if s.d_hidden is not None])
                alpha = torch.cat([s.alpha for s in swept])
                results.append([swept[0].total + swept[1].total, alpha, hidden, d_head, d_rows, d_table])
            claims.check("prepared", all(map(torch.equal, *results)), f"prepared heads change bits {dtype}")
            whole = x.tensors(torch.float64)
            d_head = torch.zeros_like(whole[1])
            low = LowRank(*(part.double() for part in bias), *(torch.zeros_like(part).double() for part in bias))
            want = loss.sweep(*whole, x.ids, taught, need_hidden=True, d_head=d_head, labels=x.labels, bias=low)
            assert want.d_hidden is not None
            assert low.d_rows is not None
            assert low.d_table is not None
            wanted = [want.total, want.alpha, want.d_hidden, d_head[rows], low.d_rows, low.d_table[rows]]
            for found, wish in zip(results[0], wanted, strict=True):
                claims.close("prepared", found, wish, TOLERANCE[dtype], f"{type(loss).__name__} {dtype}")


# ------------------------------------------------------------------------------------------------- traffic and memory


@contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """Records (name, elements given) of every collective."""
    seen: list[tuple[str, int]] = []
    gather, reduce = dist.all_gather_into_tensor, dist.all_reduce

    def gathered(out: Tensor, values: Tensor, **kw: Any) -> Any:
        seen.append(("gather", values.numel()))
        return gather(out, values, **kw)

    def reduced(values: Tensor, *args: Any, **kw: Any) -> Any:
        seen.append(("sum", values.numel()))
        return reduce(values, *args, **kw)

    with mock.patch.object(dist, "all_gather_into_tensor", gathered), mock.patch.object(dist, "all_reduce", reduced):
        yield seen


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def fits(self, least: int, most: int) -> bool:
        """The lower bound shows that the probe, where it is on, sees inside."""
        return self.largest == 0 if dist.get_rank() else least <= self.largest < most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@contextmanager
def watch() -> Iterator[LargestTensor]:
    """On the first rank; on the others it sees nothing (the first use of a dispatch mode takes seconds)."""
    probe = LargestTensor()
    with probe if dist.get_rank() == 0 else nullcontext():
        yield probe


def traffic(claims: Claims, group: dist.ProcessGroup) -> None:
    """What is sent: scalars a row forward, the hidden gradient once. Nothing [T, V] is made."""
    g = torch.Generator().manual_seed(1)
    T, C, V = 300, 4, 900
    vocab = VocabShard.split(V, group)
    mine = slice(vocab.start, vocab.stop)
    hidden, weight = randn(g, T, C).requires_grad_(), randn(g, V, C)[mine].requires_grad_()
    labels = torch.arange(T) % 50
    labels[: T // 2] = -1
    for entropy, scalars in ((False, 3), (True, 4)):
        with collectives() as seen, watch() as size:
            lp, ent = linear_logprobs(hidden, weight, labels, chunk=16, entropy=entropy, vocab=vocab)
            (lp.sum() if ent is None else lp.sum() + ent.sum()).backward()
        wanted = [("gather", scalars * (T - T // 2)), ("sum", (T - T // 2) * C)]
        claims.check("traffic", seen == wanted, f"log-probs: {seen}, wanted {wanted}")
        claims.check(
            "traffic", size.fits(16 * vocab.rows, T * vocab.rows // 5), f"log-probs make {size.largest} elements"
        )
    more = {"labels": torch.arange(T) * 2, "bias": (randn(g, T, 2).requires_grad_(), randn(g, V, 2)[mine])}
    plain: tuple[dict[str, Any], int, list[int]] = ({}, 4, [T, T * C])
    labelled: tuple[dict[str, Any], int, list[int]] = (more, 6, [T, T * C, T * 2])
    for name, a_chunk, (given, scalars, wanted_sums) in (
        ("ce", 1, plain), ("tv", 2, plain), ("lk", 2, plain), ("mix", 2, plain), ("hard", 1, labelled),
        ("dspark", 2, labelled),
    ):  # fmt: skip
        head = randn(g, V, C)[mine].requires_grad_()
        args = (hidden, head, randn(g, T, 6), randn(g, V, 6)[mine], torch.ones(T))
        with collectives() as seen, watch() as size:
            LOSSES[name](chunk=T // 10)(*args, vocab=vocab, **given).loss.backward()
        gathers = [count for kind, count in seen if kind == "gather"]
        sums = [count for kind, count in seen if kind == "sum"]
        claims.check("traffic", len(gathers) == 10 * (1 + a_chunk), f"{name}: {len(gathers)} gathers")
        claims.check("traffic", max(gathers) <= scalars * T // 10, f"{name}: gathers of {max(gathers)}")
        claims.check("traffic", sums == wanted_sums, f"{name}: sums {sums}")
        claims.check(
            "traffic", size.fits(16 * vocab.rows, T * vocab.rows // 5), f"{name} makes {size.largest} elements"
        )
    for empty in (torch.full((T,), -1), torch.zeros(0, dtype=torch.int64)):
        with collectives() as seen:
            lp, _ = linear_logprobs(hidden[: len(empty)], weight, empty, vocab=vocab)
            lp.sum().backward()
        claims.check("traffic", not seen, f"log-probs of no row: {seen}")


def refusals(claims: Claims, group: dist.ProcessGroup) -> None:
    """Every rank refuses before anything is sent."""
    vocab = VocabShard.split(50, group)
    hidden, head, labels = torch.zeros(3, 4), torch.zeros(50, 4), torch.tensor([0, 1, 50])
    part = head[vocab.start : vocab.stop]
    heads = prepare_heads(part, part, None, vocab, dtype=torch.float32)
    claims.check("refusals", heads.draft is heads.teacher, "heads of the same memory are converted twice")
    rows = torch.arange(3)
    ids = torch.arange(50)
    wrong: dict[str, Callable[[], Any]] = {
        "outside the vocabulary": lambda: linear_logprobs(hidden, part, labels, vocab=vocab),
        "of the head": lambda: linear_logprobs(hidden, head, labels, vocab=vocab),
        "teacher's head": lambda: LK()(hidden, part, hidden, head, torch.ones(3), vocab=vocab),
        "VocabShard.part": lambda: LK()(hidden, head, hidden, part, torch.ones(3), ids, vocab=vocab),
        "label 50 is outside": lambda: HardCrossEntropy()(
            hidden, part, hidden, part, torch.ones(3), labels=labels, vocab=vocab
        ),
        "need bias": lambda: LK()(
            hidden, part, hidden, part, torch.ones(3), vocab=vocab, bias=(torch.ones(3, 2), torch.ones(50, 2))
        ),
        "`heads` was made": lambda: LK().sweep(
            hidden.double(),
            part,
            hidden,
            part,
            torch.ones(3),
            None,
            rows,
            need_hidden=False,
            d_head=None,
            vocab=vocab,
            heads=heads,
        ),
    }
    for words, call in wrong.items():
        with collectives() as seen:
            try:
                call()
                claims.check("refusals", False, f"no error with '{words}'")
            except ValueError as error:
                claims.check("refusals", words in str(error) and not seen, f"{error}; {seen}; wanted '{words}'")


def subgroup(claims: Claims, group: dist.ProcessGroup) -> None:
    """Ranks count inside the group: the world's ends form one, every rank between is alone."""
    world = dist.get_world_size()
    members = [sorted({0, world - 1}), *([rank] for rank in range(1, world - 1))]
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, part in zip(members, groups, strict=True):
        if dist.get_rank() in ranks:
            draw = random.Random("subgroup")
            for name, make in LOSSES.items():
                compare(claims, "subgroup", example(draw, torch.float64, len(ranks)), make(chunk=4), part, name)
            for _ in range(4):
                logprobs_case(claims, draw, torch.float64, part)


def main() -> None:
    folder = Path(sys.argv[1])
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    group, claims = dist.group.WORLD, Claims()
    assert group is not None
    for part in (logprobs, draft, reduced_borders, ties, poison, prepared, traffic, refusals, subgroup):
        try:
            part(claims, group)
        except Exception:
            claims.check(part.__name__, False, traceback.format_exc())
            break
    (folder / f"{rank}.json").write_text(json.dumps({"failed": claims.failed, "checks": claims.checks}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
