"""Worked procedural tasks: a compact prompt and its solution, step by step, made from reasoning-gym's metadata.

A small policy cannot jump to the answer but can learn the steps; their regular form is what a draft predicts well. The
final answer follows `#`, and reasoning-gym's own verifier scores it: our text is for supervised learning only.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

from lightning_spec.errors import ConfigError

ANSWER_MARK = "#"
ANSWER_PATTERN = r"#([^#]*)$"
"""Regular expression that extracts the final answer of a worked solution."""


class WorkedTask(ABC):
    """Renders one entry of a reasoning-gym dataset as (prompt, worked solution)."""

    name: str

    @abstractmethod
    def prompt(self, entry: dict[str, Any]) -> str:
        """The question in a form that a character-level policy reads in few tokens."""

    @abstractmethod
    def steps(self, entry: dict[str, Any]) -> str:
        """The scratch work that leads to the answer, without the answer itself."""

    def answer(self, entry: dict[str, Any]) -> str:
        return str(entry["answer"])

    def worked(self, entry: dict[str, Any]) -> str:
        return f"{self.steps(entry)}{ANSWER_MARK}{self.answer(entry)}"

    def flawed(self, entry: dict[str, Any], rng: random.Random) -> str:
        """Right steps, and an answer that is off by a little: what uncurated text is full of.

        Raises:
            ConfigError: the task's answers are not numbers.
        """
        try:
            answer = int(self.answer(entry)) + rng.choice((-2, -1, 1, 2))
        except ValueError:
            raise ConfigError(
                "answers that are not numbers cannot be off by a little",
                found=self.name,
                needed="a task with whole numbers as answers, or flaws: 0",
                key="data.source.flaws",
            ) from None
        return f"{self.steps(entry)}{ANSWER_MARK}{answer}"


class ChainSum(WorkedTask):
    """`4-1+7=` -> `4-1=3;3+7=10;#10`: the running total, one operation a step."""

    name = "chain_sum"

    def prompt(self, entry: dict[str, Any]) -> str:
        return entry["metadata"]["expression"].replace(" ", "") + "="

    def steps(self, entry: dict[str, Any]) -> str:
        parts = entry["metadata"]["expression"].split(" ")
        total, text = int(parts[0]), ""
        for sign, term in zip(parts[1::2], parts[2::2], strict=True):
            after = total + int(term) if sign == "+" else total - int(term)
            text += f"{total}{sign}{term}={after};"
            total = after
        return text


class SpellBackward(WorkedTask):
    """`reverse:sun=` -> `s;us;nus;#nus`: the reversed word grows by one letter a step."""

    name = "spell_backward"

    def prompt(self, entry: dict[str, Any]) -> str:
        return f"reverse:{entry['metadata']['word']}="

    def steps(self, entry: dict[str, Any]) -> str:
        word = entry["metadata"]["word"]
        return "".join(f"{word[end::-1]};" for end in range(len(word)))


class NumberSorting(WorkedTask):
    """`up:14,-3,9=` -> `-3|14,9;9|14;14|;#['-3', '9', '14']`: take the next number, write the ones that are left."""

    name = "number_sorting"

    def prompt(self, entry: dict[str, Any]) -> str:
        way = "up" if entry["metadata"]["direction"] == "ascending" else "down"
        return f"{way}:{','.join(entry['metadata']['original_numbers'])}="

    def steps(self, entry: dict[str, Any]) -> str:
        left = list(entry["metadata"]["original_numbers"])
        text = ""
        for number in entry["metadata"]["sorted_numbers"]:
            left.remove(number)
            text += f"{number}|{','.join(left)};"
        return text


WORKED_TASKS: dict[str, WorkedTask] = {task.name: task for task in (ChainSum(), SpellBackward(), NumberSorting())}
