"""One rank of test_draft_tensor_parallel.py: `python draft_tp_worker.py OUT`, with LOCAL_RANK and WORLD_SIZE given.

Every rank builds the same draft and the same packed micro-batch, and takes its part of the vocabulary and, under
context parallelism, its rows. Loss and metrics are compared on each rank (summed over context-parallel ranks alone),
gradients as sums over all ranks, with one rank's plain run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from draft_worker import EXAMPLES, Example, build, make
from one_rank import learn, split

from lightning_spec.attention.context import Context
from lightning_spec.draft import DraftInputs
from lightning_spec.loss.draft import LK, DraftLoss, SoftCrossEntropy, TotalVariation, Weighted
from lightning_spec.loss.vocab import VocabShard

MORE = {
    "one anchor a chunk": Example([7, 4], {"num_passes": 2, "chunk_rows": 1}),
    "two tokens": Example([2], {"num_passes": 3}),
    "no draft token in the upper vocabulary, rows dropped": Example(
        [11, 7], {"num_passes": 3, "draft_vocab_size": 3, "chunk_rows": 4}
    ),
    "overlap losses, own head": Example([12, 5], {"num_passes": 3, "own_head": True, "chunk_rows": 5}),
    "own head, two layers, own embedding": Example(
        [9, 5], {"num_passes": 2, "num_layers": 2, "own_head": True, "own_embedding": True, "chunk_rows": 4}
    ),
}
LOSSES: dict[str, DraftLoss] = {
    "no draft token in the upper vocabulary, rows dropped": TotalVariation(out_of_vocab="drop"),
    "overlap losses, own head": Weighted([SoftCrossEntropy(), LK(), TotalVariation()], [0.5, 0.3, 0.2], chunk=4),
}
WITH_CONTEXT = (
    "packed",
    "one row a document, ranks without rows",
    "one token",
    "nothing sampled",
    "loss on the last row",
    "reduced vocabulary",
    "two layers",
    "three layers, all norms, owned",
    "sampled rows",
    "mtp",
    "float32",
    *MORE,
)
"""Examples for tensor x context parallelism."""
WITHOUT_GRAD = ("packed", "reduced vocabulary", "two layers", "one token")
"""Examples that are also run without grad mode."""
ON_FOUR = (
    "packed",
    "one token",
    "reduced vocabulary",
    "two layers",
    "sampled rows",
    "mtp",
    "own head, two layers, own embedding",
)
"""Examples for four tensor-parallel ranks."""


@dataclass(frozen=True)
class Layout:
    """Tensor-parallel ranks are neighbours, as Megatron orders them."""

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup

    @classmethod
    def of(cls, tensor: int) -> Layout:
        world, rank = dist.get_world_size(), dist.get_rank()
        across = [[c * tensor + t for t in range(tensor)] for c in range(world // tensor)]
        along = [[c * tensor + t for c in range(world // tensor)] for t in range(tensor)]
        groups = [{tuple(ranks): dist.new_group(ranks) for ranks in parts} for parts in (across, along)]
        return cls(*(next(group for ranks, group in made.items() if rank in ranks) for made in groups))

    def share(self, x: DraftInputs) -> DraftInputs:
        """What this rank is given of a whole micro-batch."""
        size, rank = x.policy_head.shape[0], dist.get_rank(self.tensor)
        per = -(-size // dist.get_world_size(self.tensor))
        vocab = VocabShard(rank * per, min((rank + 1) * per, size), size, self.tensor)
        x = replace(x, policy_head=x.policy_head[vocab.start : vocab.stop], policy_embedding=None, vocab=vocab)
        return split(x, Context.of(self.context)) if dist.get_world_size(self.context) > 1 else x


def compare(name: str, example: Example, layout: Layout, frozen: str = "") -> None:
    wide, draft = build(example, torch.float64), build(example, example.dtype)
    x64, x = make(example, torch.float64), make(example, example.dtype)
    totals = {key: value + 2.0 for key, value in wide.counts(x64).items()}  # type: ignore[arg-type]
    for one in (wide, draft):
        for key, parameter in one.named_parameters():
            parameter.requires_grad_(not (frozen and key.startswith(frozen)))
    with torch.no_grad():
        for a, b in zip(wide.parameters(), draft.parameters(), strict=True):
            a.copy_(b)
    loss = LOSSES.get(name, example.loss())
    wide.set_attention("ring")
    want_sums, want_grads = learn(wide, x64, totals, loss)
    alone = dist.get_world_size(layout.context) == 1
    for mode in ("stream", "ring", "ulysses") if name == "packed" and not alone else ("stream", "ring"):
        draft.set_attention(mode)  # type: ignore[arg-type]
        sums, grads = learn(draft, layout.share(x), totals, loss)
        if name in WITHOUT_GRAD:
            with torch.no_grad():
                quiet = draft(layout.share(x), loss, totals)
            assert torch.equal(quiet.loss.double(), sums["loss"])
        for found, want, group in ((sums, want_sums, layout.context), (grads, want_grads, None)):
            assert found.keys() == want.keys()
            for key, value in found.items():
                dist.all_reduce(value, group=group)
                scale = max(1.0, float(want[key].abs().max()))
                error = float((value - want[key]).abs().max()) / scale
                tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.03}[example.dtype]
                assert error < tolerance, f"{name}, {mode}: {key} is off by {error}"


def nothing_trained(layout: Layout) -> None:
    """A frozen draft has its metrics and no graph, and no rank waits for gradients."""
    example = EXAMPLES["packed"]
    draft, x = build(example, torch.float64).requires_grad_(False), make(example, torch.float64)
    draft.set_attention("stream")
    out = draft(layout.share(x), SoftCrossEntropy(), draft.counts(x))  # type: ignore[arg-type]
    assert not out.loss.requires_grad
    assert float(out.loss) > 0


def wrong_head(layout: Layout) -> None:
    """A head that is not the rank's part is refused before any message."""
    draft, x = build(EXAMPLES["packed"], torch.float64), make(EXAMPLES["packed"], torch.float64)
    for mode in ("stream", "ring"):
        draft.set_attention(mode)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="policy_head has 23 rows"):
            draft(replace(layout.share(x), policy_head=x.policy_head), SoftCrossEntropy(), draft.counts(x))  # type: ignore[arg-type]


def main() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    layout, every = Layout.of(2), EXAMPLES | MORE
    state = torch.get_rng_state()
    for name in every if dist.get_world_size() == 2 else WITH_CONTEXT:
        compare(name, every[name], layout)
    if dist.get_world_size() == 2:
        compare("bfloat16", Example([15, 6], {"num_passes": 3, "own_head": True}, dtype=torch.bfloat16), layout)
        for frozen in ("lm_head", "embed_tokens", "midlayer", "fc"):
            compare("own head, two layers, own embedding", every["own head, two layers, own embedding"], layout, frozen)
    else:
        four = Layout.of(4)
        for name in ON_FOUR:
            compare(name, every[name], four)
    wrong_head(layout)
    nothing_trained(layout)
    assert torch.equal(state, torch.get_rng_state()), "the global random state was touched"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
