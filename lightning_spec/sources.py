"""Where prompts come from: JSONL files, Hugging Face datasets on disk, procedural tasks with verifiers.

A source gives text by index and knows nothing of tokens, order or ranks; `PromptData` does the rest.
"""

from __future__ import annotations

import difflib
import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_spec.errors import ConfigError
from lightning_spec.worked import WORKED_TASKS

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Example:
    """One item of a source. `prompt` is text or chat messages; `task` is plain JSON data for the reward."""

    uid: str
    prompt: str | Messages
    task: dict[str, Any] = field(default_factory=dict)
    worked: str | None = None


class PromptSource(ABC):
    """A finite, indexable collection of prompts. Cheap to construct; `prepare` does the reading and the checks."""

    @abstractmethod
    def prepare(self) -> None:
        """Read or check whatever the items need; called once before work starts, idempotent.

        Raises:
            ConfigError: the files or settings cannot serve.
        """

    @property
    @abstractmethod
    def has_worked(self) -> bool:
        """Whether items carry a worked answer."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of items; calls `prepare` if need be."""

    @abstractmethod
    def item(self, index: int) -> Example:
        """Item `index` in 0..len-1; the same for the same settings, whenever and wherever it is asked for."""


class _Rows(PromptSource):
    """What sources share whose items are dictionaries."""

    def __init__(self, path: str, prompt: str, answer: str | None, worked: str | None) -> None:
        self.path, self.prompt, self.answer, self.worked = path, prompt, answer, worked
        self._rows: Any = None

    @abstractmethod
    def _read(self) -> Any:
        """A sequence of dictionaries."""

    def _where(self, index: int) -> str:
        return f"row {index}"

    def prepare(self) -> None:
        if self._rows is None:
            rows = self._read()
            if len(rows) == 0:
                raise ConfigError(
                    "no prompts in the file", found=self.path, needed="at least one", key="data.source.path"
                )
            self._rows = rows

    @property
    def has_worked(self) -> bool:
        return self.worked is not None

    def __len__(self) -> int:
        self.prepare()
        return len(self._rows)

    def item(self, index: int) -> Example:
        self.prepare()
        row = self._rows[index]
        self._check(row, index)
        task = {} if self.answer is None else {"answer": row[self.answer]}
        worked = None if self.worked is None else row[self.worked]
        return Example(f"{Path(self.path).name}:{index}", row[self.prompt], task, worked)

    def _check(self, row: dict[str, Any], index: int) -> None:
        for name, key in ((self.prompt, "prompt"), (self.answer, "answer"), (self.worked, "worked")):
            if name is not None and name not in row:
                raise ConfigError(
                    f"{self.path}, {self._where(index)}: no field {name!r}{_nearest(name, row)}",
                    found=sorted(map(str, row)),
                    needed=f"a field {name!r} in every row",
                    key=f"data.source.{key}",
                )
        prompt = row[self.prompt]
        chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
        if not isinstance(prompt, str) and not chat:
            raise ConfigError(
                f"{self.path}, {self._where(index)}: the prompt is neither text nor chat messages",
                found=type(prompt).__name__,
                needed="a string, or a list of {role, content}",
                key="data.source.prompt",
            )
        if self.worked is not None and not isinstance(row[self.worked], str):
            raise ConfigError(
                f"{self.path}, {self._where(index)}: the worked answer is not text",
                found=type(row[self.worked]).__name__,
                needed="a string",
                key="data.source.worked",
            )


class JSONLPrompts(_Rows):
    """Prompts from a file with one JSON object a line. The whole file is checked before work starts.

    Args:
        path: the file.
        prompt: field with the question: a string, or chat messages ({role, content} each).
        answer: field with the reference answer that rewards compare with, or None.
        worked: field with a worked answer for supervised training, or None.
    """

    def __init__(self, path: str, prompt: str = "prompt", answer: str | None = "answer", worked: str | None = None):
        super().__init__(path, prompt, answer, worked)
        self._lines: list[int] = []

    def _where(self, index: int) -> str:
        return f"line {self._lines[index]}"

    def _read(self) -> list[dict[str, Any]]:
        rows = []
        for line, row in read_jsonl(self.path, "data.source.path"):
            self._lines.append(line)
            rows.append(row)
            self._check(row, len(rows) - 1)
        return rows


class HFDatasetPrompts(_Rows):
    """Prompts from a Hugging Face dataset on disk: a `save_to_disk` folder, a parquet file or folder, a JSON file.

    Args:
        path: the folder or file; nothing is downloaded.
        split: which split, where the folder holds a DatasetDict.
        prompt, answer, worked: column names, as for JSONLPrompts.
    """

    def __init__(
        self,
        path: str,
        split: str | None = None,
        prompt: str = "prompt",
        answer: str | None = "answer",
        worked: str | None = None,
    ) -> None:
        super().__init__(path, prompt, answer, worked)
        self.split = split

    def _read(self) -> Any:
        path = Path(self.path)
        key = "data.source.path"
        if not path.exists():
            raise ConfigError("no such dataset", found=self.path, needed="a local folder or file", key=key)
        import datasets
        import pyarrow.parquet

        try:
            if path.suffix in (".json", ".jsonl"):
                data: Any = datasets.Dataset.from_list(_json_rows(path, key))
            elif path.suffix == ".parquet" or any(path.glob("*.parquet")):
                data = datasets.Dataset(pyarrow.parquet.read_table(str(path)))
            else:
                data = datasets.load_from_disk(str(path))
        except ConfigError:
            raise
        except Exception as error:  # datasets and pyarrow raise many types; all mean an unreadable dataset
            raise ConfigError(
                f"the dataset cannot be read ({type(error).__name__}: {error})",
                found=self.path,
                needed="a save_to_disk folder, parquet, or JSON",
                key=key,
            ) from error
        if isinstance(data, datasets.DatasetDict):
            if self.split not in data:
                raise ConfigError(
                    "the dataset has several splits",
                    found=self.split,
                    needed=f"one of {sorted(data)}",
                    key="data.source.split",
                )
            data = data[self.split]
        elif self.split is not None:
            raise ConfigError("the dataset has no splits", found=self.split, needed="null", key="data.source.split")
        if len(data):
            self._check(data[0], 0)
        return data


