"""`ringspan import` and `ringspan export`: models from elsewhere and for elsewhere."""

from __future__ import annotations

import click

from pipelines.commands.terminal import answer, json_option, verbose_option, wrong_input


@click.command("import", epilog="Example: ringspan import models/SmolLM2-135M.Q8_0.gguf --out models/smollm2 --special-tokens")
@click.argument("source", metavar="FOLDER|FILE.gguf")
@click.option("--out", required=True, metavar="MODEL", help="The model folder to write.")
@click.option(
    "--special-tokens/--no-special-tokens",
    default=False,
    show_default=True,
    help="Give the tokenizer Ringspan's control tokens, and the embedding rows for them: what training on a corpus needs.",
)
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
    answer(as_json, vars(result), text)


@click.command(epilog="Example: ringspan export runs/first --out exports/first --dtype bfloat16")
@click.argument("source", metavar="RUN|CHECKPOINT|MODEL")
@click.option("--out", required=True, metavar="FOLDER", help="The folder to write.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the weights. Default: as they are; a run's are float32."
)
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
    answer(as_json, vars(result), f"{result.architecture}: {result.parameters:,} parameters in {result.dtype}\nfolder: {result.folder}")
