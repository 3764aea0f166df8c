"""The demo: supervised warm start, draft distillation, GRPO with co-training, rollout speed, report.

Each stage is a command that a user could type; a finished stage is not run again, and a killed one continues from its
last checkpoint, so `make demo` can be stopped and started at any moment. Another drafter than EAGLE-3 starts from the
same policy, which is copied from the first demo where that is done.

    python -m benchmarks.demo [--draft dflash] [--root runs/demo] [--strategy cp2] [--fresh] [--plan]
                              [more for every training stage]
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
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_spec.rollout.process import cpu_environment

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs" / "experiment"
STRATEGIES = REPOSITORY / "configs" / "strategy"
ROLLOUTS = REPOSITORY / "configs" / "rollout"
ROOT = Path("runs/demo")


@dataclass(frozen=True)
class Stage:
    """One step of the demo. `minutes` was measured on two cores; `result` exists when the stage is done."""

    name: str
    what: str
    minutes: float
    result: Path
    run: Callable[[], None]


@dataclass(frozen=True)
class Drafter:
    """What the demo does for one drafter: files of configs/, and what its stages need beside them."""

    what: str
    rollout: str
    """File of configs/rollout that serves it."""
    grpo: tuple[str, ...] = ()
    minutes: tuple[float, float, float] = (1.0, 4.5, 1.3)
    """Of distillation, GRPO, speed; measured on two cores."""
    note: str = ""


K = 3
"""Proposals per verification step, of every drafter."""
KNOB = "--rollout.engine.init_args.speculation.num_speculative_tokens"
FEWER = (
    *("--data.prompts_per_step", "8", "--rollout.samples_per_prompt", "4", "--trainer.max_steps", "60"),
    *("--rollout.validation_samples", "1", "--trainer.val_check_interval", "20", "--model.draft_optim.lr", "3e-4"),
)
"""For an engine that runs one request at a time. Of a quarter of the rollouts the draft takes smaller steps: at the
others' rate it was worse than its frozen twin after 40."""
DRAFTERS = {
    "eagle3": Drafter("EAGLE-3 draft", "vllm"),
    "dflash": Drafter("DFlash draft", "dflash", (KNOB, str(K))),
    "dspark": Drafter(
        "DSpark draft",
        "reference",
        FEWER,
        (1.0, 12.0, 1.0),
        "vLLM cannot serve DSpark on a CPU: rollouts come from the reference engine, slowly, so they are fewer.",
    ),
    "mtp": Drafter("multi-token-prediction head", "mtp"),
    "draft_model": Drafter("small draft model", "draft_model"),
}


def stages(root: Path, extra: list[str], draft: str = "eagle3", reuse: Path | None = None) -> list[Stage]:
    """The demo's stages in `root`. The policy's are copied from the demo in `reuse` where that has finished them."""
    kind = DRAFTERS[draft]

    def fit(name: str, *overrides: str) -> Callable[[], None]:
        command = ["fit", "-c", str(CONFIGS / f"demo_{name}.yaml")]
        if draft != "eagle3" and name != "sft":
            command += ["-c", str(CONFIGS / "demo_draft" / f"{draft}.yaml")]
        if draft != "eagle3" and name == "grpo":
            command += ["-c", str(ROLLOUTS / f"{kind.rollout}.yaml")]
        command += ["--vars.root", str(root), *overrides, *extra]
        return lambda: lightning_spec(*command)

    def policy(stage: Stage) -> Stage:
        there = reuse / stage.result.relative_to(root) if reuse is not None and reuse != root else None
        if there is None or not there.exists():
            return stage
        what = f"copy of the one in {reuse}: {stage.what}"
        source, target = there.parents[2] if stage.name == "sft" else there, root / stage.name
        return replace(stage, what=what, minutes=0.0, run=lambda: copy(source, target))

    distill, grpo, speed = kind.minutes
    export, measured = root / "grpo" / "export", root / "bench" / "rollout.json"
    return [
        policy(
            Stage("init", "write the policy's config and a character tokenizer", 0.1, root / "init", lambda: init(root))
        ),
        policy(
            Stage(
                "sft",
                "train the policy from scratch on worked sums (supervised)",
                5.0,
                root / "sft" / "export" / "policy" / "config.json",
                fit("sft"),
            )
        ),
        Stage(
            "distill",
            f"train the {kind.what} to the frozen policy's distribution (offline distillation)",
            distill,
            root / "distill" / "export" / "draft" / "config.json",
            fit("distill"),
        ),
        Stage(
            "grpo",
            "GRPO with speculative rollouts; policy and draft are trained and refitted at every step",
            grpo,
            export / "draft" / "config.json",
            fit("grpo", *kind.grpo),
        ),
        Stage(
            "speed",
            "rollout tokens/s with and without speculation, at batch "
            + ("1" if kind.rollout == "reference" else "1, 8, 32"),
            speed,
            measured,
            lambda: rollout_speed(root, export, measured, draft),
        ),
        Stage("report", "plots, summary.json, index.html", 0.2, Path("/nonexistent"), lambda: report(root)),
    ]


