"""The command line, thin: it parses, calls, and prints. Progress and logs go to stderr; stdout is the answer.

Exit codes: 0 done, 1 the run failed, 2 the input was wrong.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import sys
import time
from pathlib import Path

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


def _answer(as_json: bool, value: dict, text, stdout=None) -> None:
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
def _stdout_for_the_answer():
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
verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Show more of what happens, also in Ray and its workers.",
    callback=lambda context, option, value: logging.getLogger().setLevel(logging.INFO if value else logging.WARNING) or value,
)  # fmt: skip


class _Commands(click.Group):
    """What the parser refuses is one line, too."""

    def make_context(self, *args, **kwargs):
        with _usage_in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx):
        with _usage_in_one_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def _usage_in_one_line():
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise Stop(f"{error.format_message()} (see: {error.ctx.command_path} --help)", WRONG_INPUT) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ringspan")
def main() -> None:
    """Train and run language models whose context is a whole code base or a shelf of papers."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s")


@main.group()
def ingest() -> None:
    """Turn files into a token store."""


@ingest.command("code", epilog="Example: ringspan ingest code ~/src/project --out corpora/project --tokenizer bpe:4096")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--out", required=True, help="Folder of the store.")
@click.option("--tokenizer", default="byte", show_default=True, help="byte, bpe:N (trained on these files), or a tokenizer.json.")
@click.option("--unit", type=click.Choice(["file", "repository"]), default="file", show_default=True, help="What training takes as one document.")
@click.option("--order", type=click.Choice(["path", "dependency", "random"]), default="path", show_default=True, help="Of the files in their repository.")
@click.option("--line-ends", type=click.Choice(["keep", "lf"]), default="keep", show_default=True)
@click.option("--licences", metavar="ID,ID", help="Take only files under these licences, by SPDX id, as in MIT,Apache-2.0.")
@click.option("--near-duplicates", type=float, metavar="SIMILARITY", help="Leave out files so much like an earlier one, as in 0.85; exact copies always are.")
@click.option("--gitignore/--no-gitignore", default=True, show_default=True, help="Whether .gitignore files count.")
@click.option("--hold-out", multiple=True, metavar="PATTERN", help="Keep a repository or folder, as in project/tests, and copies of it from training; repeatable.")
@json_option
@verbose_option
def ingest_code(paths, out, tokenizer, unit, order, line_ends, licences, near_duplicates, gitignore, hold_out, as_json, verbose) -> None:
    """Ingest source code from files, folders, archives (tar, zip), and git repositories at a commit (REPO@COMMIT)."""
    from pipelines.corpus.code import Code

    with wrong_input():
        kind = Code(
            unit={"file": "row", "repository": "collection"}[unit], order=order, line_ends=line_ends,
            licences=() if licences is None else tuple(licences.split(",")),
            near_duplicates=near_duplicates, held_out=hold_out, gitignore=gitignore,
        )  # fmt: skip
    _ingest(kind, paths, out, tokenizer, as_json, verbose)


@ingest.command("papers", epilog="Example: ringspan ingest papers ~/papers --out corpora/shelves --shelves citation --tokenizer bpe:8192")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--out", required=True, help="Folder of the store.")
@click.option("--tokenizer", default="byte", show_default=True, help="byte, bpe:N (trained on these papers), or a tokenizer.json.")
@click.option(
    "--shelves", type=click.Choice(["citation", "similarity", "folder", "none"]), default="citation", show_default=True,
    help="What brings papers together as one document, the older first; none: every paper is one.",
)  # fmt: skip
@click.option("--shelf-papers", type=int, default=16, show_default=True, help="Most papers on a shelf.")
@click.option("--shelf-bytes", type=int, metavar="BYTES", help="Most bytes of text on a shelf; a byte is a token of the byte tokenizer.")
@click.option("--hold-out", multiple=True, metavar="PATTERN", help="Keep a folder or papers, as in papers/2024*, from training; repeatable.")
@json_option
@verbose_option
def ingest_papers(paths, out, tokenizer, shelves, shelf_papers, shelf_bytes, hold_out, as_json, verbose) -> None:
    """Ingest papers: PDF, LaTeX, JATS, TEI, Markdown, reStructuredText, plain text, sentence-numbered XML and SciREX."""
    from pipelines.literature_analysis.kind import Papers

    with wrong_input():
        kind = Papers(shelves, shelf_papers, shelf_bytes, hold_out)
    _ingest(kind, paths, out, tokenizer, as_json, verbose)


