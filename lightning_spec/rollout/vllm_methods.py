"""What each of vLLM's speculation methods asks of a draft's config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_spec.errors import ConfigError
from lightning_spec.rollout.speculation import KEY as SPECULATION
from lightning_spec.rollout.speculation import Speculation

Raw = dict[str, Any]
ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    "dflash": ("DFlashDraftModel",),
    "dspark": ("Qwen3DSparkModel",),
    "mtp": ("MiMoForCausalLM",),
    "draft_model": ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
}
"""By which config.json of a method's drafts is known."""
NAMED = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Parts of a path from which vLLM tells a method, whatever method it was given, unless that is one of these."""


def check_method(speculation: Speculation, folder: Path, draft: Raw, policy: Raw) -> None:
    """Refuse a draft that is not one of the method, or does not fit policy and proposals.

    Args:
        folder: where the draft is. draft, policy: their config.json.
    """
    method, key = speculation.method, f"{folder}/config.json"
    found = (draft.get("architectures") or [None])[0]
    for other, names in ARCHITECTURES.items():
        if other != method and method in ARCHITECTURES and found in names:
            raise ConfigError(
                f"the draft is served by method {other}, not {method}",
                found=method,
                needed=f"{other} (its architecture is {found}), or another model.draft",
                key=f"{SPECULATION}.method",
            )
    if method not in NAMED.values():
        _check_name(method, folder)
    if method == "eagle3":
        _check_eagle3(draft, policy, key)
    elif method == "mtp":
        _check_mtp(speculation, draft, policy, key)
    elif method in ("dflash", "dspark"):
        _check_block(speculation, draft, policy, key)


def _check_name(method: str, folder: Path) -> None:
    for part, other in NAMED.items():
        if part in str(folder).lower():
            raise ConfigError(
                f"vLLM takes a draft for one of method {other} because of its folder's name",
                found=f"{folder} with method {method}",
                needed=f"a path without {part!r} (rollout.workdir, run.dir)",
                key="rollout.workdir",
            )


def _check_width(draft: Raw, policy: Raw, key: str, name: str) -> None:
    width = draft.get(name, draft.get("hidden_size"))
    if width != policy.get("hidden_size"):
        raise ConfigError(
            "the draft was made for another hidden size",
            found=width,
            needed=policy.get("hidden_size"),
            key=f"{key}:{name}",
        )


def _check_eagle3(draft: Raw, policy: Raw, key: str) -> None:
    _check_width(draft, policy, key, "target_hidden_size")
    layers = int(policy["num_hidden_layers"])
    nested = draft.get("eagle_config") or {}
    ids = draft.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    default = ids is None
    ids = [2, layers // 2, layers - 3] if ids is None else list(ids)
    if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) > layers:
        raise ConfigError(
            f"aux layers of a policy with {layers} layers collide or do not exist"
            + (" (the default 2, L//2, L-3 needs 7 layers)" if default else ""),
            found=ids,
            needed=f"distinct ids in 0..{layers}",
            key=f"{key}:eagle_aux_hidden_state_layer_ids",
        )


def _check_mtp(speculation: Speculation, draft: Raw, policy: Raw, key: str) -> None:
    _check_width(draft, policy, key, "hidden_size")
    heads = draft.get("num_nextn_predict_layers")
    if not isinstance(heads, int) or heads < 1:
        raise ConfigError(
            "no MTP layer", found=heads, needed="a number of at least 1", key=f"{key}:num_nextn_predict_layers"
        )
    k = speculation.num_speculative_tokens
    if k > heads and k % heads:
        raise ConfigError(
            "vLLM runs an MTP head's layers in turns, each as often as the others",
            found=k,
            needed=f"at most {heads}, or a multiple of it",
            key=f"{SPECULATION}.num_speculative_tokens",
        )
    given = "residual" if policy.get("model_type") == "mimo" else "normed"
    if draft.get("mtp_reads") not in (None, given):
        raise ConfigError(
            "vLLM gives the MTP head other states of this policy than it was trained on",
            found=draft["mtp_reads"],
            needed=f"{given}, for a policy of model_type {policy.get('model_type')}",
            key="model.draft.init_args.reads",
        )


def _check_block(speculation: Speculation, draft: Raw, policy: Raw, key: str) -> None:
    """A DFlash or DSpark draft: it is as wide as the policy, and its block holds what is proposed."""
    _check_width(draft, policy, key, "hidden_size")
    nested = draft.get("dflash_config") or {}
    mask, vocabulary = nested.get("mask_token_id", draft.get("mask_token_id")), policy.get("vocab_size")
    if not isinstance(mask, int) or mask < 0 or (vocabulary is not None and mask >= vocabulary):
        raise ConfigError(
            "the block draft has no mask token of the policy's vocabulary",
            found=mask,
            needed=f"a token in 0..{vocabulary - 1}" if vocabulary is not None else "a token",
            key=f"{key}:dflash_config.mask_token_id",
        )
    layers = int(policy["num_hidden_layers"])
    ids = nested.get("target_layer_ids", draft.get("target_layer_ids"))
    if not isinstance(ids, list) or not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= layers:
        raise ConfigError(
            f"layers that a block draft reads of a policy with {layers} layers collide or do not exist",
            found=ids,
            needed=f"ascending layers in 0..{layers - 1}",
            key=f"{key}:dflash_config.target_layer_ids",
        )
    size, k = draft.get("block_size", nested.get("block_size")), speculation.num_speculative_tokens
    # DFlash's first slot holds the last token and proposes nothing.
    context = 1 if speculation.method == "dflash" else 0
    if size is not None and k + context > size:
        raise ConfigError(
            "more proposals than the draft's block was trained for",
            found=k,
            needed=f"at most {size - context} (block_size {size})",
            key=f"{SPECULATION}.num_speculative_tokens",
        )
