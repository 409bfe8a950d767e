"""``prepare`` checks all of a run before anything is started or written."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from cluster.launch import RunFailed
from pipelines.config import load_config
from pipelines.corpus import TokenStore
from pipelines.train import Prepared, _write_run_folder, changed_mixes, prepare, run_stages
from workers.training.loop import STOP_FILE

SETTINGS = ("training.context=64", "training.steps=4", "training.batch=2", "model.dim=32", "model.layers=1", "model.ffn_dim=64")


@pytest.fixture
def prepared(code_store, tmp_path):
    """A function that prepares a run of the tiny preset with some settings changed."""

    def build(*settings: str, out: str | Path = "run", resume: Path | None = None, store: Path = code_store) -> Prepared:
        config = load_config("code_completion/tiny", (f"corpus.store={store}", *SETTINGS, *settings))
        before = sorted(tmp_path.rglob("*"))
        try:
            return prepare(config, tmp_path / out, resume)
        finally:
            assert sorted(tmp_path.rglob("*")) == before, "prepare wrote something"

    return build


@pytest.fixture
def finished(prepared):
    """A run folder as a run of two steps leaves it (but for the tensors, which nothing here reads)."""
    run = prepared(out="finished")
    _write_run_folder(run)
    leave_checkpoint(run, 2)
    return run.job.run


def leave_checkpoint(run: Prepared, step: int, named: bool = True) -> None:
    """A checkpoint without tensors; an older version's (not ``named``) does not say whose windows its number counts."""
    folder = run.job.checkpoint_folder / f"step-{step:08d}"
    folder.mkdir(parents=True)
    stage = next(stage for stage in run.stages if step <= stage.job.last_step)
    plan, job = stage.data.train, stage.job
    tokens = sum(span.stop - span.start - span.context_only for g in range(2 * step) for span in plan.window(g))
    progress = {"step": step, "tokens": tokens, "sequences": 2 * step, "skipped_steps": 0} | (
        {"windows": plan.fingerprint} if named else {}
    )
    state = {"progress": progress, "model": dataclasses.asdict(job.model)}
    if job.base is not None:
        state["adapter"] = {"config": dataclasses.asdict(job.adapter), "base": dataclasses.asdict(job.base)}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_run_is_settled_and_written_down_in_full(prepared, code_store, tmp_path):
    run = prepared("mesh.dp=-1", "cluster.workers=4")
    assert run.mesh.dp == 2 and run.mesh.world == 4
    assert run.job.model.vocab_size == 320  # 256 bytes and 8 control tokens, in whole 64s
    assert run.config.model == run.job.model
    assert run.config.corpus.store == str(code_store.resolve())
    assert run.job.run == tmp_path / "run" and run.job.start()[0] is None
    assert run.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert load_config(None).model_validate(run.config.model_dump()) == run.config


def test_held_out_windows_are_dealt_to_the_groups_and_never_more_than_there_are(prepared):
    assert prepared("corpus.held_out=0.3", "corpus.held_out_windows=5", "mesh.dp=2", "cluster.workers=4").job.held_out == 3
    many = prepared("corpus.held_out_windows=100000")
    assert many.data.held_out_windows == len(many.data.held_out) < 100000
    for none in ("corpus.held_out_windows=0", "corpus.held_out=0"):
        run = prepared(none)
        assert run.job.held_out == 0 and run.data.held_out is None


def test_fill_in_the_middle_and_repeats_are_for_training_windows_alone(prepared):
    run = prepared("corpus.held_out=0.3", "corpus.fim_rate=0.5", "corpus.upsample.longer_than=100", "corpus.upsample.factor=3")
    assert run.data.train.rewriter.rate == 0.5 and set(run.data.train.repeats.tolist()) >= {1, 3}
    assert run.data.held_out.rewriter is None and run.data.held_out.repeats is None
    plain = prepared("corpus.held_out=0.3")
    assert run.data.held_out.fingerprint == plain.data.held_out.fingerprint
    (change,) = changed_mixes(run)
    assert (change.first_step, change.last_step) == (1, 4) and changed_mixes(plain) == []
    assert sum(share.tokens for share in change.after) == run.data.train.targets > sum(share.tokens for share in change.before)