def _ingest(kind, paths, out, tokenizer, as_json, verbose) -> None:
    from pipelines.corpus import ingest as corpus
    from pipelines.corpus.unfinished import check_replaceable
    from pipelines.paths import absolute

    with wrong_input():
        out = absolute(out, "--out")
        paths = [absolute(path, "PATH") for path in paths]
        report = corpus.reusable(kind, paths, out, tokenizer)
        if report is None:
            check_replaceable(out)
    if report is None:
        from cluster.launch import connected

        with _stdout_for_the_answer(), connected(cpus=_cpus(), verbose=verbose), _bar() as progress:
            try:
                report = corpus.ingest(kind, paths, out, tokenizer, progress=progress)
            except ValueError as error:
                raise Stop(str(error), WRONG_INPUT) from error
            except OSError as error:
                raise Stop(f"ingest failed: {error}; what is finished is kept, the same command goes on", FAILED) from error
    skipped = ", ".join(f"{count} {reason}" for reason, count in report.skipped.items())
    skipped = f"{skipped} (listed in {report.folder}/skipped.jsonl)" if skipped else "nothing"
    how = "unchanged, reused" if report.reused else f"{report.megabytes_per_second:.1f} MB/s, {report.tokens_per_second:,.0f} tokens/s"
    counts = ", ".join(f"{count:,} {what}" for what, count in report.counts.items())
    text = (
        f"{report.files:,} files, {report.bytes / 1e6:,.1f} MB, {report.tokens:,} tokens in {report.seconds:.1f} s ({how})\n"
        + (f"{counts}\n" if counts else "")
        + f"skipped: {skipped}\nstore: {report.folder}"
    )
    _answer(as_json, vars(report), text)


