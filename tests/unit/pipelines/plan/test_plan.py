"""From a configuration to figures: an 8B model's, what a switch saves, the longest context that fits, and what is refused."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from pipelines.cli import main
from pipelines.config import Config, load_config
from pipelines.plan import make_plan, make_shape
from pipelines.plan.devices import GPUS
from pipelines.plan.duration import step_work
from pipelines.plan.memory import instants, peak
from pipelines.plan.search import changes, longest, steps
from pipelines.plan.simulate import mesh_of, simulate
from pipelines.plan.text import verdict
from pipelines.plan.traffic import flows
from workers.attention.plan import imbalance

LLAMA = "long_context/llama-3.1-8b-128k"
SMALL = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 128, "vocab_size": 512}


def shape(device="cpu", **sections):
    return make_shape(Config.model_validate({"model": SMALL, **sections}), None, device)


def test_an_8b_model_on_eight_gpus():
    plan = make_plan(load_config(LLAMA))
    assert plan.total == plan.trainable == 8_030_261_248
    kinds = plan.peak.by_kind()
    # Four bytes a parameter, eight of optimizer, over eight ranks; shards of uneven rows are a little more.
    assert kinds["weights"] == pytest.approx(4 * plan.total / 8, rel=1e-3)
    assert kinds["optimizer"] == 2 * kinds["weights"]
    # 32 blocks: the input and the output, before and after its heads return, q, and two of a KV head, of 16,384 tokens in bfloat16.
    assert kinds["attention"] > 32 * 16_384 * 2 * (3 * 4096 + 2 * 1024)
    assert plan.fits and "fits: " in verdict(plan) and 131_072 < plan.longest < 1 << 20
    assert plan.work.model == pytest.approx(32 * 131_072 * (6 * (plan.total - 128_256 * 4096) + 6 * 32 * 4096 * 131_072), rel=1e-2)
    assert 0.1 < plan.work.model / plan.duration.slow / (8 * plan.device.bf16_flops) < 0.3


def test_what_does_not_fit_says_why():
    plan = make_plan(load_config(LLAMA, ("memory.recompute=none", "training.context=1048576")))
    assert not plan.fits
    assert verdict(plan).startswith("does not fit: ") and "because" in verdict(plan) and f"of it {plan.largest.kind}" in verdict(plan)
    assert any(step.change == "recompute blocks" and step.longest > plan.longest for step in plan.steps)


@pytest.mark.parametrize("adapter, share", [({}, 2 / 6), ({"rank": 1, "targets": ["q_proj"]}, 2 / 4)])
def test_recomputation_is_one_more_forward_of_the_blocks(adapter, share):
    """A third of what trains, half of what is frozen, and nothing of the head."""
    model = {**SMALL, "dim": 512, "heads": 8, "ffn_dim": 2048}
    none, selective = (step_work(shape(model=model, adapter=adapter, memory={"recompute": how})) for how in ("none", "selective"))
    tokens, head = 4096, 512 * 512
    blocks = 4 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 2048)
    assert none.model == selective.model
    assert selective.rank - none.rank == pytest.approx(2 * tokens * blocks, rel=5e-3)
    assert selective.rank - none.rank == pytest.approx(share * (none.model - none.attention - 2 * head * tokens / share), rel=1e-2)


def test_what_the_host_holds_is_told():
    """An optimizer on the host leaves the device; its 16 bytes a parameter and its transfers at every micro-step don't vanish."""
    plans = [make_plan(load_config(LLAMA, ("memory.optimizer=host", f"training.batch={batch}"))) for batch in (1, 4)]
    assert plans[0].host_optimizer_bytes == pytest.approx(16 * plans[0].total / 8, rel=1e-3)
    assert make_plan(load_config(LLAMA)).host_optimizer_bytes == 0
    assert plans[1].duration.host > 3.9 * plans[0].duration.host > 0


@pytest.mark.parametrize("node, between", [(8, 1.0), (16, 0.0), (4, 1.0)])
def test_copies_of_the_weights_are_on_nodes_of_their_own(node, between):
    """All of an all-reduce between copies passes the network where a copy fills its nodes."""
    mesh = {"dp": 2, "replicate": 2, "ulysses": 4, "tp": 2, "ranks_per_node": node}
    model = {**SMALL, "heads": 8, "kv_heads": 8}
    found = flows(shape("cuda", model=model, mesh=mesh, training={"context": 4096, "batch": 2}))
    copies = next(flow for flow in found if flow.kind == "copies")
    assert copies.between == between * (copies.inside + copies.between) and copies.inside + copies.between > 0


def test_memory_is_a_line_in_the_context():
    bytes = [peak(shape(training={"context": context})).bytes for context in (32_768, 49_152, 65_536)]
    assert bytes[2] - bytes[1] == pytest.approx(bytes[1] - bytes[0], rel=1e-3)


@pytest.mark.parametrize("mesh", [{}, {"ring": 2}, {"tp": 2}, {"ulysses": 2}, {"dp": 2}])
def test_a_rank_holds_its_share_of_a_ring(mesh):
    # Per token of the sequence; the tokens of dp are more sequences.
    one = shape(training={"context": 1 << 20})
    many = shape(mesh=mesh, training={"context": 1 << 20, "batch": 2})
    share = peak(many).bytes / peak(one).bytes
    assert share == pytest.approx(1.0, rel=0.02) if mesh == {} or "dp" in mesh else 0.45 < share < 0.75


@pytest.mark.parametrize("device, mesh", [("cpu", {}), ("cpu", {"ring": 2}), ("cuda", {"ring": 2, "tp": 2})])
def test_every_change_saves_at_a_long_context(device, mesh):
    base = shape(device, mesh=mesh, training={"context": 1 << 20})
    for change, settings, other in changes(base):
        # Logits are of one chunk at any length, and the optimizer's state of this model is small.
        assert peak(other).bytes < peak(base).bytes or settings[0].startswith(("memory.loss_chunk", "memory.optimizer")), change


