"""The policy: Megatron's GPTModel over packed documents, which stops at the final norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lightning_spec.attention.rope import RotaryEmbedding
from lightning_spec.attention.zigzag import Shard
from lightning_spec.errors import ConfigError
from lightning_spec.loss.vocab import VocabShard
from lightning_spec.parallel.groups import ParallelSizes, PipelineParallel, TensorParallel, strategy_key
from lightning_spec.policy.checkpoint import has_weights, load_policy
from lightning_spec.policy.config import megatron_config
from lightning_spec.policy.core_attention import PackedDocuments, Padded, SplitAttention, attend_over
from lightning_spec.policy.initial import initialize
from lightning_spec.policy.layer_spec import block_spec
from lightning_spec.policy.stage import check_config, check_layout, parallel_options, stage_layers
from lightning_spec.policy.weights import Holding, Model, chunks
from lightning_spec.shapes import PolicyShape


class PolicyModel(GPTModel):
    """A decoder from Megatron's layers, or one chunk of it: the layers of one virtual pipeline stage.

    The forward pass ends at the final norm: a [T, V] tensor of logits is never made here. The losses multiply by
    `head_weight(model)` chunk by chunk; the head is a parameter of this module all the same (`output_layer.weight`,
    or the embedding when tied), so Megatron's optimiser, data parallelism and checkpoints see it as usual.
    """

    def __init__(
        self,
        shape: PolicyShape,
        config: TransformerConfig,
        *,
        padded_vocab: int,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(shape, config, vp_stage),
            vocab_size=padded_vocab,
            max_sequence_length=shape.max_positions,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",
            vp_stage=vp_stage,
        )
        self.shape = shape
        rope = shape.rope
        # A plain object, not a submodule: it has nothing to save, and its tables are made for each micro-batch.
        self.rope = RotaryEmbedding(rope.head_dim, rope.theta, rope.max_positions, rope.scaling, rope.partial_factor)
        self.split_attention: SplitAttention = "ring"
        """How documents are attended that several ranks share; the strategy decides."""

    def padded_rows(self, rows: int) -> int:
        """Rows that the residual stream holds for a micro-batch of `rows`, over all tensor-parallel ranks.

        At least one, as Megatron's reshapes want it, and under sequence parallelism as many on each rank. The rows
        behind the real ones are idle: attention leaves them out, and the hidden states that come back lack them.
        """
        share = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        return max(1, -(-rows // share)) * share

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], shard: Shard | None = None) -> Tensor:
        """Packed documents to hidden states. All tensor-parallel ranks get the same arguments.

        Args:
            tokens: int64 [T], documents end to end. T may be 0. Only the chunk with the embedding looks at them;
                the others take the stream that the schedule has set as input, and need positions and lengths alone.
            positions: int64 [T], position inside the document.
            lengths: rows of each document; without a shard they sum to T.
            shard: the T rows are this rank's part of the documents (context parallelism), in the shard's order. All
                ranks of its group call forward, also with T = 0.

        Returns:
            On the last stage final-normed hidden states [T, C], all rows on every tensor-parallel rank. Their gradient
            must be complete on every rank: what comes from shards of the head is summed by who uses them.
            On any other stage the residual stream as the schedule sends it, [rows, 1, C]: `padded_rows(T)` rows, or
            this rank's share of them under sequence parallelism.
        """
        rows = positions.shape[0]
        padding = self.padded_rows(rows) - rows
        attend = attend_over(lengths, shard, self.split_attention)
        if padding:
            attend = Padded(attend, rows)
            tokens, positions = (torch.cat((x, x.new_zeros(padding))) for x in (tokens, positions))
        documents = PackedDocuments.of(self.rope, positions, attend, self.config.params_dtype)
        hidden: Tensor = super().forward(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=None,
            packed_seq_params=documents,
        )
        return hidden[:rows] if self.post_process else hidden

    def _postprocess(self, hidden_states: Tensor, **unused: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        hidden = hidden_states.squeeze(1)
        if self.config.sequence_parallel:
            # Backward takes this rank's rows and sums nothing: every rank is given the whole gradient.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden


class PolicyChunks(nn.ModuleList):
    """The chunks of one rank under virtual pipeline stages, in order: chunk c is virtual stage c * P + rank."""

    def __init__(self, models: Iterable[PolicyModel]) -> None:
        super().__init__(models)

    @property
    def config(self) -> TransformerConfig:
        return chunks(self)[0].config

    @property
    def shape(self) -> PolicyShape:
        return chunks(self)[0].shape

    @property
    def split_attention(self) -> SplitAttention:
        return chunks(self)[0].split_attention

    @split_attention.setter
    def split_attention(self, split: SplitAttention) -> None:
        for chunk in chunks(self):
            chunk.split_attention = split


Policy = PolicyModel | PolicyChunks


def build_policy(
    shape: PolicyShape,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
    scaled_output_init: bool = False,
    vocab_multiple: int = 1,
    sizes: ParallelSizes | None = None,
    sequence_parallel: bool = False,
    layout: Sequence[int] | None = None,
    **megatron: Any,
) -> Policy:
    """Build this rank's part of a policy, on CUDA where there is one. Collective over the pipeline's ranks.

    Args:
        shape: the policy's sizes.
        dtype: of parameters and activations.
        seed: of the random weights; they depend on the seed and the tensor's name only, never on the layout, the
            device or the global generator. None leaves zeros, for a caller that loads a checkpoint next.
        scaled_output_init: divide the standard deviation of the projections back to the residual stream (o_proj,
            down_proj) by sqrt(2 L), as GPT-2 does. Off, as in transformers.
        vocab_multiple: pad the vocabulary's rows up to a multiple of this, and of the tensor-parallel ranks.
            `head_weight` and the checkpoints leave the padding out.
        sizes: how the model is split; those of the process groups.
        sequence_parallel: tensor-parallel ranks split the rows of norms and residual stream.
        layout: decoder layers of each virtual pipeline stage in order; even stages by default.
        megatron: further fields of Megatron's TransformerConfig.

    Returns:
        a PolicyModel; under virtual pipeline stages a PolicyChunks.

    Megatron's process groups must exist, and without CUDA the caller is inside `cpu_stand_in()`.

    Raises:
        ConfigError: a layout that this policy cannot have, or that the process groups do not.
    """
    if vocab_multiple < 1:
        raise ConfigError("bad vocabulary multiple", found=vocab_multiple, needed="1 or more", key="vocab_multiple")
    sizes = sizes or ParallelSizes()
    check_layout(shape, sizes, sequence_parallel=sequence_parallel, layout=layout)
    _check_groups(sizes)
    layers = stage_layers(shape.num_layers, sizes, layout)
    laid_out = parallel_options(sizes, sequence_parallel=sequence_parallel, layout=layers)
    if taken := sorted(set(laid_out) & set(megatron)):
        raise ConfigError(
            "a Megatron option that the layout decides",
            found=f"{taken[0]}={megatron[taken[0]]!r}",
            needed="no such entry; the strategy has the parallel sizes",
            key=f"megatron.{taken[0]}",
        )
    config = megatron_config(shape, dtype, **laid_out, **megatron)
    check_config(config)
    multiple = math.lcm(vocab_multiple, sizes.tensor_parallel)
    padded_vocab = -(-shape.vocab_size // multiple) * multiple
    rank, virtual = PipelineParallel().rank, sizes.virtual_pipeline
    stages = [chunk * sizes.pipeline_parallel + rank for chunk in range(virtual)]
    models = [
        PolicyModel(
            shape,
            config,
            padded_vocab=padded_vocab,
            pre_process=stage == 0,
            post_process=stage == sizes.stages - 1,
            vp_stage=chunk if virtual > 1 else None,
        )
        for chunk, stage in enumerate(stages)
    ]
    policy: Policy = models[0] if virtual == 1 else PolicyChunks(models)
    if seed is not None:
        initialize(policy, seed, scaled_output_init=scaled_output_init)
    if torch.cuda.is_available():
        policy.cuda(torch.cuda.current_device())
    return policy


def policy_from_folder(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> Policy:
    """Build the policy that a Hugging Face folder describes and load its weights, this rank's part of both.

    A folder with a config.json and no weights of any kind is a policy that starts from random weights of `seed`.
    `options` are build_policy's.
    """
    loaded = has_weights(folder)
    policy = build_policy(PolicyShape.from_file(folder), dtype=dtype, seed=None if loaded else seed, **options)
    if loaded:
        load_policy(policy, folder)
    return policy


def _check_groups(sizes: ParallelSizes) -> None:
    """The groups split the parameters whatever the config says: another size there gives wrong numbers, no error."""
    for name, ranks in (("tensor_parallel", TensorParallel()), ("pipeline_parallel", PipelineParallel())):
        if getattr(sizes, name) != ranks.size:
            raise ConfigError(
                "the process groups have another layout than the policy is built for",
                found=f"{name}={getattr(sizes, name)}",
                needed=ranks.size,
                key=strategy_key(name),
            )


def vocab_shard(model: Model) -> VocabShard | None:
    """Which rows of the vocabulary `head_weight` and `embedding_weight` give here; None without tensor parallelism."""
    chunk = chunks(model)[0]
    group = chunk.pg_collection.tp
    if group.size() == 1:
        return None
    start, stop = Holding.of(chunk).vocabulary(chunk.shape)
    return VocabShard(start, stop, chunk.shape.vocab_size, group)


def head_weight(model: Model) -> Tensor:
    """This rank's rows of the language-model head, [V, C] or those of `vocab_shard`: the parameter itself (tied or
    own), without the rows that pad the vocabulary.

    Raises:
        RuntimeError: the head is on another pipeline stage.
    """
    chunk = chunks(model)[-1]
    if not chunk.post_process:
        raise RuntimeError("the policy's head is on the last pipeline stage, not on this one")
    if chunk.share_embeddings_and_output_weights:
        return _without_padding(chunk, chunk.shared_embedding_or_output_weight())
    return _without_padding(chunk, chunk.output_layer.weight)


def embedding_weight(model: Model) -> Tensor:
    """This rank's rows of the input embedding, as head_weight. A tied policy has them on its last stage too.

    Raises:
        RuntimeError: the embedding is on another pipeline stage.
    """
    parts = chunks(model)
    if parts[0].pre_process:
        return _without_padding(parts[0], parts[0].embedding.word_embeddings.weight)
    if parts[-1].post_process and parts[-1].share_embeddings_and_output_weights:
        return head_weight(model)
    raise RuntimeError("the policy's embedding is on the first pipeline stage, not on this one")


def _without_padding(policy: PolicyModel, weight: Tensor) -> Tensor:
    start, stop = Holding.of(policy).vocabulary(policy.shape)
    return weight if weight.shape[0] == stop - start else weight[: stop - start]
