"""The policy: Megatron's GPTModel over packed documents, which stops at the final norm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from lightning_spec.attention.rope import RotaryEmbedding
from lightning_spec.attention.zigzag import Shard
from lightning_spec.errors import ConfigError
from lightning_spec.policy.checkpoint import has_weights, load_policy
from lightning_spec.policy.config import megatron_config
from lightning_spec.policy.core_attention import PackedDocuments, SplitAttention, attend_over
from lightning_spec.policy.layer_spec import block_spec
from lightning_spec.policy.weights import initialize, unwrap
from lightning_spec.shapes import PolicyShape


class PolicyModel(GPTModel):
    """A Llama, Qwen2 or Qwen3 decoder from Megatron's layers.

    The forward pass ends at the final norm: a [T, V] tensor of logits is never made here. The losses multiply by
    `head_weight(model)` chunk by chunk; the head is a parameter of this module all the same (`output_layer.weight`,
    or the embedding when tied), so Megatron's optimiser, data parallelism and checkpoints see it as usual.
    """

    def __init__(
        self,
        shape: PolicyShape,
        config: Any,
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

    def forward(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], shard: Shard | None = None) -> Tensor:
        """Packed documents to hidden states.

        Args:
            tokens: int64 [T], documents end to end.
            positions: int64 [T], position inside the document.
            lengths: rows of each document; without a shard they sum to T.
            shard: the T rows are this rank's part of the documents (context parallelism), in the shard's order. All
                ranks of its group call forward, also with T = 0; taps then hold one idle row.

        Returns:
            Final-normed hidden states [T, C]; on a pipeline stage that is not the last, the residual stream [T, 1, C].
        """
        attend = attend_over(lengths, shard, self.split_attention)
        rows = tokens.shape[0]
        if shard is not None and rows == 0:
            # Megatron's reshapes want a row, and the other ranks want this one in every layer's attention.
            tokens, positions = tokens.new_zeros(1), positions.new_zeros(1)
        documents = PackedDocuments.of(self.rope, positions, attend, self.config.params_dtype)
        hidden: Tensor = super().forward(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=None,
            packed_seq_params=documents,
        )
        return hidden[:rows]

    def _postprocess(self, hidden_states: Tensor, **unused: Any) -> Tensor:
        return hidden_states.squeeze(1) if self.post_process else hidden_states


def build_policy(
    shape: PolicyShape,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
    scaled_output_init: bool = False,
    vocab_multiple: int = 1,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    **megatron: Any,
) -> PolicyModel:
    """Build this rank's part of a policy, on CUDA where there is one.

    Args:
        shape: the policy's sizes.
        dtype: of parameters and activations.
        seed: of the random weights; they depend on the seed and the tensor's name only, never on the layout, the
            device or the global generator. None leaves zeros, for a caller that loads a checkpoint next.
        scaled_output_init: divide the standard deviation of the projections back to the residual stream (o_proj,
            down_proj) by sqrt(2 L), as GPT-2 does. Off, as in transformers.
        vocab_multiple: pad the vocabulary's rows up to a multiple of this. `head_weight` and the checkpoints leave
            the padding out.
        pre_process, post_process, vp_stage: which pipeline stage this is; all of the model by default.
        megatron: further fields of Megatron's TransformerConfig.

    Megatron's process groups must exist, and without CUDA the caller is inside `cpu_stand_in()`.
    """
    if vocab_multiple < 1:
        raise ConfigError("bad vocabulary multiple", found=vocab_multiple, needed="1 or more", key="vocab_multiple")
    config = megatron_config(shape, dtype, **megatron)
    model = PolicyModel(
        shape,
        config,
        padded_vocab=-(-shape.vocab_size // vocab_multiple) * vocab_multiple,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )
    if seed is not None:
        initialize(model, seed, scaled_output_init=scaled_output_init)
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    return model


def policy_from_folder(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> PolicyModel:
    """Build the policy that a Hugging Face folder describes and load its weights.

    A folder with a config.json and no weights of any kind is a policy that starts from random weights of `seed`.
    `options` are build_policy's.
    """
    loaded = has_weights(folder)
    model = build_policy(PolicyShape.from_file(folder), dtype=dtype, seed=None if loaded else seed, **options)
    if loaded:
        load_policy(model, folder)
    return model


def head_weight(model: nn.Module) -> Tensor:
    """The language-model head [V, C]: the parameter itself (tied or own), without the rows that pad the vocabulary."""
    policy = unwrap(model)
    if policy.share_embeddings_and_output_weights:
        weight = policy.shared_embedding_or_output_weight()
    else:
        weight = policy.output_layer.weight
    return _without_padding(policy, weight)


def embedding_weight(model: nn.Module) -> Tensor:
    """The input embedding [V, C]: the parameter itself, without the rows that pad the vocabulary."""
    policy = unwrap(model)
    return _without_padding(policy, policy.embedding.word_embeddings.weight)


def _without_padding(policy: PolicyModel, weight: Tensor) -> Tensor:
    vocab = policy.shape.vocab_size
    return weight if weight.shape[0] == vocab else weight[:vocab]
