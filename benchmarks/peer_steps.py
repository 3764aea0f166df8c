"""One EAGLE-3 training step (forward and backward) by each public trainer's own classes, and by ours: see `peers.py`.

Each function prepares the same problem (weights, tokens, taps, teacher) and returns a callable that runs one step.
Peers are imported, never copied; each runs in an environment that has it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, HEADS, INNER, VOCABULARY = 256, 4, 1024, 4096
Step = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Problem:
    """One document of T tokens in which every token was sampled by the policy: all rows but the last carry loss."""

    tokens: Tensor
    taps: Tensor
    """[T, 3 C]."""
    hidden: Tensor
    """[T, C], the policy's final hidden states, whose logits teach."""
    head: Tensor
    """[V, C], the policy's head; also its embedding."""
    weights: dict[str, Tensor]
    """The draft's, under the names of vLLM's checkpoint."""


def problem(tokens: int) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator) * scale

    head = normal(VOCABULARY, HIDDEN, scale=HIDDEN**-0.5)
    names = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    weights = {name: normal(*shape, scale=shape[1] ** -0.5) for name, shape in names.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights |= {f"midlayer.{name}.weight": torch.ones(HIDDEN) for name in norms}
    weights["norm.weight"] = torch.ones(HIDDEN)
    ids = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return Problem(ids, normal(tokens, 3 * HIDDEN), normal(tokens, HIDDEN), head, weights)


def ours(tokens: int, passes: int, weights: Sequence[float] | None = None, mean_of: str = "valid") -> Step:
    """`Eagle3` and `SoftCrossEntropy` as `fit` runs them.

    Args:
        weights: of the passes (uniform by default).
        mean_of: "valid": each pass's loss is the mean over its valid rows; "all": the sum over T.
    """
    from lightning_spec.draft.base import DraftInputs
    from lightning_spec.draft.eagle3 import Eagle3
    from lightning_spec.loss.draft import SoftCrossEntropy
    from lightning_spec.shapes import PolicyShape

    p = problem(tokens)
    shape = PolicyShape.from_hf(_hf_config(tokens) | {"model_type": "llama", "num_hidden_layers": 8})
    given = list(weights) if weights is not None else [1.0] * passes
    draft = Eagle3(num_passes=passes, intermediate_size=INNER, own_head=True, pass_weights=given)
    draft.build(shape)
    draft.load_tensors(p.weights.items(), "the benchmark")
    inputs = DraftInputs(
        features=p.taps,
        embeddings=p.head[p.tokens],
        hidden=p.hidden,
        tokens=p.tokens,
        positions=torch.arange(tokens),
        lengths=[tokens],
        sampled=torch.ones(tokens, dtype=torch.bool),
        stop=torch.zeros(tokens, dtype=torch.bool),
        policy_head=p.head,
        policy_embedding=p.head,
    )
    loss = SoftCrossEntropy()
    totals = {f"draft_pass_{i}": float(tokens - (1 + i) * (mean_of == "valid")) for i in range(passes)}

    def run() -> dict[str, Any]:
        out = draft(inputs, loss, totals)
        out.loss.backward()
        return _measured(draft, out.loss, draft.fc.weight)

    return run


def automodel(tokens: int, passes: int) -> Step:
    """NeMo Automodel's `Eagle3TrainerModule` over its eager attention (its other one needs flash-attn, hence a GPU)."""
    from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

    p = problem(tokens)
    draft = LlamaEagle3DraftModel(_llama(tokens, target_hidden_size=HIDDEN, num_aux_hidden_states=3))
    _load(
        draft,
        p,
        {"midlayer": "model.layers.0", "fc": "model.fc", "norm": "model.norm", "lm_head": "lm_head"},
        "model.embed_tokens.weight",
    )
    draft.freeze_embeddings()
    everything = torch.ones(VOCABULARY, dtype=torch.bool)
    trainer = Eagle3TrainerModule(
        draft, selected_token_ids=torch.arange(VOCABULARY), selected_token_mask=everything, ttt_steps=passes
    )
    row = p.tokens[None]
    ones = torch.ones_like(row)

    def run() -> dict[str, Any]:
        with torch.no_grad():  # its target wrapper hands over logits, shifted by one
            logits = _shifted(nn.functional.linear(p.hidden, p.head)[None])
        out = trainer(
            input_ids=_shifted(row),
            attention_mask=ones,
            loss_mask=_shifted(ones),
            aux_hidden_states=p.taps[None],
            target_logits=logits,
        )
        out.loss.backward()
        return _measured(draft, out.loss, draft.model.fc.weight)

    return run


def specforge(tokens: int, passes: int) -> Step:
    """SpecForge's `OnlineEagle3Model` ("sdpa", its attention in matmuls) under its `Eagle3TrainStrategy`.

    Its loss is a Triton kernel that only runs on a GPU; the compiled reference that it ships beside it takes its place.
    """
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.training.strategies.base import Eagle3TrainStrategy

    class Reference:
        apply = staticmethod(_compute_loss)

    eagle3.LogSoftmaxLoss = Reference
    p = problem(tokens)
    draft = LlamaForCausalLMEagle3(_llama(tokens, pretraining_tp=1, pad_token_id=0), attention_backend="sdpa")
    _load(draft, p, {name: name for name in ("midlayer", "fc", "norm", "lm_head")}, "embed_tokens.weight")
    draft.freeze_embedding()
    head = TargetHead.__new__(TargetHead)  # its constructor reads a checkpoint
    nn.Module.__init__(head)
    head.fc = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head.fc.weight = nn.Parameter(p.head, requires_grad=False)
    model = eagle3.OnlineEagle3Model(draft, length=passes, attention_backend="sdpa")
    strategy = Eagle3TrainStrategy(model, target_head=head)
    row = p.tokens[None]

    def run() -> dict[str, Any]:
        from types import SimpleNamespace

        tensors = {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "loss_mask": torch.ones_like(row),
            "hidden_state": p.taps[None],
            "target": p.hidden[None],
        }
        strategy.validate_batch = lambda batch: None
        out = strategy.forward_loss(SimpleNamespace(tensors=tensors, metadata={"target_repr": "hidden_state"}))
        out.loss.backward()
        return _measured(draft, out.loss, draft.fc.weight)

    return run


def speculators(tokens: int, passes: int, attention: str = "sdpa") -> Step:
    """speculators' `Eagle3DraftModel` with its eager loss (the fused one is Triton, for GPUs). Its head is frozen by
    default, so it has one matrix product a pass less to do."""
    from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig, SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    p = problem(tokens)
    layer = _llama(tokens)
    layer._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=VOCABULARY,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=passes)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    draft = Eagle3DraftModel(config)
    _load(
        draft,
        p,
        {"midlayer": "layers.0", "fc": "fc", "norm": "norm", "lm_head": "lm_head"},
        "embed_tokens.weight",
    )
    with torch.no_grad():
        draft.verifier_lm_head.weight.copy_(p.head)
        draft.verifier_norm.weight.fill_(1.0)
    draft.verifier_norm = nn.Identity()  # our taps end with states that are normed already
    loss = resolve_loss_config("kl_div", "eager")

    def run() -> dict[str, Any]:
        _, total, _ = draft(
            hidden_states=p.taps[None, :-1],
            input_ids=p.tokens[None, 1:],
            document_ids=torch.zeros(1, tokens - 1, dtype=torch.int64),
            loss_mask=torch.ones(1, tokens - 1, dtype=torch.bool),
            position_ids=torch.arange(tokens - 1)[None],
            verifier_last_hidden_states=p.hidden[None, 1:],
            ttt_steps=passes,
            loss_config=loss,
        )
        total.backward()
        return _measured(draft, total, draft.fc.weight)

    return run


