"""What runs that form gradients chunk by chunk keep of them, and how they reach autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_spec.draft.ahead import Ahead
from lightning_spec.draft.base import DraftInputs
from lightning_spec.draft.head import HeadPart

if TYPE_CHECKING:
    from lightning_spec.draft.chained import ChainedDraft


class Gradients:
    """Sums of gradients in float32 (float64 for float64) of the parameters that are trained, if any are.

    Args:
        by_hand: parameters that autograd is not asked about: what they get is added to `sum_of`.
    """

    def __init__(self, draft: nn.Module, by_hand: Sequence[Tensor] = ()) -> None:
        on = torch.is_grad_enabled()
        self.parameters = [p for p in draft.parameters() if p.requires_grad and on]
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._graph = [n for n, p in enumerate(self.parameters) if not any(p is weight for weight in by_hand)]

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def sum_of(self, parameter: Tensor) -> Tensor | None:
        """The sum of one parameter's gradients, to be added to; None where it is not trained."""
        for n, p in enumerate(self.parameters):
            if p is parameter:
                total = self._sums[n]
                if total is None:
                    total = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                    self._sums[n] = total
                return total
        return None

    def backward(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor], add: bool = True
    ) -> list[Tensor]:
        """Add what `grads` of `outputs` give the parameters (unless another rank does: `add` False); returns the
        gradients of `leaves`."""
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        if not pairs:
            return [torch.zeros_like(leaf) for leaf in leaves]
        inputs = [*leaves, *(self.parameters[n] for n in self._graph)]
        made, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(made, inputs, given, allow_unused=True)
        for n, grad in zip(self._graph, found[len(leaves) :], strict=True):
            total = self._sums[n]
            if grad is None or not add:
                continue
            if total is not None:
                total += grad
            else:
                self._sums[n] = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(leaves, found[: len(leaves)], strict=True)
        ]

    def take(self) -> list[tuple[Tensor, torch.dtype]]:
        """(gradient, the parameter's dtype) of every parameter, zeros where it got none."""
        return [
            (torch.zeros_like(p) if total is None else total, p.dtype)
            for p, total in zip(self.parameters, self._sums, strict=True)
        ]


def formed(run: Callable[[], Tensor], gradients: Gradients) -> Tensor:
    """The scalar that `run` returns, a function of the parameters whose `gradients` it forms on the way: backward only
    scales them."""
    result: Tensor = _Formed.apply(run, gradients, *gradients.parameters)
    return result


class _Formed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], gradients: Gradients, *parameters: Tensor) -> Tensor:
        result = run()
        ctx.gradients = gradients.take()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *((gradient * upstream).to(dtype) for gradient, dtype in ctx.gradients)


class HeadGradient:
    """The gradient of the rows `part` of the draft's own head.

    `rows` [n, H] is to be added to, then `done` called; None where no own head is trained. Consecutive rows are a view
    of the whole gradient. A tensor-parallel rank's part of a reduced vocabulary may be any rows: a tensor of its own.
    """

    def __init__(self, gradients: Gradients, draft: ChainedDraft, part: HeadPart) -> None:
        self._whole = None if draft.lm_head is None else gradients.sum_of(draft.lm_head.weight)
        self._index = part.rows if isinstance(part.rows, Tensor) else None
        self.rows: Tensor | None = None
        if self._whole is not None and part.rows is not None:
            self.rows = self._whole[part.rows] if self._index is None else self._whole.new_zeros(part.weight.shape)

    def done(self) -> None:
        if self._whole is not None and self._index is not None and self.rows is not None:
            self._whole.index_add_(0, self._index, self.rows)


class Lookup:
    """Input embeddings of tokens by their global row. The draft's own ones are leaves, whose gradients are added to the
    table's rows: through autograd each pass would make a gradient as large as the table."""

    def __init__(self, draft: ChainedDraft, x: DraftInputs, gradients: Gradients, ahead: Ahead) -> None:
        self.x, self.ahead = x, ahead
        self.dtype = draft.dtype
        self.table = None if draft.embed_tokens is None else draft.embed_tokens.weight
        self.gradient = None if self.table is None else gradients.sum_of(self.table)
        self.leaves: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def __call__(self, rows: Tensor) -> Tensor:
        """[R, H]."""
        if self.table is None:
            return self.ahead.embeddings[self.ahead.index(rows)].to(self.dtype)
        tokens = self.x.tokens[rows.clamp(max=self.x.tokens.numel() - 1)]
        leaf = self.table.detach()[tokens]
        if self.gradient is not None:
            self._tokens.append(tokens)
            self.leaves.append(leaf.requires_grad_())
        return leaf

    def backward(self, grads: Sequence[Tensor]) -> None:
        """Gradients of `leaves`."""
        for tokens, grad in zip(self._tokens, grads, strict=True):
            assert self.gradient is not None
            self.gradient.index_add_(0, tokens, grad.to(self.gradient.dtype))
