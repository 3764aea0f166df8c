"""Mixture-of-experts layers: Megatron's dispatcher and experts, our router, and where the experts' weights stand.

The router computes what transformers (and vLLM) compute, in their dtypes. Megatron's own rounds the probabilities to
the model's dtype before it chooses, and always works in float32, which float64 parity could not see through. Its
auxiliary and z losses are left out: they are not sums over tokens, so results would depend on how a step is cut into
micro-batches and spread over ranks.

Experts are never split: tensor-parallel ranks hold whole experts (Megatron's "expert tensor parallel size" 1), and
expert parallelism deals the experts out over consecutive ranks, tensor-parallel ones first.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from lightning_spec.parallel.placement import Placement, Span
from lightning_spec.shapes import ExpertShape, PolicyShape


def route(logits: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, as transformers' Qwen3MoeTopKRouter has them.

    Args:
        logits: [T, E] of the router. The softmax is taken over all experts, in float32 (float64 where they are).

    Returns:
        weights [T, E] in the dtype of `logits`, zero for experts that were not chosen, and the choice, bool [T, E].
    """
    scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, chosen = scores.topk(top_k, dim=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    choice = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    return torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype)), choice


class PolicyRouter(TopKRouter):
    """Megatron's router, for its parameter and its groups, with the arithmetic of `route`."""

    def __init__(self, *args: Any, norm_topk_prob: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm_topk_prob = norm_topk_prob

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows [.., C] to weights and choice [T, E]. Rows that only pad are routed like any other."""
        logits = F.linear(input.reshape(-1, input.shape[-1]), self.weight)
        return route(logits, self.topk, self.norm_topk_prob)


class PolicyExperts(SequentialMLP):
    """This rank's experts, one after the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # An expert is whole on its rank: its projections say that they do without sequence parallelism.
            warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`")
            super().__init__(*args, **kwargs)
        for parameter in self.parameters():
            # Their gradients are summed over the ranks that hold the same experts, which without expert parallelism
            # includes the tensor-parallel ranks (each has rows of its own). Megatron would leave those out then.
            parameter.allreduce = False


def moe_spec(experts: ExpertShape) -> ModuleSpec:
    """The spec of the MLP of a sparse layer."""
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=partial(PolicyRouter, norm_topk_prob=experts.norm_topk_prob),
            experts=ModuleSpec(module=PolicyExperts, submodules=linear),
        ),
    )


def expert_options(shape: PolicyShape) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig that a policy's experts decide."""
    experts = shape.experts
    if experts is None:
        return {"num_moe_experts": None, "moe_ffn_hidden_size": None}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [int(sparse) for sparse in experts.sparse_layers],
        "moe_grouped_gemm": False,
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_input_jitter_eps": None,
        "moe_expert_capacity_factor": None,  # no token is ever dropped
        # PolicyRouter reads no more than the top-k; Megatron checks the others against it.
        "moe_router_topk": experts.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,
    }


def expert_placements(
    shape: PolicyShape, hf: str, mg: str, *, expert_rank: int, expert_size: int
) -> Iterator[tuple[str, Placement]]:
    """Where the router and this rank's experts of one sparse layer stand in Hugging Face's tensors.

    The names are those of checkpoints, one tensor per expert and projection; inside a model, transformers 5 stacks
    all experts of a layer. Every rank holds the whole router.

    Args:
        hf: prefix of the layer in a checkpoint, "model.layers.7."
        mg: prefix of the layer in the policy's parameters, "decoder.layers.0."
        expert_rank, expert_size: this rank's place in its expert-parallel group: it holds the experts from
            rank * num_experts / size on.

    Yields:
        parameter name and placement, by expert number; gate and up of an expert (one parameter) are neighbours.
    """
    experts = shape.experts
    if experts is None:
        raise ValueError(f"{shape.model_type} has no experts")
    hidden, inner, local = shape.hidden_size, experts.intermediate_size, experts.num_experts // expert_size
    yield f"{mg}mlp.router.weight", Placement.whole(f"{hf}mlp.gate.weight", (experts.num_experts, hidden))
    for index in range(local):
        to, parameter = f"{hf}mlp.experts.{expert_rank * local + index}.", f"{mg}mlp.experts.local_experts.{index}."
        for part, name in enumerate(("gate", "up")):
            span = Span(part * inner, inner, 0)
            yield f"{parameter}linear_fc1.weight", Placement(f"{to}{name}_proj.weight", (inner, hidden), (span,))
        yield f"{parameter}linear_fc2.weight", Placement.whole(f"{to}down_proj.weight", (hidden, inner))
