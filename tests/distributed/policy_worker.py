"""One rank of test_policy_parallel.py: `python policy_worker.py OUT CASE ...`.

For every case: the whole policy on one rank alone, then the same policy split over the world and run through
Megatron's own schedule. Writes OUT/CASE-RANK.pt: by how much each quantity differs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from lightning_spec.attention.zigzag import Shard, Zigzag
from lightning_spec.errors import ConfigError
from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.parallel.groups import ContextParallel, ParallelSizes, TensorParallel, initialise_groups
from lightning_spec.policy import (
    PolicyModel,
    TapRecorder,
    chunks,
    export_policy,
    head_weight,
    hf_tensors,
    local_gradients,
    local_tensors,
    new_policy_config,
    policy_from_folder,
    vocab_shard,
)
from lightning_spec.policy.weights import unwrap

RECOMPUTE: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MICRO: tuple[list[int], ...] = ([7, 1, 12, 5], [3], [], [9, 4])
"""Lengths of the documents of each micro-batch: odd numbers of rows, and none at all."""


@dataclass
class Case:
    """A policy and its layout. The whole policy is built without the layout's options."""

    sizes: ParallelSizes
    policy: dict[str, Any] = field(default_factory=dict)
    """Changes to the config.json."""
    sequence_parallel: bool = False
    layout: list[int] | None = None
    recompute: bool = False
    dtype: torch.dtype = torch.float64
    micro: tuple[list[int], ...] = MICRO
    drawn: bool = False
    """Start from random weights instead of a checkpoint."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that change no result."""


