"""Which layouts a policy can have, and Megatron's configuration of them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import ParallelSizes
from lightning_spec.policy import build_policy, check_layout, new_policy_config, parallel_options, stage_layers
from lightning_spec.policy.config import megatron_config
from lightning_spec.policy.stage import check_config
from lightning_spec.shapes import PolicyShape


def shape_of(**changes: Any) -> PolicyShape:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "intermediate_size": 48,
    }
    return PolicyShape.from_hf(new_policy_config(**{**sizes, **changes}))


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 6}

REFUSED: dict[str, tuple[dict[str, Any], ParallelSizes, dict[str, Any], str]] = {
    "layers": ({"num_layers": 5}, ParallelSizes(1, 2), {}, r"5 layers, 2 virtual stages.*pipeline_layout"),
    "virtual layers": ({}, ParallelSizes(1, 4, 2), {}, r"4 layers, 8 virtual stages.*pipeline_layout"),
    "layout's length": ({}, ParallelSizes(1, 2), {"layout": [1, 1, 2]}, r"found \[1, 1, 2\].*2 numbers.*sum to 4"),
    "layout's sum": ({}, ParallelSizes(1, 2), {"layout": [2, 3]}, r"found \[2, 3\].*sum to 4.*pipeline_layout"),
    "layout's sign": ({}, ParallelSizes(1, 2), {"layout": [-1, 5]}, r"found \[-1, 5\].*0 or more"),
    "heads": ({}, ParallelSizes(3), {}, r"8 heads over 3 ranks.*divisor of 8.*tensor_parallel"),
    "kv heads": (
        {"num_heads": 12, "num_kv_heads": 6, "head_dim": 4},
        ParallelSizes(4),
        {},
        r"6 kv heads over 4 ranks.*tensor_parallel",
    ),
    "rows of the fused projection": (
        {"num_kv_heads": 1, "head_dim": 3},
        ParallelSizes(4),
        {},
        r"30 rows over 4 ranks.*tensor_parallel",
    ),
    "inner size": ({"intermediate_size": 50}, ParallelSizes(4), {}, r"50 over 4.*tensor_parallel"),
    "vocabulary": ({"vocab_size": 3}, ParallelSizes(4), {}, r"3 tokens, 4 ranks"),
    "no tensor ranks": ({}, ParallelSizes(), {"sequence_parallel": True}, r"tensor_parallel: 1.*sequence_parallel"),
    "no experts": ({}, ParallelSizes(expert_parallel=2), {}, r"without experts.*expert_parallel"),
    "experts": (EXPERTS, ParallelSizes(expert_parallel=4), {}, r"6 experts over 4 ranks.*expert_parallel"),
    "experts' rows": (EXPERTS, ParallelSizes(2), {}, r"sequence_parallel: false.*needed sequence_parallel: true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_the_policy_cannot_have_is_refused_by_name(case: str) -> None:
    changes, sizes, options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        check_layout(shape_of(**changes), sizes, **options)


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_more_ranks_than_kv_heads_are_a_layout(ways: int) -> None:
    check_layout(shape_of(), ParallelSizes(ways), sequence_parallel=ways > 1)


def test_layers_are_even_unless_a_layout_says_otherwise() -> None:
    assert stage_layers(4, ParallelSizes()) == (4,)
    assert stage_layers(8, ParallelSizes(1, 2, 2)) == (2, 2, 2, 2)
    assert stage_layers(8, ParallelSizes(1, 2, 2), [3, 3, 2, 0]) == (3, 3, 2, 0)


def test_megatron_reads_the_layout_with_the_embedding_first_and_the_loss_last() -> None:
    sizes = ParallelSizes(2, 2, 2, context_parallel=2)
    options = parallel_options(sizes, sequence_parallel=True, layout=[1, 0, 2, 1])
    config = megatron_config(shape_of(), **options)
    layout = config.pipeline_model_parallel_layout
    assert [[kind.name for kind in stage] for stage in options_of(layout)] == [
        ["embedding", "decoder"],
        [],
        ["decoder", "decoder"],
        ["decoder", "loss"],
    ]
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (2, 2)
    assert (config.virtual_pipeline_model_parallel_size, config.context_parallel_size) == (2, 2)
    assert config.sequence_parallel
    check_config(config)


def options_of(layout: Any) -> list[list[Any]]:
    """Layer kinds of each virtual stage in order; Megatron keeps them by pipeline rank, then chunk."""
    return [layout.layout[rank][chunk] for chunk in range(2) for rank in range(2)]


def test_messages_between_virtual_stages_are_overlapped_and_never_batched() -> None:
    for sizes, virtual in ((ParallelSizes(1, 2, 2), True), (ParallelSizes(1, 2), False), (ParallelSizes(), False)):
        options = parallel_options(sizes, sequence_parallel=False, layout=None)
        assert options["overlap_p2p_comm"] is virtual
        assert options["batch_p2p_comm"] is not virtual


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("perform_initialization", False),
        ("batch_p2p_comm", True),
        ("overlap_p2p_comm", False),
        ("variable_seq_lengths", False),
        ("moe_token_dispatcher_type", "allgather"),
    ],
)
def test_settings_that_give_wrong_numbers_without_an_error_are_refused(field: str, value: Any) -> None:
    options = parallel_options(ParallelSizes(1, 2, 2), sequence_parallel=False, layout=[1, 1, 1, 1])
    config = megatron_config(shape_of(), **options)
    check_config(config)
    setattr(config, field, value)
    with pytest.raises(ConfigError, match=r"unsafe Megatron option.*megatron\."):
        check_config(config)


def test_the_layout_cannot_be_given_twice_nor_differ_from_the_process_groups() -> None:
    with pytest.raises(ConfigError, match=r"the layout decides.*megatron\.tensor_model_parallel_size"):
        build_policy(shape_of(), tensor_model_parallel_size=2)
    for sizes, key in ((ParallelSizes(2), "tensor_parallel"), (ParallelSizes(1, 2), "pipeline_parallel")):
        with pytest.raises(ConfigError, match=rf"another layout.*needed 1.*{key}"):
            build_policy(shape_of(), sizes=sizes)
