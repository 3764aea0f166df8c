"""The training commands: a LightningCLI over SpecGRPO, PromptData and the callbacks the project owns.

Three things differ from Lightning's own command line. Files compose other files (`compose.py`). A configuration is
walked key by key before it is parsed, so that a mistyped key is answered with the right one (`keys.py`). Interpolation
(`${run.dir}`) is resolved once, after files and command line are merged, so an override reaches every reference.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from lightning_spec.quick_import import import_torchmetrics, quiet

quiet()
import_torchmetrics()

import lightning.pytorch as pl  # noqa: E402
import yaml  # noqa: E402
from jsonargparse import ArgumentError, set_parsing_settings  # noqa: E402
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI  # noqa: E402
from lightning.pytorch.strategies import Strategy  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from callbacks.acceptance import FrozenTwin  # noqa: E402
from callbacks.checkpoint import SpecCheckpoint  # noqa: E402
from callbacks.export import ExportCallback, export  # noqa: E402
from callbacks.preemption import EarlyListener, PreemptionCallback  # noqa: E402
from callbacks.progress import ProgressCallback  # noqa: E402
from callbacks.rollout import RolloutCallback  # noqa: E402
from callbacks.throughput import ThroughputCallback  # noqa: E402
from lightning_spec.compose import Composed, load, merge, nearest  # noqa: E402
from lightning_spec.data import PromptData  # noqa: E402
from lightning_spec.errors import ConfigError  # noqa: E402
from lightning_spec.keys import KeyCheck  # noqa: E402
from lightning_spec.module import SpecGRPO  # noqa: E402
from lightning_spec.readable import at, interpolation_error, readable  # noqa: E402
from lightning_spec.run_folder import KeepConfig, resume_path  # noqa: E402
from strategies.slurm import check_start  # noqa: E402

COMMANDS = ("fit", "validate", "export")
GROUPS: dict[str, type] = {
    # In the order the callbacks run. Lightning moves checkpoints to the end.
    "progress": ProgressCallback,
    "rollout": RolloutCallback,
    "acceptance": FrozenTwin,
    "export_at_end": ExportCallback,
    "checkpoint": SpecCheckpoint,
    "preemption": PreemptionCallback,
}


@dataclass
class RunConfig:
    """The run's folder and name; refer to them as ${run.dir} and ${run.name} anywhere.

    Args:
        dir: folder of everything that the run writes.
        name: name of the run in logs.
        resume: `auto` continues from the newest complete checkpoint under the run's folder, if there is one; `never`
            starts afresh; anything else is the checkpoint's path.
    """

    dir: str = "runs/default"
    name: str = "run"
    resume: str = "auto"


class SpecTrainer(pl.Trainer):
    """Lightning's Trainer, with a `strategy` that takes classes from YAML and one more command."""

    def __init__(self, strategy: Union[Strategy, str] = "auto", **kwargs: Any) -> None:  # noqa: UP007
        # Lightning annotates Union[str, Strategy]: str would win, and a class path become an "invalid strategy name".
        _refuse(kwargs)
        super().__init__(strategy=strategy, **kwargs)

    def export(
        self,
        model: SpecGRPO,
        datamodule: PromptData | None = None,
        ckpt_path: str | None = None,
        out: str | None = None,
    ) -> Path:
        """Write a checkpoint as a Hugging Face policy folder and a vLLM draft folder.

        Args:
            model: the module.
            datamodule: not used.
            ckpt_path: checkpoint folder; null takes what `run.resume` finds, or the initial weights.
            out: folder that gets `policy/` and `draft/`; null is `${run.dir}/export`.
        """
        # A validation over nothing builds the model and restores the weights, and runs no hook of a callback.
        self.limit_val_batches = 0
        self.validate(model, dataloaders=[], ckpt_path=ckpt_path, verbose=False, weights_only=False)
        return export(self, model, out or Path(self.default_root_dir) / "export")


def _refuse(trainer: dict[str, Any]) -> None:
    """Trainer settings that would be ignored or would break the schedule."""
    if trainer.get("max_epochs") not in (None, -1):
        raise ConfigError(
            "the run is measured in optimiser steps; together with epochs a resumed run would stop early",
            found=trainer["max_epochs"],
            needed="trainer.max_steps alone",
            key="trainer.max_epochs",
        )
    if trainer.get("accumulate_grad_batches", 1) != 1:
        raise ConfigError(
            "the schedule accumulates micro-batches itself",
            found=trainer["accumulate_grad_batches"],
            needed="1; set trainer.strategy.init_args.token_budget",
            key="trainer.accumulate_grad_batches",
        )
    if trainer.get("gradient_clip_val"):
        raise ConfigError(
            "policy and draft are clipped each by its own norm",
            found=trainer["gradient_clip_val"],
            needed="model.policy_optim.clip_norm and model.draft_optim.clip_norm",
            key="trainer.gradient_clip_val",
        )


