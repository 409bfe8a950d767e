"""Defaults < preset or file < --set; what is wrong is answered in one line that names the key, the value and the way out."""

import dataclasses

import pytest
import yaml

from pipelines.config import Config, load_config, presets


def refusal(source, *assignments) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(source, assignments).mesh_spec()
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
    assert config.mesh_spec().world >= 1
    config.training.micro_steps(config.mesh_spec().dp)


def test_the_last_word_is_that_of_the_command_line(file):
    path = file("training: {steps: 7, context: 256}\nmesh: {ring: 2}\n")
    config = load_config(path, ("training.steps=9", "training.steps=11", " mesh.tp = 4 "))
    assert (config.training.steps, config.training.context, config.training.batch) == (11, 256, 1)
    assert (config.mesh.ring, config.mesh.tp) == (2, 4)


def test_what_is_printed_loads_as_the_same(file):
    config = load_config("code_completion/tiny", ("corpus.store=/a/b", "training.learning_rate=1e-3", "corpus.overlap=5"))
    assert load_config(file(config.to_yaml())) == config


def test_every_section_is_a_frozen_dataclass_whose_docstring_or_name_says_its_keys():
    for name, info in Config.model_fields.items():
        assert dataclasses.is_dataclass(info.annotation) and info.annotation.__dataclass_params__.frozen, name


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
    assert refusal(None, assignment) == f"unknown configuration key {assignment.split('=')[0]}; the nearest is {nearest} (see: ringspan config)"


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
    "training.beta1=1.5", "training.beta2=-0.1", "training.eps=-1", "training.final_ratio=-1", "training.seed=-1",
    "training.seed=1267650600228229401496703205376", "training.skips_in_a_row=0", "training.evaluate_every=-1",
    "checkpoint.every=-1", "checkpoint.keep=0", "corpus.store=3", "corpus.held_out=half", "corpus.held_out_windows=-1",
    "corpus.overlap=-1", "corpus.held_out=1.5", "corpus.positions=backwards",
    "mesh.ring=0", "mesh.tp=two", "mesh.dp=0", "mesh.ulysses=-1", "attention.layout=spiral", "attention.backend=fastest",
    "model.dim=0", "model.layers=-1", "model.head_dim=0", "model.norm_eps=-1", "model.rope_theta=0", "model.tie_embeddings=perhaps",
    "model.vocab_size=0",
    "cluster.workers=0", "cluster.workers=-1", "cluster.cpus_per_worker=0", "cluster.cpus_per_worker=-1", "cluster.gpus_per_worker=-1",
    "cluster.max_failures=-5", "cluster.collective_timeout=0",
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
    assert {f"{section}.{key}" for section, keys in tree.items() for key in keys} == {
        f"{name}.{field.name}" for name, info in Config.model_fields.items() for field in dataclasses.fields(info.annotation)
    }
