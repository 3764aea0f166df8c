"""What a rollout engine is: it generates completions, takes new weights while it runs, and counts its drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from lightning_spec.batch import Completion, SpecStats
from lightning_spec.errors import ConfigError, EngineError

NamedTensors = Iterable[tuple[str, Tensor]]
Progress = Callable[[int, int], None]
"""Called with (completions done, completions asked for) while `generate` runs."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to make. `seed` makes it reproducible; `max_tokens` overrides the sampling's."""

    prompt_tokens: tuple[int, ...]
    seed: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; shared by the requests of one call.

    Args:
        temperature: 0 is greedy. Log-probs are of softmax(logits / temperature), and at 0 of softmax(logits).
        top_p: nucleus, in (0, 1]; 1 is off.
        top_k: at most this many candidates; -1 is off.
        max_tokens: most tokens of a completion, the stop token included.
        stop_token_ids: each ends generation and is kept as the completion's last token.
        seed: seeds the requests that have no seed of their own: request i gets seed + i.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        key = "rollout.sampling"
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                "bad temperature", found=self.temperature, needed="a number >= 0", key=f"{key}.temperature"
            )
        if 0.0 < self.temperature < 0.01:
            # vLLM raises such a temperature to 0.01 with a warning only: the trainer's log-probs would not match.
            raise ConfigError(
                "temperature too small",
                found=self.temperature,
                needed="0 (greedy) or >= 0.01",
                key=f"{key}.temperature",
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError("bad top_p", found=self.top_p, needed="0 < top_p <= 1", key=f"{key}.top_p")
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigError("bad top_k", found=self.top_k, needed="-1 (off) or >= 1", key=f"{key}.top_k")
        if self.max_tokens < 1:
            raise ConfigError("bad max_tokens", found=self.max_tokens, needed="at least 1", key=f"{key}.max_tokens")
        # YAML gives lists; the class is hashable and crosses processes as a tuple.
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def seed_of(self, request: Request, index: int) -> int | None:
        """The seed that request number `index` of a call is drawn with."""
        if request.seed is not None:
            return request.seed
        return None if self.seed is None else self.seed + index


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """Checkpoints that an engine starts from.

    Args:
        policy: Hugging Face folder (config.json and safetensors).
        draft: folder of a draft checkpoint in the format the engine loads, or None.
        draft_class: class path of the project's draft (`lightning_spec.draft.eagle3.Eagle3`), for engines that run
            it themselves; vLLM goes by the checkpoint.
    """

    policy: Path
    draft: Path | None = None
    draft_class: str | None = None


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What one refit moved. `version` is now the engine's; `verified` counts tensors compared inside the engine."""

    seconds: float
    bytes: int
    tensors: int
    version: int
    verified: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What adaptive speculation did in a `generate` call, and what it knows after it.

    Args:
        requests: engine steps, counted once for each request in them.
        proposals: proposals asked for in them, summed over the requests.
        off: those of `requests` at batch sizes where proposals were found not to pay.
        chosen: proposals by batch size as decided now (entry b for b requests; entry 0 unused).
        gains: measured speed with proposals over speed without, by the first batch size of each band.
        state: for `Engine.restore_speculation`; plain data.
    """

    requests: int
    proposals: int
    off: int
    chosen: tuple[int, ...]
    gains: dict[int, float]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Generation:
    """Figures of the last `generate` call, measured where the engine runs. `adaptive` is None where it is not on."""

    tokens: int = 0
    seconds: float = 0.0
    spec: SpecStats = field(default_factory=SpecStats)
    adaptive: SpeculationReport | None = None

    def __add__(self, other: Generation) -> Generation:
        """This and a later one together; the report is the later's."""
        return Generation(
            self.tokens + other.tokens, self.seconds + other.seconds, self.spec + other.spec, other.adaptive
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Engine(ABC):
    """A rollout engine. Constructed cheaply from YAML; `start` loads weights; usable as a context manager."""

    last: Generation = Generation()

    @property
    @abstractmethod
    def speculative(self) -> bool:
        """Whether generation drafts and verifies."""

    @property
    def takes_draft(self) -> bool:
        """Whether the engine runs a trained draft, so that `refit` may be given its tensors."""
        return self.speculative

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether `start` has succeeded and neither `close` nor a crash has ended the engine."""

    @abstractmethod
    def start(self, files: EngineFiles) -> None:
        """Load the checkpoints; they count as version 0.

        Raises:
            ConfigError: the files do not fit each other or the engine's settings.
            EngineError: the engine did not start; carries its own traceback.
        """

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_progress: Progress | None = None
    ) -> list[Completion]:
        """Complete each request; results are in the order of the requests.

        Raises:
            ConfigError: a request that cannot be served (empty prompt, prompt and completion beyond the context).
            EngineError, EngineTimeoutError: the engine died or did not answer in time; it is closed then.
        """

    @abstractmethod
    def refit(
        self, policy: NamedTensors | None, draft: NamedTensors | None, version: int, verify: bool = False
    ) -> RefitReport:
        """Replace the weights in place and drop every cache of the old ones. Names are those of the checkpoints.

        Args:
            policy, draft: one pass over all tensors of the checkpoint, streamed; None leaves that model as it is. The
                policy's is read first: other ranks may be sending their parts of both, in this order.
            version: reported by every completion sampled from now on.
            verify: compare each tensor with what the engine holds afterwards.

        Raises:
            EngineError: missing, surplus, or (with `verify`) differing tensors; it names them.
        """

    @abstractmethod
    def stats(self) -> SpecStats:
        """Counters since the start; they never fall, so differences are taken."""

    def restore_speculation(self, state: dict[str, Any]) -> None:
        """Go on with what adaptive speculation knew (`SpeculationReport.state`). Nothing where it is not on."""
        return

    def sleep(self) -> bool:
        """Give the accelerator's memory back until `wake`. Returns False where there is nothing to give back."""
        return False

    def wake(self) -> bool:
        """Take the memory again; weights are as they were. Returns False where `sleep` did nothing."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End the engine and everything it started. Safe to call again, and before `start`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's shape and dtype, as its checkpoint declares them."""

    shape: tuple[int, ...]
    dtype: str


def checkpoint_specs(folder: Path) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of all safetensors in a folder, from the headers only."""
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError("no weights", found=str(folder), needed="a folder with *.safetensors", key="EngineFiles")
    specs: dict[str, TensorSpec] = {}
    for path in files:
        with safe_open(path, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (a reader, not a dict)
                view = reader.get_slice(name)
                specs[name] = TensorSpec(tuple(view.get_shape()), view.get_dtype())
    return specs


def checked(tensors: NamedTensors, wanted: Mapping[str, TensorSpec], what: str) -> Iterator[tuple[str, Tensor]]:
    """Pass a stream of tensors through; raise EngineError at the first surplus, repeated or misshapen one, and at the
    end if any is missing. A refit is complete only when every tensor has arrived (SEMANTICS.md section 7).
    """
    seen: set[str] = set()
    for name, tensor in tensors:
        spec = wanted.get(name)
        if spec is None:
            raise EngineError(f"{what} refit: surplus tensor {name!r}; the engine was started without it")
        if name in seen:
            raise EngineError(f"{what} refit: tensor {name!r} was sent twice")
        if tuple(tensor.shape) != spec.shape:
            raise EngineError(f"{what} refit: {name!r} has shape {tuple(tensor.shape)}, needs {spec.shape}")
        seen.add(name)
        yield name, tensor
    if missing := sorted(set(wanted) - seen):
        raise EngineError(f"{what} refit: {len(missing)} of {len(wanted)} tensors missing: {', '.join(missing[:8])}")
