"""Memory and traffic of one draft step on one context-parallel rank, by mode: arithmetic (SEMANTICS.md section 3).

Memory is what a forward and backward of one micro-batch takes beside weights, optimiser state and the policy's own
activations (the draft's inputs); traffic is what the rank sends to others, in bytes. Both are upper estimates: every
row that carries loss is taken to run through all passes. Tests compare them with measured peaks and counted bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_spec.errors import ConfigError

Mode = Literal["stream", "ring", "ulysses", "gather", "dense"]
"""`gather` (the trunk is gathered in every pass) and `dense` (concatenated keys under a mask) are what others do; this
project has no such mode."""
MODES: tuple[Mode, ...] = get_args(Mode)

WIDE = 4
"""Bytes of an accumulator: float32."""
_MIB = 1 << 20
LOSS_CHUNK = 4 * _MIB
"""Bytes of one chunk of logits in the draft loss on a CPU; it holds three of them."""
KEY = "trainer.strategy.init_args"


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One micro-batch of a draft with test-time-training passes. Rows and tokens are global; heads are of one rank."""

    tokens: int
    """T, rows of the packed micro-batch."""
    context: int
    """CP, ranks that split them."""
    passes: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    """Of the draft's head."""
    taps: int
    """Layers of the policy that the draft reads."""
    bytes_per_element: int
    """Of weights and activations: 2 for bf16, 4 for float32."""
    rows: int
    """Rows that carry loss, at most T."""
    chunk_rows: int
    """Rows that the streamed engine runs at a time."""

    def __post_init__(self) -> None:
        low = min(self.tokens, self.context, self.passes, self.layers, self.heads, self.kv_heads, self.chunk_rows)
        if low < 1 or not 0 <= self.rows <= self.tokens:
            raise ValueError(f"impossible work: {self}")

    # Sizes that the formulas share, in elements a row unless said otherwise.

    @property
    def local_tokens(self) -> int:
        """Rows of the trunk on the fullest rank."""
        return -(-self.tokens // self.context)

    @property
    def local_rows(self) -> int:
        """Rows with loss on a rank, when they are dealt evenly."""
        return -(-self.rows // self.context)

    @property
    def queries(self) -> int:
        """Width of q and of the attention's output."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of K and V together."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def trunk(self) -> int:
        """Bytes of K and V of all T rows, all layers."""
        return self.tokens * self.layers * self.keys * self.bytes_per_element

    @property
    def weights(self) -> int:
        """Elements of the draft's weights but its head."""
        attention = 2 * self.hidden * (self.queries + self.keys) + self.queries * self.hidden
        return self.taps * self.hidden**2 + self.layers * (attention + 3 * self.hidden * self.intermediate)


@dataclass(frozen=True, slots=True)
class Estimate:
    memory: dict[str, int]
    """Bytes held at the peak, by part."""
    sent: dict[str, int]
    """Bytes sent to other ranks in one forward and backward, by part."""

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def traffic(self) -> int:
        return sum(self.sent.values())


def estimate(work: DraftWork, mode: Mode) -> Estimate:
    """Peak memory and traffic of one rank.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}, known are {MODES}")
    make: dict[Mode, Callable[[DraftWork], Estimate]] = {
        "stream": _stream,
        "ring": _ring,
        "ulysses": _ulysses,
        "gather": _gather,
        "dense": _dense,
    }
    return make[mode](work)


def prefer(work: DraftWork, limit: int | None) -> Literal["stream", "ring"]:
    """The mode of `draft_attention: auto`: stream where its estimate fits into `limit` bytes (None: no limit), else the
    one of stream and ring that needs less."""
    stream = estimate(work, "stream").peak
    return "stream" if limit is None or stream <= max(limit, estimate(work, "ring").peak) else "ring"


def choose(work: DraftWork, limit: int | None) -> Literal["stream", "ring"]:
    """`prefer`, where it fits.

    Args:
        limit: bytes that the draft step may take; None: no limit is known.

    Raises:
        ConfigError: neither mode fits; it names the smallest changes that would.
    """
    mode = prefer(work, limit)
    least = estimate(work, mode).peak
    if limit is None or least <= limit:
        return mode
    raise ConfigError(
        "the draft step does not fit into memory, streamed or on the ring",
        found=f"{_mib(least)} for {work.tokens} tokens and {work.passes} passes over {work.context} ranks",
        needed=f"{_mib(limit)}: " + what_fits(work, limit),
        key=f"{KEY}.context_parallel",
    )


def what_fits(work: DraftWork, limit: int) -> str:
    """The smallest change of settings that fits `limit` bytes, in words."""
    options = []
    rows = fitting_chunk(work, limit)
    if rows is not None and rows < work.chunk_rows:
        options.append(f"draft_attention: stream with chunk_rows {rows}")
    for size in (2**n for n in range(1, 11)):
        wider = replace(work, context=size)
        fitting = [mode for mode in ("stream", "ring") if size > work.context and estimate(wider, mode).peak <= limit]
        if fitting:
            options.append(f"context_parallel {size} ({fitting[0]})")
            break
    tokens = _largest(lambda n: estimate(_shorter(work, n), "stream").peak <= limit, work.tokens - 1)
    if tokens:
        options.append(f"micro-batches of at most {tokens} tokens")
    return " or ".join(options) if options else "more memory: the draft's weights alone leave no room"


def fitting_chunk(work: DraftWork, limit: int) -> int | None:
    """The most rows a chunk of the streamed engine may have within `limit` bytes; None where not even 16 fit."""
    most = max(16, work.local_rows)
    rows = _largest(lambda n: estimate(replace(work, chunk_rows=n), "stream").peak <= limit, most)
    return rows if rows >= 16 else None


def _shorter(work: DraftWork, tokens: int) -> DraftWork:
    return replace(work, tokens=tokens, rows=min(tokens, max(1, work.rows * tokens // work.tokens)))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most that fits, 0 if none; larger n are never better."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# ---- memory ---------------------------------------------------------------------------------------------------------


def _entered(work: DraftWork) -> int:
    """Bytes that the inputs of all layers keep of one row in one pass: norms and what the projections read."""
    b, wide = work.bytes_per_element, work.bytes_per_element < WIDE
    first = 4 * work.hidden * b + work.hidden * WIDE * wide  # both normed halves, their concatenation
    return first + (work.layers - 1) * work.hidden * (2 * b + WIDE * wide)


def _left(work: DraftWork) -> int:
    """Bytes that one layer keeps of one row in one pass after its projections: q, attention's output and log-sum-exp,
    the residual stream and its norm, the gated MLP."""
    elements = 2 * work.queries + 2 * work.hidden + 4 * work.intermediate
    return elements * work.bytes_per_element + work.hidden * WIDE + work.heads * WIDE


def _scored(work: DraftWork) -> int:
    """Bytes of one row in one pass from the last layer's output to the loss: final norm, its gradient in float32."""
    return work.hidden * (2 * work.bytes_per_element + 2 * WIDE)


def _row(work: DraftWork) -> int:
    """Bytes of one row through all passes, the branch's K and V apart."""
    return work.passes * (_entered(work) + work.layers * _left(work) + _scored(work))


def _loss_chunk(work: DraftWork) -> int:
    """Bytes of the loss while it sweeps: three chunks of logits, and both heads in float32 where they are not."""
    copies = 2 * work.vocabulary * work.hidden * WIDE if work.bytes_per_element < WIDE else 0
    return 3 * max(LOSS_CHUNK, 16 * work.vocabulary * WIDE) + copies


def _mlp_backward(work: DraftWork, rows: int) -> int:
    """Bytes that the backward of a layer's MLP takes before it frees what the forward had kept."""
    return 2 * work.intermediate * rows * work.bytes_per_element


def _attention_backward(work: DraftWork, rows: int, buffers: int) -> int:
    """Bytes that the backward of a layer's attention adds with `buffers` bytes for keys: by then the MLP is gone."""
    return max(0, buffers - 4 * work.intermediate * rows * work.bytes_per_element)


def _whole_passes(work: DraftWork, key_buffers: int) -> dict[str, int]:
    """Parts of engines without row chunks: all passes of all rows are kept until the backward."""
    b, rows, below = work.bytes_per_element, work.local_rows, work.layers - 1
    unscored = max(0, work.local_tokens - rows)
    copied = rows * 3 * work.hidden * b if unscored else 0
    return {
        "fc and input of pass 0": work.local_tokens * work.hidden * b + unscored * _entered(work) + copied,
        "saved activations": rows * _row(work) + unscored * below * _left(work),
        "branch K/V": (work.passes - 1) * rows * work.layers * work.keys * b,
        "head gradient": work.vocabulary * work.hidden * (WIDE + b),
        "working set": max(_loss_chunk(work), _mlp_backward(work, rows), _attention_backward(work, rows, key_buffers)),
    }


def _ring(work: DraftWork) -> Estimate:
    b, local, travels = work.bytes_per_element, work.local_tokens * work.keys, work.context > 1
    memory = {
        "trunk K/V": local * work.layers * b,
        **_whole_passes(work, local * ((2 + travels) * WIDE + 3 * travels * b)),
    }
    part = work.passes * work.layers * local
    hops = work.context - 1
    sent = {"K/V, forward": hops * part * b, "K/V, backward": hops * part * b}
    return Estimate(memory, sent | {"dK/dV": (hops + travels) * part * WIDE} | _halo(work))


def _halo(work: DraftWork) -> dict[str, int]:
    """Embeddings and teacher states of the rows that the last anchors of a chunk look ahead to (one document)."""
    rows = 2 * work.passes if work.context > 1 else 0
    return {"rows ahead": rows * 2 * work.hidden * work.bytes_per_element}


def _ulysses(work: DraftWork) -> Estimate:
    """All-to-all of what attention reads, and of its output, in every pass. Each rank holds all rows of its share of
    the heads: as many elements as all heads of its own rows."""
    b, size, rows = work.bytes_per_element, work.context, work.local_rows
    earlier = work.passes * (work.passes - 1) // 2  # branch keys travel again in every later pass
    q = work.passes * work.layers * rows * work.queries
    trunk = work.passes * work.layers * work.local_tokens * work.keys
    branch = work.layers * rows * earlier * work.keys
    memory = {
        "trunk K/V": work.local_tokens * work.layers * work.keys * b,
        **_whole_passes(work, 3 * work.local_tokens * work.keys * WIDE),
        "K/V and outputs by heads": (trunk + branch + q) * b if size > 1 else 0,
    }
    one_way = {"q and outputs": 2 * q, "trunk K/V": trunk, "branch K/V": branch}
    sent = {
        f"{name}, {way}": n * b * (size - 1) // size for way in ("forward", "backward") for name, n in one_way.items()
    }
    return Estimate(memory, sent | _halo(work))


def _gather(work: DraftWork) -> Estimate:
    b, size, whole = work.bytes_per_element, work.context, work.tokens * work.keys
    memory = {
        "trunk K/V": work.local_tokens * work.layers * work.keys * b,
        "gathered K/V": whole * b if size > 1 else 0,
        **_whole_passes(work, 2 * whole * WIDE),
    }
    once = work.passes * work.trunk * (size - 1) // size
    return Estimate(memory, {"K/V, forward": once, "K/V, backward": once, "dK/dV": once // b * WIDE} | _halo(work))


def _dense(work: DraftWork) -> Estimate:
    """Every pass concatenates the keys of all passes and attends under a dense mask (in the dtype of q, as the kernel
    wants it), on one rank."""
    b, rows, alone = work.bytes_per_element, work.rows, replace(work, context=1)
    columns = [work.tokens + i * rows for i in range(work.passes)]
    memory = {
        "trunk K/V": work.trunk,
        "concatenated K/V": work.layers * sum(columns[1:]) * work.keys * b,
        "masks": work.layers * rows * sum(columns) * b,
        **_whole_passes(alone, 3 * columns[-1] * work.keys * WIDE),
    }
    return Estimate(memory, {})


def _stream(work: DraftWork) -> Estimate:
    """K and V of all rows, one chunk of rows, and sums of gradients. Layers below the last keep pass 0 of all rows."""
    b, size, below = work.bytes_per_element, work.context, work.layers - 1
    chunk = min(work.chunk_rows, max(1, work.local_rows))
    gradients = work.trunk // b * WIDE
    dealt = work.local_rows * (work.taps + 2) * work.hidden * b if size > 1 else 0
    exchanged = work.local_tokens * 4 * work.hidden * b if size > 1 else 0
    returned = 2 * gradients // size if size > 1 else 0
    row = _row(work) + (work.passes - 1) * work.layers * work.keys * b
    held = chunk * row
    working = max(
        held + _loss_chunk(work),
        held + _mlp_backward(work, chunk),
        held + _attention_backward(work, chunk, 2 * gradients // work.layers),
        exchanged,
        returned,
    )
    memory = {
        "gathered K/V": work.trunk,
        "accumulators dK/dV": gradients,
        "pass 0 of lower layers": work.local_tokens * (_entered(work) + below * _left(work)) if below else 0,
        "dealt rows": dealt,
        "chunk activations": held,
        "working set": working - held if working > held else 0,
        "gradient sums": (work.weights + work.vocabulary * work.hidden) * WIDE,
    }
    away = work.trunk * (size - 1) // size
    moved = _moved(work)
    sent = {
        "K/V": away,
        "dK/dV": away // b * WIDE,
        "features of dealt rows": moved * work.taps * work.hidden * b,
        "embeddings and teachers of dealt rows": moved * 2 * work.hidden * b,
        **_halo(work),
    }
    if below:
        sent["ring of lower layers in pass 0"] = sum(_ring(replace(work, layers=below, passes=1)).sent.values())
    return Estimate(memory, sent)


def _moved(work: DraftWork) -> int:
    """Rows with loss, taken to be the last of one document, that a rank sends on average: they lie zigzag, and are
    dealt in consecutive pieces of equal work, of which attention's part grows with the position."""
    size, rows = work.context, work.rows
    if size == 1 or not rows:
        return 0
    start = 1 - rows / work.tokens
    most = 0.0
    for power in (1, 2):  # rows of equal work, and of work in proportion to the position
        low, high = start**power, 1.0
        borders = [(low + (high - low) * n / size) ** (1 / power) for n in range(size + 1)]
        stays = sum(
            max(0.0, min(borders[rank + 1], (chunk + 1) / (2 * size)) - max(borders[rank], chunk / (2 * size)))
            for rank in range(size)
            for chunk in (rank, 2 * size - 1 - rank)
        )
        most = max(most, 1 - stays / (1 - start))
    return round(most * rows / size)


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB"
