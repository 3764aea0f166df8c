"""The draft's engines and the attention under context parallelism: time, memory, traffic.

    python -m benchmarks.cp [--quick] [--json FILE] [--only SECTION ...] [--plots FOLDER]

Sections (the figures that issue 3 asks for):
    lengths     one draft step at 4K to 64K tokens, streamed and on the ring, one rank
    dense       against keys of all passes concatenated under a dense mask, 8K tokens
    engines     stream against ring at 16K tokens, N = 7; the same with loss on the last 25 % of rows
    ranks       one rank and two, one thread each: CPU-seconds of the slower rank, memory, bytes sent
    passes      peak memory by number of passes
    attention   causal attention of 256K tokens, forward and backward, one head, one rank and two
Single runs where a figure is far from its bound or very long; the engines and ranks are interleaved rounds, medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Case, Result, machine, measure, parser, ratio, table, write_json
from lightning_spec.plots import lines

DRAFT, ATTENTION = "benchmarks.cp_steps:draft", "benchmarks.cp_steps:attention"
NARROW: dict[str, Any] = {
    "hidden": 128, "heads": 2, "kv_heads": 2, "head_dim": 32, "inner": 512, "vocabulary": 2048, "passes": 3,
}  # fmt: skip
"""A small draft: one step at 64K tokens would take minutes with the wide one."""
WIDE: dict[str, Any] = {
    "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "inner": 1024, "vocabulary": 4096, "passes": 7,
}  # fmt: skip
Found = dict[str, Any]


def seven_passes(options: argparse.Namespace) -> dict[str, Any]:
    """The draft of the sections with N = 7."""
    return WIDE if options.wide else {**NARROW, "passes": 7}


def lengths(options: argparse.Namespace) -> Found:
    sizes = [512, 1024] if options.quick else [4096, 8192, 16384, 32768, 65536]
    cases = [
        Case(f"{mode} {tokens}", DRAFT, {"mode": mode, "tokens": tokens, **NARROW})
        for tokens in sizes
        for mode in ("stream", "ring")
    ]
    results = measure(cases, rounds=0, threads=options.threads)
    show("One draft step by length (N = 3, hidden 128, 2 heads of 32), one rank", results)
    if options.plots:
        for name, y in (("peak_mib", "peak MiB"), ("cpu_seconds", "CPU seconds")):
            curves = {
                mode: [(tokens, getattr(find(results, f"{mode} {tokens}"), name)) for tokens in sizes]
                for mode in ("stream", "ring")
            }
            lines(
                options.plots / f"cp-{name.split('_')[0]}.png", "One draft step, one rank, N = 3", y, curves, "tokens"
            )
    first, last = (find(results, f"stream {n}").peak_mib / n * 1024 for n in (sizes[-2], sizes[-1]))
    print(f"streamed memory per 1024 tokens: {first:.2f} MiB at {sizes[-2]}, {last:.2f} MiB at {sizes[-1]}")
    return {"results": results, "stream_kib_per_token": {sizes[-2]: first, sizes[-1]: last}}


def dense(options: argparse.Namespace) -> Found:
    tokens, draft = 512 if options.quick else 8192, seven_passes(options)
    cases = [Case(mode, DRAFT, {"mode": mode, "tokens": tokens, **draft}) for mode in ("stream", "ring", "dense")]
    # A timed round, too: the run that is measured for memory pays for every page that chunks free and take again.
    results = measure(cases, rounds=1, threads=options.threads)
    check_equal(results)
    show(f"{tokens} tokens, {draft}", results)
    ours, theirs = find(results, "stream"), find(results, "dense")
    found = {"faster": theirs.cpu_seconds / ours.cpu_seconds, "smaller": theirs.peak_mib / ours.peak_mib}
    print(f"stream needs {found['faster']:.1f}x less CPU time and {found['smaller']:.1f}x less memory (goal 4x, 20x)")
    return {"results": results, **found}


def engines(options: argparse.Namespace) -> Found:
    tokens, draft = 1024 if options.quick else 16384, seven_passes(options)
    cases = [
        Case(f"{mode}{name}", DRAFT, {"mode": mode, "tokens": tokens, "prompt": prompt, **draft})
        for name, prompt in (("", 0), (", last quarter", tokens * 3 // 4))
        for mode in ("stream", "ring")
    ]
    results = measure(cases, rounds=options.rounds, threads=options.threads)
    check_equal(results[:2])
    check_equal(results[2:])
    show(f"{tokens} tokens, {draft}", results)
    stream, ring, last, ring_last = results
    found = {
        "memory": stream.peak_mib / ring.peak_mib,
        "cpu": ratio(stream.cpu, ring.cpu),
        "last_quarter_cpu": ratio(last.cpu, ring.cpu),
        "last_quarter_cpu_to_ring_last_quarter": ratio(last.cpu, ring_last.cpu),
    }
    print(
        f"stream over ring: memory {found['memory']:.3f} (goal 0.2), CPU {found['cpu']:.2f} (goal 1.1); with loss on "
        f"the last quarter, CPU over the ring's {found['last_quarter_cpu']:.2f} (goal 0.5)"
    )
    return {"results": results, **found}


def ranks(options: argparse.Namespace) -> Found:
    tokens = 1024 if options.quick else 16384
    cases = [
        Case(f"{mode}, {n} rank(s)", DRAFT, {"mode": mode, "tokens": tokens, **NARROW}, ranks=n)
        for mode in ("stream", "ring", "ulysses")
        for n in (1, 2)
        if (mode, n) != ("ulysses", 1)
    ]
    results = measure(cases, rounds=options.rounds, threads=1)
    check_equal(results)
    show(f"{tokens} tokens, N = 3, hidden 128, 2 heads of 32; one thread a rank", results)
    found: Found = {"results": results}
    for mode in ("stream", "ring"):
        one, two = (find(results, f"{mode}, {n} rank(s)") for n in (1, 2))
        found[mode] = {"cpu": ratio(one.cpu, two.cpu) / 2, "wall": ratio(one.wall, two.wall) / 2}
        found[mode]["memory"] = two.peak_mib / one.peak_mib
        print(
            f"{mode}, 1 -> 2 ranks: {found[mode]['cpu']:.0%} of ideal by CPU-seconds of the slower rank (goal 90 %), "
            f"{found[mode]['wall']:.0%} by wall time; memory of a rank {found[mode]['memory']:.2f}x"
        )
    for result in results:
        print(f"{result.name}: {result.extra['sent'] / 2**20:.1f} MiB sent by rank 0")
    return found


def passes(options: argparse.Namespace) -> Found:
    tokens, counts = (1024, (1, 3)) if options.quick else (8192, (1, 3, 5, 7))
    cases = [
        Case(f"{mode}, N = {n}", DRAFT, {"mode": mode, "tokens": tokens, **NARROW, "passes": n})
        for mode in ("stream", "ring")
        for n in counts
    ]
    results = measure(cases, rounds=0, threads=options.threads)
    show(f"{tokens} tokens by passes, hidden 128, 2 heads of 32", results)
    curves = {mode: [(n, find(results, f"{mode}, N = {n}").peak_mib) for n in counts] for mode in ("stream", "ring")}
    if options.plots:
        lines(options.plots / "cp-passes.png", f"One draft step, {tokens} tokens", "peak MiB", curves, "passes N")
    growth = {mode: (values[-1][1] - values[0][1]) / (counts[-1] - counts[0]) for mode, values in curves.items()}
    print("MiB a pass: " + ", ".join(f"{mode} {value:.1f}" for mode, value in growth.items()))
    return {"results": results, "mib_a_pass": growth}


def attention(options: argparse.Namespace) -> Found:
    arguments = {"tokens": 4096 if options.quick else 2**18, "heads": 1, "kv_heads": 1, "head_dim": 16}
    cases = [Case(f"{n} rank(s)", ATTENTION, arguments, ranks=n) for n in (1, 2)]
    results = measure(cases, rounds=0, threads=1)
    show(f"Causal attention of {arguments['tokens']} tokens, one head of 16; one thread a rank", results)
    one, two = results
    efficiency = one.cpu_seconds / two.cpu_seconds / 2
    print(f"1 -> 2 ranks: {efficiency:.0%} of ideal by CPU-seconds of the slower rank (goal 90 %)")
    return {"results": results, "efficiency": efficiency}


SECTIONS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "engines": engines,
    "ranks": ranks,
    "dense": dense,
    "passes": passes,
    "lengths": lengths,
    "attention": attention,
}


def find(results: Sequence[Result], name: str) -> Result:
    return next(result for result in results if result.name == name)


def show(title: str, results: Sequence[Result]) -> None:
    print(f"\n{title}\n{table(results, results[0].name)}", flush=True)


def check_equal(results: Sequence[Result]) -> None:
    """Stops where two ways of the same step differ in loss or gradient."""
    first = results[0]
    for result in results[1:]:
        for key in ("loss", "gradient_norm"):
            if abs(result.extra[key] - first.extra[key]) > 1e-3 * abs(first.extra[key]):
                raise SystemExit(f"{result.name} and {first.name} differ in {key}: {result.extra} and {first.extra}")


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    options.add_argument("--wide", action="store_true", help="hidden 256, 4 heads of 64 in engines and dense (minutes)")
    options.add_argument("--plots", type=Path, help="folder for the plots (none without it)")
    options.set_defaults(rounds=1)
    chosen = options.parse_args()
    if chosen.plots:
        chosen.plots.mkdir(parents=True, exist_ok=True)
    print(machine(chosen.threads))
    found = {name: SECTIONS[name](chosen) for name in SECTIONS if name in chosen.only}
    chosen.plots = str(chosen.plots)
    write_json(chosen.json, "cp", chosen, **found)


if __name__ == "__main__":
    main()
