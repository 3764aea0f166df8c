"""`make demo DRAFT=...`: each drafter's stages are whole configurations that hand over to each other."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo
from benchmarks.rollout import CLASSES

METHODS = {"dspark": "draft"}


def commands(monkeypatch: pytest.MonkeyPatch, root: Path, draft: str, extra: list[str] | None = None) -> dict[str, Any]:
    """What each training stage would run."""
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(demo, "lightning_spec", lambda *arguments: ran.append(arguments))
    for stage in demo.stages(root, extra or [], draft):
        if stage.name in ("sft", "distill", "grpo"):
            stage.run()
    return dict(zip(("sft", "distill", "grpo"), ran, strict=True))


@pytest.mark.parametrize("draft", demo.DRAFTERS)
def test_the_stages_of_a_drafter_train_it_and_serve_it_by_its_own_method(parse, monkeypatch, draft):
    stage = {name: parse(*command) for name, command in commands(monkeypatch, Path("/r"), draft).items()}
    kind = CLASSES[draft].rpartition(".")[2]
    assert stage["sft"].model.draft is None
    assert stage["distill"].model.draft.class_path.rpartition(".")[2] == kind
    assert stage["distill"].model.draft.init_args.path is None
    assert stage["distill"].rollout.engine is None
    assert stage["grpo"].model.draft.class_path.rpartition(".")[2] == kind
    assert stage["grpo"].model.draft.init_args.path == "/r/distill/export/draft"
    engine = stage["grpo"].rollout.engine.init_args
    speculation = engine if draft == "dspark" else engine.speculation
    assert speculation.method == METHODS.get(draft, draft)
    assert speculation.num_speculative_tokens == demo.K
    assert stage["grpo"].acceptance.enabled
    # The stage says how a draft is optimised, the same for all that see as many rollouts.
    rates = [2e-3, 3e-4 if kind == "DSpark" else 8e-4]
    assert [stage[name].model.draft_optim.lr for name in ("distill", "grpo")] == rates
    assert "${" not in str(stage)


def test_the_stages_of_eagle_3_are_the_experiments_as_they_are(monkeypatch):
    ran = commands(monkeypatch, Path("/r"), "eagle3")
    for name, command in ran.items():
        assert command == ("fit", "-c", str(demo.CONFIGS / f"demo_{name}.yaml"), "--vars.root", "/r")


def test_what_is_added_on_the_command_line_wins_over_the_drafter_s_own(parse, monkeypatch):
    more = ["--trainer.max_steps", "3", "--data.prompts_per_step", "2"]
    ran = commands(monkeypatch, Path("/r"), "dspark", more)
    config = parse(*ran["grpo"])
    assert (config.trainer.max_steps, config.data.prompts_per_step) == (3, 2)


def test_a_finished_policy_is_copied_whole_and_an_unfinished_one_is_not(tmp_path):
    first, second = tmp_path / "demo", tmp_path / "demo_mtp"
    second.mkdir()
    (first / "init").mkdir(parents=True)
    (first / "init" / "config.json").write_text("{}")
    (first / "sft" / "checkpoints").mkdir(parents=True)
    (first / "sft" / "metrics.jsonl").write_text("")

    def plan() -> dict[str, demo.Stage]:
        return {stage.name: stage for stage in demo.stages(second, [], "mtp", first)}

    before = plan()
    assert before["init"].what.startswith("copy of")
    assert not before["sft"].what.startswith("copy of")
    before["init"].run()
    assert before["init"].result.exists()
    export = first / "sft" / "export" / "policy"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    after = plan()["sft"]
    assert (after.minutes, after.what.startswith("copy of")) == (0.0, True)
    (second / "sft.partial").mkdir()  # of a copy that was killed
    after.run()
    assert after.result.exists()
    assert (second / "sft" / "metrics.jsonl").exists()
    assert not (second / "sft" / "checkpoints").exists()
    assert not (second / "sft.partial").exists()
    # The first demo's own stages are its own.
    assert not any(stage.what.startswith("copy") for stage in demo.stages(first, [], "eagle3", first))


def test_the_plan_says_where_a_drafter_s_demo_goes_and_what_a_cpu_cannot_serve(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["demo", "--draft", "dspark", "--plan"])
    demo.main()
    said = capsys.readouterr().out
    assert "runs/demo_dspark" in said
    assert "vLLM cannot serve DSpark on a CPU" in said


def test_make_takes_the_drafter_by_name():
    told = subprocess.run(
        ["make", "-n", "demo", "DRAFT=dflash", "ARGS=--plan"],
        cwd=demo.REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert "benchmarks.demo --draft dflash --plan" in told
