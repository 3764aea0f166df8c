"""A small rollout engine in PyTorch: the policy through transformers, speculation by exact rejection sampling.

It checks the fast engine (losslessness, log-probs, acceptance) and serves where that cannot run. Requests are run one
at a time: a completion depends on its own prompt and seed alone, never on what else is in the call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_spec.batch import Completion, FinishReason, SpecStats
from lightning_spec.errors import CheckpointError, ConfigError, EngineError
from lightning_spec.rollout.engine import (
    Engine,
    EngineFiles,
    Generation,
    NamedTensors,
    Progress,
    RefitReport,
    Request,
    Sampling,
    TensorSpec,
    checked,
    checkpoint_specs,
)
from lightning_spec.rollout.proposers import Context, DraftProposer, NgramProposer, Proposer
from lightning_spec.rollout.reference_taps import Taps
from lightning_spec.rollout.sampling import target_probs, token_logprob, verify
from lightning_spec.shapes import PolicyShape

Method = Literal["none", "ngram", "draft"]


@dataclass(slots=True)
class _Sequence:
    """A request while it runs. `features` covers the tokens that are in the cache: all but the last."""

    tokens: list[int]
    cache: Any
    generator: torch.Generator
    features: list[Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spec: SpecStats = field(default_factory=SpecStats)


class ReferenceEngine(Engine):
    """Generates with a Hugging Face checkpoint in float32 on the CPU.

    Args:
        method: `draft` runs the draft named by EngineFiles, `ngram` looks the context up, `none` drafts nothing.
        num_speculative_tokens: k, the most tokens drafted before each verification.
        ngram_longest, ngram_shortest: n-gram sizes of method `ngram`.
        confidence_threshold: a proposal ends before the first token that the draft is less sure of; for drafts with a
            confidence head.
        proposer: an object to draft with instead, for tests and experiments; overrides `method`.
    """

    def __init__(
        self,
        method: Method = "none",
        num_speculative_tokens: int = 3,
        ngram_longest: int = 4,
        ngram_shortest: int = 1,
        confidence_threshold: float | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        if method not in ("none", "ngram", "draft"):
            raise ConfigError(
                "unknown method", found=method, needed="none, ngram or draft", key="rollout.engine.method"
            )
        if num_speculative_tokens < 1:
            raise ConfigError(
                "bad number of drafted tokens",
                found=num_speculative_tokens,
                needed="at least 1 (method: none drafts nothing)",
                key="rollout.engine.num_speculative_tokens",
            )
        if confidence_threshold is not None and not 0 <= confidence_threshold <= 1:
            raise ConfigError(
                "bad confidence_threshold",
                found=confidence_threshold,
                needed="a number from 0 to 1, or null",
                key="rollout.engine.confidence_threshold",
            )
        self.method, self.k, self.confidence_threshold = method, num_speculative_tokens, confidence_threshold
        self._proposer = proposer
        if proposer is None and method == "ngram":
            self._proposer = NgramProposer(ngram_longest, ngram_shortest)
        self._model: Any = None
        self._taps: Taps | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._draft_specs: dict[str, TensorSpec] = {}
        self._stats = SpecStats()
        self.version = 0
        self.max_positions = 0

    @property
    def speculative(self) -> bool:
        return self._proposer is not None or self.method == "draft"

    @property
    def running(self) -> bool:
        return self._model is not None

    def start(self, files: EngineFiles) -> None:
        from transformers import AutoModelForCausalLM

        shape = PolicyShape.from_file(files.policy, key="EngineFiles.policy")
        self._specs = checkpoint_specs(files.policy)
        try:
            model = AutoModelForCausalLM.from_pretrained(str(files.policy), dtype=torch.float32, local_files_only=True)
        except Exception as error:  # transformers raises many types; all mean an unusable checkpoint
            raise EngineError(
                f"the policy at {files.policy} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if self.method == "draft" and (self._proposer is None or isinstance(self._proposer, DraftProposer)):
            if files.draft is None or files.draft_class is None:
                raise ConfigError(
                    "method `draft` needs a draft",
                    found=(files.draft, files.draft_class),
                    needed="a draft's folder and class",
                    key="rollout.engine.method",
                )
            self._proposer = DraftProposer(files.draft, files.draft_class, shape, self.confidence_threshold)
        self._check_k()
        self._model = model.eval().requires_grad_(False)
        if self._proposer is not None:
            self._taps = Taps(model, self._proposer.aux_layer_ids, self._proposer.reads_hidden)
        self.max_positions = shape.max_positions
        self.version = 0

    def _check_k(self) -> None:
        most = None if self._proposer is None else self._proposer.longest_proposal
        if most is not None and self.k > most:
            raise ConfigError(
                "more proposals than the draft's block gives",
                found=self.k,
                needed=f"at most {most}, or a draft with a larger block (model.draft.init_args.block_size)",
                key="rollout.engine.num_speculative_tokens",
            )

    def stats(self) -> SpecStats:
        return self._stats

    def close(self) -> None:
        if self._taps is not None:
            self._taps.close()
        self._model = self._taps = None

    # Weights

    def refit(
        self, policy: NamedTensors | None, draft: NamedTensors | None, version: int, verify: bool = False
    ) -> RefitReport:
        model = self._started()
        began = time.perf_counter()
        sizes: list[int] = []
        verified = 0

        def staged(tensors: NamedTensors) -> dict[str, Tensor]:
            kept = {name: tensor.detach().clone() for name, tensor in tensors}
            sizes.extend(tensor.numel() * tensor.element_size() for tensor in kept.values())
            return kept

        # All tensors of both are here and checked before the first is copied: a bad refit changes nothing.
        new_policy = None if policy is None else staged(checked(policy, self._specs, "policy"))
        new_draft = None
        if draft is not None:
            if self._proposer is None:
                raise EngineError("draft refit: the engine runs without a draft")
            new_draft = staged(checked(draft, _specs(self._proposer.tensors()), "draft"))
        if new_policy is not None:
            held = checkpoint_views(model.state_dict())
            for name, tensor in new_policy.items():
                held[name].copy_(tensor)
            verified += _compare(new_policy, held, "policy") if verify else 0
        if new_draft is not None:
            assert self._proposer is not None
            try:
                self._proposer.refit(new_draft.items())
            except CheckpointError as error:
                raise EngineError(f"draft refit: {error}") from error
            verified += _compare(new_draft, self._proposer.tensors(), "draft") if verify else 0
        self.version = version
        return RefitReport(time.perf_counter() - began, sum(sizes), len(sizes), version, verified)

    def _started(self) -> Any:
        if self._model is None:
            raise EngineError("the engine is not running: call start() first")
        return self._model

    # Generation

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_progress: Progress | None = None
    ) -> list[Completion]:
        self._started()
        for number, request in enumerate(requests):
            self._check(request, sampling, number)
        began = time.perf_counter()
        done = []
        for number, request in enumerate(requests):
            done.append(self._complete(request, sampling, sampling.seed_of(request, number)))
            if on_progress is not None:
                on_progress(number + 1, len(requests))
        spec = sum((completion.spec for completion in done if completion.spec is not None), SpecStats())
        self._stats = self._stats + spec
        self.last = Generation(sum(len(c.tokens) for c in done), time.perf_counter() - began, spec)
        return done

    def _check(self, request: Request, sampling: Sampling, number: int) -> None:
        prompt, most = request.prompt_tokens, _most(request, sampling)
        vocab = self._model.get_input_embeddings().weight.shape[0]
        if not prompt:
            raise ConfigError("empty prompt", found=f"request {number}", needed="at least one token", key="data.source")
        if most < 1:
            raise ConfigError("bad max_tokens", found=most, needed="at least 1", key="rollout.sampling.max_tokens")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ConfigError(
                "a prompt token is outside the policy's vocabulary",
                found=max(prompt),
                needed=f"ids 0..{vocab - 1}",
                key="data.tokenizer",
            )
        if len(prompt) + most > self.max_positions:
            raise ConfigError(
                "prompt and completion are longer than the policy's context",
                found=f"{len(prompt)} + {most} tokens",
                needed=f"at most {self.max_positions}",
                key="rollout.sampling.max_tokens",
            )

    def _complete(self, request: Request, sampling: Sampling, seed: int | None) -> Completion:
        from transformers import DynamicCache

        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        state = _Sequence(list(request.prompt_tokens), DynamicCache(), generator)
        first, most = len(state.tokens), _most(request, sampling)
        finish: FinishReason | None = None
        while finish is None:
            emitted = self._step(state, sampling)
            finish = _cut(state, emitted, first + most, sampling.stop_token_ids)
        return Completion(
            tuple(state.tokens[first:]),
            tuple(state.logprobs),
            finish,
            self.version,
            state.spec if self.speculative else None,
        )

    def _step(self, state: _Sequence, sampling: Sampling) -> list[tuple[int, float]]:
        """One verification: draft, run the policy over what is new, accept. Returns the emitted (token, log-prob)."""
        drafted, draft_probs = self._draft(state, sampling)
        logits = self._forward(state, drafted)
        target = target_probs(logits, sampling)

        def uniform() -> float:
            return float(torch.rand((), generator=state.generator, dtype=torch.float64))

        accepted, token = verify(target, drafted, draft_probs, uniform)
        if surplus := len(drafted) - accepted:
            # Rejected tokens leave the cache, so it again holds all tokens but the last.
            state.cache.crop(-surplus)
            if state.features:
                state.features[-1] = state.features[-1][:-surplus]
        if drafted:
            reached = tuple(int(i < accepted) for i in range(self.k))
            state.spec = state.spec + SpecStats(1, len(drafted), accepted, reached)
        tokens = [*drafted[:accepted], token]
        return [(t, token_logprob(logits[i], target[i], t, sampling)) for i, t in enumerate(tokens)]

    def _draft(self, state: _Sequence, sampling: Sampling) -> tuple[list[int], Tensor]:
        vocab = self._model.get_output_embeddings().weight.shape[0]
        # Positions past the policy's last are never read.
        k = min(self.k, self.max_positions - len(state.tokens))
        # Before the prompt's own forward there is nothing to draft from; its last row gives the first token.
        if self._proposer is None or k < 1 or not state.logprobs:
            return [], torch.zeros(0, vocab, dtype=torch.float64)
        context = Context(
            tokens=state.tokens,
            features=torch.cat(state.features) if state.features else None,
            head=self._model.get_output_embeddings().weight,
            embedding=self._model.get_input_embeddings().weight,
            temperature=sampling.temperature,
            generator=state.generator,
        )
        return self._proposer.propose(context, k)

    def _forward(self, state: _Sequence, drafted: list[int]) -> Tensor:
        """Logits [len(drafted)+1, V] of the rows that predict the drafted tokens and the one after them."""
        fresh = state.tokens[state.cache.get_seq_length() :] + drafted
        out = self._model(
            input_ids=torch.tensor([fresh]),
            past_key_values=state.cache,
            use_cache=True,
            logits_to_keep=len(drafted) + 1,
        )
        if self._taps is not None and (read := self._taps.take()) is not None:
            state.features.append(read)
        logits: Tensor = out.logits[0]
        return logits


def _most(request: Request, sampling: Sampling) -> int:
    return sampling.max_tokens if request.max_tokens is None else request.max_tokens


def _cut(
    state: _Sequence, emitted: list[tuple[int, float]], longest: int, stops: tuple[int, ...]
) -> FinishReason | None:
    """Append what was emitted up to a stop token or the length limit; None while the sequence goes on."""
    for token, logprob in emitted:
        state.tokens.append(token)
        state.logprobs.append(logprob)
        if token in stops:
            return "stop"
        if len(state.tokens) >= longest:
            return "length"
    return None


def _specs(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}


def _compare(sent: dict[str, Tensor], held: dict[str, Tensor], what: str) -> int:
    differing = [name for name, tensor in sent.items() if not torch.equal(held[name], tensor.to(held[name].dtype))]
    if differing:
        raise EngineError(f"{what} refit: the engine holds other values of {', '.join(differing[:8])}")
    return len(sent)


def checkpoint_views(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a transformers model under the names of its checkpoint, sharing memory with it.

    transformers 5 holds all experts of a layer in two tensors, [E, 2I, C] (gate above up) and [E, C, I]; a checkpoint
    has three for each expert.
    """
    views: dict[str, Tensor] = {}
    for name, tensor in state.items():
        before, _, last = name.rpartition(".")
        if not before.endswith(".experts") or last not in ("gate_up_proj", "down_proj"):
            views[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            if last == "down_proj":
                views[f"{before}.{number}.down_proj.weight"] = expert
            else:
                gate, up = expert.chunk(2)
                views[f"{before}.{number}.gate_proj.weight"] = gate
                views[f"{before}.{number}.up_proj.weight"] = up
    return views
