"""A small language model as the draft, distilled online, as vLLM serves it with method `draft_model`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_spec.batch import PackedBatch
from lightning_spec.draft.base import AttentionMode, Draft, DraftInputs, DraftOutput, Proposal, need_built
from lightning_spec.draft.checkpoint import assign, read_tensors, write_checkpoint
from lightning_spec.draft.config import KEY, rotary
from lightning_spec.draft.layers import DecoderLayer, Linear, RMSNorm
from lightning_spec.draft.lm_config import new_lm, read_lm, same, stored_lm, to_json
from lightning_spec.draft.lm_run import predicted, propose, run
from lightning_spec.draft.step_memory import LayerSizes, model_step
from lightning_spec.draft.tally import Tally, nothing
from lightning_spec.draft.validity import pass_depth
from lightning_spec.errors import CheckpointError, ConfigError
from lightning_spec.shapes import PolicyShape

_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"


class DraftModel(Draft):
    """A causal language model with the policy's vocabulary: Llama, Qwen2 or (dense) Qwen3.

    It reads tokens alone, so row r, which reads x_r and predicts x_{r+1}, is taught by the policy's distribution at the
    same row. A row is scored once, if serving can predict from it: its token was sampled, did not end generation, and
    is not a document's first. Proposal i after a bonus token x_{t+1} comes from row t + 1 + i; metrics are by i, over
    the anchors t that EAGLE-3's pass i has.

    Arguments left at null are read from `path`'s config.json, or without a path follow the policy. Given ones must
    agree with the checkpoint.

    Args:
        path: Hugging Face folder of the model to start from (tokenizer files are not needed); null starts a new one.
        num_proposals: N, proposals that metrics are reported for. The loss does not depend on it.
        model_type: llama, qwen2 or qwen3; the policy's by default (its dense sibling for a mixture of experts).
        num_layers: decoder layers; a new model has 2 by default.
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: sizes.
        tie_embeddings: whether the head is the input embedding.
        max_positions: longest context; rollouts longer than this are refused. May raise a checkpoint's.
        recompute: keep each layer's input only and run the layer again in the backward.
        seed: of the initial weights.
    """

    aux_layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        path: str | None = None,
        num_proposals: int = 3,
        model_type: Literal["llama", "qwen2", "qwen3"] | None = None,
        num_layers: int | None = None,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        tie_embeddings: bool | None = None,
        max_positions: int | None = None,
        recompute: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_proposals < 1:
            raise ConfigError("no proposals", found=num_proposals, needed="at least 1", key=f"{KEY}.num_proposals")
        self.path, self.num_proposals, self.recompute, self.seed = path, num_proposals, recompute, seed
        self._given: dict[str, Any] = {
            "model_type": model_type,
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "tie_embeddings": tie_embeddings,
            "max_positions": max_positions,
        }
        self.config: PolicyShape | None = None

    # ---- building ---------------------------------------------------------------------------------------------------

    def build(self, shape: PolicyShape, *, dtype: torch.dtype = torch.float32, seed: int | None = None) -> None:
        if self.config is not None:
            return
        config = new_lm(self._given, shape) if self.path is None else stored_lm(self.path, self._given, shape)
        self.rope = rotary(config.rope, config.head_dim, config.max_positions)
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        self.model = Decoder(config, dtype, generator)
        tied = config.tied_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, dtype, generator)
        self.config = config
        if self.path is not None:
            self.load_tensors(read_tensors(self.path), str(self.path))

    @torch.no_grad()
    def init_from_policy(self, policy_head: Tensor, policy_embedding: Tensor) -> None:
        """Start a new draft of the policy's width from its embedding and head (a tied one from its head). They are
        copies: vLLM shares no module of a `draft_model` with the policy, equal or not."""
        self.need_parameters()
        if self.path is not None or policy_head.shape[1] != self.built().hidden_size:
            return
        table = self.model.embed_tokens.weight
        if self.lm_head is None:
            table.copy_(policy_head.detach())
        else:
            table.copy_(policy_embedding.detach())
            self.lm_head.weight.copy_(policy_head.detach())

    def set_attention(self, mode: AttentionMode, memory_limit: int | None = None) -> None:
        """As of any draft, but there is no stream: its keys are made of attention's outputs, layer by layer. `auto` is
        the ring."""
        if mode == "stream":
            raise ConfigError(
                "a draft model cannot stream", found=mode, needed="auto, ring or ulysses", key="draft_attention"
            )
        super().set_attention(mode, memory_limit)

    def built(self) -> PolicyShape:
        return need_built(self.config)

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    def head(self) -> Tensor:
        """[V, H]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    # ---- training ---------------------------------------------------------------------------------------------------

    def row_products(self) -> float:
        layers = sum(p.numel() for layer in self.decoder_layers() for p in layer.parameters())
        return (4 if self.recompute else 3) * layers + 3 * self.built().vocab_size * self.built().hidden_size

    def step_memory(self, tokens: int, context: int, bytes_per_element: int) -> int:
        config = self.built()
        return model_step(
            LayerSizes.of(config, qk_norm=config.qk_norm),
            layers=config.num_layers,
            rows=-(-tokens // context),
            vocabulary=config.vocab_size,
            parameters=sum(parameter.numel() for parameter in self.parameters()),
            recompute=self.recompute,
            bytes_per_element=bytes_per_element,
        )

    def counts(self, batch: PackedBatch) -> dict[str, Tensor]:
        return {"draft_rows": predicted(self._depth(batch)).sum(dtype=torch.float64)}

    def forward(self, inputs: DraftInputs, loss: Any, totals: Mapping[str, Tensor | float]) -> DraftOutput:
        self.need_parameters()
        x = inputs.detached()
        depth = self._depth(x)
        if not bool((depth > 0).any()):  # on every rank alike
            tally = Tally(self.num_proposals, 1.0, x.hidden.device)
            return DraftOutput(nothing(self.parameters(), x.hidden), tally.metrics())
        return run(self, x, loss, depth, totals)

    def _depth(self, batch: DraftInputs | PackedBatch) -> Tensor:
        longest = self.built().max_positions
        return pass_depth(batch.positions, batch.sampled, batch.stop, self.num_proposals, longest)

    # ---- serving ----------------------------------------------------------------------------------------------------

    def propose(
        self,
        features: Tensor | None,
        tokens: Tensor,
        lengths: list[int],
        bonus: Tensor,
        k: int,
        *,
        policy_head: Tensor,
        policy_embedding: Tensor,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """As of any draft; nothing of the policy is read."""
        del features, policy_head, policy_embedding
        self.need_parameters()
        return propose(self, tokens, lengths, bonus, k, temperature=temperature, generator=generator)

    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]:
        return {"method": "draft_model", "num_speculative_tokens": num_speculative_tokens}

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
        self.built()
        self.need_parameters()
        assign(self.state_dict(), self._own(tensors, source), source)

    def _own(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> Iterator[tuple[str, Tensor]]:
        """Without what transformers wrote beside the parameters: rotary frequencies, and a copy of a tied head."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if self.lm_head is None and name in (_HEAD, _TABLE):
                found[name] = tensor
            if not name.endswith("rotary_emb.inv_freq") and not (name == _HEAD and self.lm_head is None):
                yield name, tensor
        if len(found) == 2 and not torch.equal(found[_HEAD], found[_TABLE]):
            raise CheckpointError(
                f"{source}: {_HEAD} differs from {_TABLE}, but config.json says tie_word_embeddings: true; set it to "
                "false to keep the head"
            )

    def export(self, folder: str | Path, tensors: Iterable[tuple[str, Tensor]] | None = None) -> Path:
        held = dict(tensors if tensors is not None else self.engine_tensors())
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in held.values()}
        return write_checkpoint(folder, to_json(self.built(), min(dtypes, default=None)), held)

    def load(self, folder: str | Path) -> None:
        found, where = read_lm(str(folder))
        same(self.built(), found, where)
        self.load_tensors(read_tensors(folder), str(folder))

    def fingerprint(self) -> dict[str, Any]:
        return {"class": type(self).__name__, **to_json(self.built())}


class Decoder(nn.Module):
    """Embedding, layers and final norm, under Hugging Face's names."""

    def __init__(self, config: PolicyShape, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size, dtype, generator)
        self.layers = nn.ModuleList(_layer(config, dtype, generator) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)


def _layer(config: PolicyShape, dtype: torch.dtype, generator: torch.Generator) -> DecoderLayer:
    """A plain Llama layer, with the biases and head norms of the family."""
    return DecoderLayer(
        first=False,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inner=config.intermediate_size,
        eps=config.norm_eps,
        norm_before_residual=False,
        dtype=dtype,
        generator=generator,
        out_gain=(2 * config.num_layers) ** -0.5,
        bias=config.attention_bias,
        out_bias=config.output_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
    )
