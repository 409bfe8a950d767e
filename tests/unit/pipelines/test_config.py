"""Defaults < preset or file < --set; what is wrong is answered in one line that names the key, the value and the way out."""

import dataclasses

import pytest
import yaml

from pipelines.config import SECTIONS, Config, load_config, presets
from workers.model.config import ModelConfig
from workers.model.positions import RopeScaling


def refusal(source, *assignments) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(source, assignments).check_meshes()
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.fixture
def file(tmp_path):
    """A function that writes a configuration and gives its path."""

    def write(content: str | bytes) -> str:
        path = tmp_path / "my.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_its_mesh_fits(name):
    config = load_config(name)
    config.check_meshes()


@pytest.mark.parametrize("name", ["literature-analysis", "literature_analysis", "literature-analysis/tiny", "literature_analysis/tiny"])
def test_a_job_by_its_name_is_its_tiny_preset(name):
    config = load_config(name, ("model.window=256",))
    assert (config.model.segment, config.model.window, config.mesh.ring) == (64, 256, 2)
    assert load_config("code-completion") == load_config("code_completion/tiny")
    assert load_config("long_context/llama_3.1_8b_128k") == load_config("long_context/llama-3.1-8b-128k")


# As published: the sums of the sizes of the tensors in the models' safetensors files.
@pytest.mark.parametrize("family, parameters", [("llama-3.1-8b", 8_030_261_248), ("qwen2.5-coder-7b", 7_615_616_512)])
def test_a_preset_of_a_published_model_has_its_parameters(family, parameters):
    found = [name for name in presets() if family in name]
    assert found
    for name in found:
        assert {stage.model.parameters for stage in load_config(name).each_stage()} == {parameters}


def test_the_last_word_is_that_of_the_command_line(file):
    path = file("training: {steps: 7, context: 256}\nmesh: {ring: 2}\n")
    config = load_config(path, ("training.steps=9", "training.steps=11", " mesh.tp = 4 "))
    assert (config.training.steps, config.training.context, config.training.batch) == (11, 256, 1)
    assert (config.mesh.ring, config.mesh.tp) == (2, 4)


def test_what_is_printed_loads_as_the_same(file):
    config = load_config("code_completion/tiny", ("corpus.store=/a/b", "training.learning_rate=1e-3", "corpus.overlap=5"))
    assert load_config(file(config.to_yaml())) == config


def test_every_section_is_a_frozen_dataclass_whose_docstring_or_name_says_its_keys():
    assert set(SECTIONS) == Config.model_fields.keys() - {"stages"}
    for name in SECTIONS:
        assert Config.model_fields[name].annotation.__dataclass_params__.frozen, name


