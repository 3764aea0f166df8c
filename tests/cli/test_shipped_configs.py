"""Every shipped YAML parses under every subcommand, and an override reaches every reference."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lightning_spec.command import COMMANDS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GRPO = str(CONFIGS / "experiment" / "demo_grpo.yaml")

EXPERIMENTS = sorted((CONFIGS / "experiment").glob("*.yaml"))
PARTS = sorted(p for p in CONFIGS.rglob("*.yaml") if p.parent.name not in ("experiment", "configs"))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda p: p.stem)
def test_an_experiment_is_a_whole_configuration_and_its_folder_can_be_moved(parse, command, file):
    config = parse(command, "-c", str(file), "--run.dir", "/elsewhere", "--vars.policy", "/policy")
    assert config.checkpoint.dirpath == "/elsewhere/checkpoints"
    assert config.rollout.workdir == "/elsewhere/engine"
    assert config.acceptance.folder == "/elsewhere/frozen_draft"
    assert config.export_at_end.folder == "/elsewhere/export"
    assert config.trainer.default_root_dir == "/elsewhere"
    assert [str(logger.init_args.get("dir") or logger.init_args.save_dir) for logger in config.trainer.logger] == [
        "/elsewhere"
    ] * 2
    assert config.model.policy.path == config.data.tokenizer == "/policy"
    assert "${" not in str(config)


@pytest.mark.parametrize(
    "command", ["fit", *(pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS if name != "fit")]
)
@pytest.mark.parametrize("file", PARTS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_part_overlays_an_experiment(parse, command, file):
    config = parse(command, "-c", GRPO, "-c", str(file), "--run.dir", "/elsewhere")
    assert config.checkpoint.dirpath == "/elsewhere/checkpoints"
    assert "${" not in str(config)


def test_the_base_names_every_callback_group_and_each_part_says_what_it_is():
    from lightning_spec.command import GROUPS
    from lightning_spec.compose import load

    assert set(GROUPS) <= set(load(CONFIGS / "base.yaml").values)
    for file in CONFIGS.rglob("*.yaml"):
        assert file.read_text().startswith("# "), f"{file} has no first line that says what it is"


def test_the_demo_stages_hand_over_to_each_other_under_one_root(parse):
    stage = {name: parse("fit", "-c", str(CONFIGS / "experiment" / f"demo_{name}.yaml"), "--vars.root", "/r")
             for name in ("sft", "distill", "grpo")}  # fmt: skip
    assert stage["sft"].model.policy.path == "/r/init"
    assert stage["distill"].model.policy.path == stage["grpo"].model.policy.path == "/r/sft/export/policy"
    assert stage["grpo"].model.draft.init_args.path == "/r/distill/export/draft"
    assert [stage[name].run.dir for name in stage] == ["/r/sft", "/r/distill", "/r/grpo"]


FORMS = (["--model.policy.path", "${run.dir}/p"], ["--model.policy.path=${run.dir}/p"])


def test_an_interpolation_on_the_command_line_works_under_subcommands(parse):
    for command, words in zip(COMMANDS, itertools.cycle(FORMS), strict=False):
        assert parse(command, "-c", GRPO, *words, "--run.dir", "/q").model.policy.path == "/q/p"


def test_the_seed_reaches_data_order_and_sampling(parse):
    config = parse("fit", "-c", GRPO, "--seed_everything", "5")
    assert (config.seed_everything, config.data.seed, config.rollout.seed, config.model.policy.init_seed) == (
        5,
        5,
        5,
        5,
    )


def test_an_overlay_replaces_a_class_whole_and_keeps_our_groups(parse):
    overlay = str(CONFIGS / "rollout" / "reference.yaml")
    config = parse("fit", "-c", GRPO, "-c", overlay, "--trainer.callbacks", "null")
    assert config.rollout.engine.class_path.endswith("ReferenceEngine")
    assert "max_num_seqs" not in config.rollout.engine.init_args
    assert config.checkpoint.every_n_steps
    assert config.rollout.reward.class_path.endswith("ReasoningGymReward")


def test_the_strategy_is_taken_as_class_name_dotted_path_or_registered_name(parse):
    for given in ("MegatronStrategy", "strategies.MegatronStrategy"):
        config = parse("fit", "-c", GRPO, "--trainer.strategy", given, "--trainer.strategy.token_budget", "64")
        assert config.trainer.strategy.class_path.endswith("MegatronStrategy")
        assert config.trainer.strategy.init_args.token_budget == 64
    assert parse("fit", "-c", GRPO, "--trainer.strategy", "ddp").trainer.strategy == "ddp"


def test_the_saved_configuration_parses_to_itself(parse, tmp_path):
    from lightning_spec.command import build

    cli = build("fit", ["-c", GRPO, "--run.dir", "/q", "--vars.extra", "1"], execute=False)
    file = tmp_path / "config.yaml"
    parser = cli._parser("fit")
    parser.save(cli.config.fit, str(file), skip_none=False)
    again = parse("fit", "-c", str(file))
    skip = ("config", "__path__")
    first = {k: v for k, v in cli.config.fit.as_dict().items() if k not in skip}
    assert {k: v for k, v in again.as_dict().items() if k not in skip} == first


@pytest.mark.slow
def test_our_command_line_raises_no_deprecation_warning():
    import subprocess
    import sys

    code = (
        "import sys, warnings\nfrom lightning_spec import command\n"
        "warnings.simplefilter('error', DeprecationWarning); warnings.simplefilter('error', FutureWarning)\n"
        f"command.build('fit', ['-c', {GRPO!r}], execute=False)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=240, env={**_environment(), "OMP_NUM_THREADS": "1"}
    )


def _environment():
    import os

    return {**os.environ, "JSONARGPARSE_DEPRECATION_WARNINGS": "all"}


def test_paths_of_this_test_are_where_the_configs_are():
    assert Path(GRPO).is_file()
    assert len(EXPERIMENTS) >= 4
    assert len(PARTS) >= 10


def test_a_configuration_saved_by_one_command_serves_another(parse, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"compose: [{GRPO}]\nverbose: true\nckpt_path: /c\n")
    config = parse("export", "-c", str(file), "--out", "/x")
    assert (config.ckpt_path, config.out) == ("/c", "/x")
    assert "verbose" not in config