STEPS: dict[str, Callable[..., Step]] = {
    "ours": ours,
    "specforge": specforge,
    "automodel": automodel,
    "speculators": speculators,
}


def make(who: str, tokens: int, passes: int, **options: Any) -> Step:
    """A step of `who`; a tiny one has run before, so that libraries are loaded and code is compiled."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    if tokens > 64:
        STEPS[who](64, passes, **options)()
    step = STEPS[who](tokens, passes, **options)
    if who == "specforge":  # torch.compile compiles once more for the real length
        step()
    return step


def _hf_config(tokens: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 2 * tokens,
        "rms_norm_eps": 1e-6,
    }


def _llama(tokens: int, **more: Any) -> Any:
    from transformers import LlamaConfig

    config = _hf_config(tokens)
    return LlamaConfig(**config, num_hidden_layers=1, draft_vocab_size=VOCABULARY, **more)


def _load(draft: nn.Module, p: Problem, names: dict[str, str], embedding: str) -> None:
    state = {embedding: p.head}
    for name, tensor in p.weights.items():
        first, rest = name.split(".", 1)
        state[f"{names[first]}.{rest}"] = tensor
    missing, surplus = draft.load_state_dict(state, strict=False)
    floats = dict(draft.named_parameters())
    missing = [name for name in missing if name in floats and not name.startswith("verifier")]
    if missing or surplus:
        raise RuntimeError(f"the peer's draft has other tensors: missing {missing}, surplus {surplus}")


def _shifted(x: Tensor) -> Tensor:
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), 1)


def _measured(draft: nn.Module, loss: Tensor, fc: Tensor) -> dict[str, Any]:
    assert fc.grad is not None
    found = {"loss": float(loss.detach()), "fc_gradient": float(fc.grad.double().norm())}
    draft.zero_grad(set_to_none=True)
    return found