TP2, PP2, VPP2 = ParallelSizes(2), ParallelSizes(1, 2), ParallelSizes(1, 2, 2)
ONE_KV_HEAD = {"num_key_value_heads": 1}
CASES = {
    # Two processes.
    "tp2": Case(TP2, {"model_type": "qwen2", "vocab_size": 97}),
    "tp2-sp": Case(TP2, {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True}, True, drawn=True),
    "tp2-sp-biases": Case(TP2, {"attention_bias": True, "mlp_bias": True}, True, recompute=True),
    "tp2-one-kv-head": Case(TP2, {"model_type": "qwen3", **ONE_KV_HEAD, "head_dim": 8}, True, recompute=True),
    "pp2": Case(PP2, {}, recompute=True),
    "pp2-tied": Case(PP2, {"model_type": "qwen2", "tie_word_embeddings": True}, layout=[3, 1]),
    "pp2-no-layer-first": Case(PP2, {"tie_word_embeddings": True}, layout=[0, 4], drawn=True),
    "pp2-vpp2": Case(VPP2, {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}, recompute=True),
    "pp2-vpp2-uneven": Case(VPP2, {}, layout=[2, 0, 1, 1], megatron={"deallocate_pipeline_outputs": True}),
    # Four processes.
    "tp4-two-kv-heads": Case(ParallelSizes(4), {"model_type": "qwen3", "head_dim": 8, "vocab_size": 97}, True),
    "tp4-one-kv-head": Case(
        ParallelSizes(4), {"model_type": "qwen3", "attention_bias": True, "head_dim": 8, **ONE_KV_HEAD}
    ),
    "pp4": Case(ParallelSizes(1, 4), {"tie_word_embeddings": True}),
    "tp2-pp2": Case(ParallelSizes(2, 2), {"model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 97}),
    "tp2-pp2-sp": Case(ParallelSizes(2, 2), {"model_type": "qwen3", "head_dim": 8}, True, recompute=True),
    "tp2-pp2-vpp2-sp": Case(ParallelSizes(2, 2, 2), {"model_type": "qwen2", "tie_word_embeddings": True}, True),
    "tp2-cp2-sp": Case(ParallelSizes(2, context_parallel=2), {"model_type": "qwen2"}, True),
    "pp2-cp2": Case(ParallelSizes(1, 2, context_parallel=2), {}, recompute=True),
    "tp2-pp2-sp-float32": Case(ParallelSizes(2, 2), {"model_type": "qwen3", "head_dim": 8}, True, dtype=torch.float32),
}
CONFIG: dict[str, Any] = {
    **new_policy_config(
        vocab_size=96,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        tied_embeddings=False,
        initializer_range=0.2,
    ),
    "head_dim": None,
}


# ---- the policy ------------------------------------------------------------------------------------------------------


def relayout(sizes: ParallelSizes) -> None:
    """Cut the running world anew. A run never does this: its layout is fixed."""
    parallel_state.destroy_model_parallel()
    initialise_groups(sizes, timeout_s=60)


def policy_folder(out: Path, name: str, case: Case) -> Path:
    """A checkpoint in which no weight has a special value."""
    folder = out / f"policy-{name}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **case.policy}))
    if not case.drawn:
        policy = policy_from_folder(folder, seed=5)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for tensor_name, tensor in hf_tensors(policy):
                if tensor_name.endswith((".bias", "norm.weight")):
                    tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        export_policy(policy, folder)
    return folder


# ---- a step ----------------------------------------------------------------------------------------------------------


@dataclass
class Micro:
    """One micro-batch on this rank, and the coefficients of its loss, [T, V] over all rows and tokens."""

    tokens: Tensor
    positions: Tensor
    lengths: list[int]
    coefficients: Tensor
    shard: Shard | None = None

    @property
    def rows(self) -> Tensor:
        """Which rows of the micro-batch are here."""
        return torch.arange(sum(self.lengths)) if self.shard is None else self.shard.rows

    def on_this_rank(self) -> Micro:
        context = ContextParallel().context
        if context.size == 1:
            return self
        shard = Shard(Zigzag(self.lengths, context.size), context)
        rows = shard.rows
        return replace(self, tokens=self.tokens[rows], positions=self.positions[rows], shard=shard)


def micro_batches(case: Case) -> list[Micro]:
    generator = torch.Generator().manual_seed(3)
    vocab = case.policy.get("vocab_size", CONFIG["vocab_size"])
    found = []
    for lengths in case.micro:
        rows = sum(lengths)
        tokens = torch.randint(0, vocab, (rows,), generator=generator)
        positions = torch.cat([torch.arange(n) for n in lengths]) if lengths else tokens.clone()
        coefficients = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
        found.append(Micro(tokens, positions, lengths, coefficients.to(case.dtype)))
    return found


def loss_of(model: nn.Module, hidden: Tensor, micro: Micro) -> Tensor:
    """Sum over rows and tokens of c z (1 + z / 9): this rank's part of it. The sum over the vocabulary's ranks of the
    hidden states' gradient is made here, as the project's losses do."""
    shard = vocab_shard([model])
    mine = micro.coefficients[micro.rows]
    if shard is not None:
        hidden = copy_to_tensor_model_parallel_region(hidden)
        mine = mine[:, shard.start : shard.stop]
    logits = hidden @ head_weight([model]).T
    return (mine * logits * (1 + logits / 9)).sum()


@dataclass
class Step:
    """What a step leaves on this rank: by micro-batch, hidden states (last stage) and taps by layer id, -1 the
    embedding; the loss (last stage)."""

    hidden: list[Tensor] = field(default_factory=list)
    taps: list[dict[int, Tensor]] = field(default_factory=list)
    loss: float = 0.0
    again: bool = False
    """Something was recorded after the last forward pass."""


def run_step(models: list[nn.Module], micro: list[Micro]) -> Step:
    """Forward and backward of all micro-batches by Megatron's schedule, then its reductions of the gradients."""
    done = Step(taps=[{} for _ in micro])
    layers = tuple(range(chunks(models)[0].config.num_layers + 1))
    recorders = {unwrap(model): TapRecorder(model, layers) for model in models}
    at = dict.fromkeys(recorders, 0)

    def step(batches: Iterator[Micro], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        one, chunk = next(batches), unwrap(model)
        out = model(one.tokens, one.positions, one.lengths, one.shard)
        keep_taps(chunk, recorders[chunk], done.taps[at[chunk]], one)
        at[chunk] += 1
        if chunk.post_process:
            done.hidden.append(out.detach().clone())

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            value = loss_of(chunk, hidden, one)
            done.loss += float(value.detach())
            return value, torch.zeros((), dtype=torch.int), {}

        return out, loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(micro) for _ in models],
        model=models,
        num_microbatches=len(micro),
        seq_length=0,
        micro_batch_size=1,
        forward_only=False,
    )
    if isinstance(models[0], DistributedDataParallel):
        finalize_model_grads(models)
    for recorder in recorders.values():
        # What backward ran again was not recorded.
        done.again |= recorder._complete or bool(recorder._features)
        recorder.close()
    return done


def keep_taps(chunk: PolicyModel, recorder: TapRecorder, taps: dict[int, Tensor], micro: Micro) -> None:
    parts = recorder.take_parts()
    found = dict(parts.features) | ({-1: parts.embeddings} if parts.embeddings is not None else {})
    rows = len(micro.rows)
    for k, tensor in found.items():
        assert k not in taps, f"tap {k} was recorded by two chunks"
        if chunk.config.sequence_parallel:
            every = [torch.empty_like(tensor) for _ in range(TensorParallel().size)]
            dist.all_gather(every, tensor.contiguous(), group=TensorParallel().group)
            tensor = torch.cat(every)
        assert tensor.shape[0] == chunk.padded_rows(rows)
        taps[k] = tensor[:rows].clone()


def wrapped(policy: nn.Module) -> list[nn.Module]:
    settings = DistributedDataParallelConfig(overlap_grad_reduce=False)
    models = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks(policy)]
    for model in models:
        model.zero_grad_buffer()
    return models


# ---- comparison ------------------------------------------------------------------------------------------------------


