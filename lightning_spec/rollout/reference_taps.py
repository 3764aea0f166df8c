"""What the reference engine's drafts read of the policy: hidden states, caught while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Taps:
    """Catches the states of a transformers model that a draft asks for, with every forward until `close`.

    Args:
        model: a causal language model of transformers.
        layers: ids of layers whose input is read, ascending; id L, the number of layers, is what the last one gives,
            before the final norm.
        normed: read the states after the final norm instead.
    """

    def __init__(self, model: Any, layers: Sequence[int], normed: bool) -> None:
        decoder = model.get_decoder()
        blocks = [*decoder.layers, decoder.norm]
        self._found: dict[int, Tensor] = {}
        self._wanted = [len(blocks)] if normed else list(layers)
        self._handles = [] if normed else [blocks[i].register_forward_pre_hook(self._catch(i)) for i in layers]
        if normed:
            self._handles.append(decoder.norm.register_forward_hook(self._catch(len(blocks))))

    def _catch(self, number: int) -> Any:
        def keep(module: Any, args: tuple[Tensor, ...], output: Tensor | None = None) -> None:
            self._found[number] = args[0] if output is None else output

        return keep

    def take(self) -> Tensor | None:
        """[n, taps*C] of the last forward's n tokens, side by side; None where nothing is read."""
        if not self._wanted:
            return None
        states = torch.cat([self._found[number][0] for number in self._wanted], dim=-1)
        self._found = {}
        return states

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
