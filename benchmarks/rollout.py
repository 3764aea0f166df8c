"""Rollout speed with and without speculation: two engines of a kind, the same policy, prompts, seeds and sampling.

The engines take turns within one run and medians are compared, because timings of a shared machine drift. Greedy
outputs of both are compared token for token on the way (CASES.md E1).

    python -m benchmarks.rollout --policy runs/demo/grpo/export/policy --draft runs/demo/grpo/export/draft \
        --prompts prompts.json --json runs/bench/rollout.json

`--engine reference` measures the reference engine: for what vLLM cannot serve on this machine, and slow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_spec.batch import SpecStats
from lightning_spec.rollout.engine import Engine, EngineFiles, Generation, Request, Sampling
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm import VLLMEngine

CLASSES = {
    "eagle3": "lightning_spec.draft.Eagle3",
    "dflash": "lightning_spec.draft.DFlash",
    "dspark": "lightning_spec.draft.DSpark",
    "mtp": "lightning_spec.draft.MTP",
    "draft_model": "lightning_spec.draft.DraftModel",
}
"""The project's draft of each method."""


def measure(
    files: EngineFiles,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    speculation: Speculation,
    batch_sizes: Sequence[int] = (1, 8, 32),
    rounds: int = 5,
    seconds: float = 1.2,
    engines: tuple[Engine, Engine] | None = None,
) -> dict[str, Any]:
    """Tokens/s of both engines by batch size, interleaved.

    Args:
        files: policy and draft folders.
        prompts: token ids; a batch of size b runs b of them at a time.
        sampling: shared by both engines; request i of a round has the same seed in both.
        speculation: settings of the speculative engine.
        batch_sizes: requests that run together.
        rounds: measurements of each engine at each size.
        seconds: a round is as many batches as the plain engine ran in this time in a round before the first, which
            does not count. Rounds go on through the prompts, so that a small batch size sees all of them too.
        engines: the plain and the speculative one; None: vLLM's.

    Returns:
        by batch size: tokens/s of both (medians), their ratio (median of the rounds' ratios), acceptance length.
    """
    most = max(batch_sizes)
    plain, fast = engines or (VLLMEngine(max_num_seqs=most), VLLMEngine(speculation, max_num_seqs=most))
    rows: dict[str, Any] = {}
    with plain, fast:
        plain.start(EngineFiles(files.policy))
        fast.start(files)
        same = _greedy_equal(plain, fast, prompts[: max(batch_sizes)], sampling)
        for size in batch_sizes:
            batches = enumerate(_batches(prompts, size))
            _run(plain, fast, itertools.islice(batches, 1), sampling)  # shapes that were not met yet
            count, elapsed = 0, 0.0
            while elapsed < seconds:
                elapsed += _run(plain, fast, itertools.islice(batches, 1), sampling)[0].seconds
                count += 1
            pairs: list[tuple[float, float]] = []
            spec = SpecStats()
            for _ in range(rounds):
                slow, quick = _run(plain, fast, itertools.islice(batches, count), sampling)
                spec += quick.spec
                pairs.append((slow.tokens_per_second, quick.tokens_per_second))
            rows[str(size)] = {
                "tokens_per_second_plain": statistics.median(p for p, _ in pairs),
                "tokens_per_second_speculative": statistics.median(f for _, f in pairs),
                "ratio": statistics.median(f / p for p, f in pairs),
                "ratio_range": [min(f / p for p, f in pairs), max(f / p for p, f in pairs)],
                "acceptance_length": spec.acceptance_length,
                "rounds": rounds,
                "batches_per_round": count,
            }
            row = rows[str(size)]
            print(
                f"batch {size:>3}: {row['tokens_per_second_plain']:7.0f} -> "
                f"{row['tokens_per_second_speculative']:7.0f} tokens/s, x{row['ratio']:.2f}, "
                f"acceptance length {row['acceptance_length']:.2f}",
                flush=True,
            )
    return {
        "by_batch_size": rows,
        "greedy_equal": same,
        "num_speculative_tokens": speculation.num_speculative_tokens,
        "by_batch_size_k": speculation.by_batch_size,
        "temperature": sampling.temperature,
        "machine": f"{platform.machine()}, {platform.platform()}, Python {sys.version.split()[0]}",
    }


def _batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[Request]]:
    """Batch after batch through the prompts, again and again, every request with a seed of its own."""
    for first in itertools.count(step=size):
        yield [Request(tuple(prompts[i % len(prompts)]), seed=i) for i in range(first, first + size)]


def _run(
    plain: Engine, fast: Engine, batches: Iterable[tuple[int, list[Request]]], sampling: Sampling
) -> tuple[Generation, Generation]:
    """The same numbered batches through both, in turns; the order alternates, so that neither always runs on a tired
    machine."""
    engines, done = (plain, fast), [Generation(), Generation()]
    for number, batch in batches:
        for index in (1, 0) if number % 2 else (0, 1):
            engines[index].generate(batch, sampling)
            done[index] += engines[index].last
    return done[0], done[1]


def _greedy_equal(plain: Engine, fast: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> dict[str, int]:
    greedy = Sampling(temperature=0.0, max_tokens=sampling.max_tokens, stop_token_ids=sampling.stop_token_ids)
    requests = [Request(tuple(p)) for p in prompts]
    pairs = list(zip(plain.generate(requests, greedy), fast.generate(requests, greedy), strict=True))
    return {"equal": sum(a.tokens == b.tokens for a, b in pairs), "of": len(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--draft", type=Path, help="draft folder in vLLM's format")
    parser.add_argument("--method", default="eagle3", help="of vLLM's speculation; the reference engine runs any draft")
    parser.add_argument("--engine", choices=["vllm", "reference"], default="vllm")
    parser.add_argument("--k", type=int, default=3, help="proposals per verification step")
    parser.add_argument("--by-batch-size", type=json.loads, help="rows [[first, last, k], ...]")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: a list of lists of token ids")
    parser.add_argument("--stop", type=int, nargs="*", default=[2], help="token ids that end a completion")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--json", type=Path, help="where the result goes")
    args = parser.parse_args()
    engines = None
    if args.engine == "reference":
        engines = ReferenceEngine("none"), ReferenceEngine("draft" if args.draft else args.method, args.k)
    result = measure(
        EngineFiles(args.policy, args.draft, CLASSES.get(args.method)),
        json.loads(args.prompts.read_text()),
        Sampling(temperature=args.temperature, max_tokens=args.max_tokens, stop_token_ids=tuple(args.stop)),
        Speculation(args.method, args.k, args.by_batch_size),
        args.batch_sizes,
        3 if args.quick else args.rounds,
        engines=engines,
    )
    result |= {"engine": args.engine, "method": args.method}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