def copy(source: Path, target: Path) -> None:
    """A finished stage's folder without what only a resumed run needs, whole or not at all."""
    beside = target.with_name(f"{target.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(source, beside, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    beside.rename(target)


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


def rollout_speed(root: Path, export: Path, result: Path, draft: str) -> None:
    """Compare the engines on the validation prompts of the GRPO stage."""
    prompts = root / "bench" / "prompts.json"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    recorded = sorted((root / "grpo" / "rollouts").glob("*.jsonl"))[-1]
    from lightning_spec.recorded import load_rollouts

    unique = {rollout.prompt.uid: list(rollout.prompt.tokens) for rollout in load_rollouts(str(recorded))}
    prompts.write_text(json.dumps(list(unique.values())))
    command = [
        sys.executable, "-m", "benchmarks.rollout", "--policy", str(export / "policy"),
        "--draft", str(export / "draft"), "--method", draft, "--k", str(K),
        "--prompts", str(prompts), "--json", str(result),
    ]  # fmt: skip
    if DRAFTERS[draft].rollout == "reference":
        command += ["--engine", "reference", "--batch-sizes", "1", "--rounds", "5"]
    subprocess.run(command, check=True, cwd=REPOSITORY)


def report(root: Path) -> None:
    lightning_spec("report", "--run.dir", str(root))
    summary = json.loads((root / "report" / "summary.json").read_text())
    print(json.dumps(summary, indent=2))
    print(f"\nReport: {root / 'report' / 'index.html'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", choices=list(DRAFTERS), default="eagle3", help="the drafter (default: eagle3)")
    parser.add_argument("--root", type=Path, help="the demo's folder (default: runs/demo, or runs/demo_DRAFT)")
    parser.add_argument("--reuse", type=Path, default=ROOT, help="a demo whose policy is taken, if it is done")
    names = sorted(file.stem for file in STRATEGIES.glob("*.yaml"))
    parser.add_argument("--strategy", choices=names, help="train on configs/strategy/NAME.yaml (default: one process)")
    parser.add_argument("--fresh", action="store_true", help="delete the folder first")
    parser.add_argument("--plan", action="store_true", help="show the stages and stop")
    args, extra = parser.parse_known_args()
    if args.strategy:
        extra = ["-c", str(STRATEGIES / f"{args.strategy}.yaml"), *extra]
    default = ROOT if args.draft == "eagle3" else ROOT.with_name(f"{ROOT.name}_{args.draft}")
    root = (args.root or default).resolve()
    if args.fresh:
        shutil.rmtree(root, ignore_errors=True)
    plan = stages(root, extra, args.draft, args.reuse.resolve())
    todo = [stage for stage in plan if not stage.result.exists()]
    print(f"The demo has {len(plan)} stages; {len(todo)} to do, about {sum(s.minutes for s in todo):.0f} minutes.")
    for stage in plan:
        mark = "to do" if stage in todo else "done "
        print(f"  {mark}  {stage.name:<8} {stage.minutes:4.1f} min  {stage.what}")
    if note := DRAFTERS[args.draft].note:
        print(note)
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
