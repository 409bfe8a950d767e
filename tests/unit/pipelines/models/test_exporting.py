"""Exporting a run, a checkpoint or a model folder; a run that starts from a model folder, and completes with it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from pipelines.code_completion.complete import complete
from pipelines.config import load_config
from pipelines.corpus.code import Code
from pipelines.corpus.ingest import in_process, ingest
from pipelines.corpus.tokenizer import ByteTokenizer
from pipelines.models.exporting import export_model
from pipelines.models.importing import import_model
from pipelines.models.source import open_source
from pipelines.train import _write_run_folder, prepare
from tests.unit.pipelines.models import small
from tests.unit.pipelines.untrained import SHORT, SMALL, untrained_run
from workers.attention import Pattern
from workers.inference.generate import load_decoder
from workers.model import load_pretrained
from workers.model.huggingface import FolderTensors, read_config


def store(folder: Path, tokenizer: str) -> Path:
    return Path(ingest(Code(), [Path(__file__).parent], folder, tokenizer, run=in_process).folder)


@pytest.fixture(scope="module")
def byte_store(tmp_path_factory):
    return store(tmp_path_factory.mktemp("stores") / "bytes", "byte")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A bfloat16 model that came in with control tokens."""
    folder = tmp_path_factory.mktemp("models")
    small.folder(folder / "theirs", torch.bfloat16)
    import_model(folder / "theirs", folder / "model", special_tokens=True)
    return folder / "model"


@pytest.fixture(scope="module")
def own_store(model):
    return store(model.parent / "store", str(model / "tokenizer.json"))


def logits(model):
    tokens_BS = torch.arange(40)[None] * 6
    return model(tokens_BS, torch.arange(40)[None], Pattern())


@pytest.mark.parametrize(
    "fields, architecture",
    [
        ((), "LlamaForCausalLM"),
        (("model.window=9", "model.tie_embeddings=true"), "MistralForCausalLM"),
        (("model.qkv_bias=true",), "Qwen2ForCausalLM"),
        (
            ("model.qk_norm=true", "model.rope_scaling={rope_type: yarn, factor: 2, original_max_position_embeddings: 16}"),
            "Qwen3ForCausalLM",
        ),
    ],
)
def test_transformers_opens_a_run(tmp_path, byte_store, fields, architecture):
    transformers = pytest.importorskip("transformers")
    run = untrained_run(tmp_path / "run", f"corpus.store={byte_store}", *SMALL, *fields)
    result = export_model(run, tmp_path / "out")
    assert (result.architecture, result.dtype) == (architecture, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == architecture and theirs.config.max_position_embeddings == 64
    ours = load_decoder(run / "checkpoints/step-00000002")
    tokens_BS = torch.arange(40)[None] * 6
    wanted = ours(tokens_BS, torch.arange(40)[None], ours.config.pattern())
    torch.testing.assert_close(theirs(tokens_BS).logits, wanted, rtol=0, atol=1e-4)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x):\r\n\treturn  x  # naïve\n"
    assert tokenizer(text).input_ids == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == theirs.generation_config.eos_token_id == 256


def test_a_model_folder_goes_out_as_it_came_in(tmp_path, model):
    result = export_model(model, tmp_path / "same")
    assert result.dtype == "bfloat16"
    before, after = FolderTensors(model), FolderTensors(tmp_path / "same")
    assert after.sizes == before.sizes and all(torch.equal(after.read(name), before.read(name)) for name in before.sizes)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "same" / name).read_text()) == json.loads((model / name).read_text())
    assert export_model(model, tmp_path / "wide", "float32").dtype == "float32"
    assert read_config(tmp_path / "wide")["torch_dtype"] == "float32"
    assert torch.equal(logits(load_pretrained(tmp_path / "wide")), logits(load_pretrained(model)))


def test_a_run_starts_from_a_model_folder_and_goes_out_like_it(tmp_path, model, own_store, caplog):
    gone = tmp_path / "gone"
    shutil.copytree(model, gone)
    run = untrained_run(tmp_path / "run", f"corpus.store={own_store}", f"checkpoint.init={gone}")
    config = load_config(str(run / "config.yaml"))
    assert config.model == load_pretrained(model).config  # not the preset's
    assert config.checkpoint.init == str(gone)
    assert torch.equal(logits(load_decoder(run / "checkpoints/step-00000002")), logits(load_pretrained(model)))

    shutil.rmtree(gone)  # from here on nothing needs it
    export_model(run / "checkpoints/step-00000002", tmp_path / "out", "bfloat16")
    before, after = FolderTensors(model), FolderTensors(tmp_path / "out")
    assert after.sizes == before.sizes and all(torch.equal(after.read(name), before.read(name)) for name in before.sizes)
    raw = read_config(tmp_path / "out")
    assert (raw["eos_token_id"], raw["max_position_embeddings"], raw["torch_dtype"]) == (262, 512, "bfloat16")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": 262}

    longer = load_config(str(run / "config.yaml"), ("training.steps=9",))
    resumed = prepare(longer, tmp_path / "longer", run)
    assert "checkpoint.init" not in caplog.text
    prepare(load_config(str(run / "config.yaml"), ("training.steps=9", f"checkpoint.init={model}")), tmp_path / "longer", run)
    assert f"checkpoint.init {model} is not read: the weights are those of {run}" in caplog.text
    assert resumed.job.init is None and resumed.job.resume is not None
    _write_run_folder(resumed)
    assert (tmp_path / "longer/init/generation_config.json").is_file()


