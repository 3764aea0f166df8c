"""Features from pipeline stages to the draft: what the transport costs a step, and how the stages balance.

    python -m benchmarks.tap [--quick] [--json FILE] [--only SECTION ...]

Sections (the figures that issue 4 asks for):
    transport   step time with features brought and looked at, against no draft at all (goal 1.02), two and four stages,
                by shared memory, by a process group of its own, by blocking send/recv in the forward, by files
    balance     what training the draft adds to a step: even layers, `pipeline_layout: auto`, `draft_stage: spread`
Interleaved rounds; ratios are medians of the rounds' ratios. With more processes than cores wall time measures the
cores, so four stages are compared by CPU seconds: the sum for the transport, the busiest stage for the balance.
A step varies by more than the transport costs: "none again" shows by how much, and `own_share` is the CPU time inside
the calls that bring features, over all of the step's, measured directly.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import Case, Team, machine, parser, ratio, write_json

STEP = "benchmarks.tap_steps:make"
Found = dict[str, Any]
Runs = dict[str, list[dict[str, Any]]]


def transport(options: argparse.Namespace) -> Found:
    found: Found = {}
    for stages in (2,) if options.quick else options.stages:
        size = {"pipeline": stages, **(SMALL if options.quick else STEPS), "layers": 8}
        cases = [
            Case("none", STEP, {"mode": "none", **size}, ranks=stages),
            Case("none again", STEP, {"mode": "none", **size}, ranks=stages),
            Case("shared memory", STEP, {"mode": "read", **size, "transport": "shared_memory"}, ranks=stages),
            Case("group", STEP, {"mode": "read", **size, "transport": "group"}, ranks=stages),
            Case("pickle", STEP, {"mode": "pickle", **size}, ranks=stages),
        ]
        runs = take_turns(cases, options.rounds)
        rows = {}
        alone = [sum(r["cpu"]) for r in runs["none"]]
        for name, results in runs.items():
            cpu = [sum(r["cpu"]) for r in results]
            ratios = sorted(one / other for one, other in zip(cpu, alone, strict=True))
            rows[name] = {
                "wall": ratio([max(r["wall"]) for r in results], [max(r["wall"]) for r in runs["none"]]),
                "cpu": statistics.median(ratios),
                "cpu_low": ratios[len(ratios) // 4],
                "cpu_high": ratios[-1 - len(ratios) // 4],
                "own_share": ratio([sum(r["own"]) for r in results], cpu),
                "seconds": statistics.median(max(r["wall"]) for r in results),
                **{key: statistics.median(r[key] for r in results) for key in results[0] if key.startswith("taps/")},
            }
        rows["blocking send/recv"] = survives(Case("blocking", STEP, {"mode": "blocking", **size}, ranks=stages))
        found[f"{stages} stages"] = rows
        print(f"\n{stages} stages, {size}")
        for name, row in rows.items():
            print(f"  {name:20}" + ", ".join(f"{key} {value:.4g}" for key, value in row.items() if key != "failed"))
            if "failed" in row:
                print(f"  {'':20}{row['failed']}")
    return found


def survives(case: Case) -> Found:
    """The median step of a case that may not end."""
    team = None
    try:
        team = Team(case, 1, 60.0)
        walls = [max(team.ask("run")["extra"]["wall"]) for _ in range(3)]
        return {"seconds": statistics.median(walls)}
    except RuntimeError as error:
        return {"failed": f"does not survive: {error}"}
    finally:
        if team is not None:
            team.close()


def balance(options: argparse.Namespace) -> Found:
    found: Found = {}
    for stages, shape in [(2, SMALL)] if options.quick else PLANS:
        size = {"pipeline": stages, **shape}
        cases = [
            Case("even, no draft", STEP, {"mode": "none", **size}, ranks=stages),
            Case("auto, no draft", STEP, {"mode": "none", **size, "layout": "auto"}, ranks=stages),
            Case("even", STEP, {"mode": "draft", **size}, ranks=stages),
            Case("auto", STEP, {"mode": "draft", **size, "layout": "auto"}, ranks=stages),
            Case("even, spread", STEP, {"mode": "draft", **size, "stage": "spread"}, ranks=stages),
            Case("auto, spread", STEP, {"mode": "draft", **size, "layout": "auto", "stage": "spread"}, ranks=stages),
        ]
        if shape is DEEP:
            cases = [case for case in cases if case.name in ("even, no draft", "even", "auto")]
        runs = take_turns(cases, options.rounds)
        one = runs["even, no draft"]
        rows: dict[str, Found] = {
            name: {
                "wall": ratio([max(r["wall"]) for r in results], [max(r["wall"]) for r in one]),
                "busiest_cpu": ratio([max(r["cpu"]) for r in results], [max(r["cpu"]) for r in one]),
                "cpu": ratio([sum(r["cpu"]) for r in results], [sum(r["cpu"]) for r in one]),
                "stages": [statistics.median(r["cpu"][rank] for r in results) for rank in range(stages)],
            }
            for name, results in runs.items()
        }
        found[f"{stages} stages, {shape['layers']} layers"] = rows
        print(f"\n{stages} stages, {size}; over even layers without a draft")
        for name, row in rows.items():
            each = ", ".join(f"{seconds:.2f}" for seconds in row["stages"])
            print(
                f"  {name:16}wall {row['wall']:.3f}, busiest stage {row['busiest_cpu']:.3f}, all CPU {row['cpu']:.3f} "
                f"(CPU s of the stages {each})"
            )
    return found


def take_turns(cases: Sequence[Case], rounds: int) -> Runs:
    """What each case says of itself, round by round, the cases taking turns."""
    teams = []
    try:
        for case in cases:
            teams.append(Team(case, 1, 600.0))
            teams[-1].ask("run")
        runs: Runs = {case.name: [] for case in cases}
        for number in range(rounds):
            order = range(len(cases)) if number % 2 == 0 else reversed(range(len(cases)))
            for index in order:
                runs[cases[index].name].append(teams[index].ask("run")["extra"])
        return runs
    finally:
        for team in teams:
            team.close()


STEPS: dict[str, Any] = {"hidden": 256, "micro": 8, "tokens": 512}
BALANCE: dict[str, Any] = {"layers": 16, "hidden": 256, "micro": 8, "tokens": 256}
DEEP: dict[str, Any] = {"layers": 64, "hidden": 256, "micro": 8, "tokens": 128}
"""A draft of a few layers' work beside a deep policy, as real ones are: layers are fine enough to make room for it."""
SMALL: dict[str, Any] = {"layers": 8, "hidden": 128, "micro": 4, "tokens": 64}
PLANS = [(2, BALANCE), (4, BALANCE), (4, DEEP)]
SECTIONS: dict[str, Callable[[argparse.Namespace], Found]] = {"transport": transport, "balance": balance}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="of the transport section")
    arguments.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    chosen = arguments.parse_args()
    print(machine(1))
    found = {name: SECTIONS[name](chosen) for name in chosen.only}
    write_json(chosen.json, "tap", chosen, **found)


if __name__ == "__main__":
    main()
