"""Mixture-of-experts layers in vLLM's worker: a work-round for their reload on a CPU, and reading their weights back.

On a CPU the grouped kernel wants the experts' matrices in a packed order (and padded to whole blocks). vLLM 0.32 packs
them at load only: after a reload the plain matrices lie where packed ones are expected, and where nothing is padded
that is a silent wrong result. A packing is a permutation, so packing the numbers of the elements tells where each went.
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_NAME = re.compile(r"(?P<layer>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_DIGIT = 256
"""Numbers below this are exact in every floating dtype that the kernel packs."""


def reload_is_broken() -> bool:
    """Whether a second load leaves the experts unpacked: asked of a layer that records whether it is packed again."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    packed: list[nn.Module] = []
    kernel = SimpleNamespace(fused_experts=SimpleNamespace(process_weights_after_loading=packed.append))
    method: Any = SimpleNamespace(unquantized_backend=UnquantizedMoeBackend.CPU, moe_kernel=kernel)
    layer: Any = nn.Module()
    layer.moe_config = None
    for name in ("w13_weight", "w2_weight"):
        layer.register_parameter(name, nn.Parameter(torch.zeros(1, 2, 2), requires_grad=False))
    UnquantizedFusedMoEMethod._setup_kernel(method, layer, layer.w13_weight, layer.w2_weight)
    return not packed


def mend_reload() -> None:
    """Pack at every load."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_pack(self: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        again = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack


def expert_values(model: nn.Module, name: str) -> tuple[Tensor, tuple[int, int], bool] | None:
    """What the engine computes with for one expert's matrix in a checkpoint.

    Returns:
        The values, unpacked and without padding, the (row, column) where they start in the whole matrix (an engine's
        tensor-parallel ranks split each expert), and whether they are the whole; None for any other tensor.

    Raises:
        KeyError: the model has no such expert.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        layer: Any = model.get_submodule(match["layer"]).routed_experts
    except AttributeError as error:
        raise KeyError(name) from error
    expert, part, config = int(match["expert"]), match["part"], layer.moe_config
    if expert >= layer.local_num_experts:
        raise KeyError(name)
    packed = (layer.w2_weight if part == "down" else layer.w13_weight)[expert].detach()
    values = _unpacked(packed, layer.quant_method)
    width, first = config.intermediate_size_per_partition_unpadded, 0
    rank, whole = config.moe_parallel_config.tp_rank, config.moe_parallel_config.tp_size == 1
    if part == "down":
        return values[: config.hidden_dim_unpadded, :width], (0, rank * width), whole
    if part == "up":
        first = values.shape[0] // 2
    return values[first : first + width, : config.hidden_dim_unpadded], (rank * width, 0), whole


def _unpacked(packed: Tensor, method: Any) -> Tensor:
    """The plain matrix [O, I] of one expert; on a GPU it is that already."""
    experts = method.moe_kernel.fused_experts
    isa = getattr(experts, "isa", None)
    if isa is None or getattr(experts, "_use_zentorch", False):
        return packed
    from vllm._custom_ops import cpu_prepack_moe_weight

    count = packed.numel()
    numbers = torch.arange(count).view(1, *packed.shape)
    source = torch.zeros(count, dtype=torch.int64)
    for place in range(max(1, math.ceil(math.log(count, _DIGIT)))):
        digit = (numbers // _DIGIT**place % _DIGIT).to(packed.dtype)
        source += cpu_prepack_moe_weight(digit, isa).flatten().to(torch.int64) * _DIGIT**place
    return torch.empty_like(packed).view(-1).index_copy_(0, source, packed.reshape(-1)).view(packed.shape)