def test_keys_that_change_no_shape_can_be_set(tmp_path, model, own_store):
    start = (f"corpus.store={own_store}", f"checkpoint.init={model}", *SHORT)
    config = load_config("code_completion/tiny", (*start, "model.window=32", "model.rope_scaling={rope_type: linear, factor: 4}"))
    job = prepare(config, tmp_path / "run").job
    assert (job.model.window, job.model.rope_scaling.factor, job.model.dim) == (32, 4, 32)
    assert job.init == model
    yarn = json.loads((model / "config.json").read_text()) | {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    }
    shutil.copytree(model, tmp_path / "scaled")
    (tmp_path / "scaled/config.json").write_text(json.dumps(yarn))
    config = load_config("code_completion/tiny", (*start, f"checkpoint.init={tmp_path / 'scaled'}", "model.rope_scaling.factor=4"))
    scaling = config.model.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4, 256)
    # A recipe chooses positions; what the norms add to a variance goes with the weights that were trained with it.
    config = load_config("long_context/qwen2.5-coder-7b-256k", (*start, "stages=[]"))
    assert (config.model.rope_theta, config.model.norm_eps) == (1e6, read_config(model)["rms_norm_eps"]) != (1e6, 1e-6)


def test_a_start_that_does_not_fit_is_said_in_one_line(tmp_path, model, own_store, byte_store):
    plain = tmp_path / "plain"
    import_model(model.parent / "theirs", plain)
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "tokenizer.json").unlink()
    for settings, named in [
        ((f"checkpoint.init={model}", f"corpus.store={byte_store}"), f"ingest again with --tokenizer {model}/tokenizer.json"),
        ((f"checkpoint.init={plain}", f"corpus.store={own_store}"), "import the model again with --special-tokens"),
        ((f"checkpoint.init={bare}", f"corpus.store={own_store}"), "no tokenizer at"),
        ((f"checkpoint.init={model}", f"corpus.store={own_store}", "model.dim=64"), "model.dim is 64, but 32 in"),
        ((f"checkpoint.init={model}", f"corpus.store={own_store}", "model.qk_norm=true"), "model.qk_norm is True, but False in"),
        ((f"checkpoint.init={tmp_path}", f"corpus.store={own_store}"), "is not a model folder"),
        ((f"checkpoint.init={tmp_path / 'none'}", f"corpus.store={own_store}"), "is not a model folder"),
        (("checkpoint.init=7", f"corpus.store={own_store}"), "checkpoint.init is 7"),
    ]:
        with pytest.raises(ValueError, match=named) as caught:
            prepare(load_config("code_completion/tiny", (*SHORT, *settings)), tmp_path / "run")
        assert "\n" not in str(caught.value)


def test_what_transformers_does_not_compute_is_not_written(tmp_path, byte_store):
    run = untrained_run(tmp_path / "run", f"corpus.store={byte_store}", *SMALL, "model.sinks=2", "model.window=16")
    with pytest.raises(ValueError, match="model.sinks = 2 has no counterpart in LlamaForCausalLM.*cannot be exported"):
        export_model(run, tmp_path / "out")
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ValueError, match="is not a folder|no finished checkpoint"):
            export_model(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_folder_completes(tmp_path, model):
    (tmp_path / "a.py").write_text("def f():\n    return 1\n")
    result = complete(model, tmp_path, "a.py:2:5", new_tokens=6)
    assert result.checkpoint == str(model) and result.new_tokens <= 6
    assert open_source(model).stop == {262} and open_source(model).context == 512
    with pytest.raises(ValueError, match="more than the 512 tokens"):
        complete(model, tmp_path, "a.py:2:5", context=1024)
    small.folder(tmp_path / "small", vocab_size=263)  # which is the id that the tokenizer gives it
    with pytest.raises(ValueError, match="no id for .*--special-tokens"):
        complete(tmp_path / "small", tmp_path, "a.py:2:5")
