"""Work-rounds for silent defects of vLLM: found by a tiny operation, mended only if found, and reported.

All but one (`empty_top_k`, which raises) give wrong numbers without an error in vLLM 0.32 (PLATFORM.md part 2). When a
newer vLLM has mended one, its check says so and nothing is replaced. `LIGHTNING_SPEC_KEEP_DEFECTS=name,...` leaves the
named ones alone; tests use it to show that each work-round is needed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spec.rollout import vllm_experts

EXPAND = "expand"
EMPTY_TOP_K = "empty_top_k"
TIED_HEAD = "tied_head"
DFLASH_BUFFERS = "dflash_buffers"
DFLASH_K_NORM = "dflash_k_norm"
ALIASING = "aliasing"
EXPERTS_RELOAD = "experts_reload"
MTP_CONFIG = "mtp_config"
KEEP_VARIABLE = "LIGHTNING_SPEC_KEEP_DEFECTS"


def kept() -> frozenset[str]:
    """Names of the defects that the environment says to leave."""
    return frozenset(filter(None, os.environ.get(KEEP_VARIABLE, "").split(",")))


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


# --- 1. Sampling parameters of draft tokens are uninitialised memory (vllm 55005) -----------------------------------


def expand_is_broken() -> bool:
    from vllm.v1.sample import rejection_sampler

    values = torch.tensor([0.25, 0.5], dtype=torch.float32)
    ends = torch.tensor([2, 3], dtype=torch.int32)
    out = rejection_sampler.expand_batch_to_tokens(values, ends, 3)
    again = rejection_sampler.expand_batch_to_tokens(values + 1, ends, 3)
    return not (torch.equal(out, values[[0, 0, 1]]) and torch.equal(again, values[[0, 0, 1]] + 1))


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """[batch] -> [tokens]: x[b] once for each token of request b; `replace_from` becomes `replace_to`."""
    counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)


def mend_expand() -> None:
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


# --- Top-k in a step whose requests all have no draft tokens raises: maximum of an empty tensor -----------------------


def empty_top_k_is_broken() -> bool:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    try:
        apply_top_k_top_p(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), None)
    except (RuntimeError, IndexError):
        return True
    return False


def mend_empty_top_k() -> None:
    from vllm.v1.sample import rejection_sampler

    apply = rejection_sampler.apply_top_k_top_p

    def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        return apply(logits, k, p, *args, **kwargs) if logits.shape[0] else logits

    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p


# --- 4. A two-dimensional RMSNorm weight is read as its first row only ----------------------------------------------


def k_norm_is_broken() -> bool:
    from vllm import _custom_ops as ops

    x = torch.ones(2, 1, 1, 8)
    weight = torch.stack([torch.ones(8), torch.full((8,), 2.0)])
    out = torch.empty_like(x)
    try:
        ops.rms_norm(out, x, weight, 1e-6)
    except RuntimeError:
        return True
    return not torch.allclose(out[:, 0, 0], weight, atol=1e-3)


def normalize_context_k(self: Any, all_k: Tensor) -> Tensor:
    """RMSNorm of each layer's keys [L, T, K, D] with that layer's own weight."""
    from vllm import _custom_ops as ops

    out = torch.empty_like(all_k)
    for layer, weight in enumerate(self._k_norm_weights):
        ops.rms_norm(out[layer], all_k[layer], weight.contiguous(), self._rms_norm_eps)
    return out


def mend_k_norm() -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    DFlashQwen3Model._normalize_context_k = normalize_context_k


# --- A draft that owns a head equal to the policy's is given the policy's module (CPU and GPU; vllm 27737) ----------


def aliasing_is_present() -> bool:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    def head() -> nn.Module:
        return nn.Linear(2, 2, bias=False)

    target = SimpleNamespace(lm_head=head(), model=SimpleNamespace())
    draft = SimpleNamespace(lm_head=head(), has_own_lm_head=True, model=SimpleNamespace())
    draft.lm_head.load_state_dict(target.lm_head.state_dict())
    proposer = SimpleNamespace(
        model=draft,
        vllm_config=SimpleNamespace(speculative_config=None),
        use_local_argmax_reduction=False,
    )
    SpecDecodeBaseProposer._maybe_share_lm_head(proposer, target)
    return draft.lm_head is target.lm_head


def mend_aliasing() -> None:
    """Share a head or an embedding only with drafts whose checkpoint has none."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    share_head = SpecDecodeBaseProposer._maybe_share_lm_head
    share_embeddings = SpecDecodeBaseProposer._maybe_share_embeddings

    def maybe_share_lm_head(self: Any, target: nn.Module) -> None:
        owns = getattr(self.model, "has_own_lm_head", False)
        # The method does more than sharing; a target without a head is one whose head is not taken.
        share_head(self, SimpleNamespace(model=target.model) if owns else target)

    def maybe_share_embeddings(self: Any, target: nn.Module) -> None:
        if not getattr(self.model, "has_own_embed_tokens", False):
            share_embeddings(self, target)

    SpecDecodeBaseProposer._maybe_share_lm_head = maybe_share_lm_head
    SpecDecodeBaseProposer._maybe_share_embeddings = maybe_share_embeddings


