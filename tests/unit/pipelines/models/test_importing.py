"""Importing a folder: checked, untouched bit for bit, or with rows for control tokens."""

import json
import re

import pytest
import torch

from pipelines.corpus.tokenizer import SPECIAL, load_tokenizer
from pipelines.models.importing import EMBEDDING, HEAD, import_model
from tests.unit.pipelines.models import small
from workers.model import load_pretrained
from workers.model.huggingface import FolderTensors, read_config


def same(ours, theirs, names) -> bool:
    return all(torch.equal(ours.read(name), theirs.read(name)) for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_in_untouched(tmp_path, dtype):
    small.folder(tmp_path / "theirs", dtype)
    result = import_model(tmp_path / "theirs", tmp_path / "model")
    before, after = FolderTensors(tmp_path / "theirs"), FolderTensors(tmp_path / "model")
    assert after.sizes == before.sizes and same(after, before, before.sizes)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "model" / name).read_text()) == json.loads((tmp_path / "theirs" / name).read_text())
    assert (result.vocab_size, result.added_rows, result.dtype) == (264, 0, str(dtype).removeprefix("torch."))
    assert result.parameters == sum(parameter.numel() for parameter in load_pretrained(tmp_path / "model").parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_control_tokens_get_rows_that_are_the_mean_of_the_others(tmp_path, tied):
    small.folder(tmp_path / "theirs", torch.bfloat16, tie_embeddings=tied)
    result = import_model(tmp_path / "theirs", tmp_path / "model", special_tokens=True)
    assert result.added_rows == 320 - 264 and read_config(tmp_path / "model")["vocab_size"] == 320
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.vocab_size == 263 + len(SPECIAL) and tokenizer.special["<|endoftext|>"] == 263
    assert tokenizer.encode("def in").tolist() == load_tokenizer(tmp_path / "theirs").encode("def in").tolist()
    before, after = FolderTensors(tmp_path / "theirs"), FolderTensors(tmp_path / "model")
    assert same(after, before, before.sizes.keys() - {EMBEDDING, HEAD})
    assert (HEAD in after.sizes) is not tied
    for name in (EMBEDDING,) if tied else (EMBEDDING, HEAD):
        old, new = before.read(name), after.read(name)
        assert new.dtype == torch.bfloat16 and torch.equal(new[:264], old)
        assert torch.equal(new[264:], old.float().mean(0).bfloat16().expand(56, -1))
    assert load_pretrained(tmp_path / "model").config.vocab_size == 320


def test_rows_that_the_model_has_left_are_used(tmp_path):
    small.folder(tmp_path / "theirs", vocab_size=300)
    result = import_model(tmp_path / "theirs", tmp_path / "model", special_tokens=True)
    before, after = FolderTensors(tmp_path / "theirs"), FolderTensors(tmp_path / "model")
    assert result.added_rows == 0 and same(after, before, before.sizes)
    assert load_tokenizer(tmp_path / "model").vocab_size == 271


def test_what_transformers_once_saved_beside_the_weights_is_dropped(tmp_path):
    decoder = small.folder(tmp_path / "theirs", tie_embeddings=True)
    index = json.loads((tmp_path / "theirs/model.safetensors.index.json").read_text())
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), HEAD: decoder.embed_tokens.weight.detach().clone()}
    for number, (name, tensor) in enumerate(extra.items()):
        save(tmp_path / f"theirs/extra-{number}.safetensors", {name: tensor})
        index["weight_map"][name] = f"extra-{number}.safetensors"
    (tmp_path / "theirs/model.safetensors.index.json").write_text(json.dumps(index))
    import_model(tmp_path / "theirs", tmp_path / "model")
    assert not extra.keys() & FolderTensors(tmp_path / "model").sizes.keys()

    save(tmp_path / "theirs/extra-1.safetensors", {HEAD: extra[HEAD] + 1})
    with pytest.raises(ValueError, match="tie_word_embeddings, but lm_head.weight differs"):
        import_model(tmp_path / "theirs", tmp_path / "again")
    with pytest.raises(ValueError, match="tie_word_embeddings, but lm_head.weight differs"):
        load_pretrained(tmp_path / "theirs")  # which is the door of a folder that was never imported


def test_a_tokenizer_that_only_sentencepiece_reads_goes_along_with_a_warning(tmp_path, caplog):
    small.folder(tmp_path / "theirs")
    theirs = tmp_path / "theirs"
    import_model(theirs, tmp_path / "whole")
    assert not caplog.records
    (theirs / "tokenizer.json").unlink()
    (theirs / "tokenizer.model").write_bytes(b"pieces")
    import_model(theirs, tmp_path / "model")
    assert (tmp_path / "model/tokenizer.model").read_bytes() == b"pieces"
    assert "has no tokenizer.json, so no corpus can be made" in caplog.text


def save(path, tensors):
    from safetensors.torch import save_file

    save_file(tensors, path)


def test_what_cannot_come_in_is_said_in_one_line(tmp_path):
    small.folder(tmp_path / "theirs")
    theirs = tmp_path / "theirs"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("")
    cases = [
        (theirs, "full", False, "exists already"),
        (tmp_path / "full", "out", False, "full is not a model folder: config.json cannot be read"),
        (tmp_path / "none", "out", False, "none is neither a model folder nor a .gguf file"),
    ]
    for source, out, special, named in cases:
        refused(source, tmp_path / out, special, named)
    config = json.loads((theirs / "config.json").read_text())
    for change, named in [
        (dict(auto_map={"AutoModel": "evil.Model"}), "code from its folder, which is never run"),
        (dict(architectures=["PhiForCausalLM"], model_type="phi"), "PhiForCausalLM (model_type phi) is not supported; supported are Llama"),
        (dict(num_hidden_layers=3), "has no tensor model.layers.2.input_layernorm.weight"),
    ]:
        (theirs / "config.json").write_text(json.dumps(config | change))
        refused(theirs, tmp_path / "out", False, named)
    (theirs / "config.json").write_text(json.dumps(config))
    (theirs / "tokenizer.json").unlink()
    refused(theirs, tmp_path / "out", True, "has no tokenizer.json")
    assert import_model(theirs, tmp_path / "without").added_rows == 0


def refused(source, out, special, named):
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        import_model(source, out, special)
    assert "\n" not in str(caught.value) and sorted(out.parent.rglob("*")) == before