def test_a_curriculum_changes_what_a_corpus_is_read_as_and_says_so(prepared):
    stages = "[{}, {training: {steps: 3}, corpus: {upsample: {factor: 2}, fim_rate: 0.9, overlap: 1, positions: continue}}]"
    run = prepared(f"stages={stages}", "corpus.fim_rate=0.2")
    first, second = (stage.data.train for stage in run.stages)
    assert (first.rewriter.rate, first.repeats, first.overlap, first.positions) == (0.2, None, 8, "restart")
    assert (second.rewriter.rate, second.overlap, second.positions) == (0.9, 1, "continue") and second.repeats is not None
    assert [(change.first_step, change.last_step) for change in changed_mixes(run)] == [(5, 7)]
    record = _write_run_folder(run)
    told = json.loads((run.job.run / "corpus.json").read_text())
    assert record["unit"] == told["unit"] == "row" and told["mix"][0]["before"][0]["source"]


def test_training_and_held_out_documents_are_apart_and_all_there_are(prepared, code_store):
    run = prepared("corpus.held_out=0.3")
    learnt, kept_back = set(run.data.train.documents.tolist()), set(run.data.held_out.documents.tolist())
    assert learnt and kept_back and not learnt & kept_back
    assert len(learnt | kept_back) == len(TokenStore.open(code_store))


# fmt: off
@pytest.mark.parametrize("settings, said", [
    (["cluster.workers=3"], "needs 2 workers, not 3"),
    (["model.dim=36", "model.heads=9", "model.kv_heads=3", "mesh.tp=2"], "9 query heads do not divide by tp × ulysses = 2 × 1"),  # A4
    (["model.dim=48", "model.heads=12", "model.kv_heads=6", "mesh.ulysses=4"], "6 KV heads do not divide by tp × ulysses = 1 × 4"),
    (["model.positions=alibi", "attention.backend=cuda"], "attention.backend 'cuda' has no ALiBi; use auto or reference"),
    (["attention.backend=flash2"], "attention.backend 'flash2' does not compute float32, only bfloat16, float16"),
    (["model.summaries=4"], "model.summaries is 4, but model.segment is not set"),
    (["adapter.rank=17"], "adapter.rank = 17 is more than the rank of k_proj, which is 16 × 32"),
    (["mesh.tp=4"], "2 KV heads do not divide by tp × ulysses = 4 × 1"),
    (["mesh.tp=2", "model.ffn_dim=65"], "model.ffn_dim = 65 does not divide by mesh.tp = 2"),
    (["mesh.dp=2", "training.batch=3"], "training.batch = 3 sequences do not divide by mesh.dp × training.micro_batch = 2 × 1"),
    (["corpus.overlap=64"], "overlap is 64; it must be at least 0 and less than the context of 64"),
    (["corpus.overlap=-1"], "overlap is -1"),
    (["corpus.positions=backwards"], "positions is 'backwards'"),
    (["corpus.held_out=1"], "is 1.0; it must be at least 0 and less than 1"),
    (["model.vocab_size=100"], "of 264 ids, but model.vocab_size is 100; leave it null"),
    (["tracking.uri=./mlruns"], "tracking uri './mlruns'"),
    (["memory.recompute=some"], "memory.recompute is 'some'; it must be one of none, full, selective"),
    (["memory.offload=disk", "memory.offload_folder=/dev/null"], "memory.offload_folder /dev/null: /dev/null is a file; name a folder"),
])
# fmt: on
def test_what_does_not_fit_together(prepared, settings, said):
    with pytest.raises(ValueError) as caught:
        prepared(*settings)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_store_the_way_to_one_is_told(tmp_path):
    with pytest.raises(ValueError, match="corpus.store is not set; make one with `ringspan ingest code"):
        prepare(load_config("code_completion/tiny"), tmp_path / "run")


def test_a_store_that_is_not_there_and_one_that_is_damaged(prepared, code_store, tmp_path):
    with pytest.raises(ValueError, match="no manifest.json, so no finished token store"):
        prepared(store=tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(code_store, damaged)
    shard = damaged / "shard-00000.arrow"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"shard-00000.arrow: [\d,]+ bytes, the manifest says"):  # C2
        prepared(store=damaged)


def test_an_out_that_holds_a_run_is_refused_with_both_ways_out(prepared, finished):
    with pytest.raises(ValueError, match=f"{finished} holds a run already; give --resume {finished} to go on with it, or another --out"):
        prepared(out="finished")


@pytest.mark.parametrize("out", ["file", "file/below/run"])
def test_an_out_that_cannot_become_a_folder(prepared, tmp_path, out):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=f"--out .*{out}"):
        prepared(out=out)


def test_resume_goes_on_where_the_run_stands(prepared, finished):
    run = prepared(out="finished", resume=finished)
    assert run.job.start()[0].name == "step-00000002" and run.job.run == finished


def test_resume_into_another_folder_starts_from_the_runs_checkpoint(prepared, finished):
    run = prepared(out="second", resume=finished)
    assert run.job.start()[0] == finished / "checkpoints/step-00000002" and run.job.run.name == "second"


