"""The report says what was measured, and says so where nothing was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lightning_spec import report
from lightning_spec.cli import main
from lightning_spec.errors import ConfigError


def write(folder, records, config=None):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config))


GRPO = {"model": {"policy_loss": {"class_path": "G"}}, "rollout": {"engine": {"class_path": "E"}, "reward": {"c": 1}}}
SFT = {"model": {"policy_loss": {"class_path": "S"}}, "rollout": {"engine": None}}


@pytest.fixture
def demo(tmp_path):
    write(tmp_path / "sft", [{"step": 1, "wall": 1.0, "loss": 2.0, "time/update": 5.0}], SFT)
    write(
        tmp_path / "grpo",
        [
            {"step": 0, "wall": 10.0, "val/reward": 0.25},
            {"step": 1, "wall": 11.0, "reward": 0.3, "time/rollout": 2.0, "time/update": 1.0},
            {"step": 2, "wall": 12.0, "reward": 0.4, "time/rollout": 3.0, "time/update": 1.5},
            {
                "step": 2,
                "wall": 13.0,
                "val/reward": 0.75,
                "val/acceptance_cotrained": 2.9,
                "val/acceptance_frozen": 2.1,
            },
        ],
        GRPO,
    )
    speed = {
        "by_batch_size": {
            "1": {"tokens_per_second_plain": 100.0, "tokens_per_second_speculative": 170.0, "ratio": 1.7},
            "8": {"tokens_per_second_plain": 400.0, "tokens_per_second_speculative": 500.0, "ratio": 1.25},
        }
    }
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "rollout.json").write_text(json.dumps(speed))
    return tmp_path


def test_the_summary_holds_the_measured_numbers(demo):
    report.write(demo)
    summary = json.loads((demo / "report" / "summary.json").read_text())
    assert summary["reward_first"] == 0.25
    assert summary["reward_last"] == 0.75
    assert summary["acceptance_cotrained"] == 2.9
    assert summary["acceptance_frozen"] == 2.1
    assert summary["rollout_ratio"] == {"1": 1.7, "8": 1.25}
    assert summary["seconds"] == {"rollouts": 5.0, "updates": 7.5}
    assert summary["not_measured"] == []


def test_the_page_carries_its_pictures_and_links_to_nothing(demo):
    page = (report.write(demo) / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page
    names = {p.name for p in (demo / "report").glob("*.png")}
    assert names == {"reward.png", "acceptance.png", "rollout_speed.png", "time.png"}


def test_what_was_not_measured_is_null_named_and_has_no_picture(tmp_path):
    write(tmp_path / "run", [{"step": 1, "wall": 1.0, "loss": 1.0}])
    out = report.write(tmp_path / "run")
    summary = json.loads((out / "summary.json").read_text())
    missing = {"reward_first", "reward_last", "acceptance_cotrained", "acceptance_frozen", "rollout_ratio", "seconds"}
    assert set(summary["not_measured"]) == missing
    assert all(summary[name] is None for name in missing)
    assert (out / "index.html").read_text().count("not measured") >= 6
    assert list(out.glob("*.png")) == []


def test_one_validation_is_a_first_reward_and_no_last_one(tmp_path):
    write(tmp_path / "run", [{"step": 0, "wall": 1.0, "val/reward": 0.5}])
    summary = json.loads((report.write(tmp_path / "run") / "summary.json").read_text())
    assert (summary["reward_first"], summary["reward_last"]) == (0.5, None)


def test_a_picture_of_an_earlier_report_does_not_survive_its_numbers(demo):
    report.write(demo)
    (demo / "bench" / "rollout.json").unlink()
    report.write(demo)
    assert not (demo / "report" / "rollout_speed.png").exists()


def test_names_from_files_are_escaped(tmp_path):
    write(tmp_path / "<b>x", [{"step": 1, "wall": 1.0}])
    assert "<b>x" not in (report.write(tmp_path / "<b>x") / "index.html").read_text()


def test_stages_are_in_the_order_they_ran_and_know_their_kind(demo):
    write(demo / "a_distill", [{"step": 1, "wall": 5.0}], {"model": {"policy_loss": None}})
    assert [(s.name, s.kind) for s in report.find_stages(demo)] == [
        ("sft", "sft"),
        ("a_distill", "distill"),
        ("grpo", "grpo"),
    ]


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        report.write(tmp_path)


def test_the_command_takes_a_folder_a_flag_or_a_configuration(demo, tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(f"vars: {{root: /nowhere}}\nrun: {{dir: '${{vars.root}}'}}\ntrainer: {{x: '{demo}'}}\n")
    for args in ([str(demo)], ["--run.dir", str(demo)], ["-c", str(config), "--vars.root", str(demo)]):
        assert main(["report", *args]) == 0
    assert capsys.readouterr().out.count("index.html") == 3
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "needed:" in capsys.readouterr().err


def test_help_and_report_start_without_torch():
    code = (
        "import sys; from lightning_spec.cli import main; main(['--help']); import lightning_spec.report; "
        "heavy = {'torch', 'lightning', 'transformers', 'vllm', 'megatron'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
