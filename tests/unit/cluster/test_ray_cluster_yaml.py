"""The cluster file passes Ray's own validation and the checks that Ray doesn't make; broken copies are refused.

`prepare_config` and `validate_config` are private to Ray: this test is also the alarm for the day they change.
"""

import copy
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
NODE_START_MINUTES = 12  # boot, image, packages; the assumption stated in the file


@pytest.fixture(scope="module")
def config() -> dict:
    return yaml.safe_load((ROOT / "ray_cluster.yaml").read_text(encoding="utf-8"))


def ray_objects(config: dict) -> list[str]:
    """What Ray's own validation says against a configuration."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(copy.deepcopy(config)))
    except Exception as error:  # whatever class it uses, it is a refusal
        return [f"ray: {type(error).__name__}: {error}"]
    return []


def problems(config: dict) -> list[str]:
    """Ray's objections, or where it has none, ours."""
    if found := ray_objects(config):
        return found
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    types, docker = config.get("available_node_types", {}), config["docker"]
    workers = {name: node for name, node in types.items() if name != config.get("head_node_type")}

    images = [docker[key] for key in ("image", "head_image", "worker_image") if key in docker]
    images += [image for node in types.values() for key, image in node.get("docker", {}).items() if key.endswith("image")]
    found += [f"image {image} isn't Ray {pins['ray']}" for image in images if image.partition(":")[2].split("-")[0] != pins["ray"]]
    if not any("-c /home/ray/ringspan/constraints.txt" in command for command in config["setup_commands"]):
        found.append("packages are installed without the pins")

    head = types.get(config.get("head_node_type"), {})
    if head.get("resources", {}).get("CPU") != 0:
        found.append("tasks may land on the head")
    trainers = [name for name, node in types.items() if node.get("labels", {}).get("pool") == "train"]
    if len(trainers) != 1 or not types[trainers[0]].get("resources", {}).get("GPU"):
        found.append(f"pool=train must be exactly one GPU type, not {trainers}")
    for name, node in workers.items():
        resources = node.get("resources", {})
        if resources.get("CPU", 0) <= resources.get("GPU", 0):
            found.append(f"{name}: no CPU is left for Ray Data beside one rank a GPU")
        if node.get("min_workers", 0) != 0:
            found.append(f"{name}: costs money while nothing runs")
    if config["max_workers"] != sum(node.get("max_workers", 0) for node in workers.values()):
        found.append("max_workers isn't the sum of the types")
    if config["idle_timeout_minutes"] < 1.5 * NODE_START_MINUTES:
        found.append("nodes of a mesh are taken away while the others start")

    options = " ".join(docker.get("run_options", []))
    if "RAY_AUTH_MODE=token" not in options:
        found.append("token authentication is off")
    token = re.search(r"RAY_AUTH_TOKEN_PATH=(\S+)/auth_token", options)
    if token is None or token[1] not in config["file_mounts"]:
        found.append("the token isn't mounted where Ray looks for it")
    if any(Path(source).suffix for source in config["file_mounts"].values() if source != "."):
        found.append("a single file is mounted: Docker would keep the old one")
    if config["provider"].get("use_internal_ips") is not True:
        found.append("nodes have public addresses")
    for name, node in types.items():
        if not node["node_config"].get("SecurityGroupIds"):
            found.append(f"{name}: Ray's own security group opens SSH to the world")
        if not all(disk["Ebs"].get("Encrypted") for disk in node["node_config"].get("BlockDeviceMappings", [{"Ebs": {}}])):
            found.append(f"{name}: the disk isn't encrypted")
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    if not any("--dashboard-host=127.0.0.1" in command for command in starts) or "0.0.0.0" in " ".join(starts):
        found.append("the dashboard, which takes jobs, listens beyond loopback")
    if "--volume /mnt/ringspan:/mnt/ringspan" not in options or not any(
        "/mnt/ringspan" in c and "mount -t" in c for c in config["initialization_commands"]
    ):
        found.append("no shared file system for runs")
    return found


def test_the_cluster_file_is_accepted(config):
    assert problems(config) == []


def change(*path, to=None, drop=False):
    def apply(config: dict) -> None:
        for key in path[:-1]:
            config = config[key]
        if drop:
            del config[path[-1]]
        else:
            config[path[-1]] = to

    return apply


TYPES = "available_node_types"
MUTATIONS = {
    "a typo at the top": (change("idle_timeout_minuts", to=5), "ray:"),
    "a typo in a node type": (change(TYPES, "train", "max_worker", to=5), "ray:"),
    "a head type that isn't there": (change("head_node_type", to="nobody"), "ray:"),
    "an unknown provider": (change("provider", "type", to="awz"), "ray:"),
    "resources left to the cloud": (change(TYPES, "train", "resources", drop=True), "ray:"),
    "resources that are no number": (change(TYPES, "train", "resources", "GPU", to="eight"), "ray:"),
    "more nodes at least than at most": (change(TYPES, "train", "min_workers", to=50), "ray:"),
    "another Ray in the workers": (change("docker", "worker_image", to="rayproject/ray:2.59.0-py311-gpu"), "isn't Ray"),
    "a Ray that moves": (change("docker", "head_image", to="rayproject/ray:latest"), "isn't Ray"),
    "another Ray in one type": (change(TYPES, "data", "docker", "worker_image", to="rayproject/ray:2.6.0-py311-cpu"), "isn't Ray"),
    "no pins": (change("setup_commands", to=["pip install ringspan"]), "without the pins"),
    "tasks on the head": (change(TYPES, "head", "resources", "CPU", to=8), "on the head"),
    "no training pool": (change(TYPES, "train", "labels", drop=True), "pool=train"),
    "two training pools": (change(TYPES, "data", "labels", "pool", to="train"), "pool=train"),
    "no CPU for Ray Data": (change(TYPES, "train", "resources", "CPU", to=8), "no CPU is left"),
    "a node that never sleeps": (change(TYPES, "train", "min_workers", to=1), "costs money"),
    "a type that starves another": (change("max_workers", to=4), "sum of the types"),
    "nodes that go while others come": (change("idle_timeout_minutes", to=5), "taken away"),
    "no authentication": (change("docker", "run_options", 0, to="--env RAY_AUTH_MODE=disabled"), "authentication is off"),
    "no token on the nodes": (change("file_mounts", "/home/ray/ringspan-auth", drop=True), "token isn't mounted"),
    "a token mounted as a file": (change("file_mounts", "/home/ray/token", to="~/token.txt"), "single file"),
    "public addresses": (change("provider", "use_internal_ips", to=False), "public addresses"),
    "Ray's own security group": (change(TYPES, "train", "node_config", "SecurityGroupIds", drop=True), "SSH to the world"),
    "a plain disk": (
        change(TYPES, "data", "node_config", "BlockDeviceMappings", to=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 9}}]),
        "encrypted",
    ),
    "a dashboard for everybody": (change("head_start_ray_commands", 1, to="ray start --head --dashboard-host=0.0.0.0"), "beyond loopback"),
    "runs on a local disk": (change("initialization_commands", to=[]), "no shared file system"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_copy_is_refused(config, name):
    broken = copy.deepcopy(config)
    apply, reason = MUTATIONS[name]
    apply(broken)
    found = problems(broken)
    assert any(reason in problem for problem in found), f"{name}: {found}"
