"""A completion from a checkpoint on disk: what it says of itself, line ends, cut-off characters, and what is refused."""

import os
import shutil

import pytest

from pipelines.code_completion.complete import complete
from pipelines.models.source import checkpoint_of
from tests.unit.pipelines.untrained import SMALL, untrained_run
from workers.inference import generate as generation


@pytest.fixture(scope="module")
def run(tmp_path_factory, code_store):
    return untrained_run(tmp_path_factory.mktemp("runs") / "untrained", f"corpus.store={code_store}", *SMALL)


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    return 1\n")
    (tmp_path / "b.py").write_text("B = 1\n")
    (tmp_path / "crlf.py").write_bytes(b"def f():\r\n    return 1\r\n")
    return tmp_path


@pytest.fixture
def answers(monkeypatch):
    """A function that makes the model say a text (or ids)."""

    def say(text):
        ids = list(text.encode()) if isinstance(text, str) else list(text)
        monkeypatch.setattr(generation, "generate", lambda *_, **__: iter(ids))

    return say


def test_a_completion_says_where_it_comes_from(run, repo):
    result = complete(run, repo, "a.py:2:5", new_tokens=6)
    assert result.checkpoint == str(run / "checkpoints/step-00000002")
    assert result.files == ["crlf.py", "b.py", "a.py"]
    assert 0 < result.prompt_tokens <= 64 - 6 and result.new_tokens <= 6
    assert "\ufffd" not in result.text[-1:]


def test_the_same_question_has_the_same_answer_also_when_sampled(run, repo):
    for temperature in (0.0, 1.0):
        ask = lambda seed: complete(run, repo, "a.py:2:5", new_tokens=12, temperature=temperature, seed=seed)
        assert ask(1) == ask(1)
    assert ask(1) != ask(2)


@pytest.mark.parametrize("new_tokens, context", [(63, None), (1, 2), (8, 16), (8, 64)])
def test_prompt_and_answer_keep_to_the_context(run, repo, new_tokens, context):
    result = complete(run, repo, "a.py:3:1", new_tokens=new_tokens, context=context)
    assert 1 <= result.prompt_tokens <= (context or 64) - new_tokens
    assert result.new_tokens <= new_tokens


@pytest.mark.parametrize("said", ["x\n\n    y", "x\r\n\r\n    y", "x\n\r\n    y"], ids=repr)
def test_a_file_with_crlf_is_answered_in_crlf(run, repo, answers, said):  # C4
    answers(said)
    assert complete(run, repo, "crlf.py:2:5", new_tokens=32).text == "x\r\n\r\n    y"


def test_a_file_with_newlines_gets_what_the_model_said(run, repo, answers):
    answers("x\n    y")
    assert complete(run, repo, "a.py:2:5", new_tokens=32).text == "x\n    y"


def test_a_character_that_the_limit_cut_is_left_out(run, repo, answers):  # I6
    answers("né⭢".encode()[:-1])
    result = complete(run, repo, "a.py:2:5", new_tokens=32)
    assert result.text == "né" and result.new_tokens == 5


def test_a_whole_checkpoint_a_run_and_a_run_behind_a_link_are_the_same(run, repo, tmp_path):
    os.symlink(run, tmp_path / "link")
    of_run = complete(run, repo, "a.py:2:5", new_tokens=4)
    assert complete(run / "checkpoints/step-00000002", repo, "a.py:2:5", new_tokens=4) == of_run
    assert complete(tmp_path / "link", repo, "a.py:2:5", new_tokens=4).text == of_run.text


def test_the_latest_whole_checkpoint_is_taken(run, tmp_path):
    for name, whole in {"step-00000004": True, "step-00000006": True, "step-00000008.partial": True, "step-00000010": False}.items():
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if whole:
            (tmp_path / "checkpoints" / name / "state.json").write_text("{}")
    assert checkpoint_of(tmp_path) == (tmp_path, tmp_path / "checkpoints/step-00000006")


@pytest.mark.parametrize(
    "place, said", [("nowhere", "nowhere is not a folder"), (".", "holds no finished checkpoint"), ("a.py", "a.py is not a folder")]
)
def test_a_checkpoint_that_is_none(repo, place, said):
    with pytest.raises(ValueError, match=said):
        complete(repo / place, repo, "a.py:1:1")


def test_a_checkpoint_that_is_still_being_written_is_refused(run, repo, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    partial = copy / "checkpoints/step-00000004.partial"
    shutil.copytree(copy / "checkpoints/step-00000002", partial)
    with pytest.raises(ValueError, match="step-00000004.partial"):
        complete(partial, repo, "a.py:1:1", new_tokens=8)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(context=65), "--context 65 is more than the 64 tokens that the model was trained at"),
        (dict(context=0), "--max-tokens is 64"),
        (dict(new_tokens=0), "--max-tokens is 0; it must be at least 1"),
        (dict(new_tokens=-1), "--max-tokens is -1"),
        (dict(new_tokens=64), "--max-tokens is 64; it must be at least 1 and leave room for a prompt in 64 tokens"),
        (dict(new_tokens=8, context=8), "--max-tokens is 8; .* in 8 tokens"),
        (dict(new_tokens=8, temperature=-1.0), "--temperature is -1.0"),
        (dict(new_tokens=8, temperature=float("nan")), "--temperature is nan"),
        (dict(new_tokens=8, temperature=1.0, seed=2**70), "--seed is"),
    ],
)
def test_limits_are_checked_before_any_work_with_their_numbers(run, repo, monkeypatch, arguments, said):  # I7
    monkeypatch.setattr(generation, "load_decoder", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=said):
        complete(run, repo, "a.py:1:1", **arguments)


def test_a_repository_that_is_none(run, repo):
    for wrong in ("nowhere", "a.py"):
        with pytest.raises(ValueError, match=f"--repo .*{wrong} is not a folder"):
            complete(run, repo / wrong, "a.py:1:1", new_tokens=4)
