"""One EAGLE-3 training step of ours against SpecForge, NeMo Automodel and speculators, on a CPU.

    python -m benchmarks.peers --peers-python .venv-peers/bin/python [--quick] [--json FILE]

All do the same work: one document, hidden 256, 4 heads, vocabulary 4096, float32, N test-time-training passes, the
teacher's logits made from its hidden states, forward and backward. First, at 256 tokens, each peer's gradient is
compared with ours under the peer's own weighting of passes; only those that agree are timed. What a peer ships for GPUs
alone is replaced by what it ships beside it (see `peer_steps`), and said here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.common import Case, Result, machine, measure, parser, ratio, table, write_json

TARGET = "benchmarks.peer_steps:make"
PEERS = ("specforge", "automodel", "speculators")
NOTES = {
    "specforge": "its loss kernel is Triton for GPUs: the compiled reference that it ships takes its place",
    "automodel": "eager attention: its other one needs flash-attn, hence a GPU",
    "speculators": "'sdpa' attention and eager loss: FlexAttention has no backward on a CPU, the fused loss is Triton; "
    "its head is frozen by default (one product a pass less)",
}


def same_work(who: str, python: str, threads: int, passes: int = 3) -> float | None:
    """Relative difference between the gradient norms of `who` and of ours, weighted and averaged as `who` does; None
    where `who` does not run."""
    decay = [0.8**i for i in range(passes)]
    like: dict[str, dict[str, Any]] = {
        "specforge": {"weights": decay, "mean_of": "all"},
        "automodel": {"weights": [w / sum(decay) for w in decay]},
        "speculators": {},
    }
    sizes = {"tokens": 256, "passes": passes}
    (mine,) = measure([Case("ours", TARGET, {"who": "ours", **sizes, **like[who]})], rounds=0, threads=threads)
    try:
        (theirs,) = measure([Case(who, TARGET, {"who": who, **sizes}, python=python)], rounds=0, threads=threads)
    except RuntimeError as error:
        print(f"{who} does not run here: {error}", file=sys.stderr)
        return None
    return abs(theirs.extra["fc_gradient"] / mine.extra["fc_gradient"] - 1)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--peers-python", default=".venv-peers/bin/python", help="interpreter that has the peers")
    options.add_argument("--tokens", type=int, nargs="+", help="T (default 2048 4096, quick 512)")
    options.add_argument("--passes", type=int, nargs="+", help="N (default 3 5 7, quick 3)")
    options.add_argument("--who", nargs="+", choices=PEERS, default=list(PEERS))
    options.set_defaults(rounds=2)
    chosen = options.parse_args()
    chosen.tokens = chosen.tokens or ([512] if chosen.quick else [2048, 4096])
    chosen.passes = chosen.passes or ([3] if chosen.quick else [3, 5, 7])
    python = str(Path(chosen.peers_python).absolute())
    if not Path(python).exists():
        raise SystemExit(f"no {chosen.peers_python}: run `make bench-peers`, which creates it")
    print(machine(chosen.threads))
    agreeing = []
    for who in chosen.who:
        difference = same_work(who, python, chosen.threads)
        if difference is None:
            continue
        print(f"{who}: gradient differs from ours by {difference:.1e}; {NOTES[who]}")
        # SpecForge also scores the last row, which has no next token: 1 row of 256.
        if difference < (1e-2 if who == "specforge" else 1e-4):
            agreeing.append(who)
        else:
            print(f"{who} does other work than ours and is not timed", file=sys.stderr)
    tables: list[dict[str, Any]] = []
    for tokens in chosen.tokens:
        for passes in chosen.passes:
            arguments = {"tokens": tokens, "passes": passes}
            cases = [Case("ours", TARGET, {"who": "ours", **arguments})]
            cases += [Case(who, TARGET, {"who": who, **arguments}, python=python) for who in agreeing]
            results = measure(cases, rounds=chosen.rounds, threads=chosen.threads)
            print(f"\nT = {tokens}, N = {passes}\n{table(results, 'ours')}", flush=True)
            tables.append({**arguments, "results": results, **_against_best(results)})
    for row in tables:
        if "faster" in row:
            print(
                f"T = {row['tokens']}, N = {row['passes']}: {row['faster']:.2f}x less CPU time than the fastest peer, "
                f"{row['smaller']:.2f}x less memory than the smallest"
            )
    write_json(chosen.json, "peers", chosen, notes=NOTES, tables=tables)


def _against_best(results: list[Result]) -> dict[str, float]:
    ours, *peers = results
    if not peers:
        return {}
    return {
        "faster": min(ratio(peer.cpu, ours.cpu) for peer in peers),
        "smaller": min(peer.peak_mib for peer in peers) / ours.peak_mib,
    }


if __name__ == "__main__":
    main()