def apart(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference, over the size of what is compared (1 where it is small)."""
    if not mine.numel():
        return 0.0 if mine.shape == theirs.shape else float("inf")
    return float((mine - theirs).abs().max() / max(1.0, float(theirs.abs().max())))


@dataclass
class Whole:
    """The step of the whole policy, and what it left."""

    folder: Path
    step: Step
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def options(case: Case) -> dict[str, Any]:
    return {"dtype": case.dtype, "seed": 5, "calculate_per_token_loss": True}


def run_whole(case: Case, out: Path, name: str) -> Whole:
    """On this rank alone: no group of this layout has more ranks than one, but the data-parallel one."""
    folder = policy_folder(out, name, case)
    policy = policy_from_folder(folder, **options(case))
    step = run_step([policy], micro_batches(case))
    weights = {place.name: tensor.clone() for place, tensor in parts_of(local_tensors(policy))}
    return Whole(folder, step, weights, {place.name: tensor for place, tensor in parts_of(local_gradients(policy))})


def compare(case: Case, whole: Whole) -> dict[str, Any]:
    layout: dict[str, Any] = {"sizes": case.sizes, "sequence_parallel": case.sequence_parallel, "layout": case.layout}
    megatron = case.megatron | (RECOMPUTE if case.recompute else {})
    policy = policy_from_folder(whole.folder, **layout, **options(case), **megatron)
    loaded = errors(local_tensors(policy), whole.weights)
    models = wrapped(policy)
    mine = [one.on_this_rank() for one in micro_batches(case)]
    split = run_step(models, mine)
    last = chunks(models)[-1].post_process
    rows = [one.rows for one in mine]
    loss = torch.tensor(split.loss if last else 0.0, dtype=torch.float64)
    dist.all_reduce(loss)
    hidden = [apart(a, b[r]) for a, b, r in zip(split.hidden, whole.step.hidden, rows, strict=False)]
    return {
        "weights": loaded,
        "gradients": errors(local_gradients(models), whole.gradients),
        "hidden": hidden if last else None,
        "loss": abs(float(loss) - whole.step.loss) / max(1.0, abs(whole.step.loss)),
        "taps": taps_apart(split, whole.step, rows),
        "tap ids": [sorted(taps) for taps in split.taps],
        "scale": {name: float(gradient.abs().max()) for name, gradient in whole.gradients.items()},
        "recorded again": split.again,
        "refused": all(refuses_tap(chunk, chunk.config.num_layers + 1) for chunk in chunks(models)),
        "padding": padding_of(models),
    }


def refuses_tap(chunk: PolicyModel, k: int) -> bool:
    try:
        TapRecorder(chunk, [k])
    except ConfigError as error:
        return f"from 0 to {CONFIG['num_hidden_layers']}" in str(error)
    return False


def taps_apart(split: Step, whole: Step, rows: list[Tensor]) -> float:
    """0.0: the same bits."""
    worst = 0.0
    for mine, theirs, here in zip(split.taps, whole.taps, rows, strict=True):
        for k, tensor in mine.items():
            same = torch.equal(tensor, theirs[k][here])
            worst = max(worst, 0.0 if same else max(apart(tensor, theirs[k][here]), 1e-300))
    return worst


def parts_of(parts: Iterator[tuple[Any, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
    """Whole tensors of a rank that has them."""
    for place, tensor in parts:
        pieces = sorted(place.pieces(tensor), key=lambda piece: piece.offset)
        yield place, torch.cat([piece.tensor for piece in pieces])


def errors(parts: Iterator[tuple[Any, Tensor]], expected: dict[str, Tensor]) -> dict[str, float]:
    found: dict[str, float] = {}
    for place, tensor in parts:
        for piece in place.pieces(tensor):
            there = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
            found[place.name] = max(found.get(place.name, 0.0), apart(piece.tensor, expected[place.name][there]))
    return found


def padding_of(models: list[nn.Module]) -> float:
    """Largest weight or gradient in the rows that pad the vocabulary."""
    worst = 0.0
    shard = vocab_shard(models)
    for chunk in chunks(models):
        for name, parameter in chunk.named_parameters():
            if shard is not None and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                for tensor in (parameter.detach(), parameter.main_grad):
                    rest = tensor[shard.stop - shard.start :]
                    worst = max(worst, float(rest.abs().max()) if rest.numel() else 0.0)
    return worst


def main() -> None:
    torch.set_num_threads(1)
    out, names = Path(sys.argv[1]), sys.argv[2:]
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    with cpu_stand_in():
        relayout(ParallelSizes())
        for name in names[rank::world]:
            torch.save(run_whole(CASES[name], out, name), out / f"{name}-whole.pt")
        dist.barrier()
        whole = {name: torch.load(out / f"{name}-whole.pt", weights_only=False) for name in names}
        for sizes in dict.fromkeys(CASES[name].sizes for name in names):
            relayout(sizes)
            for name in (name for name in names if CASES[name].sizes == sizes):
                torch.save(compare(CASES[name], whole[name]), out / f"{name}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
