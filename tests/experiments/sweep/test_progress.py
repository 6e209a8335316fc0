import io

from rich.console import Console
from toy_runs import job

from experiments.sweep.job import Outcome, Progress
from experiments.sweep.progress import Lines, Live, display, table


def show(console, one, another):
    with display(5, 2, console) as shown:
        shown.note("a sentence with [brackets]")
        for event in (
            Progress(one, 0, 0, "starting"),
            Progress(one, 5, 10, "train [a]"),
            Outcome(another, "running"),
            Outcome(one, "finished"),
            Outcome(another, "failed", "why [not]"),
        ):
            shown.event(event)
    return shown


def test_without_a_terminal_a_run_takes_two_lines_and_no_control_characters(tmp_path):
    one, another = job(tmp_path, seed=1), job(tmp_path, seed=2)
    out = io.StringIO()
    assert isinstance(show(Console(file=out, width=40), one, another), Lines)
    assert out.getvalue().splitlines() == [
        "a sentence with [brackets]",
        "task.deed=finish seed=1: starting",
        "[3/5] task.deed=finish seed=1: finished",
        "[4/5] task.deed=finish seed=2: failed (why [not])",
    ]


def test_on_a_terminal_the_sweep_and_each_active_run_have_a_bar(tmp_path):
    one, another = job(tmp_path, seed=1), job(tmp_path, seed=2)
    out = io.StringIO()
    assert isinstance(show(Console(file=out, width=120, force_terminal=True, color_system=None), one, another), Live)
    assert "4/5" in out.getvalue()
    assert "task.deed=finish seed=2: failed (why [not])" in out.getvalue()
    assert "a sentence with [brackets]" in out.getvalue()


def test_a_path_in_the_table_is_never_broken(tmp_path):
    outcome = Outcome(job(tmp_path / ("long" * 60), "raise"), "failed", "why")
    head, row = table([outcome]).splitlines()
    assert head.split() == ["run", "status", "overrides", "reason", "log"]
    assert row.endswith(str(outcome.job.log))
