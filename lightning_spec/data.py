"""Prompts for training: order, split, shards and position; and the loaders that training and validation read.

The position is one global number, so a checkpoint resumes with the same prompts at any data-parallel size. Loaders are
sized iterables and not torch DataLoaders: Lightning then puts no sampler of its own between us and the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule

from lightning_spec.batch import Prompt, Rollout, StepBatch
from lightning_spec.buffer import RolloutBuffer, StateElsewhere
from lightning_spec.errors import ConfigError
from lightning_spec.recorded import load_rollouts
from lightning_spec.sources import Example, PromptSource
from lightning_spec.tokenizer import PromptEncoder, decode

Mode = Literal["rollouts", "worked", "recorded"]


class SizedLoader(StateElsewhere):
    """A loader with a length that makes its batches one at a time, when they are asked for."""

    def __init__(self, length: int, make: Callable[[int], StepBatch]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[StepBatch]:
        return (self._make(index) for index in range(self._length))


class PromptData(LightningDataModule):
    """Prompts, their order and its state; what a step's loader yields depends on `mode`.

    Args:
        tokenizer: local folder of a Hugging Face tokenizer.
        source: training prompts. Not needed in mode `recorded`.
        validation: validation prompts; null holds the last `validation_size` items of `source` out of training.
            Training never sees a prompt whose text is in the validation set, whatever the sources share.
        validation_size: number of validation prompts, fixed for the run (equal ones count once); 0 is no validation.
        validation_batch: prompts in one validation batch of one data-parallel rank.
        prompts_per_step: prompts that `next_prompts` draws by default, over all ranks: those of one supervised step or
            of one rollout phase (in mode `recorded`, groups of one step). Samples per prompt are the callback's.
        mode: `rollouts`: the loader yields what the Rollout callback puts into `buffer`. `worked`: supervised examples
            from worked answers. `recorded`: rollouts from a file that `save_rollouts` wrote.
        recorded: that file.
        updates_per_rollout: optimiser steps from one rollout phase (mode `rollouts`).
        steps_per_epoch: length of the training loader in modes `worked` and `recorded`; null is one pass.
        shuffle: draw a new order each epoch from (seed, epoch); otherwise keep the source's order.
        seed: of the order.
        max_prompt_tokens: longer prompts are counted in `dropped` and left out.
        max_worked_tokens: the same for worked answers (end token included).
        chat_template: format prompts as chat with the tokenizer's template.
        system: system message for the chat template.
    """

    def __init__(
        self,
        tokenizer: str,
        source: PromptSource | None = None,
        validation: PromptSource | None = None,
        validation_size: int = 64,
        validation_batch: int = 16,
        prompts_per_step: int = 16,
        mode: Mode = "rollouts",
        recorded: str | None = None,
        updates_per_rollout: int = 1,
        steps_per_epoch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_prompt_tokens: int = 512,
        max_worked_tokens: int | None = None,
        chat_template: bool = False,
        system: str | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer_path, self.source, self.validation = tokenizer, source, validation
        self.validation_size, self.validation_batch = validation_size, validation_batch
        self.prompts_per_step, self.mode, self.recorded = prompts_per_step, mode, recorded
        self.steps_per_epoch, self.shuffle, self.seed = steps_per_epoch, shuffle, seed
        self.max_prompt_tokens, self.max_worked_tokens = max_prompt_tokens, max_worked_tokens
        self.chat_template, self.system = chat_template, system
        self.buffer = RolloutBuffer(updates_per_rollout, "train")
        self.val_buffer = RolloutBuffer(0, "validation")
        self.position = 0
        """Items drawn so far over all ranks and epochs, dropped ones included."""
        self.dropped = 0
        """Training draws left out: too long, empty, or in the validation set."""
        self._encoder: PromptEncoder | None = None
        self._groups: list[list[Rollout]] = []
        self._validation: list[Prompt] = []
        self._held_out: set[tuple[int, ...]] = set()
        self._order: tuple[int, Any] = (-1, None)
        self._check_sizes()

    # Set-up

    def _check_sizes(self) -> None:
        lowest = {
            "prompts_per_step": 1,
            "validation_batch": 1,
            "validation_size": 0,
            "max_prompt_tokens": 1,
            "steps_per_epoch": 1,
            "max_worked_tokens": 1,
        }
        values = {name: getattr(self, name) for name in lowest}
        values["updates_per_rollout"], lowest["updates_per_rollout"] = self.buffer.updates_per_rollout, 1
        for name, value in values.items():
            if value is not None and value < lowest[name]:
                raise ConfigError(f"bad {name}", found=value, needed=f"at least {lowest[name]}", key=f"data.{name}")
        if self.mode not in ("rollouts", "worked", "recorded"):
            raise ConfigError(
                "unknown data mode", found=self.mode, needed="rollouts, worked or recorded", key="data.mode"
            )
        if self.mode == "recorded" and self.recorded is None:
            raise ConfigError("no recorded rollouts given", found=None, needed="a file", key="data.recorded")
        if self.mode != "recorded" and self.source is None:
            raise ConfigError("no prompts given", found=None, needed="a prompt source", key="data.source")

    def setup(self, stage: str | None = None) -> None:
        """Read the sources, make the validation set, and refuse what cannot work. Idempotent.

        Raises:
            ConfigError: unreadable files; no usable prompt; worked answers missing; a split that leaves nothing.
        """
        if self._encoder is not None:
            return
        self.check_shards()
        if self.mode == "recorded":
            groups: dict[str, list[Rollout]] = {}
            for rollout in load_rollouts(str(self.recorded)):
                groups.setdefault(rollout.group, []).append(rollout)
            self._groups = list(groups.values())
        for source, key in ((self.source, "source"), (self.validation, "validation")):
            if source is None:
                continue
            source.prepare()
            if self.mode == "worked" and not source.has_worked:
                raise ConfigError(
                    "mode `worked` needs worked answers, and the source has none",
                    found=type(source).__name__,
                    needed="a source with `worked` set",
                    key=f"data.{key}.worked",
                )
        self._encoder = PromptEncoder(self.tokenizer_path, self.chat_template, self.system)
        try:
            self._make_validation()
            if self.source is not None:
                self._require_usable()
        except ConfigError:
            self._encoder = None
            raise

    def _make_validation(self) -> None:
        source, size = self.validation or self.source, self.validation_size
        if source is None or size == 0:
            return
        longest = len(source) if self.validation is not None else len(source) - 1
        if size > longest:
            raise ConfigError(
                "more validation prompts than the source can give",
                found=size,
                needed=f"at most {longest} (training needs a prompt too)"
                if self.validation is None
                else f"<= {longest}",
                key="data.validation_size",
            )
        first = 0 if self.validation is not None else len(source) - size
        seen: dict[tuple[int, ...], Prompt] = {}
        for index in range(first, first + size):
            prompt = self.encode(source.item(index))
            if self._fits(prompt):
                seen.setdefault(prompt.tokens, prompt)
        if not seen:
            raise ConfigError(
                "every validation prompt is too long",
                found=f"{size} prompts over {self.max_prompt_tokens} tokens",
                needed="a larger limit or shorter prompts",
                key="data.max_prompt_tokens",
            )
        self._validation, self._held_out = list(seen.values()), set(seen)
        self.val_buffer.updates_per_rollout = self.val_batches

    def _require_usable(self) -> None:
        longest = 0
        for index in range(self._train_size):
            prompt = self._encode_train(index)
            if self._usable(prompt):
                return
            longest = max(longest, len(prompt.tokens))
        raise ConfigError(
            "no training prompt is usable: each is too long, empty, or also in the validation set",
            found=f"{self._train_size} prompts, the longest of {longest} tokens",
            needed=f"prompts of 1 to {self.max_prompt_tokens} tokens outside the validation set",
            key="data.max_prompt_tokens",
        )

    def check_shards(self) -> None:
        """Refuse a step that does not divide into the data-parallel ranks."""
        self._share(self.prompts_per_step)

    # Tokens

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; `setup` loads it."""
        self.setup()
        assert self._encoder is not None
        return self._encoder.tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion: the tokenizer's end of sequence."""
        self.setup()
        assert self._encoder is not None
        return (self._encoder.end_id,)

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Text of a completion for the rewards: no special tokens, spacing untouched."""
        return decode(self.tokenizer, tokens)

    def encode(self, example: Example, uid: str | None = None) -> Prompt:
        """Tokens of an example; see `PromptEncoder.encode`."""
        assert self._encoder is not None, "setup() makes the encoder"
        tokens, worked = self._encoder.encode(example.prompt, example.worked)
        text = example.prompt if isinstance(example.prompt, str) else "\n".join(m["content"] for m in example.prompt)
        return Prompt(uid or example.uid, tokens, text, example.task, worked)

    def _fits(self, prompt: Prompt) -> bool:
        short = self.max_worked_tokens is None or len(prompt.worked or ()) <= self.max_worked_tokens
        return 1 <= len(prompt.tokens) <= self.max_prompt_tokens and short

    def _usable(self, prompt: Prompt) -> bool:
        return self._fits(prompt) and prompt.tokens not in self._held_out

    # Order and shards

    @property
    def _train_size(self) -> int:
        """Items of one epoch: prompts, or recorded groups."""
        if self.mode == "recorded":
            return len(self._groups)
        assert self.source is not None
        return len(self.source) - (self.validation_size if self.validation is None else 0)

    def _index(self, position: int) -> tuple[int, int]:
        """(epoch, item) of a global position; epoch e is a permutation drawn from (seed, e) alone."""
        epoch, place = divmod(position, self._train_size)
        if not self.shuffle:
            return epoch, place
        if self._order[0] != epoch:
            order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self._train_size)
            self._order = (epoch, order)
        return epoch, int(self._order[1][place])

    def _encode_train(self, index: int, epoch: int | None = None) -> Prompt:
        assert self.source is not None
        example = self.source.item(index)
        return self.encode(example, None if epoch is None else f"{example.uid}@{epoch}")

    def shard(self) -> tuple[int, int]:
        """(rank, size) of data parallelism, as the strategy says; (0, 1) without one."""
        strategy = getattr(self.trainer, "strategy", None) if self.trainer is not None else None
        return getattr(strategy, "data_parallel_rank", 0), getattr(strategy, "data_parallel_size", 1)

    def _share(self, n: int) -> slice:
        rank, size = self.shard()
        if n % size:
            raise ConfigError(
                "the prompts of a step do not divide into the data-parallel ranks",
                found=f"{n} prompts, {size} ranks",
                needed=f"a multiple of {size}",
                key="data.prompts_per_step",
            )
        return slice(rank * n // size, (rank + 1) * n // size)

    def next_prompts(self, n: int | None = None) -> list[Prompt]:
        """Draw the next `n` prompts over all ranks (`prompts_per_step` by default) and return this rank's share.

        Every rank must call it with the same n. Shares are consecutive parts of one global order; each prompt's uid
        ends with its epoch and is unique in the run, so it can name the group of its samples.
        """
        n = self.prompts_per_step if n is None else n
        share = self._share(n)
        self.setup()
        drawn: list[Prompt] = []
        refused = 0
        while len(drawn) < n:
            epoch, index = self._index(self.position)
            self.position += 1
            prompt = self._encode_train(index, epoch)
            if self._usable(prompt):
                drawn.append(prompt)
                refused = 0
                continue
            self.dropped += 1
            refused += 1
            if refused > 2 * self._train_size:
                self._require_usable()
        return drawn[share]

    def _next_groups(self) -> list[Rollout]:
        share = self._share(self.prompts_per_step)
        drawn = []
        for _ in range(self.prompts_per_step):
            drawn.append(self._groups[self._index(self.position)[1]])
            self.position += 1
        return [rollout for group in drawn[share] for rollout in group]

    # Loaders

    def _train_batch(self, _: int) -> StepBatch:
        if self.mode == "recorded":
            rollouts = self._next_groups()
        else:
            rollouts = [Rollout.from_worked(prompt) for prompt in self.next_prompts()]
        return StepBatch(rollouts, version=self._version())

    def _version(self) -> int:
        return int(self.trainer.global_step) if self.trainer is not None else 0

    def train_dataloader(self) -> RolloutBuffer | SizedLoader:
        """In mode `rollouts` the buffer itself (one epoch is one rollout phase), else supervised step batches."""
        self.setup()
        if self.mode == "rollouts":
            return self.buffer
        length = self.steps_per_epoch or max(1, self._train_size // self.prompts_per_step)
        return SizedLoader(length, self._train_batch)

    def validation_prompts(self) -> list[Prompt]:
        """This rank's validation prompts, the same at every call; shares differ by at most one prompt."""
        self.setup()
        rank, size = self.shard()
        return self._validation[rank::size]

    @property
    def val_batches(self) -> int:
        """Validation batches, equal on every rank (the last ones may be empty on some)."""
        per_rank = -(-len(self._validation) // self.shard()[1])
        return -(-per_rank // self.validation_batch)

    def split_validation(self, rollouts: list[Rollout]) -> list[StepBatch]:
        """Cut this rank's validation rollouts into the `val_batches` batches that `val_buffer.set` takes."""
        version = self._version()
        order = {prompt.uid: i for i, prompt in enumerate(self.validation_prompts())}
        batches = [StepBatch([], version=version) for _ in range(self.val_batches)]
        for rollout in rollouts:
            batches[order[rollout.prompt.uid] // self.validation_batch].rollouts.append(rollout)
        return batches

    def val_dataloader(self) -> RolloutBuffer | SizedLoader | list[Any]:
        """In mode `rollouts` the validation buffer, filled in `on_validation_start`; else worked validation
        examples. Empty where there are none."""
        self.setup()
        if not self._validation or (self.mode != "rollouts" and any(p.worked is None for p in self._validation)):
            return []
        if self.mode == "rollouts":
            return self.val_buffer
        batches = self.split_validation([Rollout.from_worked(p) for p in self.validation_prompts()])
        return SizedLoader(len(batches), batches.__getitem__)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Position in the global order, and what is left of a rollout phase on this rank."""
        rank, size = self.shard()
        state = {"position": self.position, "dropped": self.dropped, **self._identity()}
        if self.buffer.remaining:
            state["phase"] = {"rank": rank, "size": size, **self.buffer.save_phase()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken, at any data-parallel size between phases.

        Raises:
            ConfigError: another order of other items, so that the position would mean something else; or a state taken
                inside a phase that belongs to another data-parallel rank.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"the checkpoint's data order has another {name}",
                    found=value,
                    needed=f"{state.get(name)!r} as in the checkpoint",
                    key="data.source" if name == "size" else f"data.{name}",
                )
        phase = state.get("phase")
        rank, size = self.shard()
        if phase is not None:
            if (phase["rank"], phase["size"]) != (rank, size):
                raise ConfigError(
                    "the checkpoint was taken inside a rollout phase of another data-parallel rank",
                    found=f"rank {rank} of {size}",
                    needed=f"rank {phase['rank']} of {phase['size']}",
                    key="trainer.strategy",
                )
            self.buffer.load_phase(phase)
        self.position, self.dropped = state["position"], state["dropped"]

    def _identity(self) -> dict[str, Any]:
        """What makes a position mean the same items."""
        if self.mode == "recorded" and not self._groups:
            self.setup()
        return {"mode": self.mode, "seed": self.seed, "shuffle": self.shuffle, "size": self._train_size}