# --- An MTP head is built from the policy's config.json, even where it has a folder of its own -----------------------


class _WasReadError(Exception):
    """Whose config was read first."""


class _Watched:
    def __init__(self, whose: str) -> None:
        self._whose = whose

    def __getattr__(self, name: str) -> Any:
        raise _WasReadError(self._whose)


def mtp_config_is_the_policy_s() -> bool:
    from vllm.model_executor.models.mimo_mtp import MiMoMTP

    def watched(whose: str) -> SimpleNamespace:
        return SimpleNamespace(hf_config=_Watched(whose), cache_config=None, quant_config=None)

    speculative = SimpleNamespace(draft_model_config=watched("draft"))
    try:
        MiMoMTP(vllm_config=SimpleNamespace(model_config=watched("policy"), speculative_config=speculative))
    except _WasReadError as error:
        return str(error) == "policy"
    except Exception:
        return False
    return False


def mend_mtp_config() -> None:
    """Build the head from its own config.json, so that it can stand beside any policy. Its layer is numbered after the
    policy's, as in MiMo itself: the engine knows keys and values by that number."""
    from vllm.model_executor.models.mimo_mtp import MiMoMTP

    make = MiMoMTP.__init__

    def init(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        own, model = copy.copy(vllm_config), copy.copy(vllm_config.speculative_config.draft_model_config)
        model.hf_config = copy.copy(model.hf_config)
        model.hf_config.num_hidden_layers = vllm_config.model_config.hf_config.num_hidden_layers
        own.model_config = model
        make(self, vllm_config=own, prefix=prefix)

    MiMoMTP.__init__ = init


# --- All that is replaced when the engine starts --------------------------------------------------------------------


@dataclass(frozen=True)
class Mend:
    name: str
    cpu_only: bool
    broken: Callable[[], bool]
    apply: Callable[[], None]


MENDS = (
    Mend(EXPAND, True, expand_is_broken, mend_expand),
    Mend(EMPTY_TOP_K, False, empty_top_k_is_broken, mend_empty_top_k),
    Mend(DFLASH_K_NORM, True, k_norm_is_broken, mend_k_norm),
    Mend(ALIASING, False, aliasing_is_present, mend_aliasing),
    Mend(MTP_CONFIG, False, mtp_config_is_the_policy_s, mend_mtp_config),
    Mend(EXPERTS_RELOAD, True, vllm_experts.reload_is_broken, vllm_experts.mend_reload),
)


def apply_mends(keep: frozenset[str] | None = None) -> dict[str, str]:
    """Run in every process that holds a model, before it is loaded.

    Returns:
        name -> "mended", "not needed" or "kept".
    """
    keep = kept() if keep is None else keep
    report: dict[str, str] = {}
    for mend in MENDS:
        if mend.name in keep:
            report[mend.name] = "kept"
        elif (mend.cpu_only and not on_cpu()) or not mend.broken():
            report[mend.name] = "not needed"
        else:
            mend.apply()
            report[mend.name] = "mended"
    return report


# --- 2. and 3. What a reload leaves stale ---------------------------------------------------------------------------


def head_is_stale(embedding: Any, head: Any) -> bool:
    """Whether a tied head computes with another matrix than the embedding it is tied to."""
    weight = embedding.weight
    probe = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    got = head.quant_method.apply(head, probe, bias=None).float()
    want = probe.float() @ weight.float().t()
    tolerance = 1e-4 if weight.dtype == torch.float32 else 3e-2
    return not torch.allclose(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max() + 1e-6))


def mend_tied_head(model: Any) -> bool:
    """oneDNN packs a tied head at load, and the reload replaces only the embedding under it. Packs it again if so."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not hasattr(head, "quant_method"):
        return False
    if getattr(head, "weight", None) is not embedding.weight or not head_is_stale(embedding, head):
        return False
    head.quant_method.process_weights_after_loading(head)
    return True


class DFlashReload:
    """DFlash builds fused K/V buffers inside load_weights: in a reload that is before the layers are filled, and on
    a CPU after the weights were packed away. Hold it back, then build when the reload is final."""

    def __init__(self, model: Any) -> None:
        inner = getattr(model, "model", None)
        self._inner = inner if hasattr(inner, "_build_fused_kv_buffers") else None
        if self._inner is not None:
            self._inner._build_fused_kv_buffers = lambda: None

    def finish(self) -> bool:
        if self._inner is None:
            return False
        del self._inner._build_fused_kv_buffers  # the class's own again
        layers = [layer.self_attn.qkv_proj for layer in self._inner.layers]
        self._inner._build_fused_kv_buffers()
        if any(layer.weight.dim() != 2 or layer.weight.numel() == 0 for layer in layers):
            # Packed: no matrix to fuse. Without a fused weight vLLM runs each layer's own projection.
            self._inner._fused_kv_weight = None
            self._inner._fused_kv_bias = None
        return True
