"""Malformed input: each is refused before work starts, with what was found, what is needed, and which key to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_spec.cli import describe, main
from lightning_spec.command import SpecTrainer
from lightning_spec.errors import ConfigError
from lightning_spec.run_folder import keep_numbered, resume_path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GRPO = str(CONFIGS / "experiment" / "demo_grpo.yaml")

# arguments after `fit -c demo_grpo.yaml`, what is found, what is needed, the key
BAD_FLAGS = [
    (["--rollot.engine", "null"], "rollot", "rollout", "rollot"),
    (["--model.polcy.path", "x"], "polcy", "policy", "model.polcy"),
    (["--model.policy.pth", "x"], "pth", "path", "model.policy.pth"),
    (["--trainer.max_stepz", "3"], "max_stepz", "max_steps", "trainer.max_stepz"),
    (["--trainer.max_steps", "many"], "many", "int", "trainer.max_steps"),
    (["--data.prompt_per_step", "3"], "prompt_per_step", "prompts_per_step", "data.prompt_per_step"),
    (["--data.mode", "replay"], "replay", "rollouts", "data.mode"),
    (["--rollout.overlong", "drop"], "drop", "skip", "rollout.overlong"),
    (["--rollout.sampling.temperature", "hot"], "hot", "float", "rollout.sampling.temperature"),
    (["--rollout.sampling.top", "1"], "top", "top_", "rollout.sampling.top"),
    (["--rollout.advantages.std", "none_at_all"], "none_at_all", "group", "rollout.advantages.std"),
    (["--model.temperature", "0.5"], "model.temperature", "rollout.sampling.temperature", "model.temperature"),
    (["--rollout.engine.init_args.max_num_seq", "5"], "max_num_seq", "max_num_seqs", "rollout.engine"),
    (["--rollout.engine.max_num_seq", "5"], "max_num_seq", "max_num_seqs", "rollout.engine"),
    (["--rollout.engine.init_args.max_num_seqs", "lots"], "lots", "int", "rollout.engine"),
    (["--rollout.engine.init_args.speculation.method", "eagle4"], "eagle4", "eagle3", "speculation.method"),
    (["--rollout.engine", "lightning_spec.rollout.vlm.VLLMEngine"], "vlm", "rollout.vllm", "rollout.engine"),
    (["--rollout.engine", "lightning_spec.rollout.vllm.VLMEngine"], "VLMEngine", "VLLMEngine", "rollout.engine"),
    (["--model.policy_loss.class_path", "lightning_spec.loss.GRP"], "GRP", "GRPO", "model.policy_loss.class_path"),
    (["--model.draft", "lightning_spec.loss.GRPO"], "GRPO", "a Draft", "model.draft"),
    (["--model.draft", "none"], "none", "class_path, or null", "model.draft"),
    (["--model.policy_optim.lr", "fast"], "fast", "float", "model.policy_optim.lr"),
    (["--model.policy_optim.betas", "[0.9]"], "[0.9]", "2 values", "model.policy_optim.betas"),
    (["--model.policy_optim.beta", "0.9"], "beta", "betas", "model.policy_optim.beta"),
    (["--model.policy", "[a, b]"], "['a', 'b']", "PolicySource", "model.policy"),
    (["--trainer.strategy", "MegatronStrateg"], "MegatronStrateg", "MegatronStrategy", "trainer.strategy"),
    (["--trainer.strategy", "strategies.Megatron"], "Megatron", "MegatronStrategy", "trainer.strategy"),
    (
        ["--trainer.strategy", "[{class_path: strategies.MegatronStrategy}]"],
        "class_path",
        "no dash",
        "trainer.strategy",
    ),
    (["--trainer.strategy", "pytorch_lightning.strategies.DDPStrategy"], "pytorch_lightning", "do not mix", "strategy"),
    (["--run.dir", "${run.dirr}"], "${run.dirr}", "run.dir", "trainer.logger"),
    (["--run.dir", "${vars.rot}"], "${vars.rot}", "vars.root", "trainer.logger"),
    (["--rollout.record", "#here"], "#here", "another spelling", "rollout.record"),
    (["--checkpoint.every", "3"], "every", "every_n_steps", "checkpoint.every"),
    (["--acceptance.enabled", "maybe"], "maybe", "bool", "acceptance.enabled"),
    (["surplus"], "surplus", "--help", "command line"),
]


@pytest.mark.parametrize(
    ("flags", "found", "needed", "key"), BAD_FLAGS, ids=[" ".join(row[0])[:60] for row in BAD_FLAGS]
)
def test_a_bad_flag_is_answered_with_found_needed_and_key(parse, flags, found, needed, key):
    with pytest.raises(ConfigError) as caught:
        parse("fit", "-c", GRPO, *flags)
    error = caught.value
    assert found in str(error.found)
    assert needed in str(error.needed)
    assert key in error.key
    assert len(describe(error).splitlines()) == 4


BAD_FILES = [
    ("modle: {policy: {path: x}}", "modle", "model", "modle"),
    ("data:\n  source:\n    path: x", "path", "path", "data.source"),
    (
        "data:\n  source:\n    class_path: lightning_spec.sources.JSONLPrompts\n    path: x",
        "path",
        "init_args",
        "source.path",
    ),
    ("rollout:\n  reward: {class_path: my_rewards.Mine}", "my_rewards.Mine", "import", "rollout.reward"),
    ("rollout:\n  reward: {class_path: [a]}", "['a']", "dotted path", "rollout.reward"),
    ("rollout:\n  engine: {init_args: [1]}", "[1]", "a mapping", "rollout.engine"),
    ("trainer:\n  max_steps: {a: 1}", "a", "int", "trainer.max_steps"),
    ("data: [1, 2]", "[1, 2]", "PromptData", "data"),
]


@pytest.mark.parametrize(("text", "found", "needed", "key"), BAD_FILES, ids=[row[0][:40] for row in BAD_FILES])
def test_a_bad_key_in_a_file_is_answered_with_its_line(parse, tmp_path, text, found, needed, key):
    file = tmp_path / "mine.yaml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        parse("fit", "-c", GRPO, "-c", str(file))
    assert found in str(caught.value.found)
    assert needed in str(caught.value.needed)
    assert key in caught.value.key
    assert "mine.yaml:" in caught.value.key


def test_a_class_path_that_changes_in_a_mistyped_overlay_names_the_overlay(parse, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("rollout:\n  engine:\n    class_path: lightning_spec.rollout.reference.ReferenceEngin\n")
    with pytest.raises(ConfigError, match=r"`ReferenceEngine`.*mine\.yaml:3"):
        parse("fit", "-c", GRPO, "-c", str(file))


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ({"max_epochs": 3}, "trainer.max_epochs"),
        ({"accumulate_grad_batches": 4}, "trainer.accumulate_grad_batches"),
        ({"gradient_clip_val": 1.0}, "trainer.gradient_clip_val"),
    ],
)
def test_trainer_settings_that_would_be_ignored_or_break_the_schedule_are_refused(setting, key):
    with pytest.raises(ConfigError) as caught:
        SpecTrainer(**setting)
    assert caught.value.key == key


def test_a_mistyped_command_names_the_right_one(capsys):
    assert main(["fitt"]) == 2
    assert "`fit`" in capsys.readouterr().err


def test_a_mistyped_key_costs_four_lines_on_the_terminal_and_exit_code_two(capsys):
    assert main(["fit", "-c", GRPO, "--model.polcy.path", "x"]) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert [line.split(":")[0].strip() for line in text.splitlines()] == ["lightning-spec", "found", "needed", "key"]


def test_no_configuration_at_all_names_what_is_missing(parse):
    with pytest.raises(ConfigError, match=r"model\.policy\.path"):
        parse("fit")


def test_a_missing_configuration_file_names_the_nearest(parse):
    with pytest.raises(ConfigError, match=r"demo_grpo\.yaml"):
        parse("fit", "-c", str(CONFIGS / "experiment" / "demo_grp.yaml"))


def test_a_resume_path_without_a_complete_checkpoint_is_refused(tmp_path):
    (tmp_path / "step-00000010").mkdir()
    for asked, key in ((None, "run.resume"), (str(tmp_path / "step-0000010"), "ckpt_path")):
        with pytest.raises(ConfigError, match="step-00000010") as caught:
            resume_path(str(tmp_path / "step-000010"), tmp_path, asked)
        assert caught.value.key == key


def test_auto_starts_afresh_where_nothing_is_and_never_does_not_look(tmp_path, capsys):
    assert resume_path("auto", tmp_path / "none", None) is None
    assert "starting afresh" in capsys.readouterr().out
    assert resume_path("never", tmp_path, None) is None


def test_an_older_saved_configuration_is_kept_under_a_number(tmp_path):
    file = tmp_path / "config.yaml"
    for text in ("one", "two"):
        file.write_text(text)
        keep_numbered(file)
    assert not file.exists()
    assert (tmp_path / "config.1.yaml").read_text() == "one"
    assert (tmp_path / "config.2.yaml").read_text() == "two"
