"""The command as its user meets it: wrong inputs, stdout that scripts read, help that is quick.

Most cases run in this process, where starting Ray fails the test: a wrong input is answered before anything starts.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pipelines.cli import main
from tests.conftest import BIN, ROOT, last_json, ringspan
from tests.unit.pipelines.untrained import untrained_run

SMALL = ("training.context=64", "training.steps=2", "model.dim=32", "model.layers=1", "model.ffn_dim=64", "mesh.ring=1")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refusal(*arguments) -> str:
    """The one line on stderr that a wrong input is answered with; exit code 2, nothing on stdout."""
    result = run(*arguments)
    lines = result.stderr.splitlines()
    problem = (result.exit_code, result.stdout, result.stderr, result.exception)
    assert result.exit_code == 2 and result.stdout == "" and len(lines) == 1 and lines[0].startswith("error: "), problem
    return lines[0]


def settings(*assignments) -> list[str]:
    return [part for assignment in assignments for part in ("--set", assignment)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, code_store):
    """A run of two steps out of two, with a checkpoint."""
    return untrained_run(tmp_path_factory.mktemp("runs") / "finished", f"corpus.store={code_store}", *SMALL)


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/a.py").write_text("def f():\n    return 1\n")
    return tmp_path / "repo"


class TestIngest:
    def test_a_path_that_is_not_there(self, tmp_path):
        assert f"{tmp_path}/nowhere: no such file or folder" in refusal("ingest", "code", tmp_path / "nowhere", "--out", tmp_path / "s")

    def test_an_empty_folder_and_one_without_source_code(self, tmp_path):
        (tmp_path / "in").mkdir()
        assert "no source file" in refusal("ingest", "code", tmp_path / "in", "--out", tmp_path / "s")
        (tmp_path / "in/a.bin").write_bytes(b"\0")
        assert "1 entries seen (1 binary)" in refusal("ingest", "code", tmp_path / "in", "--out", tmp_path / "s")
        assert not (tmp_path / "s").exists()

    @pytest.mark.parametrize("tokenizer", ["bpe:12", "bpe:many", "words", "/nowhere/tokenizer.json"])
    def test_a_tokenizer_that_is_none(self, repo, tmp_path, tokenizer):
        assert tokenizer in refusal("ingest", "code", repo, "--out", tmp_path / "s", "--tokenizer", tokenizer)

    def test_an_out_that_is_a_file_or_holds_something_else(self, repo, tmp_path):
        assert "a.py is a file; name a folder" in refusal("ingest", "code", repo, "--out", repo / "a.py")
        assert "holds 'a.py', which is no part of a token store" in refusal("ingest", "code", repo, "--out", repo)
        assert (repo / "a.py").exists()

    @pytest.mark.parametrize(
        "options, said",
        [
            (["--near-duplicates", "85"], "near duplicates at a similarity of 85.0: it must be between 0.5 and 1"),
            (["--licences", "MIT OR ISC"], "--licences names 'mit or isc'; give SPDX ids"),
            (["--hold-out", "tests"], "--hold-out 'tests' matches none of 1 files; their names begin like 'repo/a.py'"),
            (["--unit", "folder"], "--unit"),
        ],
    )
    def test_options_that_are_wrong(self, repo, tmp_path, options, said):
        assert said in refusal("ingest", "code", repo, "--out", tmp_path / "s", *options)

    def test_a_commit_that_is_none(self, repo, tmp_path):
        assert f"{repo} is not a git repository" in refusal("ingest", "code", f"{repo}@v1", "--out", tmp_path / "s")

    def test_an_out_below_a_file(self, repo):
        assert "a.py" in refusal("ingest", "code", repo, "--out", repo / "a.py" / "store")


class TestTrain:
    @pytest.fixture
    def command(self, code_store, tmp_path):
        return lambda *changed, out=tmp_path / "run": [
            "train", "code_completion/tiny", "--out", out, *settings(f"corpus.store={code_store}", *SMALL, *changed)
        ]  # fmt: skip

    # fmt: off
    @pytest.mark.parametrize("changed, said", [
        (["mesh.ring=2", "cluster.workers=3"], "needs 2 workers, not 3; change the mesh, or set cluster.workers to 2 or null"),
        (["model.dim=36", "model.heads=9", "model.kv_heads=3", "mesh.tp=2"], "9 query heads do not divide by tp × ulysses = 2 × 1"),  # A4
        (["mesh.tp=4"], "2 KV heads do not divide by tp × ulysses = 4 × 1; choose a mesh whose tp × ulysses divides 2"),
        (["training.step=3"], "unknown configuration key training.step; the nearest is training.steps"),
        (["training.steps=many"], "training.steps is 'many'"),
        (["mesh.dp=2", "training.batch=3"], "training.batch = 3 sequences do not divide by mesh.dp × training.micro_batch = 2 × 1"),
        (["training.context=0"], "training.context is 0; it must be at least 1"),
        (["corpus.overlap=64"], "overlap is 64; it must be at least 0 and less than the context of 64"),
        (["corpus.store=/nowhere"], "/nowhere: no manifest.json, so no finished token store; run `ringspan ingest` into this folder"),
        (["corpus.store="], "corpus.store is not set; make one with `ringspan ingest code|papers PATH --out STORE`"),
        (["attention.layout=spiral"], "attention.layout is 'spiral'; it must be one of auto, zigzag, contiguous, striped"),
        (["mesh.cp=2", "mesh.ring=2"], "mesh.cp = 2 chooses ring and ulysses; leave them out, or leave out cp"),
        (["model.segment=64"], "hierarchy needs a causal window"),
        (["attention.backend=fastest"], "attention.backend is 'fastest'; it must be one of auto, "),
        (["training.decay=exponential"], "training.decay is 'exponential'; it must be constant, linear, cosine or wsd"),
        (["training.batch=yes"], "training.batch is true (as YAML reads yes, no, on and off, too); it must be a number"),
        (["stages=[{}, {training: {context: 128}, mesh: {tp: 4}}]"], "stage 2: 2 KV heads do not divide by tp × ulysses = 4 × 1"),
        (["stages=[{training: {context: 128}}]"], "--set training.context has no effect, for every stage has its own"),
    ])
    # fmt: on
    def test_settings_that_do_not_fit(self, command, tmp_path, changed, said):
        assert said in refusal(*command(*changed))
        assert list(tmp_path.iterdir()) == []

    def test_a_preset_that_is_none(self):
        assert "did you mean the preset code_completion/tiny?" in refusal("train", "code_completion/tny")

    @pytest.mark.parametrize("content", [b"training: {steps: 4\n", b"\x89PNG\r\n\x1a\n\x00\xff", b"- a\n- list\n"], ids=["no YAML", "binary", "a list"])
    def test_a_file_that_is_no_configuration(self, tmp_path, content):
        (tmp_path / "my.yaml").write_bytes(content)
        assert "my.yaml" in refusal("train", tmp_path / "my.yaml")

    def test_neither_preset_nor_run(self):
        assert "name a preset or a file (see: ringspan config), or --resume RUN" in refusal("train")

    def test_a_damaged_store(self, command, code_store, tmp_path):  # C2
        shutil.copytree(code_store, tmp_path / "damaged")
        shard = tmp_path / "damaged/shard-00000.arrow"
        os.truncate(shard, shard.stat().st_size - 1)
        assert "shard-00000.arrow: " in refusal(*command(f"corpus.store={tmp_path}/damaged"))

    def test_an_out_that_holds_a_run(self, command, finished):
        assert f"holds a run already; give --resume {finished}" in refusal(*command(out=finished))

    def test_an_out_where_a_file_stands(self, command, tmp_path):
        (tmp_path / "file").write_text("in the way")
        assert "file" in refusal(*command(out=tmp_path / "file"))
        assert "file" in refusal(*command(out=tmp_path / "file/run"))

    def test_a_relative_out_inside_a_ray_job(self, command, monkeypatch):
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
        assert "inside a Ray job give an absolute path" in refusal(*command(out="runs/x"))

    def test_resume_of_a_finished_run(self, finished):
        assert "has done 2 steps already and training.steps is 2; raise it to go on" in refusal("train", "--resume", finished)

    def test_resume_of_what_is_no_run(self, tmp_path, code_store):
        assert "nowhere is not a run folder" in refusal("train", "--resume", tmp_path / "nowhere")
        assert "nowhere is not a run folder" in refusal("train", "code_completion/tiny", "--resume", tmp_path / "nowhere", *settings(f"corpus.store={code_store}"))

    def test_resume_with_another_model(self, finished):
        said = refusal("train", "--resume", finished, *settings("model.dim=64", "training.steps=4"))
        assert "is a checkpoint of another model: model.dim is 32 there and 64 here" in said

    def test_resume_with_a_store_of_another_tokenizer(self, finished, tmp_path):
        from pipelines.corpus.code import Code
        from pipelines.corpus.ingest import in_process, ingest

        ingest(Code(), [ROOT / "workers"], tmp_path / "bpe", "bpe:264", run=in_process)
        said = refusal("train", "--resume", finished, *settings(f"corpus.store={tmp_path}/bpe", "training.steps=4"))
        assert "was made with another tokenizer (bpe:264) than the run" in said


class TestEvaluateAndAnalyze:
    def test_what_is_no_store_or_another_models(self, finished, repo, tmp_path):
        ask = ("evaluate", "--checkpoint", finished)
        assert f"{repo}: no manifest.json" in refusal(*ask, "--store", repo)
        assert f"{tmp_path}/nowhere is not a folder" in refusal("evaluate", "--checkpoint", tmp_path / "nowhere")
        ask = ("analyze", "--checkpoint", finished, "--question", "Why?")
        assert f"--shelf {tmp_path}/nowhere is neither a token store nor a folder of papers" in refusal(
            *ask, "--shelf", tmp_path / "nowhere"
        )

    @pytest.mark.parametrize("option, value, said", [
        ("--documents", 0, "--documents is 0; it must be at least 1"), ("--overlap", 64, "--context is 64 and --overlap 64"),
        ("--actors", 0, "--actors is 0; it must be at least 1"),
    ])  # fmt: skip
    def test_options_that_do_not_fit(self, finished, option, value, said):
        assert said in refusal("evaluate", "--checkpoint", finished, option, value)

    def test_questions(self, finished, code_store, tmp_path):
        ask = ("analyze", "--checkpoint", finished, "--shelf", code_store)
        assert "there is no question; ask one with --question" in refusal(*ask)
        (tmp_path / "questions.txt").write_text("\n \n")
        assert "there is no question" in refusal(*ask, "--questions", tmp_path / "questions.txt")
        assert "is too long for a context of 64" in refusal(*ask, "--question", "why " * 20, "--max-tokens", 4)
        assert "--max-tokens is 64" in refusal(*ask, "--question", "Why?")


class TestComplete:
    @pytest.mark.parametrize("checkpoint", ["nowhere", "repo", "repo/a.py"])
    def test_a_checkpoint_that_is_none(self, repo, checkpoint):
        assert str(repo.parent / checkpoint) in refusal(
            "complete", "--checkpoint", repo.parent / checkpoint, "--repo", repo, "--at", "a.py:1:1"
        )

    def test_a_repository_that_is_none(self, finished, tmp_path):
        assert "--repo" in refusal(
            "complete", "--checkpoint", finished, "--repo", tmp_path / "nowhere", "--at", "a.py:1:1", "--max-tokens", 8
        )

    @pytest.mark.parametrize(
        "at, said",
        [("b.py:1:1", "--at names 'b.py'"), ("a.py:9:1", "there is no line 9"), ("a.py:1:99", "the last column is 9"), ("a.py", "is not FILE:LINE:COL"), ("a.py:1", "is not FILE:LINE:COL")],
    )  # fmt: skip
    def test_a_place_that_is_none(self, finished, repo, at, said):
        assert said in refusal("complete", "--checkpoint", finished, "--repo", repo, "--at", at, "--max-tokens", 8)

    def test_more_than_the_context(self, finished, repo):
        ask = ("complete", "--checkpoint", finished, "--repo", repo, "--at", "a.py:1:1")
        assert "--max-tokens is 64" in refusal(*ask)
        assert "--context 128 is more than the 64 tokens" in refusal(*ask, "--context", 128)

    def test_json_is_one_line_and_text_is_the_answer(self, finished, repo):
        ask = ("complete", "--checkpoint", finished, "--repo", repo, "--at", "a.py:2:5", "--max-tokens", 8)
        result = run(*ask, "--json")
        assert result.exit_code == 0, result.stderr
        answer = json.loads(result.stdout)
        assert result.stdout.count("\n") == 1
        assert answer.keys() == {"text", "prompt_tokens", "new_tokens", "files", "checkpoint"}
        assert run(*ask).stdout == answer["text"] + "\n"

    def test_a_checkpoint_whose_tensors_are_gone(self, finished, repo, tmp_path):
        shutil.copytree(finished, tmp_path / "copy")
        for part in (tmp_path / "copy/checkpoints/step-00000002").glob("*.distcp"):
            part.unlink()
        assert "step-00000002" in refusal(
            "complete", "--checkpoint", tmp_path / "copy", "--repo", repo, "--at", "a.py:1:1", "--max-tokens", 8
        )


class TestConfig:
    def test_json_is_one_line_and_text_is_yaml_that_loads(self, tmp_path):
        result = run("config", "code_completion/tiny", "--json", *settings("mesh.ring=4"))
        assert result.stdout.count("\n") == 1 and json.loads(result.stdout)["mesh"]["ring"] == 4
        (tmp_path / "my.yaml").write_text(run("config", "code_completion/tiny", *settings("mesh.ring=4")).stdout)
        assert run("config", tmp_path / "my.yaml", "--json").stdout == result.stdout

    def test_without_a_name_the_presets_are_named_beside_the_defaults(self):
        result = run("config", "--json")
        assert "presets: code_completion/tiny" in result.stderr and json.loads(result.stdout)["training"]["steps"] == 100

    def test_a_mesh_that_does_not_fit(self):
        assert "needs 2 workers, not 3" in refusal("config", *settings("mesh.ring=2", "cluster.workers=3"))


class TestUi:
    def test_a_folder_without_runs(self, tmp_path):
        assert "holds no mlflow.db" in refusal("ui", "--runs", tmp_path)

    def test_a_port_that_is_none(self, tmp_path):
        (tmp_path / "mlflow.db").touch()
        assert "port 99999: choose one from 1 to 65535" in refusal("ui", "--runs", tmp_path, "--port", 99999)


# fmt: off
@pytest.mark.parametrize("arguments, said", [
    (["complete"], "--checkpoint"), (["ingest", "code"], "PATH"), (["ingest", "code", "x"], "--out"), (["train", "--step", "3"], "--step"),
    (["complete", "--checkpoint", "x", "--repo", "y", "--at", "z", "--max-tokens", "many"], "many"), (["trian"], "trian"),
    (["config", "a", "b"], "b"), (["ui", "--port", "http"], "http"),
])
# fmt: on
def test_what_the_parser_refuses_is_one_line_too(arguments, said):
    assert said in refusal(*arguments)


def test_a_cluster_that_is_not_there(monkeypatch, repo, tmp_path):
    def init(**_):
        raise ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:1")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = run("ingest", "code", repo, "--out", tmp_path / "store", "--json")
    assert result.exit_code == 1 and not result.stdout, result.exception
    assert result.stderr.splitlines()[-1].startswith("error: RAY_ADDRESS=127.0.0.1:1: no Ray cluster"), result.stderr


def test_a_message_of_several_lines_becomes_one(monkeypatch):
    import pipelines.config

    def several(*_):
        raise ValueError("first\n  second\nthird")

    monkeypatch.setattr(pipelines.config, "load_config", several)
    assert refusal("config") == "error: first second third"


def commands(group=main, path=()):
    for name, command in group.commands.items():
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else [(*path, name)]


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_help_shows_an_example(path):
    result = run(*path, "--help")
    assert result.exit_code == 0 and f"Example: ringspan {' '.join(path)} " in " ".join(result.stdout.split())
    assert run(*path, "-h").stdout == result.stdout


@pytest.mark.parametrize("path", [p for p in commands() if p != ("ui",)], ids=" ".join)
def test_every_command_that_answers_has_json(path):
    assert "--json" in run(*path, "--help").stdout


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from click.testing import CliRunner; from pipelines.cli import main\n"
        f"for path in {[*commands()]!r}: assert CliRunner().invoke(main, [*path, '--help']).exit_code == 0\n"
        "print([m for m in ('torch', 'ray', 'mlflow', 'pyarrow', 'numpy', 'pydantic', 'tokenizers', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout == "[]\n"


@pytest.mark.parametrize("path", [("train",), ("complete",), ("ingest", "code")], ids=" ".join)
def test_help_is_quick(path):
    """In seconds of processor time, which a busy machine does not stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert subprocess.run([BIN / "ringspan", *path, "--help"], capture_output=True).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_as_a_process_json_is_all_that_stdout_holds():
    assert last_json(ringspan("config", "code_completion/tiny", "--json"))["mesh"]["ring"] == 2


def test_as_a_process_a_wrong_input_is_one_line_and_code_2(tmp_path):
    result = ringspan("train", "code_completion/tiny", "--set", "training.step=1", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
