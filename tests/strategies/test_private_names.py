"""Every private name of Lightning, torch and Megatron that the strategy leans on, one test each.

When a version moves one, the test that names it fails, and not a run.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def test_fit_loop_has_the_switch_that_turns_lightnings_backward_off() -> None:
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization

    assert isinstance(inspect.getattr_static(_FitLoop, "_skip_backward"), property)
    source = inspect.getsource(_AutomaticOptimization)
    assert source.count("if self._skip_backward:") == 2  # backward and zero_grad


def test_subprocess_script_launcher_takes_environment_processes_and_nodes() -> None:
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    names = list(inspect.signature(_SubprocessScriptLauncher.__init__).parameters)
    assert names == ["self", "cluster_environment", "num_processes", "num_nodes"]
    assert "validate_settings" in inspect.getsource(_SubprocessScriptLauncher.launch)


def test_init_dist_connection_takes_environment_and_backend() -> None:
    from lightning.fabric.utilities.distributed import _init_dist_connection

    assert list(inspect.signature(_init_dist_connection).parameters)[:2] == [
        "cluster_environment",
        "torch_distributed_backend",
    ]


def test_sync_ddp_if_available_reduces_a_tensor() -> None:
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available

    assert list(inspect.signature(_sync_ddp_if_available).parameters) == ["result", "group", "reduce_op"]


@pytest.mark.parametrize("name", ["_configure_launcher", "_reset_optimizers_and_schedulers", "setup_precision_plugin"])
def test_strategy_base_has_the_hook(name: str) -> None:
    from lightning.pytorch.strategies import ParallelStrategy

    assert callable(getattr(ParallelStrategy, name))


def test_connector_fills_num_nodes_and_attaches_the_launcher() -> None:
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    source = inspect.getsource(_AcceleratorConnector)
    assert 'hasattr(self.strategy, "num_nodes")' in source
    assert "self.strategy._configure_launcher()" in source


def test_checkpoint_connector_restores_schedulers_without_restoring_optimizers() -> None:
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    source = inspect.getsource(_CheckpointConnector.restore_optimizers_and_schedulers)
    assert "lightning_restore_optimizer" in source
    assert "self.restore_lr_schedulers()" in source


def test_abort_process_group_exists() -> None:
    from torch.distributed import distributed_c10d

    assert callable(distributed_c10d._abort_process_group)


@pytest.mark.parametrize(
    "name", ["_get_model_param_range_map", "get_grad_norm", "prepare_grads", "step_with_ready_grads"]
)
def test_distributed_optimizer_has_the_method(name: str) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    assert callable(getattr(DistributedOptimizer, name))


@pytest.mark.parametrize("name", ["model_param_gbuf_map", "model_param_group_index_map"])
def test_distributed_optimizer_builds_the_map(name: str) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    assert f"self.{name}" in inspect.getsource(DistributedOptimizer.__init__)


def test_checkpoint_planner_helper_cuts_reads_by_chunk() -> None:
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    assert list(inspect.signature(create_read_items_for_chunk_list).parameters) == [
        "fqn",
        "checkpoint_md",
        "local_chunks",
    ]


def test_default_precision_plugin_is_the_plain_class() -> None:
    import lightning as L
    from lightning.pytorch.plugins import Precision

    plugin: Any = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False).precision_plugin
    assert type(plugin) is Precision


def test_the_logger_connector_writes_a_steps_metrics() -> None:
    """Called by callbacks/preemption.py in Lightning's place, with the very call that Lightning makes."""
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    source = inspect.getsource(_TrainingEpochLoop.advance)
    hook, logged = (
        source.index('"on_train_batch_end"'),
        source.index("trainer._logger_connector.update_train_step_metrics()"),
    )
    assert hook < logged


def test_the_signal_connector_registers_its_handlers_ahead_of_training_and_puts_the_old_ones_back() -> None:
    from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose, _SignalConnector
    from lightning.pytorch.trainer.trainer import Trainer

    assert _HandlersCompose([1, 2]).signal_handlers == [1, 2]
    source = inspect.getsource(Trainer._run)
    assert source.index('"on_fit_start"') < source.index("register_signal_handlers()") < source.index("_run_stage()")
    assert "self._signal_connector.teardown()" in inspect.getsource(Trainer._teardown)
    assert "_original_handlers" in inspect.getsource(_SignalConnector.teardown)


def test_init_process_group_takes_a_store_through_lightning() -> None:
    """strategies/rendezvous.py hands its store over as a keyword."""
    from lightning.fabric.utilities.distributed import _init_dist_connection

    assert "rank=global_rank, world_size=world_size, **kwargs" in inspect.getsource(_init_dist_connection)