@pytest.mark.parametrize("setting, key", [("training.seed=5", "training.seed"), ("corpus.held_out=0.5", "corpus.held_out")])
def test_a_resume_that_would_evaluate_on_what_was_learnt_is_refused(prepared, finished, setting, key):
    with pytest.raises(ValueError, match=f"{key} is .* documents it was trained on would be held out"):
        prepared(setting, out="finished", resume=finished)


@pytest.mark.parametrize("named", [True, False], ids=["named", "an older version's"])
def test_a_resume_whose_windows_are_others_goes_on_by_its_tokens_and_says_so(prepared, finished, caplog, named):
    run = prepared(out="finished", resume=finished)
    shutil.rmtree(finished / "checkpoints")
    leave_checkpoint(run, 2, named)
    run = prepared(out="finished", resume=finished)
    assert started(run) == 4 and "the windows are others" not in caplog.text
    for settings in (["training.context=32"], ["training.context=16", "corpus.overlap=0"]):
        caplog.clear()
        run = prepared(*settings, out="finished", resume=finished)
        plan, tokens = run.data.train, run.job.start()[1].tokens
        assert started(run) == plan.sequence_after(tokens) != 4
        assert f"the windows are others than those of {finished}" in caplog.text and f"sequence {started(run)}," in caplog.text


def started(run: Prepared) -> int:
    """The first sequence that the run reads."""
    seen = []

    def launch(job, mesh, data, cluster):
        seen.append(job.start()[1].sequences)
        return {"stopped": True}

    run_stages(run.stages, launch)
    return seen[0]


def test_resume_into_a_folder_that_holds_another_run_is_refused(prepared, finished):
    """Else that run's own checkpoint would be taken, unchecked, in place of the one that was named."""
    other = prepared(out="other")
    _write_run_folder(other)
    leave_checkpoint(other, 3)
    with pytest.raises(ValueError, match="other holds a run already"):
        prepared(out="other", resume=finished)


@pytest.mark.parametrize("setting, said", [("model.dim=64", "model.dim is 32 there and 64 here"), ("model.tie_embeddings=false", "model.tie_embeddings is True there and False here")])
def test_resume_with_another_model(prepared, finished, setting, said):
    with pytest.raises(ValueError, match=f"is a checkpoint of another model: {said}"):
        prepared(setting, out="finished", resume=finished)


@pytest.mark.parametrize("setting", ["model.rope_theta=1e6", "model.window=16", "model.positions=none"])
def test_resume_with_what_carries_no_weights_is_allowed_and_says_so(prepared, finished, caplog, setting):
    prepared(setting, out="finished", resume=finished)
    assert f"{setting.split('=')[0]} was " in caplog.text


STAGES = "stages=[{}, {training: {context: 128, steps: 3}, model: {rope_theta: 1e6}, mesh: {ring: 1}}]"


