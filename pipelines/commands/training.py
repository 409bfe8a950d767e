"""`ringspan train`, and what can be known before it: `config` and `plan`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pipelines.commands.terminal import (
    FAILED,
    WRONG_INPUT,
    Stop,
    answer,
    json_option,
    mesh_line,
    parameters_line,
    stdout_for_the_answer,
    verbose_option,
    wrong_input,
)


@click.command(epilog="Example: ringspan train code_completion/tiny --set corpus.store=corpora/project --out runs/first")
@click.argument("source", required=False, metavar="[PRESET|FILE]")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Change a key of the configuration; repeatable.")
@click.option("--out", help="The run folder. Default: runs/NAME-TIME, or the run that is resumed.")
@click.option("--resume", metavar="RUN", help="Start from the latest checkpoint of a run; without PRESET with its configuration.")
@json_option
@verbose_option
def train(source, assignments, out, resume, as_json, verbose) -> None:
    """Train a model on a mesh of Ray Train actors."""
    from cluster.launch import ClusterTooSmall, RunFailed
    from pipelines import report
    from pipelines.config import load_config
    from pipelines.corpus.mix import lines as mix_lines
    from pipelines.paths import absolute
    from pipelines.tracking.lines import read_rows
    from pipelines.train import changed_mixes, execute, prepare
    from workers.model.adapter import count_parameters

    with wrong_input():
        if source is None and resume is None:
            raise ValueError("name a preset or a file (see: ringspan config), or --resume RUN")
        if resume is not None and not Path(resume).is_dir():
            raise ValueError(f"--resume {resume} is not a run folder")
        config = load_config(source if source is not None else str(Path(resume) / "config.yaml"), assignments)
        name = Path(source).stem if source and Path(source).is_file() else (source or "").replace("/", "-")
        out = out or resume or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        prepared = prepare(config, absolute(out, "--out"), Path(resume) if resume else None)
    run = prepared.job.run
    trained, total = count_parameters(prepared.job.model, prepared.job.adapter)
    click.echo(f"run {run}\nmodel {parameters_line(trained, total)} · record {prepared.uri}", err=True)
    for stage in prepared.stages:
        job = stage.job
        click.echo(
            f"steps {job.first_step + 1}–{job.last_step} · context {job.training.context:,} · mesh {mesh_line(stage.mesh)}", err=True
        )
    for change in changed_mixes(prepared):
        click.echo("\n".join([f"mix of steps {change.first_step}–{change.last_step}", *mix_lines(change.before, change.after)]), err=True)
    with stdout_for_the_answer() as stdout:
        try:
            result, tracker = execute(
                prepared,
                verbose=verbose,
                on_step=lambda row: click.echo(report.step_line(row), err=True),
                on_evaluation=lambda row: click.echo(report.evaluation_line(row), err=True),
            )
        except RunFailed as error:
            raise Stop(str(error), FAILED) from error
        except ClusterTooSmall as error:
            raise Stop(str(error), WRONG_INPUT) from error
        if result["stopped"]:
            raise Stop(f"stopped after step {result['step']}, which is saved; go on with: ringspan train --resume {run}", FAILED)
        evaluations = read_rows(run / "evaluations.jsonl") if (run / "evaluations.jsonl").exists() else []
        value = {
            **result, "run": str(run), "parameters": total, "trained_parameters": trained, "tracking_uri": prepared.uri,
            "evaluations": evaluations,
        }  # fmt: skip
        answer(as_json, value, report.closing_report(run, tracker.info), stdout)


@click.command(epilog="Example: ringspan config code_completion/tiny --set mesh.ring=4 > my.yaml")
@click.argument("source", required=False, metavar="[PRESET|FILE]")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Change a key; repeatable.")
@json_option
@verbose_option
def config(source, assignments, as_json, verbose) -> None:
    """Print a configuration with every key; without PRESET the defaults, and the names of the presets on stderr."""
    from pipelines.config import load_config, presets

    with wrong_input():
        loaded = load_config(source, assignments)
        loaded.check_meshes()
    if source is None:
        click.echo(f"presets: {', '.join(presets())}", err=True)
    answer(as_json, loaded.model_dump(), loaded.to_yaml().rstrip())


@click.command(epilog="Example: ringspan plan code_completion/tiny --vocab 32000 --set training.context=131072 --device H100")
@click.argument("source", required=False, metavar="[PRESET|FILE]")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Change a key of the configuration; repeatable.")
@click.option("--device", default="H100", show_default=True, help="A100-80, L40S, H100, H200, B200, or cpu: this machine.")
@click.option("--vocab", type=int, help="Ids of the tokenizer, where model.vocab_size is null; rounded up as in a run.")
@click.option("--simulate", type=int, metavar="N", help="Work out the schedule of N ranks, and run one tiny attention on their ring.")
@json_option
@verbose_option
def plan(source, assignments, device, vocab, simulate, as_json, verbose) -> None:
    """Say what a run needs, before it runs: memory, traffic, time, and the longest context that fits."""
    from pipelines.config import load_config
    from pipelines.plan import make_plan
    from pipelines.plan.text import as_values, render

    with wrong_input():
        found = make_plan(load_config(source, assignments), device_name=device, vocab=vocab, simulated_ranks=simulate)
    lines = mesh_line(found.shape.mesh), parameters_line(found.trainable, found.total)
    answer(as_json, as_values(found), render(found, *lines))
