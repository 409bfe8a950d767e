"""The plan of a mesh beside the mesh: parameters that ranks hold, bytes that attention sends."""

from pathlib import Path

import pytest

from pipelines.config import Config
from pipelines.plan import make_shape
from pipelines.plan.traffic import flows
from tests.distributed.plan_cases import held, sent
from workers.training.config import CheckpointConfig
from workers.training.loop import Job

MODEL = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 250, "qkv_bias": True}


def job_of(config: Config, run: Path) -> Job:
    return Job(config.model, config.training, CheckpointConfig(every=0), run, memory=config.memory, adapter=config.adapter)


MESHES = {
    "one": {},
    "ring": {"ring": 2},
    "tensor": {"tp": 2},
    "copies": {"dp": 2, "replicate": 2},
    "ring and tensor": {"ring": 2, "tp": 2},
    "stages": {"pp": 2},
}
VARIANTS = (
    {},
    {"model": {"tie_embeddings": True, "memory": 3, "qk_norm": True}},
    {"adapter": {"rank": 4, "targets": ["q_proj", "o_proj", "down_proj"]}},
)


@pytest.mark.parametrize("name", MESHES)
def test_every_rank_holds_the_parameters_that_the_plan_says(world, tmp_path, name):
    for variant in VARIANTS:
        model = {**MODEL, **variant.get("model", {})}
        config = Config.model_validate({**variant, "model": model, "mesh": MESHES[name], "training": {"context": 64, "batch": 4}})
        shape = make_shape(config, None, "cpu")
        found = world.run(held, ranks=shape.mesh.world, spec=shape.mesh, job=job_of(config, tmp_path))
        for rank in shape.stages:  # the first rank of a stage has the most
            most = max(values[:2] for values in found if values[2] == rank.stage)
            assert most == (rank.held.weights, rank.held.trained)


ATTENTION = {
    "ring": {"mesh": {"ring": 4}},
    "ring, contiguous, accumulated": {"mesh": {"ring": 2}, "attention": {"layout": "contiguous"}, "training": {"batch": 2}},
    "window": {"mesh": {"ring": 4}, "model": {"window": 20}},
    "bfloat16, recomputed": {"mesh": {"ring": 2}, "training": {"precision": "bf16"}, "memory": {"recompute": "full"}},
    "recomputed but attention": {"mesh": {"ring": 2, "ulysses": 2}, "memory": {"recompute": "selective"}},
    "ulysses beyond the KV heads": {"mesh": {"ulysses": 4}},
    "ulysses, recomputed": {"mesh": {"ulysses": 2}, "memory": {"recompute": "full"}},
    "stages": {"mesh": {"pp": 2, "ring": 2}, "training": {"batch": 2}},
    "summaries": {"mesh": {"ring": 2}, "model": {"window": 16, "segment": 16, "summaries": 2}},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_sends_what_the_plan_says(world, tmp_path, name):
    case = ATTENTION[name]
    training = {"context": 192, "steps": 1, **case.get("training", {})}
    config = Config.model_validate({**case, "model": {**MODEL, "layers": 2, **case.get("model", {})}, "training": training})
    shape = make_shape(config, None, "cpu")
    found = world.run(sent, ranks=shape.mesh.world, spec=shape.mesh, job=job_of(config, tmp_path))
    said = sum(flow.bytes for flow in flows(shape) if flow.kind in ("ring", "ulysses", "summaries"))
    assert max(found) == said > 0
