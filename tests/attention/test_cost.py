"""The cost model: its arithmetic, against measured peaks, and what `auto` makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cp_steps import draft
from lightning_spec.attention.cost import MODES, DraftWork, Mode, choose, estimate, fitting_chunk
from lightning_spec.draft import attention
from lightning_spec.errors import ConfigError
from tests.peak import allocated_peak

GIB, MIB = 2**30, 2**20

LARGE = DraftWork(
    tokens=2**18,
    context=8,
    passes=7,
    layers=1,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=4096,
    intermediate=14336,
    vocabulary=32000,
    taps=3,
    bytes_per_element=2,
    rows=2**18,
    chunk_rows=1024,
)
"""SEMANTICS.md section 3: 256K tokens, C = 4096, 32/8 heads of 128, bf16, N = 7, CP = 8."""
SMALL = DraftWork(
    tokens=2**14,
    context=1,
    passes=7,
    layers=1,
    heads=4,
    kv_heads=4,
    head_dim=64,
    hidden=256,
    intermediate=1024,
    vocabulary=4096,
    taps=3,
    bytes_per_element=4,
    rows=2**14,
    chunk_rows=1024,
)


def keys_sent(work: DraftWork, mode: str) -> float:
    """GiB of keys, values and their gradients (and what Ulysses sends with them)."""
    parts = estimate(work, mode).sent  # type: ignore[arg-type]
    return sum(size for name, size in parts.items() if "rows" not in name) / GIB


def test_traffic_is_the_arithmetic_of_semantics() -> None:
    assert keys_sent(LARGE, "ring") == pytest.approx(26.25)
    assert keys_sent(replace(LARGE, kv_heads=32), "ring") == pytest.approx(105)
    assert keys_sent(LARGE, "stream") == pytest.approx(2.625)
    # SEMANTICS counts 18 for Ulysses, with float32 in the backward; ours sends gradients in bf16.
    assert keys_sent(LARGE, "ulysses") * 3 / 2 == pytest.approx(18, rel=0.03)


def test_kept_keys_and_their_accumulator_take_three_times_k_and_v() -> None:
    memory = estimate(LARGE, "stream").memory
    assert memory["gathered K/V"] + memory["accumulators dK/dV"] == 3 * GIB


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_sends_nothing(mode: str) -> None:
    assert estimate(SMALL, mode).traffic == 0  # type: ignore[arg-type]


def test_streamed_memory_is_a_fifth_of_the_rings_at_16k() -> None:
    ring, stream = estimate(SMALL, "ring").peak, estimate(SMALL, "stream").peak
    # Measured before this engine: 3269 and 525 MiB (SEMANTICS.md section 3).
    assert ring == pytest.approx(3269 * MIB, rel=0.15)
    assert stream < ring / 5


def test_a_chunk_bounds_what_passes_add_to_streamed_memory() -> None:
    one, seven = (estimate(replace(LARGE, passes=n, chunk_rows=64), "stream").peak for n in (1, 7))
    assert seven < 1.05 * one
    assert estimate(LARGE, "ring").peak > 5 * estimate(replace(LARGE, passes=1), "ring").peak


CASES = [
    # mode, tokens, prompt, passes, chunk rows, layers
    ("ring", 1024, 0, 1, 256, 1),
    ("ring", 1024, 0, 4, 256, 1),
    ("ring", 1024, 768, 4, 256, 1),
    ("ring", 512, 0, 3, 256, 2),
    ("stream", 1024, 0, 4, 256, 1),
    ("stream", 1024, 0, 4, 512, 1),
    ("stream", 2048, 1536, 2, 256, 1),
    ("stream", 1024, 0, 3, 256, 2),
    ("dense", 512, 0, 3, 256, 1),
]


@pytest.mark.parametrize(("mode", "tokens", "prompt", "passes", "chunk", "layers"), CASES)
def test_estimated_peaks_are_the_measured_ones_within_a_tenth(
    mode: Mode, tokens: int, prompt: int, passes: int, chunk: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the peak of what torch's allocator handed out in a real step on one rank."""
    # `dense` puts its own attention in the place of ours; this brings ours back.
    monkeypatch.setattr(attention, "branch_attention", attention.branch_attention)
    step = draft(mode, tokens, passes, prompt=prompt, chunk_rows=chunk, layers=layers)
    found = allocated_peak(step)
    rows = tokens - prompt
    work = replace(SMALL, tokens=tokens, rows=rows, passes=passes, chunk_rows=chunk, layers=layers)
    assert estimate(work, mode).peak / MIB == pytest.approx(found / MIB, rel=0.1)


def test_auto_streams_while_that_fits_and_then_takes_the_ring() -> None:
    # With few rows of loss and very wide keys, keeping all keys is what costs.
    wide = replace(LARGE, rows=2**12, chunk_rows=512, kv_heads=32)
    stream, ring = (estimate(wide, mode).peak for mode in ("stream", "ring"))
    assert ring < stream
    assert choose(wide, None) == choose(wide, stream) == "stream"
    assert choose(wide, stream - 1) == choose(wide, ring) == "ring"


def test_what_does_not_fit_is_refused_and_the_change_that_fits_is_named() -> None:
    limit = estimate(replace(LARGE, chunk_rows=256), "stream").peak
    with pytest.raises(ConfigError) as refused:
        choose(LARGE, limit)
    message = str(refused.value)
    rows = fitting_chunk(LARGE, limit)
    assert rows is not None
    assert 256 <= rows < LARGE.chunk_rows
    assert f"chunk_rows {rows}" in message
    assert choose(replace(LARGE, chunk_rows=rows), limit) == "stream"
    size = int(message.split("context_parallel ")[1].split(" ")[0])
    choose(replace(LARGE, context=size), limit)
    with pytest.raises(ConfigError):
        choose(replace(LARGE, context=size // 2), limit)
    tokens = int(message.split("at most ")[1].split(" tokens")[0])
    choose(replace(LARGE, tokens=tokens, rows=tokens), limit)
    with pytest.raises(ConfigError):
        choose(replace(LARGE, tokens=tokens + 8, rows=tokens + 8), limit)


def test_a_limit_below_the_weights_says_that_nothing_helps() -> None:
    with pytest.raises(ConfigError, match="more memory"):
        choose(LARGE, 1000)


def test_impossible_work_is_an_error() -> None:
    with pytest.raises(ValueError, match="impossible"):
        replace(SMALL, rows=SMALL.tokens + 1)
    with pytest.raises(ValueError, match="unknown mode"):
        estimate(SMALL, "sparse")  # type: ignore[arg-type]