@main.command(epilog="Example: ringspan train code_completion/tiny --set corpus.store=corpora/project --out runs/first")
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
        prepared = prepare(config, Path(out), Path(resume) if resume else None)
    run = prepared.job.run
    trained, total = count_parameters(prepared.job.model, prepared.job.adapter)
    click.echo(f"run {run}\nmodel {_parameters_line(trained, total)} · record {prepared.uri}", err=True)
    for stage in prepared.stages:
        job = stage.job
        click.echo(f"steps {job.first_step + 1}–{job.last_step} · context {job.training.context:,} · mesh {_mesh_line(stage.mesh)}", err=True)
    for change in changed_mixes(prepared):
        click.echo("\n".join([f"mix of steps {change.first_step}–{change.last_step}", *mix_lines(change.before, change.after)]), err=True)
    with _stdout_for_the_answer() as stdout:
        try:
            result, tracker = execute(
                prepared, verbose=verbose,
                on_step=lambda row: click.echo(report.step_line(row), err=True),
                on_evaluation=lambda row: click.echo(f"held-out loss at step {row['step']}: {row['loss']:.4f}", err=True),
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
        _answer(as_json, value, report.closing_report(run, tracker.info), stdout)


@main.command(epilog="Example: ringspan complete --checkpoint runs/first --repo ~/src/project --at src/parser.py:120:9")
@click.option("--checkpoint", required=True, help="A run folder, one of its checkpoints, or a model folder.")
@click.option("--repo", required=True, help="The repository that the file belongs to.")
@click.option("--at", required=True, metavar="FILE:LINE:COL", help="The cursor; line and column count from 1.")
@click.option("--max-tokens", default=64, show_default=True, help="Most tokens to add.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--seed", default=0, show_default=True)
@click.option("--context", type=int, help="Most tokens of prompt and answer; by default what the run was trained at.")
@json_option
@verbose_option
def complete(checkpoint, repo, at, max_tokens, temperature, seed, context, as_json, verbose) -> None:
    """Complete code at a cursor."""
    from pipelines.code_completion.complete import complete as run_completion

    with wrong_input():
        result = run_completion(
            Path(checkpoint), Path(repo), at, new_tokens=max_tokens, temperature=temperature, seed=seed, context=context
        )
    _answer(as_json, vars(result), result.text)


@main.command(epilog="Example: ringspan select ~/src/linux --at fs/ext4/inode.c:1000 --budget 60000 --tokenizer runs/first")
@click.argument("repo", metavar="REPO")
@click.option("--at", required=True, metavar="FILE:LINE", help="Where the work is; the line counts from 1.")
@click.option("--budget", required=True, type=int, metavar="TOKENS", help="Most tokens to choose.")
@click.option("--tokenizer", default="byte", show_default=True, help="What counts the tokens: byte, a tokenizer.json, or a folder with one.")
@click.option("--gitignore/--no-gitignore", default=True, show_default=True, help="Leave out what .gitignore files exclude.")
@click.option("--out", metavar="FILE", help="Write the text there, as a repository stands in a corpus.")
@json_option
@verbose_option
def select(repo, at, budget, tokenizer, gitignore, out, as_json, verbose) -> None:
    """Choose what of a repository too large for a context is worth having in it."""
    from pipelines.code_completion.prompt import parse_place
    from pipelines.code_completion.select import select as run_selection
    from pipelines.code_completion.select import table
    from pipelines.corpus.tokenizer import ByteTokenizer, load_tokenizer
    from pipelines.paths import absolute

    with wrong_input():
        repo = absolute(repo, "REPO")
        if not repo.is_dir():
            raise ValueError(f"REPO {repo} is not a folder")
        file, line = parse_place(at, repo)
        encoder = ByteTokenizer() if tokenizer == "byte" else load_tokenizer(absolute(tokenizer, "--tokenizer"))
        selection = run_selection(repo, file, line, budget, encoder, gitignore)
        if out is not None:
            absolute(out, "--out").write_text(encoder.decode(selection.ids(encoder)), encoding="utf-8", newline="")
    files = [{"path": c.path, "lines": c.lines, "reason": c.reason, "tokens": c.tokens} for c in selection.choices]
    value = {"repository": selection.repository, "tokens": selection.tokens, "budget": budget, "files": files}
    _answer(as_json, value, table(selection))


@main.command("import", epilog="Example: ringspan import models/SmolLM2-135M.Q8_0.gguf --out models/smollm2 --special-tokens")
@click.argument("source", metavar="FOLDER|FILE.gguf")
@click.option("--out", required=True, metavar="MODEL", help="The model folder to write.")
@click.option("--special-tokens/--no-special-tokens", default=False, show_default=True,
              help="Give the tokenizer Ringspan's control tokens, and the embedding rows for them: what training on a corpus needs.")
@json_option
@verbose_option
def import_(source, out, special_tokens, as_json, verbose) -> None:
    """Bring in a model: a Hugging Face folder (Llama, Mistral, Qwen2, Qwen3) or a GGUF file."""
    from pipelines.models.importing import import_model
    from pipelines.paths import absolute, check_folder

    with wrong_input():
        out = absolute(out, "--out")
        check_folder(out, "--out")
        result = import_model(absolute(source, "FOLDER|FILE.gguf"), out, special_tokens)
    added = f", {result.added_rows} of them new" if result.added_rows else ""
    text = f"{result.architecture}: {result.parameters:,} parameters in {result.dtype}, {result.vocab_size:,} ids{added}\nmodel: {result.model}"
    _answer(as_json, vars(result), text)


@main.command(epilog="Example: ringspan export runs/first --out exports/first --dtype bfloat16")
@click.argument("source", metavar="RUN|CHECKPOINT|MODEL")
@click.option("--out", required=True, metavar="FOLDER", help="The folder to write.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the weights. Default: as they are; a run's are float32.")
@click.option("--adapter-only", is_flag=True, help="Write a run's adapter alone, for PEFT. By default it is merged into its base.")
@json_option
@verbose_option
def export(source, out, dtype, adapter_only, as_json, verbose) -> None:
    """Write a model as a folder that Hugging Face transformers opens."""
    from pipelines.models.exporting import export_adapter, export_model
    from pipelines.paths import absolute, check_folder

    with wrong_input():
        out = absolute(out, "--out")
        check_folder(out, "--out")
        result = (export_adapter if adapter_only else export_model)(absolute(source, "RUN|CHECKPOINT|MODEL"), out, dtype)
    _answer(as_json, vars(result), f"{result.architecture}: {result.parameters:,} parameters in {result.dtype}\nfolder: {result.folder}")


@main.command(epilog="Example: ringspan config code_completion/tiny --set mesh.ring=4 > my.yaml")
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
    _answer(as_json, loaded.model_dump(), loaded.to_yaml().rstrip())


@main.command(epilog="Example: ringspan plan code_completion/tiny --vocab 32000 --set training.context=131072 --device H100")
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
    lines = _mesh_line(found.shape.mesh), _parameters_line(found.trainable, found.total)
    _answer(as_json, as_values(found), render(found, *lines))


@main.group()
def bench() -> None:
    """Measure this machine."""


@bench.command("attention", epilog="Example: ringspan bench attention --tokens 8192,16384 --pattern causal,window=512 --out bench")
@click.option("--tokens", default="8192", show_default=True, metavar="N,...", help="Lengths of the sequence, over all ranks.")
@click.option("--heads", default=8, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=int, help="KV heads; by default as many as query heads.")
@click.option("--head-dim", default=64, show_default=True)
@click.option("--ring", default="1,2", show_default=True, metavar="N,...", help="Sizes of the ring: one process a rank.")
@click.option("--ulysses", default="1", show_default=True, metavar="N,...", help="Ranks that split the heads of each ring rank.")
@click.option("--pattern", default="causal", show_default=True, metavar="P,...",
              help="causal, bidirectional, alibi, window=N, sinks=N, block=N, stride=N, segment=N (summaries=, reach=), "
              "keep=N (keep_block=); joined by +, as window=512+sinks=4.")
@click.option("--layout", default="auto", show_default=True, help="zigzag, contiguous or striped; auto takes the pattern's best.")
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16, float16 or float64.")
@click.option("--backend", default="auto", show_default=True, help="The kernel of a tile; see attention.backend.")
@click.option("--device", default="auto", show_default=True, help="cpu or cuda; auto takes CUDA when every rank has a GPU.")
@click.option("--repeat", default=3, show_default=True, help="Steps that are timed, after one that is not; the median counts.")
@click.option("--forward-only", is_flag=True, help="Leave out the backward.")
@click.option("--emulated", is_flag=True, help="Ranks are threads of one process: rings of 256 on one machine; seconds are their sum.")
@click.option("--overlap/--no-overlap", default=True, help="Compute while the next hop is under way, or wait for it first: what overlap is worth.")
@click.option("--out", metavar="FOLDER", help="Write attention.json and attention.png there.")
@json_option
@verbose_option
def bench_attention(out, as_json, verbose, **options) -> None:
    """Time, traffic and memory of ring attention beside PyTorch's kernel in one process."""
    from pipelines.bench.cases import Options, choose_device, make_cases
    from pipelines.paths import absolute, check_folder

    with wrong_input():
        options = Options(**options)
        device = choose_device(options)
        cases = make_cases(options, device)
        if out is not None:
            out = absolute(out, "--out")
            check_folder(out, "--out")
    from pipelines.bench.attention import run
    from pipelines.bench.figure import table

    backends = ", ".join(dict.fromkeys(case.backend for case in cases))
    click.echo(f"device {device.type} · backend {backends} · {len(cases)} cases of 1 + {options.repeat} steps", err=True)
    with _stdout_for_the_answer() as stdout:
        result = run(options.repeat, cases, device, out, say=lambda line: click.echo(line, err=True))
        _answer(as_json, result, table(result) if result["rows"] else "no case was measured", stdout)
    if result["failed"]:
        first = result["failed"][0]
        raise Stop(f"{len(result['failed'])} of {len(cases)} cases failed; the first, {first['case']}: {first['error']}", FAILED)


@bench.command("positions", epilog="Example: ringspan bench positions --store corpora/project --out bench")
@click.option("--store", metavar="FOLDER", help="A token store to learn from; by default the bytes of this Python's standard library.")
@click.option("--context", default=256, show_default=True, help="L, the tokens that the models are trained at.")
@click.option("--multiples", default="1,2,4,8,16", show_default=True, metavar="N,...", help="Multiples of L at which they are scored.")
@click.option("--steps", default=600, show_default=True, help="Training steps of each model.")
@click.option("--batch", default=8, show_default=True, help="Sequences of a step.")
@click.option("--dim", default=128, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--windows", default=16, show_default=True, help="Most documents that are held out for scoring.")
@click.option("--seed", default=0, show_default=True)
@click.option("--quick", is_flag=True, help="The smallest sizes, in place of those given: seconds, to see that it runs.")
@click.option("--out", metavar="FOLDER", help="Write positions.json and positions.png there.")
@json_option
@verbose_option
def bench_positions(out, as_json, verbose, **options) -> None:
    """Accuracy of rotary positions up to ten million tokens, and position encodings beyond the trained length."""
    from pipelines.bench.positions import Options, prepare, run, table
    from pipelines.paths import absolute, check_folder

    with wrong_input():
        experiment, text = prepare(Options(**options))
        if out is not None:
            out = absolute(out, "--out")
            check_folder(out, "--out")
    result = run(experiment, text, out, say=lambda line: click.echo(line, err=True))
    _answer(as_json, result, table(result))


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


def _cpus() -> int:
    return max(2, os.cpu_count() or 1)


def _mesh_line(mesh) -> str:
    stages = f"pp {mesh.pp} × " if mesh.pp > 1 else ""
    copies = f", {mesh.replicate} copies of the weights" if mesh.replicate > 1 else ""
    together = f", weights of {mesh.sync_every_blocks} blocks at once" if mesh.sync_every_blocks > 1 else ""
    return f"dp {mesh.dp} × {stages}ring {mesh.ring} × ulysses {mesh.ulysses} × tp {mesh.tp} ({mesh.layout}{copies}{together})"


def _parameters_line(trained: int, total: int) -> str:
    return f"{total:,} parameters" if trained == total else f"{total:,} parameters, of which {trained:,} train ({trained / total:.2%})"


@contextlib.contextmanager
def _bar():
    """A progress bar on stderr; yields a callback (step, files done, files in all, bytes done)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("files {task.fields[size]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {}

        def show(step: str, done: int, total: int, size: int) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total, size="")
            progress.update(tasks[step], completed=done, size=f"{size / 1e6:,.1f} MB")

        yield show


if __name__ == "__main__":
    main()
