"""Heads that are converted once for several sweeps."""

from __future__ import annotations

import pytest
import torch

from lightning_spec.errors import ConfigError
from lightning_spec.loss import SoftCrossEntropy, TotalVariation, prepare_heads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [False, True])
def test_sweeps_with_prepared_heads_have_the_bits_of_sweeps_without(dtype: torch.dtype, reduced: bool) -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.tensor([0, 3, 4, 9]) if reduced else None
    hidden, head, teacher, teacher_head = (
        torch.randn(*shape, generator=g).to(dtype) for shape in ((9, 4), (4 if reduced else 11, 4), (9, 6), (11, 6))
    )
    heads = prepare_heads(head, teacher_head, ids, dtype=dtype)
    results = []
    for given in (None, heads):
        d_head = torch.zeros_like(heads.draft)
        swept = TotalVariation(out_of_vocab="drop").sweep(
            hidden, head, teacher, teacher_head, torch.ones(9), ids, torch.arange(9),
            need_hidden=True, d_head=d_head, heads=given,
        )  # fmt: skip
        assert swept.d_hidden is not None
        assert swept.d_hidden.abs().sum() > 0
        results.append((swept.total, swept.each, swept.alpha, swept.d_hidden, d_head))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_heads_of_one_memory_share_one_copy_and_keep_no_graph() -> None:
    head = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    heads = prepare_heads(head, head.detach(), dtype=torch.bfloat16)
    assert heads.draft is heads.teacher
    assert heads.draft.dtype == torch.float32
    assert not heads.draft.requires_grad
    apart = prepare_heads(head, head.detach().clone(), dtype=torch.bfloat16)
    assert apart.draft is not apart.teacher
    assert prepare_heads(head, head.detach(), dtype=torch.float64).draft.dtype == torch.float64


def test_prepared_heads_that_do_not_fit_are_refused() -> None:
    head, hidden = torch.randn(5, 4), torch.randn(3, 4)
    heads = prepare_heads(head, head, dtype=torch.float32)
    for wrong_hidden, wrong_head in ((hidden, head[:4]), (hidden.double(), head)):
        with pytest.raises(ValueError, match="`heads` was made of other heads"):
            SoftCrossEntropy().sweep(
                wrong_hidden, wrong_head, hidden, wrong_head, torch.ones(3), None, torch.arange(3),
                need_hidden=False, d_head=None, heads=heads,
            )  # fmt: skip
    with pytest.raises(ConfigError, match="no map"):
        prepare_heads(head[:3], head, dtype=torch.float32)
    with pytest.raises(ValueError, match="need head"):
        prepare_heads(head[0], head, dtype=torch.float32)
