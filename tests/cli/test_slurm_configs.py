"""configs/slurm: each layout and its batch script agree, overlay an experiment, and pass the checks they will meet."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_spec.command import build
from lightning_spec.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GRPO = str(CONFIGS / "experiment" / "demo_grpo.yaml")
LAYOUTS = sorted((CONFIGS / "slurm").glob("*.yaml"))


def options(script: Path) -> dict[str, str]:
    """`#SBATCH --name=value` lines of a batch script."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script.read_text(), flags=re.MULTILINE))


@pytest.fixture(params=LAYOUTS, ids=lambda path: path.stem)
def layout(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def sbatch(layout: Path, tmp_path: Path) -> list[str]:
    """The words of the command that the layout's batch script runs, SLURM's variables filled in by a fake `srun`."""
    fake = tmp_path / "srun"
    fake.write_text('#!/bin/sh\nprintf \'%s\\n\' "port=$MASTER_PORT" "$@"\n')
    fake.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1234567",
        "SLURM_CPUS_PER_TASK": "8",
    }
    command = ["bash", str(layout.with_suffix(".sbatch")), "-c", GRPO]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()


def test_the_batch_script_asks_for_the_layouts_nodes_tasks_and_gpus(layout: Path, parse: Any) -> None:
    trainer = parse("fit", "-c", GRPO, "-c", str(layout)).trainer
    asked = options(layout.with_suffix(".sbatch"))
    assert int(asked["nodes"]) == trainer.num_nodes
    assert int(asked["ntasks-per-node"]) == int(asked["gpus-per-node"]) == trainer.devices
    assert "ntasks" not in asked, "the tasks of all nodes follow from those of one"


def test_the_signal_ahead_of_the_time_limit_is_answered_by_a_requeue(layout: Path, parse: Any) -> None:
    preemption = parse("fit", "-c", GRPO, "-c", str(layout)).preemption
    asked = options(layout.with_suffix(".sbatch"))
    name, seconds = asked["signal"].split("@")
    assert name in preemption.signals
    assert name in preemption.requeue
    assert int(seconds) >= 300
    assert "requeue" in asked
    assert asked["open-mode"] == "append"
    assert "TERM" not in preemption.requeue, "scancel must end a job"


def test_the_batch_script_runs_fit_in_a_folder_and_on_a_port_of_the_job(
    layout: Path, sbatch: list[str], parse: Any
) -> None:
    port, *words = sbatch
    assert port == "port=24567"
    start = words.index("lightning-spec")
    assert "--kill-on-bad-exit=1" in words[:start]
    assert "--distribution=block" in words[:start]
    command, *arguments = words[start + 1 :]
    assert arguments[:2] == ["-c", GRPO]
    arguments[arguments.index(f"configs/slurm/{layout.name}")] = str(layout)
    config = parse(command, *arguments)
    assert config.run.dir == "runs/1234567"
    assert config.checkpoint.dirpath == "runs/1234567/checkpoints"
    assert config.run.resume == "auto"


def test_the_layout_passes_the_checks_under_its_own_job(
    layout: Path, parse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    from strategies.slurm import check_layout

    config = parse("fit", "-c", GRPO, "-c", str(layout))
    (plugin,) = config.trainer.plugins
    assert plugin.class_path.rpartition(".")[2] == SLURMEnvironment.__name__
    assert plugin.init_args.auto_requeue is False
    asked = options(layout.with_suffix(".sbatch"))
    nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    last = {"PROCID": nodes * tasks - 1, "LOCALID": tasks - 1, "NODEID": nodes - 1}
    sizes = {"NTASKS": nodes * tasks, "NTASKS_PER_NODE": tasks, "NNODES": nodes, "STEP_ID": 0}
    for name, value in {**sizes, **last}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURM_JOB_NAME", asked["job-name"])
    check_layout(SLURMEnvironment(**plugin.init_args), config.trainer.devices, config.trainer.num_nodes)


def test_the_command_refuses_a_wrong_start_before_it_makes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain `lightning-spec` in a batch script, without srun."""
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    for name in ("NTASKS", "NTASKS_PER_NODE"):
        monkeypatch.setenv(f"SLURM_{name}", "8")
    for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_SRUN_COMM_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="srun did not start this process"):
        build("fit", ["-c", GRPO, "-c", str(LAYOUTS[0])])
