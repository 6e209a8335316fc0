"""The one table writer: a comparison for the terminal, for a spreadsheet (CSV) and for a paper (LaTeX).

The terminal and the paper show a row a group and a column an evaluation set; the spreadsheet has a row for each group and metric and loses
no digit. Each says what its numbers average over.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from experiments.compare.gate import GATED, gate_words
from experiments.compare.groups import BELOW_GATE, TEST, Cell, Comparison
from experiments.compare.keys import SECTIONS, spell
from experiments.compare.measures import measure
from experiments.compare.statistics import LEVEL, POWERLESS

NOTHING = "-"
TIMES = "\N{MULTIPLICATION SIGN}"
#: Before the factor from the middle of an interval to either end.
FACTOR = f"{TIMES}÷"
_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    TIMES: r"$\times$",
    "÷": r"$\div$",
    "↓": r"$\downarrow$",
    "≤": r"$\leq$",
    "·": r"$\cdot$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def show(comparison: Comparison) -> None:
    """Print the tables, as wide as the terminal."""
    Console().print(terminal(comparison))


def terminal(comparison: Comparison) -> Stack:
    """Tables for rich, narrow enough for 80 columns: means and differences along each axis, and costs."""
    axes: dict[str, list[str]] = {}
    for metric in comparison.metrics:
        match = TEST.fullmatch(metric)
        axes.setdefault(match["axis"] if match else "other", []).append(metric)
    parts: list[Table | Text] = [
        _rich(comparison, f"{comparison.study}: means by {axis}", means(comparison, metrics), axis) for axis, metrics in axes.items()
    ]
    parts += [_rich(comparison, "Costs", costs(comparison)), Text(results_caption(comparison) + "\n")]
    if any(cell.pairs for group in comparison.groups for cell in group.cells.values()):
        parts += [_rich(comparison, f"Differences by {axis}", differences(comparison, metrics), axis) for axis, metrics in axes.items()]
        parts.append(Text(differences_caption(comparison)))
    return Stack(*parts)


def to_csv(comparison: Comparison) -> str:
    """A row for each group and metric, under a first line that names the columns."""
    shown = [name for name in Cell.__dataclass_fields__ if name != "trivial"]
    spent_on = list(dict.fromkeys(name for group in comparison.groups for name in group.costs))
    rows: list[list[object]] = [["study", *comparison.by, *shown, "finished", "left_out", "solved", "steps_to_solve", *spent_on]]
    for group in comparison.groups:
        about = [len(group.finished), sum(group.left_out.values()), group.solved and group.solved.successes, group.steps_to_solve]
        spent = [group.costs.get(name) for name in spent_on]
        for cell in group.cells.values():
            values = [getattr(cell, name) for name in shown]
            rows.append([comparison.study, *map(_inert, group.by.values()), *values, *about, *spent])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def to_latex(comparison: Comparison) -> str:
    """The table of means for a paper; needs the package booktabs."""
    wide = [
        [*left, *right[len(comparison.by) :]] for left, right in zip(means(comparison, comparison.metrics), costs(comparison), strict=True)
    ]
    header, *rows = ([escape_latex(text.replace("\n", " ")) for text in row] for row in wide)
    columns = "l" * len(comparison.by) + "r" * (len(header) - len(comparison.by))
    body = [" & ".join(row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape_latex(comparison.study)}: {escape_latex(results_caption(comparison))}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(header) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def means(comparison: Comparison, metrics: Sequence[str]) -> list[list[str]]:
    """A header and a row a group: keys, finished runs of all, and the mean ± half its interval on each metric."""
    rows = []
    for group in comparison.groups:
        cells = [_mean(group.cells[metric]) for metric in metrics]
        rows.append([*map(spell, group.by.values()), f"{len(group.finished)}/{len(group.runs)}", *cells])
    return [[*_titles(comparison.by), "runs", *map(title, metrics)], *rows]


def costs(comparison: Comparison) -> list[list[str]]:
    """A header and a row a group: keys, solve rate, steps to solve, speed and size."""
    rows = []
    for group in comparison.groups:
        solved = f"{group.solved.successes}/{group.solved.n}" if group.solved else NOTHING
        steps = NOTHING if group.solved is None else "never" if group.steps_to_solve is None else f"{group.steps_to_solve:,.0f}"
        spent = [quantity(group.costs.get(name)) for name in ("tokens_per_second", "parameters")]
        rows.append([*map(spell, group.by.values()), solved, steps, *spent])
    return [[*_titles(comparison.by), "solved", "steps to solve", "tokens/s", "parameters"], *rows]


def differences(comparison: Comparison, metrics: Sequence[str]) -> list[list[str]]:
    """A header and a row for each group that is not a baseline: the paired difference ± half its interval, and its corrected p."""
    rows = [
        [*map(spell, group.by.values()), *(_difference(group.cells[metric]) for metric in metrics)]
        for group in comparison.groups
        if group.compared_with != group.by
    ]
    return [[*_titles(comparison.by), *map(title, metrics)], *rows]


def results_caption(comparison: Comparison) -> str:
    """What the numbers average over, which direction is better where that is not up, and which runs they leave out."""
    lost = [f"{count} {outcome}" for outcome, count in comparison.left_out.items() if count]
    ceiling = any(cell.ceiling is not None for group in comparison.groups for cell in group.cells.values())
    linear, ratios = _kinds(comparison)
    averages = ["Mean ± half a 95 % t interval"] if linear else []
    averages += [f"Perplexities: exp of the mean loss, {FACTOR} its 95 % t interval"] if ratios else []
    return (
        f"{'; '.join(averages)}; {comparison.averages_over}. "
        + _direction(comparison)
        + ("≤: what the model's reach allows. " if ceiling else "")
        + "Steps to solve: median, unsolved runs counted as never. "
        + f"{comparison.finished} finished runs"
        + (f"; left out: {', '.join(lost)}." if lost else ", none left out.")
        + _below_gate(comparison)
    )


def differences_caption(comparison: Comparison) -> str:
    """What is compared with what, how it is tested, and what the test can say."""
    against = ", ".join(f"{key}={spell(value)}" for key, value in comparison.baseline.items())
    verdicts = {cell.verdict for group in comparison.groups for cell in group.cells.values()}
    powerless = sorted(words for words in verdicts if words.startswith(POWERLESS))
    linear, ratios = _kinds(comparison)
    shown = "Difference (of perplexities, ratio)" if linear and ratios else "Difference" if linear else "Ratio"
    spread = " or ".join(["± half a"] * linear + [f"{FACTOR} a"] * ratios)
    return (
        f"{shown} to {against} with all else equal, paired by seed, {spread} 95 % t interval; p of the sign-flip test, Holm-corrected "
        f"within a column; * below {LEVEL}. {_direction(comparison)}" + "".join(f"Without p: {words}. " for words in powerless)
    ).rstrip()


def title(metric: str) -> str:
    """A metric as a column head: the evaluation set, the measure where it is not the accuracy, and an arrow where lower is better."""
    match = TEST.fullmatch(metric)
    arrow = " ↓" if measure(metric).better == "lower" else ""
    if match is None:
        return metric + arrow
    name = "" if match["measure"] == "accuracy" else f" {match['measure']}"
    return f"{match['axis']} {match['length']}{name}{arrow}"


def telling(cell: Cell) -> bool:
    """Whether the cell's p is shown: one that could not have been small says nothing, and the caption says why."""
    return cell.p is not None and not cell.verdict.startswith(POWERLESS)