class SpecCLI(LightningCLI):
    """The command line. Keys: trainer, model, data, run, vars, seed_everything, and one group for each callback."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunConfig, "run")
        parser.add_argument("--vars", type=dict[str, Any], default={}, help="free variables: ${vars.name} anywhere")
        for key, kind in GROUPS.items():
            parser.add_lightning_class_args(kind, key)
        parser.link_arguments("rollout.sampling.temperature", "model.temperature")

    wanted: tuple[str, ...] = COMMANDS
    """Commands whose parsers are built; building one costs a good part of a second."""

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        fit = {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"}
        validate = {"model", "dataloaders", "datamodule", "weights_only"}
        skipped = {"fit": fit, "validate": validate, "export": {"model", "datamodule"}}
        return {name: skipped[name] for name in self.wanted}

    def before_instantiate_classes(self) -> None:
        # Lightning's SLURMEnvironment would refuse some of these, as it is made, with less to go on.
        check_start()

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[pl.Callback]) -> pl.Trainer:
        early = [EarlyListener(one) for one in callbacks if isinstance(one, PreemptionCallback)]
        return super()._instantiate_trainer(config, [*early, ThroughputCallback(), *callbacks])

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # Without Lightning's warning: main() hands over sys.argv with its files composed, and so does each rank.
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        # Lightning would let the checkpoint's hyper-parameters override the command line.
        return

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        run = self._get(self.config_init, "run")
        folder = self._get(self.config_init, "checkpoint").dirpath
        kwargs["ckpt_path"] = resume_path(run.resume, folder, kwargs.get("ckpt_path"))
        return kwargs


# ---- from argv to a run ---------------------------------------------------------------------------------------------


def run(argv: Sequence[str]) -> int:
    """Run a training command; returns the exit code.

    Raises:
        ConfigError: bad input. Other errors of the run pass through.
    """
    command, args = argv[0], list(argv[1:])
    if command not in COMMANDS:
        raise ConfigError(
            "no such command", found=command, needed=nearest(command, (*COMMANDS, "report"), "one of"), key="command"
        )
    if command == "export" and args and not args[0].startswith("-"):
        args = [*_config_of(Path(args[0])), "--ckpt_path", args[0], *args[1:]]
    build(command, args)
    return 0


def _config_of(checkpoint: Path) -> list[str]:
    """`-c` and the configuration that the run of a checkpoint saved."""
    for folder in list(checkpoint.resolve().parents)[:3]:
        if (folder / "config.yaml").is_file():
            return ["-c", str(folder / "config.yaml")]
    raise ConfigError(
        "the checkpoint's run has no saved configuration",
        found=str(checkpoint),
        needed="config.yaml in its run's folder, or `-c FILE --ckpt_path DIR`",
        key="export",
    )


def build(command: str, args: Sequence[str], execute: bool = True) -> SpecCLI | Any:
    """Parse, and run unless `execute` is False: then the parsed configuration of the command is returned."""
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    quiet()
    values, expanded, origin = expand(args, command)
    check = KeyCheck(origin)
    check.roots(values, root_types(command))
    check_strategy(values, origin)
    settings = {
        "model_class": SpecGRPO,
        "datamodule_class": PromptData,
        "trainer_class": SpecTrainer,
        "trainer_defaults": TRAINER_DEFAULTS,
        "save_config_callback": KeepConfig,
        "seed_everything_default": 0,
        "auto_configure_optimizers": False,
        "load_from_checkpoint_support": False,
        "parser_kwargs": {
            "parser_mode": "omegaconf+",
            "exit_on_error": False,
            command: {"parser_mode": "omegaconf+", "exit_on_error": False},
        },
    }
    kind = type("SpecCLI", (SpecCLI if execute else _ParseOnly,), {"wanted": (command,)})
    try:
        return kind(args=[command, *expanded], **settings)
    except _Parsed as parsed:
        return parsed.cli
    except ArgumentError as error:
        raise readable(error, origin) from error.__cause__
    except OmegaConfBaseException as error:
        raise interpolation_error(error, values, origin) from None


TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": -1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": True,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "log_every_n_steps": 1,
}


class _Parsed(Exception):
    def __init__(self, cli: SpecCLI) -> None:
        self.cli = cli


class _ParseOnly(SpecCLI):
    """Stops when the configuration is parsed and checked."""

    def _parse_ckpt_path(self) -> None:
        raise _Parsed(self)


def root_types(command: str) -> dict[str, Any]:
    """The type behind each top-level key of a command's configuration."""
    return {
        "trainer": SpecTrainer,
        "model": SpecGRPO,
        "data": PromptData,
        "run": RunConfig,
        "vars": Any,
        "seed_everything": Any,
        "config": Any,
        **GROUPS,
        **dict.fromkeys(OWN_KEYS[command], Any),
    }


