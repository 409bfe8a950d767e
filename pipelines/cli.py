"""The command line, thin: it parses, calls, and prints. The commands are in `pipelines.commands`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from pipelines.commands import bench, corpus, inference, models, training
from pipelines.commands.terminal import FAILED, Stop, usage_in_one_line, wrong_input


class _Commands(click.Group):
    """What the parser refuses is one line, too."""

    def make_context(self, *args, **kwargs):
        with usage_in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx):
        with usage_in_one_line():
            try:
                return super().invoke(ctx)
            except ConnectionError as error:  # of a cluster or a server that the command needs
                raise Stop(str(error), FAILED) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ringspan")
def main() -> None:
    """Train and run language models whose context is a whole code base or a shelf of papers."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s")


@main.command(epilog="Example: ringspan ui --runs runs")
@click.option("--runs", default="runs", show_default=True, help="Folder of runs whose mlflow.db is shown.")
@click.option("--port", default=5000, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Beyond loopback anyone who reaches the port can read and write.")
def ui(runs, port, host) -> None:
    """Serve the MLflow pages of a folder of runs."""
    from pipelines.ui import serve

    with wrong_input():
        code = serve(Path(runs), port, host)
    sys.exit(code)


for command in (
    corpus.ingest, corpus.corpus, training.train, training.config, training.plan, inference.complete, inference.evaluate,
    inference.analyze, inference.select, models.import_, models.export, bench.bench,
):  # fmt: skip
    main.add_command(command)


if __name__ == "__main__":
    main()
