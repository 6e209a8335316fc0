"""The command `attnlab`: one verb a function, each a table of contents. What is heavy is imported inside the verb that needs it."""

from __future__ import annotations

import errno
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import registry
from registry import UserError

app = typer.Typer(
    name="attnlab",
    help="A bench for attention variants and position schemes: register, check, train, compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Words = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the config, such as variant=gqa seed=1.")]
Plugins = Annotated[list[str] | None, typer.Option("--plugin", help="A file or module that registers more names. May be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else there.")]
Study = Annotated[str, typer.Argument(help="A study: its folder, or its name under --runs-dir.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Where studies are kept.")]

RUNS = Path("runs")
DISK_ERRORS = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EDQUOT)


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a verb of the command. What can go wrong becomes a few lines and an exit code: 2 a mistake in the words, 1 a failure,
    130 an interrupt."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            fail("interrupted; what was finished is kept, and the same command goes on from there", 130)
        except UserError as error:
            fail(str(error), 2)
        except EOFError:
            fail("a process of this sweep ended unexpectedly; the same command goes on from what was finished", 1)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(1)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            fail(f"{error.filename or 'the disk'}: {error.strerror}", 1)

    app.command(function.__name__.removesuffix("_names").replace("_", "-"))(guarded)
    return guarded


@verb
def list_names(
    name: Annotated[str | None, typer.Argument(help="One name, to see its options; all of them if left out.")] = None,
    plugin: Plugins = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown tables.")] = False,
    as_json: Json = False,
) -> None:
    """Show the variants, position schemes and tasks there are."""
    from experiments.verbs import listing

    registry.load_plugins(plugin or [])
    if name is not None:
        described = listing.describe(name)
        print_json(described) if as_json else listing.show_one(described)
    elif as_json:
        print_json(listing.everything())
    elif markdown:
        print(listing.markdown(listing.everything()))
    else:
        listing.show(listing.everything())


@verb
def train(words: Words = None, plugin: Plugins = None, as_json: Json = False) -> None:
    """Train and test one run; an interrupted one goes on where it was, a finished one is shown."""
    from experiments.verbs import launching

    launching.train(with_plugins(words, plugin), print_json if as_json else None)


