"""The report's plots. Each takes what was measured and a file; what was not measured gets no picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Series = Sequence[tuple[int, float]]
BLUE, ORANGE, GREY, GREEN, PURPLE = "#2f6db3", "#d9822b", "#8a8f98", "#3f8f5f", "#7a5aa6"


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    # The object interface: no global state, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def lines(file: Path, title: str, y: str, curves: Mapping[str, Series], x: str = "optimiser step") -> bool:
    """Curves over steps; returns whether there was anything to draw."""
    drawn = {name: values for name, values in curves.items() if values}
    if not drawn:
        return False
    figure, axes = _figure(title, x, y)
    colours = (BLUE, ORANGE, GREEN, PURPLE, GREY)
    for (name, values), colour in zip(drawn.items(), colours, strict=False):
        steps, heights = zip(*values, strict=True)
        mark = "o" if len(values) <= 30 else None
        axes.plot(steps, heights, color=colour, marker=mark, markersize=3.5, linewidth=1.6, label=name)
    axes.legend(frameon=False)
    figure.savefig(file)
    return True


def throughput(file: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tokens/s with and without speculation by batch size; rows have batch, plain, speculative."""
    rows = [row for row in rows if row.get("plain") and row.get("speculative")]
    if not rows:
        return False
    figure, axes = _figure("Rollout speed, same engine, prompts and sampling", "requests at a time", "tokens/s")
    width = 0.38
    for index, row in enumerate(rows):
        axes.bar(index - width / 2, row["plain"], width, color=GREY, label="without speculation" if not index else None)
        axes.bar(index + width / 2, row["speculative"], width, color=BLUE, label="speculative" if not index else None)
        ratio = row["speculative"] / row["plain"]
        axes.annotate(f"{ratio:.2f}x", (index + width / 2, row["speculative"]), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(rows)), [str(row["batch"]) for row in rows])
    axes.legend(frameon=False)
    figure.savefig(file)
    return True


def phases(file: Path, seconds: Mapping[str, float]) -> bool:
    """Seconds of each phase of the run, as horizontal bars."""
    shown = {name: value for name, value in seconds.items() if value > 0}
    if not shown:
        return False
    figure, axes = _figure("Time by phase", "seconds", "")
    names = list(shown)[::-1]
    axes.barh(names, [shown[name] for name in names], color=BLUE, height=0.6)
    total = sum(shown.values())
    for row, name in enumerate(names):
        axes.annotate(f" {shown[name]:.1f} s ({shown[name] / total:.0%})", (shown[name], row), va="center", fontsize=9)
    axes.set_xlim(0, max(shown.values()) * 1.3)
    figure.savefig(file)
    return True
