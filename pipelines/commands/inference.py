"""What a trained model is asked: `ringspan complete`, `evaluate`, `analyze`; and `select`, which needs none."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from pipelines.commands.terminal import (
    FAILED,
    WRONG_INPUT,
    Stop,
    answer,
    cpus,
    gitignore_option,
    json_option,
    stdout_for_the_answer,
    verbose_option,
    wrong_input,
)


@click.command(epilog="Example: ringspan complete --checkpoint runs/first --repo ~/src/project --at src/parser.py:120:9")
@click.option("--checkpoint", required=True, help="A run folder, one of its checkpoints, or a model folder.")
@click.option("--repo", required=True, help="The repository that the file belongs to.")
@click.option("--at", required=True, metavar="FILE:LINE:COL", help="The cursor; line and column count from 1.")
@click.option("--max-tokens", default=64, show_default=True, help="Most tokens to add.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--seed", default=0, show_default=True)
@click.option("--context", type=int, help="Most tokens of prompt and answer; by default what the run was trained at.")
@gitignore_option
@json_option
@verbose_option
def complete(checkpoint, repo, at, max_tokens, temperature, seed, context, gitignore, as_json, verbose) -> None:
    """Complete code at a cursor."""
    from pipelines.code_completion.complete import complete as run_completion

    with wrong_input():
        result = run_completion(
            Path(checkpoint),
            Path(repo),
            at,
            new_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            context=context,
            gitignore=gitignore,
        )
    answer(as_json, vars(result), result.text)


@click.command(epilog="Example: ringspan evaluate --checkpoint runs/first --held-out --out evaluations/first")
@click.option("--checkpoint", required=True, help="A run folder, one of its checkpoints, or a model folder.")
@click.option("--store", help="A token store; by default the one that the run was trained on.")
@click.option("--held-out", is_flag=True, help="Only the documents that the run kept from training.")
@click.option("--documents", default=100, show_default=True, help="Most documents to score, spread evenly over the store.")
@click.option("--context", type=int, help="Tokens of a window; by default what the run was trained at.")
@click.option("--overlap", type=int, help="Tokens that a long document's windows share; by default half a context.")
@click.option("--actors", type=int, help="Actors that hold the model; by default one for each GPU, else for each CPU but one.")
@click.option("--out", metavar="FOLDER", help="Write evaluation.json and evaluation.png there.")
@json_option
@verbose_option
def evaluate(checkpoint, store, held_out, documents, context, overlap, actors, out, as_json, verbose) -> None:
    """Loss and perplexity on a store: each token scored once, documents of any length in parallel windows.

    Goes on record in MLflow, beside the run of the checkpoint if that is.
    """
    from pipelines.corpus.remote import located
    from pipelines.evaluation.evaluate import prepare, score
    from pipelines.evaluation.text import files, record, save, table
    from pipelines.paths import absolute, check_folder

    with wrong_input():
        store = located(store, "--store") if store is not None else None
        found = prepare(Path(checkpoint), store, only_held_out=held_out, documents=documents, context=context, overlap=overlap)
        if out is not None:
            out = absolute(out, "--out")
            check_folder(out, "--out")
    with _processing(found.source.weights, actors, verbose) as (process, stdout):
        value = {"checkpoint": str(found.source.weights), "store": found.pieces.store.address, **score(found, process(found.pieces))}
        made = files(value)
        if out is not None:
            save(made, out)
        answer(as_json, value, table(value), stdout)
    if (info := record(made, found.source)) is not None:
        click.echo(f"record {info.uri}, run {info.run_name}", err=True)


@click.command(epilog="Example: ringspan analyze --checkpoint runs/papers --shelf corpora/papers --question 'What limits the context?'")
@click.option("--checkpoint", required=True, help="A run folder, one of its checkpoints, or a model folder.")
@click.option("--shelf", required=True, metavar="STORE|FOLDER", help="A token store, or a folder of papers, which is ingested first.")
@click.option("--question", "asked", multiple=True, help="Repeatable.")
@click.option("--questions", metavar="FILE", help="A text file with a question a line.")
@click.option("--sources", default=4, show_default=True, help="Sections in the context of an answer.")
@click.option("--candidates", default=256, show_default=True, help="Sections whose relevance is computed; the nearest by representation.")
@click.option("--max-tokens", default=64, show_default=True, help="Most tokens of an answer.")
@click.option("--context", type=int, help="Most tokens of a window, and of prompt and answer; by default what the run was trained at.")
@click.option("--actors", type=int, help="Actors that hold the model; by default one for each GPU, else for each CPU but one.")
@json_option
@verbose_option
def analyze(checkpoint, shelf, asked, questions, sources, candidates, max_tokens, context, actors, as_json, verbose) -> None:
    """Ask questions about a shelf of papers: the sections that tell most, and the model's answer from them."""
    from dataclasses import asdict

    from pipelines.corpus.remote import located
    from pipelines.literature_analysis.analyze import analyze as run_analysis
    from pipelines.literature_analysis.analyze import as_text, open_shelf, prepare

    with wrong_input():
        if questions is not None:
            asked += tuple(Path(questions).read_text(encoding="utf-8").splitlines())
        source, shelf = Path(checkpoint), located(shelf, "--shelf")
    with contextlib.ExitStack() as stack:
        with wrong_input():
            store = stack.enter_context(open_shelf(source, shelf, "--shelf"))
            found = prepare(source, store, list(asked), sources=sources, candidates=candidates, new_tokens=max_tokens, context=context)
        process, stdout = stack.enter_context(_processing(found.source.weights, actors, verbose))
        answers = run_analysis(found, process)
        value = {"checkpoint": str(found.source.weights), "shelf": str(shelf), "answers": [asdict(answer) for answer in answers]}
        answer(as_json, value, as_text(answers), stdout)


@click.command(epilog="Example: ringspan select ~/src/linux --at fs/ext4/inode.c:1000 --budget 60000 --tokenizer runs/first")
@click.argument("repo", metavar="REPO")
@click.option("--at", required=True, metavar="FILE:LINE", help="Where the work is; the line counts from 1.")
@click.option("--budget", required=True, type=int, metavar="TOKENS", help="Most tokens to choose.")
@click.option(
    "--tokenizer", default="byte", show_default=True, help="What counts the tokens: byte, a tokenizer.json, or a folder with one."
)
@gitignore_option
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
    answer(as_json, value, table(selection))


@contextlib.contextmanager
def _processing(weights: Path, actors: int | None, verbose: bool):
    """Yields what processes pieces of documents with the model of ``weights`` over Ray's actors, and the stdout for the answer."""
    from ray.exceptions import RayError

    from cluster.launch import connected
    from cluster.process import process_pieces

    if actors is not None and actors < 1:
        raise Stop(f"--actors is {actors}; it must be at least 1", WRONG_INPUT)
    with stdout_for_the_answer() as stdout, connected(cpus=max(cpus(), (actors or 0) + 1), verbose=verbose):
        try:
            yield lambda pieces: process_pieces(pieces, weights, actors), stdout
        except RayError as error:
            raise Stop(f"the windows could not be processed: {_told(error)}", FAILED) from error


def _told(error) -> str:
    """What an actor raised, or else how Ray explains the loss of it: that stands last."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    return str(error).strip().splitlines()[-1]
