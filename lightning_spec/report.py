"""The report of a run: what its logs and benchmark files say, as one page, one JSON file and plots.

Everything shown was measured. What was not is called so; nothing is estimated. Starts without torch.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_spec import compose, plots
from lightning_spec.errors import ConfigError
from lightning_spec.records import by_step, series

PHASES = {
    "time/engine_start": "engine start",
    "time/rollout": "rollouts",
    "time/refit": "refit",
    "time/reward": "rewards",
    "time/score": "scoring",
    "time/update": "updates",
    "time/validation": "validation",
}
NOT_MEASURED = "not measured"


@dataclass
class Stage:
    """One run of the command: its steps' metrics and its configuration."""

    name: str
    folder: Path
    steps: dict[int, dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`grpo` learns from rewards, `distill` trains the draft alone, `sft` learns from worked answers."""
        model, rollout = self.config.get("model") or {}, self.config.get("rollout") or {}
        if not self.config:
            return "grpo" if series(self.steps, "val/reward") else "sft"
        if model.get("policy_loss") is None:
            return "distill"
        return "grpo" if rollout.get("engine") and rollout.get("reward") else "sft"

    def seconds(self) -> dict[str, float]:
        sums = {label: sum(value for _, value in series(self.steps, name)) for name, label in PHASES.items()}
        return {label: round(value, 3) for label, value in sums.items() if value > 0}


def find_stages(root: Path) -> list[Stage]:
    """The runs in a folder: the folder itself, or the folders in it, in the order they were started.

    Raises:
        ConfigError: no metrics there.
    """
    files = [root / "metrics.jsonl"] if (root / "metrics.jsonl").is_file() else sorted(root.glob("*/metrics.jsonl"))
    stages = []
    for file in files:
        if steps := by_step(file):
            config = file.parent / "config.yaml"
            values = yaml.safe_load(config.read_text()) if config.is_file() else {}
            name = file.parent.name if file.parent != root else str((values.get("run") or {}).get("name", root.name))
            stages.append(Stage(name, file.parent, steps, values))
    if not stages:
        raise ConfigError(
            "no metrics to report",
            found=str(root),
            needed="a run's folder with metrics.jsonl, or a folder of such folders",
            key="run.dir",
        )
    return sorted(stages, key=lambda stage: min(row.get("wall", 0.0) for row in stage.steps.values()))


def find_speed(root: Path) -> dict[str, Any] | None:
    """The rollout benchmark's result, if one was written into the folder (`bench/*.json` or `*.json`)."""
    for file in [*sorted(root.glob("bench/*.json")), *sorted(root.glob("*.json"))]:
        try:
            data = json.loads(file.read_text())
        except ValueError:
            continue
        if isinstance(data, dict) and isinstance(data.get("by_batch_size"), dict):
            return data
    return None


def summarise(stages: Sequence[Stage], speed: dict[str, Any] | None) -> dict[str, Any]:
    """The numbers of summary.json; None where something was not measured, with its name under `not_measured`."""
    main = _main_stage(stages)
    rewards = series(main.steps, "val/reward") if main else []
    cotrained = _last(main, "val/acceptance_cotrained")
    frozen = _last(main, "val/acceptance_frozen")
    rows = (speed or {}).get("by_batch_size", {})
    seconds: dict[str, float] = {}
    for stage in stages:
        for label, value in stage.seconds().items():
            seconds[label] = round(seconds.get(label, 0.0) + value, 3)
    summary: dict[str, Any] = {
        "reward_first": rewards[0][1] if rewards else None,
        "reward_last": rewards[-1][1] if len(rewards) > 1 else None,
        "acceptance_cotrained": cotrained if cotrained is not None else _last(main, "val/acceptance_length"),
        "acceptance_frozen": frozen,
        "rollout_ratio": {str(size): row["ratio"] for size, row in rows.items() if "ratio" in row} or None,
        "seconds": seconds or None,
        "stages": {
            stage.name: {"kind": stage.kind, "steps": max(stage.steps), "seconds": stage.seconds()} for stage in stages
        },
    }
    summary["not_measured"] = sorted(name for name, value in summary.items() if value is None)
    return summary


def write(root: Path, out: Path | None = None) -> Path:
    """Write index.html, summary.json and the plots; returns the folder (`root/report` by default)."""
    stages, speed = find_stages(root), find_speed(root)
    out = out or root / "report"
    out.mkdir(parents=True, exist_ok=True)
    summary = summarise(stages, speed)
    pictures = _draw(out, stages, speed, summary)
    _swap(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    _swap(out / "index.html", _page(root, out, stages, speed, summary, pictures))
    return out


def _draw(
    out: Path, stages: Sequence[Stage], speed: dict[str, Any] | None, summary: dict[str, Any]
) -> dict[str, str | None]:
    """Title of each picture and its file, None where there was nothing to draw."""
    main = _main_stage(stages)
    steps = main.steps if main else {}
    rows = [
        {
            "batch": size,
            "plain": row.get("tokens_per_second_plain"),
            "speculative": row.get("tokens_per_second_speculative"),
        }
        for size, row in (speed or {}).get("by_batch_size", {}).items()
    ]
    cotrained = series(steps, "val/acceptance_cotrained") or series(steps, "val/acceptance_length")
    acceptance = {"co-trained draft": cotrained, "same draft, frozen": series(steps, "val/acceptance_frozen")}
    reward = {"validation": series(steps, "val/reward"), "training rollouts": series(steps, "reward")}
    drawn = {
        "reward": plots.lines(out / "reward.png", "Reward", "mean reward", reward),
        "acceptance": plots.lines(
            out / "acceptance.png", "Acceptance length on validation prompts", "tokens per verification", acceptance
        ),
        "rollout_speed": plots.throughput(out / "rollout_speed.png", rows),
        "time": plots.phases(out / "time.png", summary["seconds"] or {}),
    }
    for name, there in drawn.items():
        if not there:
            # A picture of an earlier report would say something that this one did not find.
            (out / f"{name}.png").unlink(missing_ok=True)
    return {name: f"{name}.png" if there else None for name, there in drawn.items()}


def _main_stage(stages: Sequence[Stage]) -> Stage | None:
    """The stage the report is about: the last that learns from rewards, else the last."""
    learning = [stage for stage in stages if stage.kind == "grpo"]
    return (learning or list(stages) or [None])[-1]  # type: ignore[list-item]


def _last(stage: Stage | None, name: str) -> float | None:
    values = series(stage.steps, name) if stage else []
    return values[-1][1] if values else None


def _swap(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.partial")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, file)


# ---- the page -------------------------------------------------------------------------------------------------------

STYLE = """
:root{color-scheme:light}
body{margin:0 auto;max-width:62rem;padding:2.5rem 1.5rem;color:#1c2024;background:#fff;
  font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.6rem;margin:0 0 .2rem}
h2{font-size:1.15rem;margin:2.4rem 0 .8rem;padding-top:1.2rem;border-top:1px solid #e4e6ea}
p.sub{color:#60646c;margin:0 0 1.6rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(13rem,1fr));gap:1rem}
.card{border:1px solid #e4e6ea;border-radius:8px;padding:.9rem 1.1rem}
.card b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.card span{color:#60646c;font-size:.88rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(24rem,1fr));gap:1.2rem}
figure{margin:0;border:1px solid #e4e6ea;border-radius:8px;padding:.8rem}
figure img{width:100%;height:auto;display:block}
figcaption{color:#60646c;font-size:.88rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.4rem .7rem;border-bottom:1px solid #e4e6ea}
th:first-child,td:first-child{text-align:left}
th{font-weight:600;color:#60646c;font-size:.88rem}
.none{color:#8a8f98;font-style:italic}
"""
CAPTIONS = {
    "reward": "Mean reward by optimiser step.",
    "acceptance": "Tokens per verification step, the bonus token included. The frozen draft is the one the run began "
    "with, measured on the same prompts and seeds.",
    "rollout_speed": "Tokens per second with and without speculation: same engine, prompts and sampling; medians.",
    "time": "Seconds of each phase, all stages together.",
}


def _page(
    root: Path,
    out: Path,
    stages: Sequence[Stage],
    speed: dict[str, Any] | None,
    summary: dict[str, Any],
    pictures: dict[str, str | None],
) -> str:
    main = _main_stage(stages)
    cards = [
        ("validation reward", _change(summary["reward_first"], summary["reward_last"])),
        ("acceptance length, co-trained", _number(summary["acceptance_cotrained"])),
        ("acceptance length, frozen draft", _number(summary["acceptance_frozen"])),
        ("rollout speed-up", _ratios(summary["rollout_ratio"])),
    ]
    body = [
        f"<h1>{html.escape(root.name)}</h1>",
        f'<p class="sub">{_stages_line(stages)}</p>',
        '<div class="cards">',
        *(f'<div class="card"><b>{value}</b><span>{label}</span></div>' for label, value in cards),
        "</div>",
        f"<h2>{html.escape(main.name) if main else ''}</h2>",
        '<div class="plots">',
        *(_figure(out, name, file) for name, file in pictures.items()),
        "</div>",
        "<h2>Rollout speed</h2>",
        _speed_table(speed),
        "<h2>Time by phase</h2>",
        _time_table(stages, summary),
        "<h2>Not measured</h2>",
        f"<p>{', '.join(summary['not_measured']) or 'Everything above was measured in this run.'}</p>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(root.name)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _figure(folder: Path, name: str, file: str | None) -> str:
    caption = html.escape(CAPTIONS[name])
    if file is None:
        return f'<figure><p class="none">{NOT_MEASURED}</p><figcaption>{caption}</figcaption></figure>'
    data = base64.b64encode((folder / file).read_bytes()).decode()
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'


def _stages_line(stages: Sequence[Stage]) -> str:
    return "; ".join(f"{html.escape(s.name)}: {s.kind}, {max(s.steps)} steps" for s in stages)


def _number(value: float | None) -> str:
    return f'<span class="none">{NOT_MEASURED}</span>' if value is None else f"{value:.3f}"


def _change(first: float | None, last: float | None) -> str:
    return _number(None) if first is None or last is None else f"{first:.3f} &rarr; {last:.3f}"


def _ratios(ratios: dict[str, float] | None) -> str:
    if not ratios:
        return _number(None)
    return ", ".join(f"{ratio:.2f}x" for ratio in ratios.values())


def _speed_table(speed: dict[str, Any] | None) -> str:
    if not speed:
        return f'<p class="none">{NOT_MEASURED}</p>'
    rows = "".join(
        f"<tr><td>{html.escape(str(size))}</td><td>{_count(row.get('tokens_per_second_plain'))}</td>"
        f"<td>{_count(row.get('tokens_per_second_speculative'))}</td><td>{_number(row.get('ratio'))}</td>"
        f"<td>{_number(row.get('acceptance_length'))}</td></tr>"
        for size, row in speed["by_batch_size"].items()
    )
    machine = html.escape(str(speed.get("machine", "")))
    return (
        "<table><tr><th>requests at a time</th><th>plain, tokens/s</th><th>speculative, tokens/s</th><th>ratio</th>"
        f'<th>acceptance length</th></tr>{rows}</table><p class="sub">{machine}</p>'
    )


def _count(value: float | None) -> str:
    return _number(None) if value is None else f"{value:,.0f}"


def _time_table(stages: Sequence[Stage], summary: dict[str, Any]) -> str:
    if not summary["seconds"]:
        return f'<p class="none">{NOT_MEASURED}</p>'
    head = "".join(f"<th>{html.escape(stage.name)}</th>" for stage in stages)
    each = [stage.seconds() for stage in stages]
    rows = "".join(
        f"<tr><td>{label}</td>"
        + "".join(f"<td>{one[label]:.1f}</td>" if label in one else '<td class="none">-</td>' for one in each)
        + f"<td>{total:.1f}</td></tr>"
        for label, total in summary["seconds"].items()
    )
    return f"<table><tr><th>seconds</th>{head}<th>all</th></tr>{rows}</table>"


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """`lightning-spec report [DIR] [--run.dir DIR] [-c FILE] [--out DIR]`."""
    parser = argparse.ArgumentParser(
        prog="lightning-spec report", description="Write index.html, summary.json and plots from a run's logs."
    )
    parser.add_argument("folder", nargs="?", help="a run's folder, or a folder of runs")
    parser.add_argument("--run.dir", dest="run_dir", help="the same")
    parser.add_argument("-c", "--config", action="append", default=[], help="configuration whose run.dir is reported")
    parser.add_argument("--vars.root", dest="root", help="sets ${vars.root} of the configuration")
    parser.add_argument("--out", type=Path, help="where the report goes; DIR/report by default")
    args = parser.parse_args(list(argv))
    folder = args.folder or args.run_dir or _configured(args.config, args.root)
    if folder is None:
        raise ConfigError("which run?", found="no folder", needed="a run's folder, or -c FILE", key="run.dir")
    out = write(Path(folder), args.out)
    print(f"report: {out / 'index.html'}")
    return 0


def _configured(files: Sequence[str], root: str | None) -> str | None:
    """`run.dir` of a composed configuration; only this key is resolved."""
    if not files:
        return None
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values: dict[str, Any] = {}
    for file in files:
        values = compose.merge(values, compose.load(file).values)
    if root is not None:
        values = compose.merge(values, {"vars": {"root": root}})
    try:
        return str(OmegaConf.create(values).run.dir)
    except (OmegaConfBaseException, AttributeError):
        raise ConfigError(
            "the configuration gives no run folder", found=list(files), needed="run.dir", key="run.dir"
        ) from None