OWN_KEYS: dict[str, set[str]] = {
    "fit": {"ckpt_path"},
    "validate": {"ckpt_path", "verbose"},
    "export": {"ckpt_path", "out"},
}
"""Keys of a command beside the shared ones."""


def expand(args: Sequence[str], command: str = "fit") -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Merge all `-c FILE` with what they compose into one configuration, which flags override wherever they stand.

    Interpolations given as flags go into that configuration too: as flags, a subcommand's parser would look their names
    up from the wrong root.

    Returns:
        (files and flags merged, for the key check; the arguments for the parser; where each key came from).
    """
    merged = Composed()
    flags: list[tuple[str, str | None]] = []
    out: list[str] = []
    queue = list(args)
    while queue:
        word = queue.pop(0)
        flag, equals, rest = word.partition("=")
        if flag in ("-c", "--config"):
            value = rest if equals else (queue.pop(0) if queue else "")
            one = load(value)
            merged = Composed(merge(merged.values, one.values), merged.origin | one.origin)
            continue
        key = flag.removeprefix("--")
        if not flag.startswith("--") or not re.fullmatch(r"[a-z_]+(\.[A-Za-z0-9_]+)*\+?", key) or key in _FLAGS:
            out.append(word)
            continue
        given = rest if equals else (queue.pop(0) if queue and not queue[0].startswith("--") else None)
        if given is not None and "${" in given:
            merged = Composed(merge(merged.values, _nested(key, yaml.safe_load(given))), merged.origin)
        else:
            out += [flag] if given is None else [f"{flag}={given}"]
        flags.append((key, given))
    for other in OWN_KEYS.keys() - {command}:
        for key in OWN_KEYS[other] - OWN_KEYS.get(command, set()):
            # A saved configuration has its command's own keys; another command reads the rest.
            merged.values.pop(key, None)
    if merged.values:
        out = ["--config", merged.dump(), *out]
    checked = copy.deepcopy(merged.values)
    origin = dict(merged.origin)
    for key, given in flags:
        _note(checked, key, given)
        origin[key] = "command line"
    return checked, out, origin


_FLAGS = ("help", "print_config", "version")


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _note(values: dict[str, Any], key: str, value: str | None) -> None:
    """Put a flag into the merged configuration for the key check. The parser also takes `--a.b` for an argument of the
    class at `a` without naming `init_args`; where a class is named the flag is noted under its arguments."""
    node = values
    parts = key.split(".")
    for part in parts[:-1]:
        below = node.get(part)
        if not isinstance(below, dict):
            if part in node and below is not None:
                return
            below = node[part] = {}
        if "class_path" in below and parts[-1] not in ("class_path", "init_args"):
            args = below.get("init_args")
            if "init_args" not in parts and isinstance(args, dict):
                below = args
        node = below
    try:
        # A text that YAML reads as a comment stays as it is, for the check to see.
        node[parts[-1]] = value if value is None or value.lstrip().startswith("#") else yaml.safe_load(value)
    except yaml.YAMLError:
        node[parts[-1]] = value


def check_strategy(values: dict[str, Any], origin: dict[str, str]) -> None:
    """A strategy that is given as a text names a class or one of Lightning's; the Trainer would say less.

    Raises:
        ConfigError: neither.
    """
    from lightning.pytorch.strategies import StrategyRegistry

    from strategies import MegatronStrategy

    given = (values.get("trainer") or {}).get("strategy")
    if not isinstance(given, str):
        return
    known = ["auto", *StrategyRegistry.available_strategies(), MegatronStrategy.__name__]
    if given in known:
        return
    if "." in given:
        KeyCheck(origin).component(given, {}, [Strategy], "trainer.strategy", "trainer.strategy")
        return
    raise ConfigError(
        "no such strategy",
        found=given,
        needed=nearest(given, known, "a class path such as strategies.MegatronStrategy, or one of"),
        key=at("trainer.strategy", origin),
    )