def quantity(value: int | float | None) -> str:
    """A large number in three digits: 1.23M."""
    if value is None:
        return NOTHING
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def factor(value: float) -> str:
    """A perplexity or a ratio: three decimals, fewer of a large one, three digits of a small one."""
    if value >= 9999.5:
        return quantity(value) if value < 1e15 else f"{value:.0e}"
    decimals = next(d for d, end in ((3, 10), (2, 100), (1, 1000), (0, math.inf)) if round(value, d) < end)
    return f"{value:.{decimals}f}" if value >= 0.0995 or value == 0 else f"{value:.3g}"


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


def _titles(keys: Sequence[str]) -> list[str]:
    return [key.removesuffix(".name") if key.partition(".")[0] in SECTIONS else key for key in keys]


def _kinds(comparison: Comparison) -> tuple[bool, bool]:
    """Whether any metric is compared by differences, and whether any is by ratios."""
    ratios = [measure(metric).ratio for metric in comparison.metrics]
    return not all(ratios) or not ratios, any(ratios)


def _direction(comparison: Comparison) -> str:
    return "↓: lower is better. " if any(measure(metric).better == "lower" for metric in comparison.metrics) else ""


def _below_gate(comparison: Comparison) -> str:
    """Why groups have no number though their runs finished: groups with one reason in one sentence."""
    why: dict[str, list[str]] = {}
    for group in comparison.groups:
        if group.below_gate and not group.finished:
            why.setdefault(gate_words(group.below_gate), []).append(group.label)
    return "".join(f" No number for {', '.join(labels)}: {words}." for words, labels in why.items())


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _mean(cell: Cell) -> str:
    if cell.mean is None:
        return NOTHING
    ceiling = f"\n≤{cell.ceiling:.3f}" if cell.ceiling is not None else ""
    return f"{_number(cell, cell.mean)}{_spread(cell, cell.mean, cell.high)}{ceiling}"


def _difference(cell: Cell) -> str:
    if cell.difference is None:
        return BELOW_GATE if cell.verdict.startswith(GATED) else cell.verdict
    p = f"\np={cell.p:.2g}{'*' * (cell.p < LEVEL)}" if cell.p is not None and telling(cell) else ""
    difference = f"{TIMES}{factor(cell.difference)}" if cell.compared_as == "ratio" else f"{cell.difference:+.3f}"
    return f"{difference}{_spread(cell, cell.difference, cell.difference_high)}{p}"


def _number(cell: Cell, value: float) -> str:
    return factor(value) if cell.compared_as == "ratio" else f"{value:.3f}"


def _spread(cell: Cell, middle: float, high: float | None) -> str:
    """Half an interval, or, of what is compared by ratios, the factor from its middle to its end."""
    if high is None:
        return ""
    return f" {FACTOR}{factor(high / middle)}" if cell.compared_as == "ratio" else f" ±{high - middle:.3f}"


def _rich(comparison: Comparison, name: str, rows: list[list[str]], axis: str = "") -> Table:
    """A table about one axis, which its heads need not repeat."""
    # Text, not strings: rich would read square brackets in a user's words as markup. Folded, because a number cut short is another one.
    table = Table(title=Text(name), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for i, head in enumerate(rows[0]):
        is_key = i < len(comparison.by)
        table.add_column(Text(head.removeprefix(f"{axis} ")), justify="left" if is_key else "right", no_wrap=is_key, overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


def _inert(value: object) -> object:
    """A setting for a spreadsheet, which would run a text that starts like a formula."""
    text = spell(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") and not isinstance(value, int | float) else text
