"""The demo: supervised warm start, draft distillation, GRPO with co-training, rollout speed, report.

Each stage is a command that a user could type; a finished stage is not run again, and a killed one continues from its
last checkpoint, so `make demo` can be stopped and started at any moment.

    python -m benchmarks.demo [--root runs/demo] [--strategy cp2] [--fresh] [--plan] [more for every training stage]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_spec.rollout.process import cpu_environment

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs" / "experiment"
STRATEGIES = REPOSITORY / "configs" / "strategy"


@dataclass(frozen=True)
class Stage:
    """One step of the demo. `minutes` was measured on two cores; `result` exists when the stage is done."""

    name: str
    what: str
    minutes: float
    result: Path
    run: Callable[[], None]


def stages(root: Path, extra: list[str]) -> list[Stage]:
    def fit(name: str, *overrides: str) -> Callable[[], None]:
        command = ["fit", "-c", str(CONFIGS / f"demo_{name}.yaml"), "--vars.root", str(root), *overrides, *extra]
        return lambda: lightning_spec(*command)

    export = root / "grpo" / "export"
    speed = root / "bench" / "rollout.json"
    return [
        Stage("init", "write the policy's config and a character tokenizer", 0.1, root / "init", lambda: init(root)),
        Stage(
            "sft",
            "train the policy from scratch on worked sums (supervised)",
            5.0,
            root / "sft" / "export" / "policy" / "config.json",
            fit("sft"),
        ),
        Stage(
            "distill",
            "train the EAGLE-3 draft to the frozen policy's distribution (offline distillation)",
            0.8,
            root / "distill" / "export" / "draft" / "config.json",
            fit("distill"),
        ),
        Stage(
            "grpo",
            "GRPO with speculative rollouts; policy and draft are trained and refitted at every step",
            4.0,
            export / "draft" / "config.json",
            fit("grpo"),
        ),
        Stage(
            "speed",
            "rollout tokens/s with and without speculation at batch 1, 8, 32",
            1.5,
            speed,
            lambda: rollout_speed(root, export, speed),
        ),
        Stage("report", "plots, summary.json, index.html", 0.2, Path("/nonexistent"), lambda: report(root)),
    ]


def lightning_spec(*arguments: str) -> None:
    """Run the `lightning-spec` command; its exit code ends the demo."""
    # The engine's OpenMP and allocator make the trainer's small operations a tenth faster too.
    preload = {name: value for name, value in cpu_environment([0]).items() if name == "LD_PRELOAD"}
    command = [sys.executable, "-m", "lightning_spec.cli", *arguments]
    subprocess.run(command, check=True, cwd=Path.cwd(), env={**os.environ, **preload})


def init(root: Path) -> None:
    """Folder of a new policy: config.json without weights, and a tokenizer."""
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
    from lightning_spec.policy.config import new_policy_config
    from lightning_spec.tokenizer import char_tokenizer

    folder = root / "init.partial"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = char_tokenizer(folder)
    config = new_policy_config(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_layers=16,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=320,
        max_positions=512,
        tied_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    folder.rename(root / "init")


def rollout_speed(root: Path, export: Path, result: Path) -> None:
    """Compare the engines on the validation prompts of the GRPO stage."""
    prompts = root / "bench" / "prompts.json"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    recorded = sorted((root / "grpo" / "rollouts").glob("*.jsonl"))[-1]
    from lightning_spec.recorded import load_rollouts

    unique = {rollout.prompt.uid: list(rollout.prompt.tokens) for rollout in load_rollouts(str(recorded))}
    prompts.write_text(json.dumps(list(unique.values())))
    subprocess.run(
        [
            sys.executable, "-m", "benchmarks.rollout", "--policy", str(export / "policy"),
            "--draft", str(export / "draft"), "--prompts", str(prompts), "--json", str(result),
        ],
        check=True,
        cwd=REPOSITORY,
    )  # fmt: skip


def report(root: Path) -> None:
    lightning_spec("report", "--run.dir", str(root))
    summary = json.loads((root / "report" / "summary.json").read_text())
    print(json.dumps(summary, indent=2))
    print(f"\nReport: {root / 'report' / 'index.html'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/demo"), help="the demo's folder")
    names = sorted(file.stem for file in STRATEGIES.glob("*.yaml"))
    parser.add_argument("--strategy", choices=names, help="train on configs/strategy/NAME.yaml (default: one process)")
    parser.add_argument("--fresh", action="store_true", help="delete the folder first")
    parser.add_argument("--plan", action="store_true", help="show the stages and stop")
    args, extra = parser.parse_known_args()
    if args.strategy:
        extra = ["-c", str(STRATEGIES / f"{args.strategy}.yaml"), *extra]
    root = args.root.resolve()
    if args.fresh:
        shutil.rmtree(root, ignore_errors=True)
    plan = stages(root, extra)
    todo = [stage for stage in plan if not stage.result.exists()]
    print(f"The demo has {len(plan)} stages; {len(todo)} to do, about {sum(s.minutes for s in todo):.0f} minutes.")
    for stage in plan:
        mark = "to do" if stage in todo else "done "
        print(f"  {mark}  {stage.name:<8} {stage.minutes:4.1f} min  {stage.what}")
    if extra:
        print(f"Every training stage also gets: {shlex.join(extra)}")
    print(f"Everything goes to {root}; stop it at any moment and run it again to continue.\n", flush=True)
    if args.plan:
        return
    for number, stage in enumerate(todo, 1):
        print(f"== {number}/{len(todo)} {stage.name}: {stage.what}", flush=True)
        began = time.perf_counter()
        try:
            stage.run()
        except subprocess.CalledProcessError as error:
            sys.exit(f"stage {stage.name} failed with exit code {error.returncode}; run it again to continue")
        print(f"== {stage.name} took {(time.perf_counter() - began) / 60:.1f} min\n", flush=True)


if __name__ == "__main__":
    main()
