"""A run with an adapter: exported merged, or alone in PEFT's format; both need the base as it was."""

import json

import pytest
import torch
import torch.distributed as dist

from pipelines.config import load_config
from pipelines.models.exporting import export_adapter, export_model
from pipelines.models.importing import import_model
from pipelines.train import _write_run_folder, prepare
from tests.unit.pipelines.models import small
from tests.unit.pipelines.models.test_exporting import logits, store
from tests.unit.pipelines.untrained import SHORT
from workers.mesh import MeshSpec
from workers.model import load_pretrained
from workers.model.huggingface import FolderTensors
from workers.training.checkpoint import Checkpointer, Progress
from workers.training.loop import build_model
from workers.training.optimizer import build_optimizer

PARTS = (
    "adapter.rank=3",
    "adapter.alpha=6",
    "adapter.targets=[q_proj, down_proj]",
    "adapter.train_norms=true",
    "adapter.train_embeddings=true",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run folder, base folder, whole weights by name): an adapter that has moved, on a tied model folder; no step was run."""
    folder = tmp_path_factory.mktemp("adapter")
    small.folder(folder / "theirs", tie_embeddings=True)
    import_model(folder / "theirs", folder / "base", special_tokens=True)
    corpus = store(folder / "store", str(folder / "base" / "tokenizer.json"))
    settings = (*SHORT, f"corpus.store={corpus}", f"checkpoint.init={folder / 'base'}", *PARTS)
    prepared = prepare(load_config("code_completion/tiny", settings), folder / "run")
    _write_run_folder(prepared)
    job = prepared.job
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        model = build_model(job, MeshSpec().build("cpu"))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape) * parameter.requires_grad
        saver = Checkpointer(job.checkpoint_folder, 2, job.model, job.adapter, job.base)
        saver.save(Progress(step=2, sequences=2), model, build_optimizer(model, job.training))
        saver.finish()
    finally:
        dist.destroy_process_group()
    return folder / "run", folder / "base", model


def test_an_export_is_the_merged_model(trained, tmp_path):
    run, base, model = trained
    assert export_model(run, tmp_path / "merged").architecture == "LlamaForCausalLM"
    torch.testing.assert_close(logits(load_pretrained(tmp_path / "merged")), logits(model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(load_pretrained(base)), logits(model), atol=0.1)
    assert FolderTensors(tmp_path / "merged").sizes.keys() == FolderTensors(base).sizes.keys()


def test_an_adapter_alone_is_what_peft_opens(trained, tmp_path):
    """Names and keys as PEFT 0.21 writes them itself for this adapter."""
    run, base, model = trained
    report = export_adapter(run, tmp_path / "adapter", "bfloat16")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6.0, ["q_proj", "down_proj"])
    assert config["modules_to_save"] == ["embed_tokens", "input_layernorm", "norm", "post_attention_layernorm"]
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "model.safetensors")
    held = FolderTensors(tmp_path / "adapter")
    expected = {f"base_model.model.model.{name}": parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in expected
    expected["base_model.model.lm_head.weight"] = model.embed_tokens.weight
    assert held.sizes.keys() == expected.keys() and report.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    for name, parameter in expected.items():
        assert torch.equal(held.read(name), parameter.bfloat16()), name


def test_what_the_base_says_otherwise_is_a_warning(trained, tmp_path, caplog):
    run, base, _ = trained
    export_adapter(run, tmp_path / "same")
    assert "its base says" not in caplog.text
    state = next((run / "checkpoints").iterdir()) / "state.json"
    kept = json.loads(state.read_text())
    state.write_text(json.dumps({**kept, "model": {**kept["model"], "rope_theta": 5e6}}))
    try:
        export_adapter(run, tmp_path / "longer")
    finally:
        state.write_text(json.dumps(kept))
    assert "the adapter was trained with model.rope_theta = 5000000.0, its base says" in caplog.text


def test_without_its_base_an_adapter_is_nothing(trained, tmp_path):
    run, base, _ = trained
    with pytest.raises(ValueError, match="is a model folder and has no adapter; leave out --adapter-only"):
        export_adapter(base, tmp_path / "out")
    base.rename(base.with_name("moved"))
    try:
        for export in (export_model, export_adapter):
            with pytest.raises(ValueError, match="the adapter's base model .*/base is gone; put it back"):
                export(run, tmp_path / "out")
    finally:
        base.with_name("moved").rename(base)
    assert not (tmp_path / "out").exists()