class ReasoningGymPrompts(PromptSource):
    """Problems of a reasoning-gym task, made on demand from (config, seed, index).

    Args:
        task: name of the task, for example `chain_sum`.
        config: the task's own settings (reasoning-gym's config class), such as {min_terms: 4, max_terms: 6}.
        size: number of problems.
        seed: of the generator. Tasks draw problem i from seed + i, so seeds closer than `size` share problems;
            `PromptData` keeps such shared problems out of training.
        worked: use our compact prompt and add a worked solution (tasks in `lightning_spec.worked`).
        flaws: share of the worked solutions whose answer is not what the steps lead to. A policy that learnt from them
            answers carelessly, which a reward can mend; the verifier's answer stays right.
    """

    def __init__(
        self,
        task: str,
        config: dict[str, Any] | None = None,
        size: int = 10_000,
        seed: int = 0,
        worked: bool = False,
        flaws: float = 0.0,
    ) -> None:
        if not 0.0 <= flaws <= 1.0:
            raise ConfigError("bad share", found=flaws, needed="0 <= flaws <= 1", key="data.source.flaws")
        self.task, self.config, self.size, self.seed = task, dict(config or {}), size, seed
        self.worked, self.flaws = worked, flaws
        self._data: Any = None

    def prepare(self) -> None:
        if self._data is not None:
            return
        if self.worked and self.task not in WORKED_TASKS:
            raise ConfigError(
                f"no worked solutions for this task{_nearest(self.task, WORKED_TASKS)}",
                found=self.task,
                needed=f"one of {sorted(WORKED_TASKS)}, or worked: false",
                key="data.source.worked",
            )
        self._data = procedural_dataset(self.task, self.config, self.size, self.seed)

    @property
    def has_worked(self) -> bool:
        return self.worked

    def __len__(self) -> int:
        return self.size

    def item(self, index: int) -> Example:
        self.prepare()
        entry = self._data[index]
        # The verifier needs the entry itself; what is kept is its recipe, which is plain JSON and exact.
        task = {"task": self.task, "config": self.config, "size": self.size, "seed": self.seed, "index": index}
        task["answer"] = entry["answer"] if isinstance(entry["answer"], str) else str(entry["answer"])
        uid = f"{self.task}:{self.seed}:{index}"
        if not self.worked:
            return Example(uid, str(entry["question"]), task)
        render = WORKED_TASKS[self.task]
        # Drawn from the problem alone, so that an item is the same whenever it is asked for.
        rng = random.Random(f"flaws/{uid}")
        worked = render.flawed(entry, rng) if rng.random() < self.flaws else render.worked(entry)
        return Example(uid, render.prompt(entry), task, worked)


def procedural_dataset(task: str, config: dict[str, Any], size: int, seed: int) -> Any:
    """reasoning-gym's dataset object, or a ConfigError that names the key and the nearest right word."""
    import dataclasses

    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ConfigError(
            f"unknown task{_nearest(task, DATASETS)}",
            found=task,
            needed="the name of a reasoning-gym task",
            key="data.source.task",
        )
    known = {f.name for f in dataclasses.fields(DATASETS[task][1])}
    for name in config:
        if name in ("size", "seed") or name not in known:
            raise ConfigError(
                f"unknown setting of task {task!r}{_nearest(name, known)}",
                found=name,
                needed=f"one of {sorted(known - {'size', 'seed'})}",
                key=f"data.source.config.{name}",
            )
    if not isinstance(size, int) or size < 1:
        raise ConfigError("bad number of problems", found=size, needed="a positive integer", key="data.source.size")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **config)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"task {task!r} refuses its settings ({error})",
            found=config,
            needed="values the task accepts",
            key="data.source.config",
        ) from error


def read_jsonl(path: str | Path, key: str) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) for every line that is not blank.

    Raises:
        ConfigError: no such file, a line that is not JSON, or one that is not an object.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError("no such file", found=str(path), needed="a JSON-lines file", key=key)
    rows = []
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 ({error.reason})", found=str(path), needed="UTF-8 text", key=key) from error
    # Not splitlines(): U+2028 and the like may stand inside a JSON string.
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"broken JSON in {path}, line {line}: {error.msg}",
                found=content[:80],
                needed="one JSON object a line",
                key=key,
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"{path}, line {line} is not an object", found=type(row).__name__, needed="a JSON object", key=key
            )
        rows.append((line, row))
    return rows


def _json_rows(path: Path, key: str) -> list[dict[str, Any]]:
    """Rows of a JSON array, or of a JSON-lines file."""
    if path.read_text(encoding="utf-8").lstrip().startswith("["):
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"broken JSON, line {error.lineno}: {error.msg}", found=str(path), needed="a JSON array", key=key
            ) from error
        return list(rows)
    return [row for _, row in read_jsonl(path, key)]


def _nearest(word: str, known: Any) -> str:
    match = difflib.get_close_matches(word, [str(name) for name in known], n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
