"""Every drafter beside the same policy in one run: acceptance, rollout speed, cost of training, and whether training's
own metric foretells acceptance.

The policy is the demo's after its supervised warm start, the drafts those that each demo distilled to it (`make demo
DRAFT=...`); n-gram, suffix and no speculation stand beside them. DSpark, which vLLM cannot serve on a CPU, is run by
the reference engine and compared with it.

    python -m benchmarks.drafters --json runs/bench/drafters.json [--demos runs/demo runs/demo_dflash ...] [--quick]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks import common
from benchmarks.drafters_train import predict
from benchmarks.rollout import CLASSES
from lightning_spec.batch import SpecStats
from lightning_spec.rollout.engine import Engine, EngineFiles, Generation, Request, Sampling
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm import VLLMEngine

K = 3
STOP = (2,)
"""End of a completion, in the demo's tokenizer."""


def find_drafts(demos: Sequence[Path]) -> dict[str, Path]:
    """Method -> demo folder, for those whose draft is distilled."""
    found: dict[str, Path] = {}
    for root in demos:
        config = root / "distill" / "config.yaml"
        if not (root / "distill" / "export" / "draft" / "config.json").is_file() or not config.is_file():
            continue
        name = yaml.safe_load(config.read_text())["model"]["draft"]["class_path"].rpartition(".")[2]
        method = next((m for m, path in CLASSES.items() if path.rpartition(".")[2] == name), None)
        if method is not None:
            found[method] = root
    return found


def folder_of(root: Path) -> Path:
    return root / "distill" / "export" / "draft"


def start_engines(policy: Path, drafts: dict[str, Path], most: int, stack: ExitStack) -> dict[str, Engine]:
    """All engines, running. `none` is the plain vLLM, `none (reference)` the plain reference engine."""
    methods = ["none", "ngram", *(["suffix"] if importlib.util.find_spec("arctic_inference") else [])]
    engines: dict[str, Engine] = {}
    for method in [*methods, *drafts]:
        root = drafts.get(method)
        files = EngineFiles(policy, folder_of(root) if root else None, CLASSES.get(method))
        if method == "dspark":
            plain = ReferenceEngine("none")
            plain.start(EngineFiles(policy))
            engines["none (reference)"] = plain
            engines[method] = ReferenceEngine("draft", K)
        else:
            engines[method] = VLLMEngine(Speculation(method, K), max_num_seqs=most, kv_cache_gib=0.25)  # type: ignore[arg-type]
        stack.enter_context(engines[method])
        engines[method].start(files)
    return engines


def base_of(name: str) -> str:
    """The engine without speculation that a name of `start_engines` is compared with."""
    return "none (reference)" if name in ("dspark", "none (reference)") else "none"