@verb
def evaluate(
    run: Annotated[str, typer.Argument(help="A finished run: its directory, or study/run_id in runs_dir.")],
    words: Words = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Test a finished run's weights under other settings, such as position=yarn position.factor=4; kept as a run of the same study."""
    from experiments.verbs import extending

    extending.evaluate(run, with_plugins(words, plugin), print_json if as_json else None)


@verb
def longrope_search(words: Words = None, plugin: Plugins = None, as_json: Json = False) -> None:
    """Search LongRoPE's factors for a trained rotary run: checkpoint=RUN factor=4, and overrides such as search.evaluations=500.

    An interrupted search goes on where it was. What was found is saved as position.yaml in the run's directory.
    """
    from experiments.verbs import extending

    extending.longrope_search(with_plugins(words, plugin), print_json if as_json else None)


@verb
def sweep(
    words: Words = None,
    plugin: Plugins = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would run.")] = False,
    retry: Annotated[list[str] | None, typer.Option("--retry", help="Also run again what ended so: diverged.")] = None,
    as_json: Json = False,
) -> None:
    """Run every missing run of a grid: an experiment's, or comma lists such as variant=full,gqa seed=0,1,2."""
    from experiments.verbs import launching

    launching.sweep(with_plugins(words, plugin), dry_run=dry_run, retry=retry or [], report=print_json if as_json else None)


@verb
def status(study: Study, runs_dir: RunsDir = RUNS, as_json: Json = False) -> None:
    """Show what became of each run of a study."""
    from experiments.verbs import launching

    launching.status(study_dir(study, runs_dir), print_json if as_json else None)


@verb
def check(
    name: Annotated[str, typer.Argument(help="A registered variant.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="Options of the variant, such as window=8.")
    ] = None,
    plugin: Plugins = None,
    fast: Annotated[bool, typer.Option("--fast", help="Fewer lengths and positions.")] = False,
    as_json: Json = False,
) -> None:
    """Check a variant: causality, cache against full pass, padding, segments, batch, cost."""
    from experiments.verbs import checking

    registry.load_plugins(plugin or [])
    checking.check(name, options or [], fast=fast, report=print_json if as_json else None)


By = Annotated[str | None, typer.Option(help="Config keys that make a group, comma separated (default: the study's, or what varies).")]
Metric = Annotated[str | None, typer.Option(help="Metrics, comma separated (default: the task's own measure on every test set).")]
Baseline = Annotated[str | None, typer.Option(help="The group to compare with, such as variant=full.")]


@verb
def compare(
    study: Study,
    by: By = None,
    metric: Metric = None,
    baseline: Baseline = None,
    table: Annotated[str, typer.Option("--format", help="text, csv or latex.")] = "text",
    runs_dir: RunsDir = RUNS,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Compare the groups of a study: n, mean, interval, paired difference to a baseline, verdict."""
    from experiments.verbs import comparing

    registry.load_plugins(plugin or [])
    comparing.compare(study_dir(study, runs_dir), by, metric, baseline, table, print_json if as_json else None)


@verb
def report(
    study: Study,
    output: Annotated[Path | None, typer.Option(help="The HTML file (default: report.html in the study's folder).")] = None,
    by: By = None,
    metric: Metric = None,
    baseline: Baseline = None,
    runs_dir: RunsDir = RUNS,
    plugin: Plugins = None,
) -> None:
    """Write the comparison page: one self-contained HTML file."""
    from experiments.verbs import comparing

    registry.load_plugins(plugin or [])
    comparing.report(study_dir(study, runs_dir), output, by, metric, baseline)


@verb
def bench(
    level: Annotated[str, typer.Option(help="core (numerical cores and peers), layer (variants) or model (a training step).")] = "model",
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Groups or variants, comma separated. May be repeated.")] = None,
    mode: Annotated[str | None, typer.Option(help="forward, train or decode (default: all that the level has).")] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens, comma separated: in decode mode, those in the cache.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head at core level.")] = 64,
    dim: Annotated[int, typer.Option(help="Width of a layer.")] = 256,
    window: Annotated[int, typer.Option(help="Tokens in sight of the group window, at core level.")] = 256,
    processes: Annotated[int, typer.Option(help="Layers again in so many processes that share each row, each with --threads.")] = 1,
    repeats: Annotated[int | None, typer.Option(help="Timed rounds (default: 7, at core and layer level 3 where they are long).")] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Time candidates and peers against each other, interleaved in one process."""
    from experiments.bench import run

    registry.load_plugins(plugin or [])
    sizes = {"batch": batch, "heads": heads, "head_dim": head_dim, "dim": dim, "window": window, "processes": processes}
    run.bench(
        level,
        only=only or [],
        mode=mode,
        lengths=lengths,
        sizes=sizes,
        repeats=repeats,
        threads=threads,
        report=print_json if as_json else None,
    )


def main() -> None:
    """Entry point of the command."""
    app()


def fail(message: str, code: int) -> None:
    """Say what is wrong on standard error and leave."""
    print(f"attnlab: {message}", file=sys.stderr)
    sys.exit(code)


def print_json(document: Any) -> None:
    """One strict JSON document."""
    print(json.dumps(document, indent=2, allow_nan=False))


def with_plugins(words: list[str] | None, plugins: list[str] | None) -> list[str]:
    """The words, with `--plugin` written as the override it stands for."""
    if not plugins:
        return list(words or [])
    return [*(words or []), f"plugins=[{','.join(json.dumps(str(_absolute(plugin))) for plugin in plugins)}]"]


def _absolute(plugin: str) -> str:
    return str(Path(plugin).expanduser().resolve()) if plugin.endswith(".py") else plugin


def study_dir(study: str, runs_dir: Path) -> Path:
    """The folder of a study given by name or path. Raises UserError with the nearest study there is."""
    from experiments.runs.status import MANIFEST

    for folder in (Path(study), runs_dir / study):
        if (folder / MANIFEST).is_file() or any(folder.glob("*/config.json")):
            return folder
    there = [folder.parent.name for folder in runs_dir.glob(f"*/{MANIFEST}")] if runs_dir.is_dir() else []
    raise UserError(f"no study {study!r} under {runs_dir}.{registry.nearest(study, there)}")


if __name__ == "__main__":
    main()
