"""`ringspan ingest` and `ringspan corpus`: from files to token stores, and what is in one."""

from __future__ import annotations

import dataclasses
import functools

import click

from pipelines.commands.terminal import (
    FAILED,
    WRONG_INPUT,
    Stop,
    answer,
    bar,
    cpus,
    gitignore_option,
    json_option,
    stdout_for_the_answer,
    verbose_option,
    wrong_input,
)


@click.group()
def ingest() -> None:
    """Turn files into a token store."""


@ingest.command("code", epilog="Example: ringspan ingest code ~/src/project --out corpora/project --tokenizer bpe:4096")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--out", required=True, help="Folder of the store, or s3://BUCKET/FOLDER.")
@click.option("--tokenizer", help="byte (default), bpe:N (trained on these files), a tokenizer.json, or tiktoken:ENCODING:FILE.")
@click.option("--append", is_flag=True, help="Add to the store that is there, with its tokenizer and the same options.")
@click.option(
    "--unit", type=click.Choice(["file", "repository"]), default="file", show_default=True, help="What training takes as one document."
)
@click.option(
    "--order",
    type=click.Choice(["path", "dependency", "random"]),
    default="path",
    show_default=True,
    help="Of the files in their repository.",
)
@click.option("--line-ends", type=click.Choice(["keep", "lf"]), default="keep", show_default=True)
@click.option("--licences", metavar="ID,ID", help="Take only files under these licences, by SPDX id, as in MIT,Apache-2.0.")
@click.option(
    "--near-duplicates",
    type=float,
    metavar="SIMILARITY",
    help="Leave out files so much like an earlier one, as in 0.85; exact copies always are.",
)
@gitignore_option
@click.option(
    "--hold-out",
    multiple=True,
    metavar="PATTERN",
    help="Keep a repository or folder, as in project/tests, and copies of it from training; repeatable.",
)
@json_option
@verbose_option
def ingest_code(
    paths, out, tokenizer, append, unit, order, line_ends, licences, near_duplicates, gitignore, hold_out, as_json, verbose
) -> None:
    """Ingest source code from files, folders, archives (tar, zip), and git repositories at a commit (REPO@COMMIT)."""
    from pipelines.corpus.code import Code

    with wrong_input():
        kind = Code(
            unit={"file": "row", "repository": "collection"}[unit], order=order, line_ends=line_ends,
            licences=() if licences is None else tuple(licences.split(",")),
            near_duplicates=near_duplicates, held_out=hold_out, gitignore=gitignore,
        )  # fmt: skip
    _ingest(kind, paths, out, tokenizer, append, as_json, verbose)


@ingest.command("papers", epilog="Example: ringspan ingest papers ~/papers --out corpora/shelves --shelves citation --tokenizer bpe:8192")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--out", required=True, help="Folder of the store, or s3://BUCKET/FOLDER.")
@click.option("--tokenizer", help="byte (default), bpe:N (trained on these papers), a tokenizer.json, or tiktoken:ENCODING:FILE.")
@click.option(
    "--append", is_flag=True, help="Add to the store that is there, with its tokenizer and the same options; wants --shelves none."
)
@click.option(
    "--shelves", type=click.Choice(["citation", "similarity", "folder", "none"]), default="citation", show_default=True,
    help="What brings papers together as one document, the older first; none: every paper is one.",
)  # fmt: skip
@click.option("--shelf-papers", type=int, default=16, show_default=True, help="Most papers on a shelf.")
@click.option("--shelf-bytes", type=int, metavar="BYTES", help="Most bytes of text on a shelf; a byte is a token of the byte tokenizer.")
@click.option(
    "--hold-out", multiple=True, metavar="PATTERN", help="Keep a folder or papers, as in papers/2024*, from training; repeatable."
)
@json_option
@verbose_option
def ingest_papers(paths, out, tokenizer, append, shelves, shelf_papers, shelf_bytes, hold_out, as_json, verbose) -> None:
    """Ingest papers: PDF, LaTeX, JATS, TEI, Markdown, reStructuredText, plain text, sentence-numbered XML and SciREX."""
    from pipelines.literature_analysis.kind import Papers

    with wrong_input():
        if append and shelves != "none":
            raise ValueError(
                "--append: shelves are made of all papers together and can't grow; ingest anew, or make the store with --shelves none"
            )
        kind = Papers(shelves, shelf_papers, shelf_bytes, hold_out)
    _ingest(kind, paths, out, tokenizer, append, as_json, verbose)


