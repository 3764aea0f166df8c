"""How a policy is laid out over ranks: what can be, and Megatron's configuration of it.

Virtual stages are numbered in the order of the layers; stage s runs on pipeline rank s % P as its chunk s // P.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import ParallelSizes, strategy_key
from lightning_spec.shapes import PolicyShape


def stage_layers(num_layers: int, sizes: ParallelSizes, layout: Sequence[int] | None = None) -> tuple[int, ...]:
    """Decoder layers of each virtual stage, in order: `layout` where one is given, even shares otherwise.

    Raises:
        ConfigError: a layout that does not fit, or layers that do not divide without one.
    """
    key = strategy_key("pipeline_layout")
    if layout is None:
        if num_layers % sizes.stages:
            raise ConfigError(
                "the policy's layers do not divide into pipeline stages",
                found=f"{num_layers} layers, {sizes.stages} virtual stages",
                needed=f"a list of {sizes.stages} numbers of layers that sum to {num_layers}",
                key=key,
            )
        return (num_layers // sizes.stages,) * sizes.stages
    layers = tuple(layout)
    wrong = any(not isinstance(count, int) or isinstance(count, bool) or count < 0 for count in layers)
    if wrong or len(layers) != sizes.stages or sum(layers) != num_layers:
        raise ConfigError(
            "the pipeline's layout does not fit the policy",
            found=list(layers),
            needed=f"{sizes.stages} numbers of layers, 0 or more, that sum to {num_layers}",
            key=key,
        )
    return layers


def check_layout(
    shape: PolicyShape, sizes: ParallelSizes, *, sequence_parallel: bool = False, layout: Sequence[int] | None = None
) -> None:
    """Refuse a layout that the policy cannot have. Needs no process group.

    Raises:
        ConfigError: with the value found, the value needed and the key.
    """
    stage_layers(shape.num_layers, sizes, layout)
    _check_heads(shape, sizes.tensor_parallel)
    _check_experts(shape, sizes, sequence_parallel)
    ways, key = sizes.tensor_parallel, strategy_key("tensor_parallel")
    dense = any(not shape.is_sparse(layer) for layer in range(shape.num_layers))
    if dense and shape.intermediate_size % ways:
        raise ConfigError(
            "the MLP's inner size does not divide over the tensor-parallel ranks",
            found=f"{shape.intermediate_size} over {ways}",
            needed=f"a divisor of {shape.intermediate_size}",
            key=key,
        )
    if shape.vocab_size < ways:
        raise ConfigError(
            "fewer tokens in the vocabulary than tensor-parallel ranks",
            found=f"{shape.vocab_size} tokens, {ways} ranks",
            needed=f"at most {shape.vocab_size}",
            key=key,
        )
    if sequence_parallel and ways == 1:
        raise ConfigError(
            "sequence parallelism without tensor parallelism",
            found="sequence_parallel: true, tensor_parallel: 1",
            needed="sequence_parallel: false",
            key=strategy_key("sequence_parallel"),
        )


def _check_heads(shape: PolicyShape, ways: int) -> None:
    heads, kv = shape.num_heads, shape.num_kv_heads
    key = strategy_key("tensor_parallel")
    if heads % ways:
        raise ConfigError(
            "the query heads do not divide over the tensor-parallel ranks",
            found=f"{heads} heads over {ways} ranks",
            needed=f"a divisor of {heads}",
            key=key,
        )
    if kv % ways and ways % kv:
        raise ConfigError(
            "the key/value heads neither divide over the tensor-parallel ranks nor the ranks over them",
            found=f"{kv} kv heads over {ways} ranks",
            needed=f"a divisor or a multiple of {kv}",
            key=key,
        )
    rows = (heads + 2 * kv) * shape.head_dim
    if rows % ways:
        # With fewer kv heads than ranks Megatron cuts the rows of the fused projection evenly, through heads.
        raise ConfigError(
            "the rows of the fused query/key/value projection do not divide over the tensor-parallel ranks",
            found=f"{rows} rows over {ways} ranks",
            needed=f"a divisor of {rows}",
            key=key,
        )


def _check_experts(shape: PolicyShape, sizes: ParallelSizes, sequence_parallel: bool) -> None:
    experts = shape.experts
    if experts is None:
        if sizes.expert_parallel > 1:
            raise ConfigError(
                "expert parallelism of a policy without experts",
                found=f"expert_parallel={sizes.expert_parallel}, model_type {shape.model_type}",
                needed="expert_parallel: 1, or a mixture-of-experts policy",
                key=strategy_key("expert_parallel"),
            )
        return
    if experts.num_experts % sizes.expert_parallel:
        raise ConfigError(
            "the experts do not divide over the expert-parallel ranks",
            found=f"{experts.num_experts} experts over {sizes.expert_parallel} ranks",
            needed=f"a divisor of {experts.num_experts}",
            key=strategy_key("expert_parallel"),
        )
    if sizes.tensor_parallel > 1 and not sequence_parallel:
        # Every rank would compute every row's experts, and their gradients would be counted once for each.
        raise ConfigError(
            "a mixture-of-experts policy under tensor parallelism needs sequence parallelism",
            found=f"tensor_parallel={sizes.tensor_parallel}, sequence_parallel: false",
            needed="sequence_parallel: true",
            key=strategy_key("sequence_parallel"),
        )


def parallel_options(sizes: ParallelSizes, *, sequence_parallel: bool, layout: Sequence[int] | None) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig that say how the model is laid out.

    Args:
        layout: decoder layers of each virtual stage in order; None for even stages.
    """
    virtual = sizes.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": sizes.tensor_parallel,
        "pipeline_model_parallel_size": sizes.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline if virtual else None,
        "context_parallel_size": sizes.context_parallel,
        "expert_model_parallel_size": sizes.expert_parallel,
        "sequence_parallel": sequence_parallel,
        "pipeline_model_parallel_layout": _megatron_layout(layout) if sizes.stages > 1 and layout is not None else None,
        # Two stages with virtual ones send both ways between the same two ranks: batched messages pair up wrongly,
        # and the numbers are wrong without an error.
        "overlap_p2p_comm": virtual,
        "batch_p2p_comm": not virtual,
    }


def _megatron_layout(layout: Sequence[int]) -> list[list[str]]:
    stages = [["decoder"] * count for count in layout]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def check_config(config: TransformerConfig) -> None:
    """Refuse settings with which Megatron gives wrong numbers without an error, whoever asked for them.

    Raises:
        ConfigError: names Megatron's field.
    """
    if not config.perform_initialization:
        _refuse("perform_initialization", False, "true: gradient norms read what initialisation marks")
    virtual = config.virtual_pipeline_model_parallel_size is not None
    if virtual and (not config.overlap_p2p_comm or config.batch_p2p_comm):
        found = f"overlap_p2p_comm={config.overlap_p2p_comm}, batch_p2p_comm={config.batch_p2p_comm}"
        _refuse("batch_p2p_comm", found, "overlapped and unbatched messages between virtual stages")
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        _refuse("variable_seq_lengths", False, "true: packed micro-batches differ in length")
    if config.variable_seq_lengths and config.moe_token_dispatcher_type != "alltoall":
        _refuse("moe_token_dispatcher_type", config.moe_token_dispatcher_type, "alltoall, with variable_seq_lengths")


def _refuse(name: str, found: Any, needed: str) -> None:
    raise ConfigError("unsafe Megatron option", found=found, needed=needed, key=f"megatron.{name}")