@pytest.mark.parametrize(
    "value, read", [("1e-3", 1e-3), ("5e-3", 5e-3), ("0.01", 0.01), ("1", 1.0), ("1_0e-3", 0.01)]
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(value, read):
    assert load_config(None, (f"training.learning_rate={value}",)).training.learning_rate == read


@pytest.mark.parametrize("name", ["1e3", "nan", "2024", "2024-01-01", "true", "~store", "a=b"])
def test_a_quoted_text_stays_a_text(name):
    assert load_config(None, (f'corpus.store="{name}"',)).corpus.store == name


YARN = "{rope_type: yarn, factor: 4, original_max_position_embeddings: 4096}"


def test_keys_of_keys_are_read_changed_and_printed(file):
    config = load_config(None, (f"model.rope_scaling={YARN}", "model.rope_scaling.factor=8"))
    assert (config.model.rope_scaling.rope_type, config.model.rope_scaling.factor) == ("yarn", 8.0)
    assert load_config(file(config.to_yaml())) == config
    assert load_config(file(config.to_yaml()), ("model.rope_scaling=",)).model.rope_scaling is None
    one_by_one = ("model.rope_scaling.rope_type=linear", "model.rope_scaling.factor=2")
    assert load_config(file("model: {rope_scaling: }"), one_by_one).model.rope_scaling.factor == 2


def test_a_key_of_a_key_changes_that_alone_in_a_preset_and_the_whole_replaces_it(file):
    name = "long_context/llama-3.1-8b-1m"
    before, after = (
        load_config(name, settings).model.rope_scaling
        for settings in ((), ("model.rope_scaling.factor=64", "model.rope_scaling.beta_fast=8"))
    )
    assert after == dataclasses.replace(before, factor=64.0, beta_fast=8.0) != before
    linear = ("model.rope_scaling={rope_type: linear, factor: 2}", "model.rope_scaling.factor=3")
    assert load_config(name, linear).model.rope_scaling == RopeScaling("linear", factor=3.0)
    assert load_config(file(f"model: {{rope_scaling: {YARN}}}"), linear[1:]).model.rope_scaling.rope_type == "yarn"


@pytest.mark.parametrize(
    "assignment, said",
    [
        ("model.rope_scaling={rope_type: yarn, factr: 4}", "key model.rope_scaling.factr; the nearest is model.rope_scaling.factor"),
        ("model.rope_scaling={factor: 4}", "model.rope_scaling.rope_type is not set"),
        ("model.rope_scaling={rope_type: linear, factor: four}", "model.rope_scaling.factor is 'four'"),
        ("model.rope_scaling={rope_type: linear, factor: 0.5}", "model.rope_scaling.factor is 0.5; it must be at least 1"),
        ("model.rope_scaling=4", "model.rope_scaling is 4"),
        ("training.steps.often=4", "unknown configuration key training.steps.often"),
    ],
)
def test_a_wrong_key_of_a_key_is_refused_by_its_whole_name(assignment, said):
    assert said in refusal(None, assignment)


def test_an_empty_file_and_an_empty_section_are_the_defaults(file):
    assert load_config(file("")) == load_config(file("# nothing\n")) == load_config(None)
    assert load_config(file("training: {}\n")) == load_config(None)


@pytest.mark.parametrize(
    "assignment, nearest",
    [
        ("training.step=4", "training.steps"),
        ("training.lerning_rate=1", "training.learning_rate"),
        ("model.steps=4", "training.steps"),
        ("trainig.steps=4", "training.steps"),
        ("mesh.rings=2", "mesh.ring"),
        ("corpus.stor=x", "corpus.store"),
        ("checkpoints.every=5", "checkpoint.every"),
        ("model.rope_scaling.factr=4", "model.rope_scaling.factor"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(assignment, nearest):
    assert (
        refusal(None, assignment)
        == f"unknown configuration key {assignment.split('=')[0]}; the nearest is {nearest} (see: ringspan config)"
    )


def test_an_unknown_section_of_a_file_names_those_there_are(file):
    assert "training" in refusal(file("trainig: {}\n"))


@pytest.mark.parametrize("assignment", ["training.steps", "training=4", "steps=4", "=4", ".=4", "training.=4", "", "training.steps 4"])
def test_what_is_no_assignment_is_answered_with_an_example(assignment):
    assert "is not section.key=value, as in --set training.steps=200" in refusal(None, assignment)


@pytest.mark.parametrize("name, near", [("code_completion/tiney", "code_completion/tiny"), ("tiny", "code_completion/tiny")])
def test_an_unknown_preset_names_the_nearest(name, near):
    message = refusal(name)
    assert repr(name) in message and f"did you mean the preset {near}?" in message


@pytest.mark.parametrize(
    "content, said",
    [
        ("training: {steps: 4\n", "is not valid YAML"),
        ("\tsteps: 4", "is not valid YAML"),
        (b"\x89PNG\r\n\x1a\n\x00\xff\xfe", "is not valid YAML"),
        (b"training: {decay: \x00}", "is not valid YAML"),
        ("- training\n- mesh\n", "must hold sections of keys"),
        ("just words\n", "must hold sections of keys"),
        ("training: 4\n", "must hold sections of keys"),
        ("training: [steps]\n", "must hold sections of keys"),
        ("1: {2: 3}\n", "unknown configuration key 1.2"),
        ("training: {1: 3}\n", "unknown configuration key training.1"),
        ("training: !!python/object/apply:os.system [ls]\n", "is not valid YAML"),
    ],
)
def test_a_file_that_holds_something_else(file, content, said):
    assert said in refusal(file(content))


def test_a_folder_is_no_configuration(tmp_path):
    assert "neither a preset" in refusal(str(tmp_path))


# fmt: off
WRONG = [
    "training.steps=many", "training.steps=2.5", "training.steps=0", "training.steps=", "training.steps=[1]", "training.steps={a: 1}",
    "training.context=0", "training.context=-8", "training.batch=0", "training.micro_batch=0", "training.learning_rate=fast",
    "training.learning_rate=-1", "training.learning_rate=nan", "training.learning_rate=inf", "training.warmup_steps=-1",
    "training.weight_decay=nan", "training.clip=-1", "training.clip=nan", "training.decay=exponential", "training.precision=fp16",
    "training.decay_ratio=0.2", "training.decay_ratio=2", "training.beta1=1.5", "training.beta2=-0.1", "training.eps=-1", "training.final_ratio=-1", "training.seed=-1",
    "training.seed=1267650600228229401496703205376", "training.skips_in_a_row=0", "training.evaluate_every=-1",
    "checkpoint.every=-1", "checkpoint.keep=0", "corpus.store=3", "corpus.held_out=half", "corpus.held_out_windows=-1",
    "corpus.overlap=-1", "corpus.held_out=1.5", "corpus.positions=backwards", "corpus.fim_rate=1.5", "corpus.fim_rate=-0.1",
    "corpus.fim_spm_rate=2", "corpus.upsample=5", "corpus.upsample.factor=1", "corpus.upsample.longer_than=0",
    "mesh.ring=0", "mesh.tp=two", "mesh.dp=0", "mesh.ulysses=-1", "attention.layout=spiral", "attention.backend=fastest",
    "model.dim=0", "model.layers=-1", "model.head_dim=0", "model.norm_eps=-1", "model.rope_theta=0", "model.tie_embeddings=perhaps",
    "model.vocab_size=0",
    "cluster.workers=0", "cluster.workers=-1", "cluster.cpus_per_worker=0", "cluster.cpus_per_worker=-1", "cluster.gpus_per_worker=-1",
    "cluster.max_failures=-5", "cluster.collective_timeout=0", "cluster.stall_seconds=0",
]
# fmt: on


@pytest.mark.parametrize("assignment", WRONG)
def test_a_value_that_no_run_can_have_is_refused_by_its_key(assignment):
    assert assignment.split("=")[0] in refusal(None, assignment)


@pytest.mark.parametrize("assignment", ["training.steps=[1", "training.steps={", "training.decay=@x", "training.decay='"])
def test_a_value_that_is_no_yaml(assignment):
    assert "the value is not valid YAML" in refusal(None, assignment)


@pytest.mark.parametrize("workers, said", [(3, "needs 2 workers, not 3"), (1, "needs 2 workers, not 1")])
def test_a_mesh_that_does_not_fit_the_workers(workers, said):
    assert said in refusal(None, "mesh.ring=2", f"cluster.workers={workers}")


def test_dp_takes_what_the_workers_leave():
    assert load_config(None, ("mesh.dp=-1", "mesh.ring=2", "cluster.workers=6")).mesh_spec().dp == 3


def test_a_batch_that_does_not_divide_names_both_numbers():
    training = load_config(None, ("training.batch=6", "training.micro_batch=2")).training
    assert training.micro_steps(3) == 1
    with pytest.raises(ValueError, match="training.batch = 6 sequences do not divide by mesh.dp × training.micro_batch = 2 × 2"):
        training.micro_steps(2)


def test_yaml_written_holds_every_key():
    tree = yaml.safe_load(Config().to_yaml())
    assert tree.pop("stages") == []
    assert {section: set(keys) for section, keys in tree.items()} == {
        section: {field.name for field in fields_of(section)} for section in SECTIONS
    }


def fields_of(section: str):
    return dataclasses.fields(Config.model_fields[section].annotation)


NUMBERS = [
    f"{section}.{field.name}" for section in SECTIONS for field in fields_of(section) if {"int", "float"} & set(field.type.split(" | "))
]


@pytest.mark.parametrize("key", NUMBERS)
def test_yes_and_no_are_no_numbers(key):
    """Python takes True for 1: `training.steps=yes` would train one step, `model.window=true` see one token."""
    for word, read in (("yes", "true"), ("off", "false")):
        assert refusal(None, f"{key}={word}") == f"{key} is {read} (as YAML reads yes, no, on and off, too); it must be a number"


def test_numbers_are_most_of_the_keys_and_switches_still_switch():
    assert len(NUMBERS) > 40 and "training.steps" in NUMBERS and "model.tie_embeddings" not in NUMBERS
    assert load_config(None, ("model.tie_embeddings=yes",)).model.tie_embeddings is True
    scaling = "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 64, truncate: no}"
    assert load_config(None, (scaling,)).model.rope_scaling.truncate is False
    assert "model.rope_scaling.factor is true (" in refusal(None, scaling, "model.rope_scaling.factor=on")
    longrope = "{rope_type: longrope, factor: 2, original_max_position_embeddings: 8, short_factor: [1, yes], long_factor: [1, 2]}"
    assert "model.rope_scaling.short_factor is true (" in refusal(None, f"model.rope_scaling={longrope}", "model.head_dim=4")


class TestStages:
    CURRICULUM = """
training: {context: 64, batch: 4, steps: 7, warmup_steps: 2}
mesh: {dp: 2}
stages:
- {training: {steps: 5}, mesh: {ring: 1}}
- {tokens: 1000, training: {context: 128, learning_rate: 1e-4}, model: {rope_theta: 2e6, window: 32}, mesh: {dp: 1, ring: 2}}
- {training: {context: 256, decay: wsd}}
"""

    def test_each_changes_the_sections_above_and_not_the_stage_before(self, file):
        first, second, third = load_config(file(self.CURRICULUM)).each_stage()
        assert [(s.training.context, s.training.steps, s.training.decay) for s in (first, second, third)] == [
            (64, 5, "cosine"), (128, 2, "cosine"), (256, 7, "wsd")  # 1,000 tokens are 1.95 steps of 4 × 128
        ]  # fmt: skip
        assert [(s.model.rope_theta, s.model.window, s.training.learning_rate) for s in (first, second, third)] == [
            (5e5, None, 1e-3), (2e6, 32, 1e-4), (5e5, None, 1e-3)
        ]  # fmt: skip
        assert [(m.dp, m.ring) for m in (s.mesh_spec() for s in (first, second, third))] == [(2, 1), (1, 2), (2, 1)]
        assert {s.training.warmup_steps for s in (first, second, third)} == {2}

    def test_what_is_in_force_at_a_step(self, file):
        config = load_config(file(self.CURRICULUM))
        assert [config.at(step).training.context for step in (1, 5, 6, 7, 8, 14, 99)] == [64, 64, 128, 128, 256, 256, 256]
        assert load_config(None).at(3) == load_config(None)

    def test_what_is_printed_loads_as_the_same(self, file):
        config = load_config(file(self.CURRICULUM))
        assert load_config(file(config.to_yaml())) == config and len(config.stages) == 3

    def test_the_command_line_sets_and_clears_them(self, file):
        path = file(self.CURRICULUM)
        assert load_config(path, ("stages=[]",)).each_stage() == [load_config(path, ("stages=[]",))]
        config = load_config(None, ("stages=[{training: {steps: 3}}, {tokens: 9000}]", "training.batch=1"))
        assert [stage.training.steps for stage in config.each_stage()] == [3, 3]

    def test_a_key_of_a_key_changes_that_alone(self, file):
        config = load_config(file(f"model: {{rope_scaling: {YARN}}}\nstages:\n- {{model: {{rope_scaling: {{factor: 8}}}}}}"))
        (stage,) = config.each_stage()
        assert stage.model.rope_scaling == dataclasses.replace(config.model.rope_scaling, factor=8.0)

    def test_another_type_of_scaling_replaces_the_whole(self, file):
        llama3 = "{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 8192}"
        (stage,) = load_config(file(f"model: {{rope_scaling: {llama3}}}\nstages:\n- {{model: {{rope_scaling: {YARN}}}}}")).each_stage()
        assert stage.model.rope_scaling == load_config(file(f"model: {{rope_scaling: {YARN}}}")).model.rope_scaling

    def test_an_assignment_that_every_stage_overrides_is_refused(self, file):
        path = file("stages:\n- {training: {context: 64, steps: 3}}\n- {tokens: 900, training: {context: 128}}\n")
        for assignment in ("training.context=32", "training.steps=9"):
            assert f"--set {assignment.split('=')[0]} has no effect, for every stage has its own" in refusal(path, assignment)
        assert load_config(path, ("training.batch=2",)).each_stage()[1].training.batch == 2

    # fmt: off
    @pytest.mark.parametrize("stages, said", [
        ("3", "stages is 3; it must be a list"), ("", "stages is None; it must be a list"), ("{training: {steps: 3}}", "it must be a list"),
        ("[4]", "stages is [4]; it must be a list"),
        ("[{training: {steps: 0}}]", "stage 1: training.steps is 0; it must be at least 1"),
        ("[{}, {training: {step: 3}}]", "stage 2: unknown configuration key training.step; the nearest is training.steps"),
        ("[{}, {trainig: {}}]", "stage 2: unknown configuration section 'trainig'"),
        ("[{training: 5}]", "stage 1: training is 5; it must hold keys"), ("[{steps: 5}]", "stage 1: steps is 5; it must hold keys"),
        ("[{training: {steps: yes}}]", "stage 1: training.steps is true"),
        ("[{training: {steps: many}}]", "stage 1: training.steps is 'many'"),
        ("[{stages: {}}]", "stage 1: unknown configuration section 'stages'"),
        ("[{tokens: 0}]", "stage 1: tokens is 0; it must be a whole number"), ("[{tokens: yes}]", "tokens is True"), ("[{tokens: 2.5}]", "tokens is 2.5"),
        ("[{tokens: 90, training: {steps: 3}}]", "stage 1: tokens and training.steps both say how long it is"),
        ("[{}, {model: {dim: 64}}]", "stage 2: model.dim is 64 here and 256 above; a stage changes only what has no weights: block, "),
        ("[{training: {seed: 3}}]", "stage 1: training.seed holds for the whole run; set it outside the stages"),
        ("[{corpus: {store: x}}]", "stage 1: corpus.store holds for the whole run"), ("[{tracking: {uri: x}}]", "stage 1: tracking holds for the whole run"),
        ("[{}, {mesh: {ulysses: 3}}]", "stage 2: 8 query heads do not divide"), ("[{}, {mesh: {dp: 2}}]", "stage 2: training.batch = 1 sequences do not"),
        ("[{mesh: {ring: 2}, cluster: {workers: 3}}]", "stage 1: the mesh dp × ring × ulysses × tp = 1 × 2 × 1 × 1 needs 2 workers, not 3"),
    ])
    # fmt: on
    def test_what_is_wrong_in_one_says_in_which(self, stages, said):
        assert said in refusal(None, f"stages={stages}")

    def test_an_assignment_into_them_is_refused(self, file):
        assert "it must" in refusal(None, "stages.steps=3") and "it must" in refusal(file("stages: []\n"), "stages.1.training=3")


@pytest.mark.parametrize(
    "before, after, field",
    [
        ({}, dict(rope_theta=1e6, window=64, sinks=4, norm_eps=1e-6), None),
        ({}, dict(positions="none", block=16, pooling="learnt"), None),
        ({}, dict(top_blocks=2, top_block_size=8), None),
        ({}, dict(dim=512), "dim"),
        ({}, dict(heads=4, head_dim=64), "heads"),  # the same shapes, and yet another model
        ({}, dict(tie_embeddings=True), "tie_embeddings"),
        ({}, dict(memory=1), "memory"),
        ({}, dict(window=8, segment=8, pooling="mean", summaries=2), None),
        ({}, dict(window=8, segment=8), "segment"),
        (dict(window=8, segment=8), dict(window=16, segment=16, reach=4), None),
        (dict(window=8, segment=8), dict(window=8, segment=8, summaries=2), "summaries"),
        (dict(window=8, segment=8), dict(window=8, segment=8, pooling="mean"), "pooling"),
    ],
)
def test_what_weights_hang_on(before, after, field):
    assert ModelConfig(**before).other_weights(ModelConfig(**after)) == field
    assert (ModelConfig(**after).other_weights(ModelConfig(**before)) is None) == (field is None)
