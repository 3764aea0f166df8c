"""EAGLE-3 with test-time-training passes (SEMANTICS.md section 1; arXiv 2503.01840), as vLLM serves it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_spec.draft.base import need_built
from lightning_spec.draft.chained import ChainedDraft
from lightning_spec.draft.checkpoint import assign, read_tensors, tensor_names, write_checkpoint
from lightning_spec.draft.config import KEY, Eagle3Config, read_config, rotary
from lightning_spec.draft.layers import DecoderLayer, Linear, RMSNorm
from lightning_spec.draft.resolve import from_checkpoint, from_policy
from lightning_spec.draft.vocab import VocabMap
from lightning_spec.errors import ConfigError
from lightning_spec.shapes import PolicyShape

_OWNED_TENSORS = {"lm_head.weight": "own_head", "embed_tokens.weight": "own_embedding"}


class Eagle3(ChainedDraft):
    """A draft of 1 to 4 decoder layers that reads taps of the policy and is trained on its own recycled states.

    Arguments left at null are read from `path`'s config.json, or without a path follow the policy. Given ones must
    agree with the checkpoint.

    Args:
        path: folder of a draft to start from, in vLLM's format; null starts a new one.
        num_passes: N, training passes (proposals deep that the draft is trained for).
        num_layers: decoder layers; the first reads the token embedding too.
        hidden_size: width; another than the policy's needs own_head and own_embedding.
        intermediate_size, num_heads, num_kv_heads, head_dim: sizes of the layers.
        draft_vocab_size: size of a reduced vocabulary; needs a map.
        vocab_map: file with the reduced vocabulary: .safetensors with d2t, or .json with target_ids or counts.
        aux_layer_ids: taps, as transformers counts hidden_states; (2, L//2, L-3) by default.
        own_head: whether the draft has a head of its own or borrows the policy's (detached, always the live one). False
            drops the head of a checkpoint that has one. Reduced vocabularies always have their own.
        own_embedding: the same for the input embedding.
        norm_before_residual: the residual starts from the normed recycled state.
        norm_before_fc: one RMS norm over the concatenated taps.
        fc_norm: one RMS norm for each tap.
        norm_output: the recycled state is taken after the final norm instead of before.
        recycle: whether gradients flow through the recycled state from pass to pass.
        pass_weights: uniform (1), decay (0.8^i), acceptance (measured by the engine, see `set_acceptance`), or a list.
        max_positions: longest context; rollouts longer than this are refused. May raise a checkpoint's: many published
            drafts declare the length they were trained at, and rotary positions have no end.
        rows_per_step: about how many rows of a step carry draft loss, drawn uniformly; their weights make up for the
            others, so gradients stay unbiased and cost less. Null: all rows.
        chunk_rows: anchors that the streamed engine takes through all passes at a time; 7168 / num_passes by default,
            so that its memory does not grow with the passes. Tensor-parallel ranks cut them among each other.
        seed: of the initial weights.
    """

    norm: RMSNorm
    fc: Linear
    midlayer: DecoderLayer
    d2t: Tensor | None

    def __init__(
        self,
        path: str | None = None,
        num_passes: int = 3,
        num_layers: int | None = None,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        draft_vocab_size: int | None = None,
        vocab_map: str | None = None,
        aux_layer_ids: list[int] | None = None,
        own_head: bool | None = None,
        own_embedding: bool | None = None,
        norm_before_residual: bool | None = None,
        norm_before_fc: bool | None = None,
        fc_norm: bool | None = None,
        norm_output: bool | None = None,
        recycle: Literal["full", "detach"] = "full",
        pass_weights: Literal["uniform", "decay", "acceptance"] | list[float] = "uniform",
        max_positions: int | None = None,
        rows_per_step: int | None = None,
        chunk_rows: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(num_passes, recycle, pass_weights, rows_per_step, chunk_rows)
        self.path, self.seed = path, seed
        self.vocab_map = vocab_map
        self._given: dict[str, Any] = {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "draft_vocab_size": draft_vocab_size,
            "aux_layer_ids": None if aux_layer_ids is None else tuple(aux_layer_ids),
            "own_head": own_head,
            "own_embedding": own_embedding,
            "norm_before_residual": norm_before_residual,
            "norm_before_fc": norm_before_fc,
            "fc_norm": fc_norm,
            "norm_output": norm_output,
            "max_positions": max_positions,
        }
        self._map: VocabMap | None = None
        self.config: Eagle3Config | None = None

    # ---- building ---------------------------------------------------------------------------------------------------

    def use_vocab_map(self, vocab: VocabMap) -> None:
        """Give the reduced vocabulary from code (e.g. `VocabMap.from_counts`); before `build`."""
        self._map = vocab

    def build(self, shape: PolicyShape, *, dtype: torch.dtype = torch.float32, seed: int | None = None) -> None:
        if self.config is not None:
            return
        if self._map is None and self.vocab_map is not None:
            size = self._given["draft_vocab_size"]
            self._map = VocabMap.from_file(self.vocab_map, size, shape.vocab_size)
        if self.path is not None:
            config, self._map = from_checkpoint(self.path, self._given, self._map, shape)
        else:
            config, self._map = from_policy(self._given, self._map, shape)
        config.check(shape)
        self._policy_layers = shape.num_layers
        self.aux_layer_ids = config.aux_layer_ids
        self.rope = rotary(config.rope, config.head_dim, config.max_positions)
        self._make_parameters(config, dtype, torch.Generator().manual_seed(self.seed if seed is None else seed))
        self.config = config
        if self.path is not None:
            self.load_tensors(read_tensors(self.path), str(self.path))

    def _make_parameters(self, config: Eagle3Config, dtype: torch.dtype, generator: torch.Generator) -> None:
        taps, width, hidden = len(config.aux_layer_ids), config.policy_hidden_size, config.hidden_size
        eps = config.norm_eps
        self.input_norm = RMSNorm(taps * width, eps, dtype) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps, dtype) for _ in range(taps)) if config.fc_norm else None
        self.fc = Linear(taps * width, hidden, dtype, generator)
        layers = [
            DecoderLayer(
                first=number == 0,
                hidden=hidden,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                inner=config.intermediate_size,
                eps=eps,
                norm_before_residual=config.norm_before_residual,
                dtype=dtype,
                generator=generator,
                out_gain=(2 * config.num_layers) ** -0.5,
            )
            for number in range(config.num_layers)
        ]
        self.midlayer = layers[0]
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers) if number})
        self.norm = RMSNorm(hidden, eps, dtype)
        self.lm_head = Linear(hidden, config.draft_vocab_size, dtype, generator) if config.own_head else None
        self.embed_tokens = Linear(hidden, config.vocab_size, dtype, generator) if config.own_embedding else None
        self.register_buffer("d2t", self._map.d2t if self._map is not None else None)

    @torch.no_grad()
    def init_from_policy(self, policy_head: Tensor, policy_embedding: Tensor) -> None:
        """Start a new draft's own head and embedding from the policy's (where the widths agree), and refuse a loaded
        one that equals the policy's.

        Engines share modules whose weights are equal at load, and a later refit of the draft would then overwrite the
        policy: so the copies are perturbed by one part in a thousand. Call after `build`, before `export`.
        """
        self.need_parameters()
        generator = torch.Generator().manual_seed(self.seed + 1)
        owned = (
            ("own_head", self.lm_head, policy_head, self.target_ids()),
            ("own_embedding", self.embed_tokens, policy_embedding, None),
        )
        for name, module, source, rows in owned:
            if module is None:
                continue
            source = source.detach() if rows is None else source.detach()[rows.to(source.device)]
            if self.path is None and module.weight.shape == source.shape:
                noise = 1 + 1e-3 * torch.randn(source.shape, generator=generator).to(source.device)
                module.weight.copy_(source * noise)
            if rows is None and module.weight.shape == source.shape and torch.equal(module.weight, source):
                raise ConfigError(
                    "the draft's own tensor equals the policy's: the engine would share it, and a refit overwrite it",
                    found=f"{name}: true",
                    needed=f"{name}: false (borrow it)",
                    key=f"{KEY}.{name}",
                )

    # ---- the passes -------------------------------------------------------------------------------------------------

    def decoder_layers(self) -> list[DecoderLayer]:
        return [self.midlayer, *(layer for layer in self.layers.values() if isinstance(layer, DecoderLayer))]

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, features: Tensor) -> Tensor:
        """[T, n*C] taps to [T, H]."""
        a = features.to(self.dtype)
        if self.input_norm is not None:
            a = self.input_norm(a)
        if self.fc_norm is not None:
            parts = a.chunk(len(self.fc_norm), dim=-1)
            a = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(a)

    def fuse_products(self) -> int:
        return self.fc.weight.numel()

    def states_read(self) -> int:
        return len(self.aux_layer_ids)

    def normed(self, output: Tensor) -> Tensor:
        return self.norm(output)

    def recycled(self, output: Tensor, normed: Tensor) -> Tensor:
        hidden = normed if self.built().norm_output else output
        return hidden if self.recycle == "full" else hidden.detach()

    def target_ids(self) -> Tensor | None:
        return None if self.d2t is None else self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def built(self) -> Eagle3Config:
        return need_built(self.config)

    # ---- serving ----------------------------------------------------------------------------------------------------

    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]:
        return {"method": "eagle3", "num_speculative_tokens": num_speculative_tokens}

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
        self.built()
        self.need_parameters()
        dropped = {name for name, own in _OWNED_TENSORS.items() if self._given[own] is False}
        found = [(name, tensor) for name, tensor in tensors if name not in dropped]
        for name, tensor in found:
            if name == "d2t" and self.d2t is not None and not torch.equal(tensor.cpu(), self.d2t.cpu()):
                raise ConfigError(
                    "the checkpoint has another vocabulary map",
                    found=f"d2t of {source}",
                    needed="the map that the draft was built with",
                    key=f"{KEY}.vocab_map",
                )
        assign(self.state_dict(), found, source)

    def export(self, folder: str | Path, tensors: Iterable[tuple[str, Tensor]] | None = None) -> Path:
        held = tensors if tensors is not None else self.engine_tensors()
        return write_checkpoint(folder, self.built().to_json(), dict(held))

    def load(self, folder: str | Path) -> None:
        raw, where = read_config(folder)
        config = self.built()
        found = Eagle3Config.from_json(raw, tensor_names(folder), self._policy_layers, where)
        # What is owned is settled by the tensors themselves: a missing or surplus one is named.
        config.same(replace(found, own_head=config.own_head, own_embedding=config.own_embedding), where)
        self.load_tensors(read_tensors(folder), str(folder))

    def fingerprint(self) -> dict[str, Any]:
        digest = None
        if self.d2t is not None:
            digest = hashlib.sha256(self.d2t.cpu().numpy().tobytes()).hexdigest()
        owned = {"own_head": self.built().own_head, "own_embedding": self.built().own_embedding}
        return {"class": type(self).__name__, **self.built().to_json(), **owned, "vocab_map": digest}