def speed(
    engines: dict[str, Engine], prompts: Sequence[tuple[int, ...]], sizes: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Tokens/s and acceptance length at temperature 1 by engine and batch size; engines take turns in every round."""
    sampling = Sampling(temperature=1.0, max_tokens=96, stop_token_ids=STOP)
    rows: dict[str, Any] = {name: {} for name in engines}
    for size in sizes:
        rates: dict[str, list[float]] = {name: [] for name in engines}
        specs = dict.fromkeys(engines, SpecStats())
        for number in range(rounds + 1):
            batches = [prompts[i : i + size] for i in range(0, min(len(prompts), max(8, size)), size)]
            order = list(engines.items())
            for name, engine in order if number % 2 else order[::-1]:
                if base_of(name) != "none" and size > 1:
                    continue  # it runs one request at a time
                done = Generation()
                for batch in batches:
                    engine.generate([Request(p, seed=100 * number + i) for i, p in enumerate(batch)], sampling)
                    done += engine.last
                if number:
                    rates[name].append(done.tokens_per_second)
                    specs[name] += done.spec
        for name, found in rates.items():
            if found:
                ratio = statistics.median(a / b for a, b in zip(found, rates[base_of(name)], strict=True))
                rows[name][str(size)] = {
                    "tokens_per_second": statistics.median(found),
                    "ratio": ratio,
                    "acceptance_length": specs[name].acceptance_length if specs[name].drafts else None,
                }
    return rows


def accuracy(
    engines: dict[str, Engine],
    policy: Path,
    drafts: dict[str, Path],
    prompts: Sequence[tuple[int, ...]],
    longest: int,
) -> dict[str, Any]:
    """Acceptance by position, foretold by `draft/accept_i` of training and measured by the engine, on greedy rollouts.

    Completions run on past their stop token, so that both sides see the same text at the end.
    """
    requests = [Request(prompt) for prompt in prompts]
    text = engines["none"].generate(requests, Sampling(temperature=0.0, max_tokens=longest + K + 2))
    rollouts = [(prompt, completion.tokens) for prompt, completion in zip(prompts, text, strict=True)]
    rows: dict[str, Any] = {}
    for method, root in drafts.items():
        done = engines[method].generate(requests, Sampling(temperature=0.0, max_tokens=longest))
        spec = engines[method].last.spec
        measured = [accepted / spec.drafts for accepted in spec.per_position]
        found = predict(policy, CLASSES[method], folder_of(root), rollouts, K, longest)
        same = sum(a.tokens == b.tokens[:longest] for a, b in zip(done, text, strict=True))
        rows[method] = {
            **asdict(found),
            "measured": measured,
            "measured_drafts": spec.drafts,
            "largest_difference": max(abs(a - b) for a, b in zip(found.walked, measured, strict=True)),
            "greedy_equal": [same, len(done)],
        }
    return rows


def overhead(policy: Path, drafts: dict[str, Path], rounds: int, threads: int, quick: bool) -> dict[str, Any]:
    """Forward and backward of one step with each draft against the policy alone: time ratio, and MiB on top."""
    sizes = {"prompt": 20, "completion": 44, "rollouts": 16 if quick else 128}

    def case(name: str, **more: Any) -> common.Case:
        return common.Case(
            name, "benchmarks.drafters_train:make_step", {"policy": str(policy), "loss": "soft", **sizes, **more}
        )

    cases = [case("policy", class_path=None, draft=None)]
    for method, root in drafts.items():
        loss = "spark" if method == "dspark" else "soft"
        cases.append(case(method, class_path=CLASSES[method], draft=str(folder_of(root)), loss=loss))
    results = common.measure(cases, rounds=rounds, threads=threads)
    print(common.table(results, "policy"), "\n", flush=True)
    alone = results[0]
    return {
        result.name: {
            "seconds": result.seconds,
            "time_ratio": common.ratio(result.wall, alone.wall),
            "cpu_ratio": common.ratio(result.cpu, alone.cpu),
            "peak_mib": result.peak_mib,
            "more_mib": result.peak_mib - alone.peak_mib,
        }
        for result in results
    }


def cotrained(root: Path) -> tuple[float | None, float | None]:
    """(co-trained, frozen) acceptance length at the end of that demo, from its report."""
    file = root / "report" / "summary.json"
    summary = json.loads(file.read_text()) if file.is_file() else {}
    return summary.get("acceptance_cotrained"), summary.get("acceptance_frozen")


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""

    def number(value: float | None, form: str = ".2f") -> str:
        return "-" if value is None else format(value, form)

    sizes = sorted({size for row in figures["speed"].values() for size in row}, key=int)
    head = ["drafter", "acceptance length", *(f"ratio at {size}" for size in sizes)]
    head += ["step time", "more MiB", "foretold", "measured", "co-trained / frozen"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, row in figures["speed"].items():
        cost, fit = figures["overhead"].get(name, {}), figures["accuracy"].get(name, {})
        length = next((value["acceptance_length"] for value in row.values()), None)
        cells = [name, number(length), *(number(row.get(size, {}).get("ratio")) for size in sizes)]
        cells += [number(cost.get("time_ratio")), number(cost.get("more_mib"), ".0f")]
        cells += [" ".join(number(value, ".3f") for value in fit.get(key, [])) or "-" for key in ("walked", "measured")]
        cells.append(" / ".join(number(value) for value in figures["cotrained"].get(name, (None, None))))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = common.parser(__doc__ or "")
    default = [Path("runs/demo"), *(Path(f"runs/demo_{name}") for name in CLASSES if name != "eagle3")]
    parser.add_argument(
        "--demos", type=Path, nargs="+", default=default, help="folders of demos; missing ones are left"
    )
    parser.add_argument("--policy", type=Path, help="the policy's folder; default: the first demo's supervised one")
    args: argparse.Namespace = parser.parse_args()
    drafts = find_drafts(args.demos)
    if not drafts:
        parser.error(f"no distilled draft in {', '.join(map(str, args.demos))}: run make demo first")
    roots = list(drafts.values())
    policy = args.policy or roots[0] / "sft" / "export" / "policy"
    files = [root / "bench" / "prompts.json" for root in roots]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        parser.error("no bench/prompts.json in the demos: their speed stage writes it")
    prompts = [tuple(prompt) for prompt in json.loads(file.read_text())]
    quick = args.quick
    sizes = (1, 8) if quick else (1, 8, 32)
    cost = overhead(policy, drafts, 2 if quick else args.rounds, args.threads, quick)
    with ExitStack() as stack:
        engines = start_engines(policy, drafts, max(sizes), stack)
        fit = accuracy(engines, policy, drafts, prompts[: 4 if quick else 24], 16 if quick else 48)
        rates = speed(engines, prompts, sizes, 1 if quick else args.rounds)
    figures: dict[str, Any] = {"overhead": cost, "accuracy": fit, "speed": rates}
    figures["cotrained"] = {method: cotrained(root) for method, root in drafts.items()}
    print(table(figures))
    for method, row in fit.items():
        print(f"{method}: foretold and measured differ by at most {row['largest_difference']:.4f}")
    if missing := sorted(set(CLASSES) - set(drafts)):
        print(f"not measured, no distilled draft: {', '.join(missing)}")
    args.demos, args.policy = [str(root) for root in args.demos], str(policy)
    common.write_json(args.json, "drafters", args, **figures)


if __name__ == "__main__":
    main()
