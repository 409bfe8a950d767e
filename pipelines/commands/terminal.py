"""What all commands share: the answer, the error, the options, the progress bar.

Progress and logs go to stderr; stdout is the answer. Exit codes: 0 done, 1 the run failed, 2 the input was wrong.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import sys

import click

FAILED, WRONG_INPUT = 1, 2


class Stop(click.ClickException):
    """One line on stderr, and an exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(" ".join(str(message).split()))
        self.exit_code = exit_code

    def show(self, file=None):
        click.echo(f"error: {self.message}", err=True)


@contextlib.contextmanager
def wrong_input():
    """What is raised inside, before any work starts, is the user's to mend; a full disk is a failure."""
    try:
        yield
    except (ValueError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise Stop(str(error), FAILED if full else WRONG_INPUT) from error


@contextlib.contextmanager
def usage_in_one_line():
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "ringspan"  # none with an option that lacks its value
        raise Stop(f"{error.format_message()} (see: {command} --help)", WRONG_INPUT) from error


def answer(as_json: bool, value: dict, text, stdout=None) -> None:
    """The result: one JSON object as the last line of stdout, or ``text`` (a string or a rich renderable)."""
    if as_json:
        click.echo(json.dumps(_plain(value), allow_nan=False), file=stdout)
    elif isinstance(text, str):
        click.echo(text, file=stdout)
    else:
        from rich.console import Console

        Console(file=stdout).print(text)


def _plain(value):
    """JSON has no NaN: what is not finite is null."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def stdout_for_the_answer():
    """Yields the real stdout, while everything else that writes there, as Ray's processes and log streams do, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr), os.fdopen(os.dup(kept), "w") as stdout:
            yield stdout
    finally:
        os.dup2(kept, 1)
        os.close(kept)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
gitignore_option = click.option(
    "--gitignore/--no-gitignore", default=True, show_default=True, help="Leave out what .gitignore files exclude."
)
verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Show more of what happens, also in Ray and its workers.",
    callback=lambda context, option, value: logging.getLogger().setLevel(logging.INFO if value else logging.WARNING) or value,
)  # fmt: skip


def cpus() -> int:
    return max(2, os.cpu_count() or 1)


def mesh_line(mesh) -> str:
    stages = f"pp {mesh.pp} × " if mesh.pp > 1 else ""
    copies = f", {mesh.replicate} copies of the weights" if mesh.replicate > 1 else ""
    together = f", weights of {mesh.sync_every_blocks} blocks at once" if mesh.sync_every_blocks > 1 else ""
    return f"dp {mesh.dp} × {stages}ring {mesh.ring} × ulysses {mesh.ulysses} × tp {mesh.tp} ({mesh.layout}{copies}{together})"


def parameters_line(trained: int, total: int) -> str:
    return f"{total:,} parameters" if trained == total else f"{total:,} parameters, of which {trained:,} train ({trained / total:.2%})"


@contextlib.contextmanager
def bar(what: str = "files"):
    """A progress bar on stderr; yields a callback (step, files done, files in all, bytes done)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what + " {task.fields[size]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {}

        def show(step: str, done: int, total: int, size: int) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total, size="")
            progress.update(tasks[step], completed=done, size=f"{size / 1e6:,.1f} MB")

        yield show