@ingest.command(
    "tables", epilog="Example: ringspan ingest tables shards/*.parquet --column content --out corpora/stories --tokenizer bpe:8192"
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--out", required=True, help="Folder of the store, or s3://BUCKET/FOLDER.")
@click.option("--tokenizer", help="byte (default), bpe:N (trained on these texts), a tokenizer.json, or tiktoken:ENCODING:FILE.")
@click.option("--append", is_flag=True, help="Add to the store that is there, with its tokenizer and the same options.")
@click.option("--column", help="The column that holds the text. Default: text, or else content.")
@json_option
@verbose_option
def ingest_tables(paths, out, tokenizer, append, column, as_json, verbose) -> None:
    """Ingest a text column of Parquet files or of Hugging Face folders (save_to_disk); each row is a document."""
    from pipelines.corpus.records import Records

    _ingest(Records(column), paths, out, tokenizer, append, as_json, verbose)


def _ingest(kind, paths, out, tokenizer, append, as_json, verbose) -> None:
    from pipelines.corpus import append as appending
    from pipelines.corpus import ingest as corpus
    from pipelines.corpus import remote
    from pipelines.corpus.store import TokenStore
    from pipelines.corpus.unfinished import check_replaceable
    from pipelines.paths import absolute

    address = out if remote.is_remote(out) else None
    with wrong_input():
        if address:
            remote.check_writable(address)
            out = remote.staging(address, keep=append)
        out = absolute(out, "--out")
        paths = [absolute(path, "PATH") for path in paths]
        tokenizer = tokenizer if append else tokenizer or "byte"
        if append:
            report, make = None, appending.append
            appending.check_same(TokenStore.open(out), kind, tokenizer)
        else:
            found = corpus.find(kind, paths, tokenizer)
            report, make = corpus.reusable(found, out), functools.partial(corpus.ingest, found=found)
            if report is None:
                check_replaceable(out)
    if report is None:
        from ray.exceptions import RayError

        from cluster.launch import connected

        with stdout_for_the_answer(), connected(cpus=cpus(), verbose=verbose), bar() as progress:
            try:
                report = make(kind, paths, out, tokenizer, progress=progress)
            except ValueError as error:
                raise Stop(str(error), WRONG_INPUT) from error
            except KeyboardInterrupt as error:
                raise Stop("stopped; what is finished is kept, the same command goes on", FAILED) from error
            except (OSError, RayError) as error:
                told = str(error).strip().splitlines()[-1:] if isinstance(error, RayError) else [error]
                raise Stop(
                    f"ingest failed: {[*told, type(error).__name__][0]}; what is finished is kept, the same command goes on", FAILED
                ) from error
    if address:
        try:
            remote.put(out, address)
        except OSError as error:
            raise Stop(
                f"{address}: the store is made in {out} but could not be put there ({error}); the same command goes on", FAILED
            ) from error
        report = dataclasses.replace(report, folder=address)
    skipped = ", ".join(f"{count} {reason}" for reason, count in report.skipped.items())
    skipped = f"{skipped} (listed in {report.folder}/skipped.jsonl)" if skipped else "nothing"
    how = "unchanged, reused" if report.reused else f"{report.megabytes_per_second:.1f} MB/s, {report.tokens_per_second:,.0f} tokens/s"
    counts = ", ".join(f"{count:,} {what}" for what, count in report.counts.items())
    text = (
        f"{report.files:,} files, {report.bytes / 1e6:,.1f} MB, {report.tokens:,} tokens in {report.seconds:.1f} s ({how})\n"
        + (f"{counts}\n" if counts else "")
        + f"skipped: {skipped}\nstore: {report.folder}"
    )
    answer(as_json, vars(report), text)


@click.group("corpus")
def corpus() -> None:
    """Look at a token store, check it, or take it elsewhere."""


@corpus.command("show", epilog="Example: ringspan corpus show corpora/project")
@click.argument("store")
@click.option(
    "--most",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Most collections, licences and extensions to list; --json has all.",
)
@json_option
@verbose_option
def corpus_show(store, most, as_json, verbose) -> None:
    """What a store holds: by collection, licence and extension, and what was left out."""
    from pipelines.corpus.look import overview
    from pipelines.corpus.look import text as shown
    from pipelines.corpus.store import TokenStore

    with wrong_input():
        found = overview(TokenStore.open(store))
    answer(as_json, found, shown(found, most))


@corpus.command("verify", epilog="Example: ringspan corpus verify corpora/project")
@click.argument("store")
@json_option
@verbose_option
def corpus_verify(store, as_json, verbose) -> None:
    """Read every byte of a store (of one in an object store, this machine's copy) and name every file that isn't as it was written."""
    from pipelines.corpus import remote
    from pipelines.corpus.store import TokenStore, bad_shards

    with wrong_input(), bar("shards") as progress:
        folder = remote.fetch(store) if remote.is_remote(store) else store
        faults = bad_shards(folder, lambda *done: progress("verify", *done))
    value = {"store": store, "faults": faults}
    if faults:
        answer(as_json, value, "\n".join(faults))
        how = f"remove {folder}, from where it is fetched again" if remote.is_remote(store) else "remove the folder and ingest again"
        raise Stop(f"{store}: {len(faults)} of its files are not as they were written; {how}", FAILED)
    with wrong_input():
        opened = TokenStore.open(folder)
    value |= {"fingerprint": opened.fingerprint, "shards": len(opened.shards), "rows": len(opened), "tokens": opened.tokens}
    answer(as_json, value, f"{len(opened.shards):,} shards, {len(opened):,} rows, {opened.tokens:,} tokens: all as written\nstore: {store}")


@corpus.command("sample", epilog="Example: ringspan corpus sample corpora/project --count 3 --context 4096")
@click.argument("store")
@click.option("--count", default=3, show_default=True)
@click.option("--tokens", default=256, show_default=True, help="Tokens of each place.")
@click.option("--context", type=int, help="Show whole windows of so many tokens instead, as training sees them.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@json_option
@verbose_option
def corpus_sample(store, count, tokens, context, seed, as_json, verbose) -> None:
    """Show places of a store as text, control tokens by name."""
    from pipelines.corpus.look import sample_documents, sample_windows
    from pipelines.corpus.store import TokenStore

    with wrong_input():
        opened = TokenStore.open(store)
        samples = sample_documents(opened, count, tokens, seed) if context is None else sample_windows(opened, count, context, seed)
    heads = [f"window {s['window']}" if context else f"{s['path']}, tokens {s['start']:,}–{s['stop']:,}" for s in samples]
    answer(as_json, {"store": store, "samples": samples}, "\n".join(f"── {head}\n{s['text']}" for head, s in zip(heads, samples)))


@corpus.command("export", epilog="Example: ringspan corpus export corpora/project --megatron megatron/project")
@click.argument("store")
@click.option("--megatron", required=True, metavar="PREFIX", help="Write PREFIX.bin and PREFIX.idx.")
@json_option
@verbose_option
def corpus_export(store, megatron, as_json, verbose) -> None:
    """Write a store as an indexed dataset of Megatron-LM."""
    from pipelines.corpus.megatron import export_megatron
    from pipelines.corpus.store import TokenStore
    from pipelines.paths import absolute

    with wrong_input():
        absolute(megatron, "--megatron")
        result = export_megatron(TokenStore.open(store), megatron)
    text = f"{result.documents:,} documents, {result.sequences:,} sequences, {result.tokens:,} tokens as {result.dtype}\n{megatron}.bin, {megatron}.idx"
    answer(as_json, vars(result), text)


@corpus.command("import", epilog="Example: ringspan corpus import megatron/project --tokenizer models/smollm2 --out corpora/project")
@click.argument("prefix")
@click.option(
    "--tokenizer", required=True, help="What made the ids: byte, a tokenizer.json, a store or model folder, or tiktoken:ENCODING:FILE."
)
@click.option("--out", required=True, help="Folder of the store.")
@json_option
@verbose_option
def corpus_import(prefix, tokenizer, out, as_json, verbose) -> None:
    """Make a store of an indexed dataset of Megatron-LM, PREFIX.bin and PREFIX.idx."""
    from pipelines.corpus.megatron import import_megatron
    from pipelines.corpus.tokenizer import ByteTokenizer, load_tokenizer, parse_spec
    from pipelines.paths import absolute

    with wrong_input():
        how, value = parse_spec(tokenizer)
        if how == "bpe":
            raise ValueError(f"--tokenizer {tokenizer}: the ids are made already; name the tokenizer.json that made them")
        store = import_megatron(prefix, ByteTokenizer() if how == "byte" else load_tokenizer(value), absolute(out, "--out"))
    value = {"store": store.address, "documents": len(store), "tokens": store.tokens, "tokenizer": store.tokenizer.name}
    answer(as_json, value, f"{len(store):,} documents, {store.tokens:,} tokens of {store.tokenizer.name}\nstore: {store.address}")