def test_steps_are_settings_of_the_configuration():
    base = Config.model_validate({"model": SMALL, "training": {"context": 65_536}})
    for step in steps(make_shape(base, None, "cpu"), 1 << 30):
        again = load_config(None, (*(f"model.{key}={value}" for key, value in SMALL.items()), "training.context=65536", *step.settings))
        assert peak(make_shape(again, None, "cpu")).bytes == step.bytes and make_shape(again, None, "cpu").mesh.world == step.ranks


@pytest.mark.parametrize("mesh", [{}, {"ring": 3, "tp": 2}])
def test_the_longest_context_fits_and_the_next_does_not(mesh):
    base = shape(mesh=mesh, model={**SMALL, "heads": 4, "kv_heads": 2})
    found = longest(base, 1 << 30)
    unit = base.mesh.length_multiple * -(-1024 // base.mesh.length_multiple)
    assert found % unit == 0
    assert peak(base.changed("training", context=found)).bytes <= 1 << 30 < peak(base.changed("training", context=found + unit)).bytes
    assert longest(base, 1 << 20) == 0


def test_accumulation_stages_and_copies_are_seen():
    once, more = (shape(mesh={"dp": 2}, training={"batch": batch, "context": 256}) for batch in (2, 4))
    at = lambda rank, name: next(instant.by_kind() for instant in instants(rank) if instant.name == name)
    assert at(more, "loss")["gradients"] == once.held.trained * 4 and "gradients" not in at(once, "loss")
    stages = shape(mesh={"pp": 4}, training={"batch": 8})
    assert [rank.in_flight for rank in stages.stages] == [4, 1] and stages.held.blocks == 1
    copies, one = (shape(mesh={"dp": 4, "replicate": count}, training={"batch": 4}).held.weights for count in (2, 1))
    assert copies == pytest.approx(2 * one, rel=0.01)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_simulated_ring(layout):
    base = shape(mesh={"ring": 2, "ulysses": 2}, attention={"layout": layout}, training={"context": 8192})
    found = simulate(mesh_of(base, 16))
    assert (found.mesh.ring, found.mesh.world, len(found.hops), len(found.pairs)) == (8, 16, 8, 8)
    assert sum(found.pairs) == 8192 * 8193 // 2
    assert found.balance == pytest.approx(imbalance(base.pattern, 8192, 8, layout))
    # The last rank of a contiguous ring sees most, and is the busiest of every hop.
    assert found.balance == pytest.approx(1, abs=1e-3) if layout == "zigzag" else found.critical >= found.balance > 1.8
    assert found.error < 1e-5 and found.gradient_error < 1e-4
    assert {hop.rows for hop in found.hops[1:]} == {1024}


def test_a_window_asks_its_neighbour_only():
    found = simulate(mesh_of(shape(model={**SMALL, "window": 100}, training={"context": 8192}, mesh={"ring": 2}), 8))
    assert [hop.rows for hop in found.hops] == [0, 99, *[0] * 6]


def command(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_the_command_answers_in_json():
    result = command(LLAMA, "--device", "h200", "--simulate", "16", "--json", "--set", "training.batch=2")
    value = json.loads(result.stdout.splitlines()[-1])
    assert (value["device"], value["parameters"], value["ranks"], value["simulation"]["ring"]) == ("H200", 8_030_261_248, 8, 2)
    assert sum(value["memory"].values()) == value["peak_bytes"] == max(value["moments"].values()) <= value["capacity_bytes"]
    assert set(value["traffic"]) == {"ulysses", "gather", "reduce"} and value["seconds"][0] < value["seconds"][1]


def test_the_command_answers_in_words():
    result = command("code_completion/tiny", "--vocab", "300", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "longest context that fits" in result.stdout and "fits: " in result.stdout and "ring" in result.stdout


# fmt: off
@pytest.mark.parametrize("arguments, said", [
    (["code_completion/tiny"], "model.vocab_size is not set, and a plan reads no corpus; give --vocab N"),
    ([LLAMA, "--device", "H1000"], f"--device 'H1000' is not known; it must be one of {', '.join(GPUS)}, cpu"),
    ([LLAMA, "--simulate", "12"], "--simulate 12 ranks are not a multiple of the mesh without its ring, which is 8"),
    ([LLAMA, "--vocab", "0"], "--vocab is 0; it must be at least 1"),
    ([LLAMA, "--vocab", "300"], "--vocab is 300, but model.vocab_size is 128256; leave out --vocab"),
    ([LLAMA, "--set", "mesh.ulysses=3"], "32 query heads do not divide by tp × ulysses = 1 × 3"),
    ([LLAMA, "--device", "cpu", "--set", "memory.offload=host"], "memory.offload is 'host', but this run is on CPUs"),
    ([LLAMA, "--set", "attention.backend=cpu"], "attention.backend 'cpu' cannot run on cuda"),
    ([LLAMA, "--set", "adapter.rank=9999"], "adapter.rank = 9999 is more than the rank of q_proj"),
])
# fmt: on
def test_wrong_inputs_are_refused_in_one_line(arguments, said):
    result = command(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_run_in_stages_is_planned_at_its_largest():
    stages = "stages=[{training: {context: 4096, steps: 2}}, {training: {context: 262144, steps: 2}}]"
    plan = make_plan(load_config(LLAMA, (stages, "training.batch=1")))
    assert plan.stage == 2 and plan.shape.length == 262_144
    assert dataclasses.replace(plan, stage=None).shape is plan.shape
