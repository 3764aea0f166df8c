"""What runs inside vLLM's worker: our weight-transfer backend (shared memory), and reading the weights back.

vLLM imports this module in each worker through `worker_extension_cls`, which registers the backend there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from lightning_spec.rollout import vllm_cpu, vllm_experts
from lightning_spec.rollout.weight_transfer import BACKEND, checksum, read_bucket

MENDS = vllm_cpu.apply_mends()


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: buckets describe themselves."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket, as `Bucket.manifest` writes it."""

    path: str
    capacity: int
    slots: list[list[Any]] = field(default_factory=list)


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads buckets of checkpoint-named tensors through vLLM's layerwise reload."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.expected: set[str] = set()
        self.received: set[str] = set()
        self.repaired: list[str] = []
        self._dflash: vllm_cpu.DFlashReload | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.received, self.repaired = set(), []
        if vllm_cpu.DFLASH_BUFFERS not in vllm_cpu.kept():
            self._dflash = vllm_cpu.DFlashReload(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        manifest = {"path": update_info.path, "capacity": update_info.capacity, "slots": update_info.slots}
        tensors = read_bucket(manifest)
        if surplus := {name for name, _ in tensors} - self.expected:
            raise RuntimeError(f"surplus tensors: {sorted(surplus)[:8]}")
        with disable_mtp_completeness_check():
            self.model.load_weights(iter(tensors))
        self.received.update(name for name, _ in tensors)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if missing := sorted(self.expected - self.received):
            raise RuntimeError(f"{len(missing)} tensors missing: {missing[:8]}")
        finalize_layerwise_reload(self.model, self.model_config)
        if self._dflash is not None and self._dflash.finish():
            self.repaired.append(vllm_cpu.DFLASH_BUFFERS)
        self._dflash = None
        keep = vllm_cpu.kept()
        if vllm_cpu.on_cpu() and vllm_cpu.TIED_HEAD not in keep and vllm_cpu.mend_tied_head(self.model):
            self.repaired.append(vllm_cpu.TIED_HEAD)

    def abandon(self) -> None:
        """End a session that failed: layers that were not filled get their old tensors back, so that a later, complete
        refit starts from a sane model. The mixture in between must not be served."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        if self._dflash is not None:
            self._dflash.finish()
            self._dflash = None

    def shutdown(self) -> None:
        pass


class WorkerExtension:
    """Methods that vLLM adds to its worker; called through `collective_rpc`."""

    def spec_facts(self) -> dict[str, Any]:
        """What the trainer has to know of the loaded models."""
        draft = self.get_draft_model()  # type: ignore[attr-defined]
        policy = self.get_model()  # type: ignore[attr-defined]
        facts: dict[str, Any] = {"mends": MENDS, "has_draft": draft is not None}
        facts["dtype"] = str(self.model_config.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
        if draft is not None:
            facts["head_aliased"] = getattr(draft, "lm_head", None) is getattr(policy, "lm_head", 0)
            mine, theirs = getattr(draft, "model", None), getattr(policy, "model", None)
            facts["embedding_aliased"] = getattr(mine, "embed_tokens", None) is getattr(theirs, "embed_tokens", 0)
        return facts

    def spec_expect(self, names: list[str]) -> None:
        self.weight_transfer_engine.expected = set(names)  # type: ignore[attr-defined]

    def spec_repaired(self) -> list[str]:
        return list(self.weight_transfer_engine.repaired)  # type: ignore[attr-defined]

    def spec_abandon(self, target: str) -> None:
        from vllm.config import set_current_vllm_config

        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            if target == "draft":
                self._set_draft_weight_update_target()  # type: ignore[attr-defined]
            else:
                engine.reset_weight_update_target()
            try:
                engine.abandon()
            finally:
                engine.reset_weight_update_target()
                self._weight_update_active = False

    def spec_checksums(self, target: str, shapes: dict[str, list[int]]) -> dict[str, tuple[bool, int]]:
        """Checksums of the weights this worker computes with, by checkpoint name: (is a shard, checksum)."""
        model = self.get_draft_model() if target == "draft" else self.get_model()  # type: ignore[attr-defined]
        sums: dict[str, tuple[bool, int]] = {}
        with torch.inference_mode():
            for name, shape in shapes.items():
                for label, tensor, start, whole in effective(model, name, tuple(shape)):
                    sums[label] = (not whole, checksum(tensor, tuple(shape), start))
        return sums


_PARTS = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
_PARTS |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_MTP = "model.mtp_layers.0."
_MTP_BLOCK = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
"""Parts of an MTP head that the engine holds in a decoder layer of its own."""


def effective(
    model: nn.Module, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, Tensor, tuple[int, int], bool]]:
    """The values that the engine computes with for one checkpoint tensor.

    Yields (label, tensor, (row, column) where it starts in the whole, whether it is the whole). A tied embedding yields
    twice: the embedding, and the head that follows it. Packed matrices are read by applying the layer to the identity.

    Raises:
        KeyError: the model has no such tensor.
    """
    if (expert := vllm_experts.expert_values(model, name)) is not None:
        yield name, *expert
        return
    module, leaf, part = _resolve(model, name)
    values = _read(module, leaf)
    rank, ranks = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    start, whole = (0, 0), True
    if hasattr(module, "shard_indices"):
        indices = module.shard_indices
        start = (indices.org_vocab_start_index, 0)
        values = values[: indices.org_vocab_end_index - indices.org_vocab_start_index]
        whole = values.shape[0] == shape[0]
    elif part is not None:
        values, first = _part_of(module, values, part, rank, ranks)
        start, whole = (first, 0), ranks == 1
    elif ranks > 1 and tuple(values.shape) != shape:
        axis = next(i for i, extent in enumerate(shape) if values.shape[i] != extent)
        start = (rank * values.shape[0], 0) if axis == 0 else (0, rank * values.shape[1])
        whole = False
    yield name, values, start, whole
    head = getattr(model, "lm_head", None)
    if head is not None and head is not module and getattr(head, "weight", None) is getattr(module, leaf, 0):
        yield f"{name} (tied head)", _read(head, "weight")[: values.shape[0]], start, whole


def _part_of(module: Any, values: Tensor, part: int, rank: int, ranks: int) -> tuple[Tensor, int]:
    """One member of a fused projection: its rows here, and the first one's number in the whole."""
    if hasattr(module, "num_kv_heads"):
        size = module.head_size
        sizes = [module.num_heads * size, module.num_kv_heads * size, module.num_kv_heads * size]
        replicas = 1 if part == 0 else getattr(module, "num_kv_head_replicas", 1)
    else:
        sizes, replicas = [extent // ranks for extent in module.output_sizes], 1
    first = sum(sizes[:part])
    rows = values[first : first + sizes[part]]
    # A kv head that several ranks hold is counted by the first of them.
    return (rows if rank % replicas == 0 else rows[:0]), (rank // replicas) * sizes[part]


def _resolve(model: nn.Module, name: str) -> tuple[Any, str, int | None]:
    renamed = name.replace("midlayer.", "layers.0.").replace("d2t", "draft_id_to_target_id")
    if name.startswith(_MTP):
        inner = name.removeprefix(_MTP)
        block = "mtp_block." if inner.split(".")[0] in _MTP_BLOCK else ""
        renamed = f"mtp_layers.{model.get_submodule('model').mtp_start_layer_idx}.{block}{inner}"
    for candidate in (renamed, f"model.{renamed}"):
        path, _, leaf = candidate.rpartition(".")
        before, _, last = path.rpartition(".")
        fused, part = _PARTS.get(last, (None, None))
        choices: list[tuple[str, int | None]] = [(path, None)]
        if fused is not None:
            choices.append((f"{before}.{fused}", part))
        for choice, member in choices:
            try:
                module = model.get_submodule(choice)
            except AttributeError:
                continue
            if leaf in module._parameters or leaf in module._buffers:
                return module, leaf, member
    raise KeyError(name)


def _read(module: Any, leaf: str) -> Tensor:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    values: Tensor = getattr(module, leaf)
    if leaf != "weight" or not vllm_cpu.on_cpu() or not isinstance(module, LinearBase | ParallelLMHead):
        return values.detach()
    if isinstance(module, LinearBase):
        width = getattr(module, "input_size_per_partition", module.input_size)
    else:
        width = module.embedding_dim
    dtype = values.dtype if values.numel() else module.params_dtype
    columns = []
    for first in range(0, width, 1024):
        rows = min(1024, width - first)
        probe = torch.zeros(rows, width, dtype=dtype)
        probe[torch.arange(rows), torch.arange(first, first + rows)] = 1
        columns.append(module.quant_method.apply(module, probe, bias=None))
    return torch.cat(columns).t()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ShmWeightTransferEngine)
