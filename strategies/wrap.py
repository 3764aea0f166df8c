"""Puts what is trained behind Megatron's gradient buffers, each over the ranks that hold shares of its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import Ranks
from lightning_spec.parallel.optimizer import Chunk
from lightning_spec.parallel.placement import Placement
from lightning_spec.policy import PolicyModel, chunks, placements


class Wrapped:
    """Megatron's DistributedDataParallel around the trained models of this rank; made anew where a model changed."""

    def __init__(self) -> None:
        self._models: dict[str, list[Any]] = {}

    def wrap(
        self, models: Mapping[str, Sequence[nn.Module]], config: Any, options: Mapping[str, Any], draft_ranks: Ranks
    ) -> None:
        """
        Args:
            models: "policy" and "draft", as their parts on this rank; those without trained parameters are left bare.
            config: the policy's Megatron configuration.
            options: of Megatron's DistributedDataParallelConfig.
            draft_ranks: all ranks that train the draft: each has all of it, and a share of its gradient.
        """
        config.calculate_per_token_loss = True  # neither the schedule nor the buffers rescale
        for name, parts in models.items():
            if not any(param.requires_grad for part in parts for param in part.parameters()):
                self._models.pop(name, None)
            elif [known.module for known in self._models.get(name, ())] != list(parts):
                groups = _draft_groups(draft_ranks) if name == "draft" else None
                self._models[name] = [_wrap(part, config, options, groups) for part in parts]
        for name in set(self._models) - set(models):
            self._models.pop(name)

    @property
    def names(self) -> set[str]:
        return set(self._models)

    def get(self, name: str) -> list[Any]:
        """The wrapped parts; empty where the model is not trained on this rank."""
        return self._models.get(name, [])

    def zero(self) -> None:
        for parts in self._models.values():
            for part in parts:
                part.zero_grad_buffer()

    def finish(self) -> None:
        """Reduce all gradients over the ranks that hold shares of them."""
        from megatron.core.distributed import finalize_model_grads

        if "policy" in self._models:
            finalize_model_grads(self._models["policy"])
        for part in self.get("draft"):
            part.finish_grad_sync()

    def chunks(self, name: str) -> list[Chunk]:
        """For the optimiser."""
        return [Chunk(part.module, part, _placements(part.module)) for part in self.get(name)]


def _placements(module: Any) -> Mapping[str, Sequence[Placement]]:
    """Where the parameters of a part of a model stand in the tensors that checkpoints name."""
    if isinstance(module, PolicyModel):
        return placements(module)
    found: Mapping[str, Sequence[Placement]] = module.placements()
    return found


def parts_of(model: nn.Module | None) -> list[nn.Module]:
    """A model's parts on this rank: the chunks of a policy, else itself where it has parameters here."""
    if model is None or not getattr(model, "resident", True):
        return []
    policy = isinstance(model, PolicyModel) or isinstance(next(iter(model.children()), None), PolicyModel)
    return list(chunks(model)) if policy else [model]


def _wrap(part: nn.Module, config: Any, options: Mapping[str, Any], groups: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), part, pg_collection=groups)


def _draft_groups(ranks: Ranks) -> Any:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.dp = groups.dp_cp = ranks.group
    groups.expt_dp = parallel_state.get_expert_data_parallel_group()  # unused: the draft has no experts
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.ep = parallel_state.get_expert_model_parallel_group()
    return groups


def refuse_shared_parameters(models: Mapping[str, Sequence[nn.Module]]) -> None:
    """
    Raises:
        ConfigError: policy and draft share a parameter.
    """
    owner: dict[int, str] = {}
    for name, parts in models.items():
        for part in parts:
            for parameter_name, param in part.named_parameters():
                if owner.setdefault(id(param), name) != name:
                    raise ConfigError(
                        "policy and draft share a parameter",
                        found=f"{name}.{parameter_name}",
                        needed="a borrowed tensor handed over detached in each step",
                        key="model.draft",
                    )