class TestStages:
    def launches(self, run: Prepared, at=None, stop=False, saves=True):
        """What ``run_stages`` launches; each launch leaves a checkpoint at its end, ``at`` one step an interrupted one."""
        seen = []

        def launch(job, mesh, data, cluster):
            done = job.start()[1]
            seen.append((done.step, job.last_step, job.training.context, mesh.ring, job.model.rope_theta, done.sequences))
            if saves:
                leave_checkpoint(run, at or job.last_step)
            if stop:
                (job.run / STOP_FILE).touch()
            return {"stopped": bool(at), "step": at or job.last_step}

        return seen, run_stages(run.stages, launch)

    def test_they_are_launched_in_turn_each_from_the_checkpoint_before(self, prepared):
        run = prepared(STAGES)
        assert [(stage.job.first_step, stage.job.last_step) for stage in run.stages] == [(0, 4), (4, 7)]
        seen, result = self.launches(run)
        tokens = run.stages[1].job.start()[1].tokens
        assert result == {"stopped": False, "step": 7} and tokens
        first, second = seen
        assert first == (0, 4, 64, 2, 5e5, 0)
        assert second[:5] == (4, 7, 128, 1, 1e6) and 0 < second[5] < 8  # longer windows: fewer of them hold as many tokens

    @pytest.mark.parametrize("done, first", [(2, (2, 4, 64)), (4, (4, 7, 128)), (5, (5, 7, 128))])
    def test_resume_goes_on_in_the_stage_where_the_run_stands(self, prepared, tmp_path, caplog, done, first):
        run = prepared(STAGES)
        _write_run_folder(run)
        leave_checkpoint(run, done)
        seen, _ = self.launches(prepared(STAGES, resume=tmp_path / "run"))
        assert seen[0][:3] == first and seen[-1][1] == 7
        assert caplog.text == ""
        if done == 5:
            assert seen[0][5] == 10  # in the middle of a stage its own number counts

    def test_all_done(self, prepared, tmp_path):
        run = prepared(STAGES)
        _write_run_folder(run)
        leave_checkpoint(run, 7)
        with pytest.raises(ValueError, match="has done 7 steps already and its stages have 7; prolong the last, or add one, to go on"):
            prepared(STAGES, resume=tmp_path / "run")

    def test_a_stop_ends_the_run_even_in_a_stages_last_step(self, prepared):
        for how in (dict(at=2), dict(stop=True)):
            run = prepared(STAGES)
            seen, result = self.launches(run, **how)
            assert result["stopped"] and len(seen) == 1
            shutil.rmtree(run.job.run)

    def test_a_last_checkpoint_that_could_not_be_written_ends_the_run(self, prepared):
        with pytest.raises(RunFailed, match=r"the checkpoint of step 4, from which the next stage starts, was not written \(the latest is of step 0\)"):
            self.launches(prepared(STAGES), saves=False)

    # fmt: off
    @pytest.mark.parametrize("stages, said", [
        ("[{}, {mesh: {tp: 4}}]", "stage 2: 2 KV heads do not divide"), ("[{}, {corpus: {overlap: 64}}]", "stage 2: overlap is 64; it must be"),
        ("[{mesh: {ring: 1, dp: 4}}]", "stage 1: training.batch = 2 sequences do not divide"),
        ("[{}, {attention: {backend: flash2}}]", "stage 2: attention.backend 'flash2' does not compute float32"),
    ])
    # fmt: on
    def test_every_stage_is_checked_before_the_first_starts(self, prepared, stages, said):
        with pytest.raises(ValueError) as caught:
            prepared(f"stages={stages}")
        assert said in str(caught.value) and "\n" not in str(caught.value)


# fmt: off
@pytest.mark.parametrize("before, now, said", [
    (["adapter.rank=4"], ["adapter.rank=8"], "step-00000002 holds another adapter: adapter.rank is 4 there and 8 here"),
    (["adapter.rank=4"], ["adapter.rank=4", "adapter.targets=[q_proj]"], "adapter.targets is ('q_proj', 'k_proj', 'v_proj', 'o_proj') there and ('q_proj',) here"),
    (["adapter.rank=4"], [], "step-00000002 is an adapter of rank 4, but adapter.rank is not set; keep it"),
    ([], ["adapter.rank=4"], "step-00000002 has no adapter, but adapter.rank is 4; leave it null, or start a new run from an export of this one"),
    (["adapter.rank=4", "corpus.held_out=0"], ["adapter.rank=4", "corpus.held_out=0", "corpus.store={other}", "training.seed=3"],
     "step-00000002 is an adapter of the weights of seed 0, here the base is the weights of seed 3"),
])
# fmt: on
def test_resume_with_another_adapter(prepared, code_store, tmp_path, before, now, said):
    run = prepared(*before, out="adapted")
    _write_run_folder(run)
    leave_checkpoint(run, 2)
    prepared(*before, out="adapted", resume=run.job.run)
    other = shutil.copytree(code_store, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "fingerprint": "another"}))
    with pytest.raises(ValueError) as caught:
        prepared(*(setting.format(other=other) for setting in now), out="adapted", resume=run.job.run)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_resume_with_a_store_of_another_tokenizer(prepared, finished):
    record = json.loads((finished / "corpus.json").read_text())
    (finished / "corpus.json").write_text(json.dumps(record | {"tokenizer": "0" * 32}))
    with pytest.raises(ValueError, match="was made with another tokenizer"):
        prepared(out="finished", resume=finished)


def test_resume_of_a_finished_run_says_what_to_raise(prepared, finished):
    with pytest.raises(ValueError, match="has done 2 steps already and training.steps is 2; raise it to go on"):
        prepared("training.steps=2", out="finished", resume=finished)


def test_resume_of_nothing(prepared, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no finished checkpoint"):
        prepared(resume=tmp_path / "empty")
    with pytest.raises(ValueError, match="nowhere is not a run folder"):
        prepared(resume=tmp_path / "nowhere")


def test_a_checkpoint_that_was_never_finished_is_no_start(prepared, finished):
    folder = finished / "checkpoints"
    os.rename(folder / "step-00000002", folder / "step-00000002.partial")
    with pytest.raises(ValueError, match="holds no finished checkpoint"):
        prepared(out="finished", resume=finished)
