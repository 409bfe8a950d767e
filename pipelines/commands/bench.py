"""`ringspan bench`: measurements on the machine at hand."""

from __future__ import annotations

import click

from pipelines.commands.terminal import (
    FAILED,
    Stop,
    answer,
    json_option,
    stdout_for_the_answer,
    verbose_option,
    wrong_input,
)


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command("attention", epilog="Example: ringspan bench attention --tokens 8192,16384 --pattern causal,window=512 --out bench")
@click.option("--tokens", default="8192", show_default=True, metavar="N,...", help="Lengths of the sequence, over all ranks.")
@click.option("--heads", default=8, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=int, help="KV heads; by default as many as query heads.")
@click.option("--head-dim", default=64, show_default=True)
@click.option("--ring", default="1,2", show_default=True, metavar="N,...", help="Sizes of the ring: one process a rank.")
@click.option("--ulysses", default="1", show_default=True, metavar="N,...", help="Ranks that split the heads of each ring rank.")
@click.option(
    "--pattern",
    default="causal",
    show_default=True,
    metavar="P,...",
    help="causal, bidirectional, alibi, window=N, sinks=N, block=N, stride=N, segment=N (summaries=, reach=), "
    "keep=N (keep_block=); joined by +, as window=512+sinks=4.",
)
@click.option("--layout", default="auto", show_default=True, help="zigzag, contiguous or striped; auto takes the pattern's best.")
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16, float16 or float64.")
@click.option("--backend", default="auto", show_default=True, help="The kernel of a tile; see attention.backend.")
@click.option("--device", default="auto", show_default=True, help="cpu or cuda; auto takes CUDA when every rank has a GPU.")
@click.option("--repeat", default=3, show_default=True, help="Steps that are timed, after one that is not; the median counts.")
@click.option("--forward-only", is_flag=True, help="Leave out the backward.")
@click.option("--emulated", is_flag=True, help="Ranks are threads of one process: rings of 256 on one machine; seconds are their sum.")
@click.option(
    "--overlap/--no-overlap", default=True, help="Compute while the next hop is under way, or wait for it first: what overlap is worth."
)
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
    with stdout_for_the_answer() as stdout:
        result = run(options.repeat, cases, device, out, say=lambda line: click.echo(line, err=True))
        answer(as_json, result, table(result) if result["rows"] else "no case was measured", stdout)
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
    answer(as_json, result, table(result))
