"""Multi-token-prediction heads in MiMo's format, as vLLM's `mtp` method serves them.

vLLM runs the first MTP layer again for every further proposal, on its own output after the final norm. That is the
anchor frame of EAGLE-3, so training is the same: N passes, the keys of pass 0 are the trunk. The policy is a constant:
the loss reaches the head's own parameters alone (decoupled heads), whoever trains the policy beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_spec.draft.base import DraftInputs, need_built
from lightning_spec.draft.chained import ChainedDraft, Recycle, Weighting
from lightning_spec.draft.checkpoint import assign, read_tensors, write_checkpoint
from lightning_spec.draft.config import KEY, read_config, rotary
from lightning_spec.draft.layers import MLP, Attention, Linear, PassLayer, RMSNorm
from lightning_spec.draft.mtp_config import READS, MTPConfig, checkpoint_config, new_config
from lightning_spec.errors import ConfigError
from lightning_spec.shapes import PolicyShape

PREFIX = "model.mtp_layers.0."
"""Of the tensors of the layer that is trained and served. What else a folder holds is left alone."""


class MTPLayer(PassLayer):
    """x = input_proj([norm(hidden) ; norm(embedding)]) through a layer of Qwen2 (vLLM's mimo_mtp.py)."""

    def __init__(self, config: MTPConfig, dtype: torch.dtype, generator: torch.Generator):
        super().__init__()
        hidden, eps, out_gain = config.hidden_size, config.norm_eps, 2**-0.5
        self.token_layernorm = RMSNorm(hidden, eps, dtype)
        self.hidden_layernorm = RMSNorm(hidden, eps, dtype)
        self.input_proj = Linear(2 * hidden, hidden, dtype, generator)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.self_attn = Attention(
            hidden,
            hidden,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            generator,
            out_gain,
            bias=True,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.mlp = MLP(hidden, config.intermediate_size, dtype, generator, out_gain)
        self.final_layernorm = RMSNorm(hidden, eps, dtype)

    def enter(self, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        x = self.input_proj(torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedding)), -1))
        return self.input_layernorm(x), x


class MTP(ChainedDraft):
    """One MTP layer, the policy's own or a new one, trained on its own recycled states. Embedding and head are the
    policy's, detached.

    Arguments left at null are read from `path`'s config.json, or without a path follow the policy. Given ones must
    agree with the checkpoint.

    Args:
        path: folder of a head to start from: one that `export` wrote, or a MiMo policy that carries its head. Null
            starts a new one.
        num_passes: N, training passes (proposals deep that the head is trained for).
        reads: which states of the policy: `normed`, after its final norm, or `residual`, before it. `auto` is what the
            engine gives (residual for a policy of model_type mimo, else normed); it gives nothing else.
        num_heads, num_kv_heads, intermediate_size: sizes of the layer. A head's size is hidden_size / num_heads.
        recycle: whether gradients flow through the recycled state from pass to pass.
        pass_weights: uniform (1), decay (0.8^i), acceptance (measured by the engine, see `set_acceptance`), or a list.
        max_positions: longest context; rollouts longer than this are refused. May raise a checkpoint's.
        rows_per_step: about how many rows of a step carry draft loss, drawn uniformly; their weights make up for the
            others, so gradients stay unbiased and cost less. Null: all rows.
        chunk_rows: anchors that the streamed engine takes through all passes at a time; 7168 / num_passes by default.
        seed: of the initial weights.
    """

    lm_head = None
    embed_tokens = None
    blank_first = True
    model: nn.ModuleDict

    def __init__(
        self,
        path: str | None = None,
        num_passes: int = 3,
        reads: Literal["auto", "normed", "residual"] = "auto",
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        intermediate_size: int | None = None,
        recycle: Recycle = "full",
        pass_weights: Weighting | list[float] = "uniform",
        max_positions: int | None = None,
        rows_per_step: int | None = None,
        chunk_rows: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(num_passes, recycle, pass_weights, rows_per_step, chunk_rows)
        if reads not in ("auto", *READS):
            raise ConfigError("bad reads", found=reads, needed=f"auto or one of {READS}", key=f"{KEY}.reads")
        self.path, self.seed = path, seed
        self._given: dict[str, Any] = {
            "reads": None if reads == "auto" else reads,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "intermediate_size": intermediate_size,
            "max_positions": max_positions,
        }
        self.config: MTPConfig | None = None

    # ---- building ---------------------------------------------------------------------------------------------------

    def build(self, shape: PolicyShape, *, dtype: torch.dtype = torch.float32, seed: int | None = None) -> None:
        if self.config is not None:
            return
        config = (
            new_config(self._given, shape) if self.path is None else checkpoint_config(self.path, self._given, shape)
        )
        config.check(shape)
        self.reads_hidden = config.reads == "normed"
        self.aux_layer_ids = () if self.reads_hidden else (shape.num_layers,)
        self.rope = rotary(config.rope, config.head_dim, config.max_positions)
        layer = MTPLayer(config, dtype, torch.Generator().manual_seed(self.seed if seed is None else seed))
        # So that parameters have the engine's names.
        self.model = nn.ModuleDict({"mtp_layers": nn.ModuleList([layer])})
        self.config = config
        if self.path is not None:
            self.load_tensors(read_tensors(self.path, PREFIX), str(self.path))

    def built(self) -> MTPConfig:
        return need_built(self.config)

    # ---- the passes -------------------------------------------------------------------------------------------------

    @property
    def layer(self) -> MTPLayer:
        (layer,) = self.decoder_layers()
        return layer

    def decoder_layers(self) -> list[MTPLayer]:
        return [layer for layer in self.model.modules() if isinstance(layer, MTPLayer)]

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.input_proj.weight.dtype

    def read(self, inputs: DraftInputs) -> DraftInputs:
        return replace(inputs, features=inputs.hidden) if self.reads_hidden else inputs

    def fuse(self, features: Tensor) -> Tensor:
        return features.to(self.dtype)

    def fuse_products(self) -> int:
        return 0

    def states_read(self) -> int:
        return 1

    def normed(self, output: Tensor) -> Tensor:
        return self.layer.final_layernorm(output)

    def recycled(self, output: Tensor, normed: Tensor) -> Tensor:
        return normed if self.recycle == "full" else normed.detach()

    # ---- serving and checkpoints ------------------------------------------------------------------------------------

    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]:
        return {"method": "mtp", "num_speculative_tokens": num_speculative_tokens}

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
        self.built()
        self.need_parameters()
        assign(self.state_dict(), tensors, source)

    def export(self, folder: str | Path, tensors: Iterable[tuple[str, Tensor]] | None = None) -> Path:
        held = tensors if tensors is not None else self.engine_tensors()
        return write_checkpoint(folder, self.built().to_json(), dict(held))

    def load(self, folder: str | Path) -> None:
        raw, where = read_config(folder)
        config = self.built()
        config.same(MTPConfig.from_json(raw, config.reads, where), where)
        self.load_tensors(read_tensors(folder, PREFIX), str(folder))

    def fingerprint(self) -> dict[str, Any]:
        return {"class": type(self).__name__, **self.built().to_json()}
