"""The mesh: which rank does what, and which process groups it talks through.

Axes, outermost first: ``dp`` (data) × ``pp`` (pipeline) × ``ring`` × ``ulysses`` (together the context axis, ``cp``) × ``tp`` (tensor).
Tensor ranks are neighbours, so that a node holds whole tensor groups; then ulysses ranks; then a ring. A stage's ranks are
neighbours, too: what crosses to the next stage is one activation a micro-batch, the least of all traffic but that of dp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workers.attention.transport import Ring, Traffic

LAYOUTS = ("zigzag", "contiguous", "striped")


@dataclass(frozen=True)
class MeshSpec:
    """The sizes of the mesh. ``dp=-1`` takes the workers that the other axes leave.

    ``layout`` says which tokens of a sequence a context rank holds (see ``workers.attention.layout``).
    ``pp``: stages that the blocks are split over. ``replicate``: whole copies of the weights, each sharded over dp × cp / replicate
    ranks (hybrid sharding, HSDP); the copies are the outermost part of dp, so gathers of weights stay inside a copy's nodes.
    ``sync_every_blocks``: blocks whose weights are gathered, and whose gradients are reduced, in one message.
    """

    dp: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    layout: str = "zigzag"
    pp: int = 1
    replicate: int = 1
    sync_every_blocks: int = 1

    def __post_init__(self):
        for axis in ("ring", "ulysses", "tp", "pp", "replicate", "sync_every_blocks"):
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh.{axis} is {getattr(self, axis)}; it must be at least 1")
        if self.dp < 1 and self.dp != -1:
            raise ValueError(f"mesh.dp is {self.dp}; it must be at least 1, or -1 for the workers that are left")
        if self.layout not in LAYOUTS:
            raise ValueError(f"attention.layout is {self.layout!r}; it must be one of {', '.join(LAYOUTS)}")
        if self.dp % self.replicate and self.dp != -1:
            raise ValueError(
                f"mesh.replicate = {self.replicate} does not divide mesh.dp = {self.dp}; each copy of the weights needs whole dp groups"
            )

    @property
    def cp(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def ranks_per_group(self) -> int:
        """Ranks of one data-parallel group: they work on the same sequences."""
        return self.pp * self.cp * self.tp

    @property
    def _group_axes(self) -> tuple[str, str]:
        """The axes inside a data-parallel group and their sizes, as messages name them: pp only where there are stages."""
        axes = ("pp",) * (self.pp > 1) + ("ring", "ulysses", "tp")
        return " × ".join(axes), " × ".join(str(getattr(self, axis)) for axis in axes)

    @property
    def world(self) -> int:
        """Ranks of the whole mesh; ``dp`` must be resolved."""
        assert self.dp > 0, "resolve() the mesh before asking for its size"
        return self.dp * self.ranks_per_group

    def resolve(self, workers: int | None = None) -> MeshSpec:
        """This mesh with ``dp`` settled for ``workers`` ranks (``None``: as many as the mesh says).

        Raises ValueError when the product of the axes is not the number of workers.
        """
        names, sizes = self._group_axes
        if self.dp == -1:
            workers = self.ranks_per_group if workers is None else workers
            if workers < 1 or workers % self.ranks_per_group:
                raise ValueError(
                    f"{workers} workers cannot be split into groups of {names} = {sizes} = {self.ranks_per_group}; "
                    f"use a multiple of {self.ranks_per_group} workers"
                )
            return replace(self, dp=workers // self.ranks_per_group)
        if workers is not None and workers != self.world:
            raise ValueError(
                f"the mesh dp × {names} = {self.dp} × {sizes} needs {self.world} workers, not {workers}; "
                f"change the mesh, or set cluster.workers to {self.world} or null"
            )
        return self

    def check_model(self, model) -> None:
        """Raise ValueError when the heads or the feed-forward size of ``model`` (a ModelConfig) do not divide over the mesh."""
        if model.heads % (self.tp * self.ulysses):
            raise ValueError(
                f"{model.heads} query heads do not divide by tp × ulysses = {self.tp} × {self.ulysses}; "
                f"choose a mesh whose tp × ulysses divides {math.gcd(model.heads, model.kv_heads)}"
            )
        per_rank = model.kv_heads // self.tp
        if model.kv_heads % self.tp or (per_rank % self.ulysses and self.ulysses % per_rank):
            # Fewer KV heads than ulysses ranks are repeated (``ulysses.replicate``), but only whole.
            raise ValueError(
                f"{model.kv_heads} KV heads do not divide by tp × ulysses = {self.tp} × {self.ulysses}; "
                f"choose a mesh whose tp × ulysses divides {math.gcd(model.heads, model.kv_heads)}"
            )
        if model.ffn_dim % self.tp:
            raise ValueError(f"model.ffn_dim = {model.ffn_dim} does not divide by mesh.tp = {self.tp}")
        if self.pp > model.layers:
            raise ValueError(
                f"mesh.pp = {self.pp} stages for model.layers = {model.layers} blocks; every stage needs one: use at most {model.layers}"
            )

    @property
    def length_multiple(self) -> int:
        """A sequence is padded to a multiple of this many tokens.

        Zigzag needs two chunks a ring rank; sequence-parallel norms split what a context rank holds over tp.
        """
        return 2 * self.ring * self.ulysses * self.tp

    def padded(self, length: int) -> int:
        """``length`` rounded up to what the mesh divides."""
        return -(-length // self.length_multiple) * self.length_multiple

    def build(self, device_type: str) -> Mesh:
        """The mesh of this process; ``torch.distributed`` must be initialised with ``world`` ranks."""
        spec = self.resolve(dist.get_world_size())
        sizes = {
            "replicate": spec.replicate, "shard": spec.dp // spec.replicate, "pp": spec.pp,
            "ring": spec.ring, "ulysses": spec.ulysses, "tp": spec.tp,
        }  # fmt: skip
        # Each axis costs every rank a process group, so these two are axes only where they are used.
        sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis not in ("replicate", "pp")}
        return Mesh(spec, init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


def split_context(cp: int, heads: int, kv_heads: int, tp: int = 1, ranks_per_node: int = 8) -> tuple[int, int]:
    """(ring, ulysses) for ``cp`` ranks that share a sequence.

    Ulysses is the cheaper exchange where links are fast, and stops at a node and at the KV heads of a tensor rank (beyond
    them heads would be sent twice): it gets the largest divisor of ``cp`` that fits both, the ring gets the rest.
    """
    shared = math.gcd(heads, kv_heads)
    fits = [u for u in range(1, cp + 1) if cp % u == 0 and shared % (tp * u) == 0 and tp * u <= max(ranks_per_node, tp)]
    ulysses = max(fits, default=1)
    return cp // ulysses, ulysses


class Mesh:
    """A built mesh: this rank's coordinates, and the groups named by what they are for.

    - ``ring_transport``, ``ulysses_group``: hops and all-to-alls of attention, counted in ``traffic``;
    - ``tp``: the axis of tensor parallelism, a one-dimensional DeviceMesh;
    - ``fsdp``: ``dp × ring × ulysses`` flattened: weights, gradients and optimizer state are sharded over it. With copies of
      the weights it has two dimensions, ``replicate`` × the ranks that share a copy;
    - ``pp_group``: the ranks with this one's place in every stage, first stage first: its part of the activations travels
      along it. None where there is one stage;
    - ``group``: the ranks of this data-parallel group, which read the same sequences. Its first rank is the leader.
    """

    def __init__(self, spec: MeshSpec, device_mesh: DeviceMesh):
        self.spec = spec
        self.device_mesh = device_mesh
        self.device_type = device_mesh.device_type
        self.tp = device_mesh["tp"]
        self.fsdp = device_mesh["shard", "ring", "ulysses"]._flatten("fsdp")
        if spec.replicate > 1:
            self.fsdp = DeviceMesh._concatenate([device_mesh["replicate"], self.fsdp])
        self.traffic = Traffic()
        self.ring_transport = Ring(device_mesh["ring"].get_group(), self.traffic)
        self.ulysses_group = device_mesh["ulysses"].get_group()
        self.pp_group = device_mesh["pp"].get_group() if spec.pp > 1 else None
        at = dict(zip(device_mesh.mesh_dim_names, device_mesh.get_coordinate()))
        self.dp_rank = at.get("replicate", 0) * (spec.dp // spec.replicate) + at["shard"]
        self.pp_rank, self.ring_rank, self.ulysses_rank, self.tp_rank = at.get("pp", 0), at["ring"], at["ulysses"], at["tp"]
        # A group of its own: the leader scatters batches on it while attention hops run on the ring group.
        group = ("pp", "ring", "ulysses", "tp") if spec.pp > 1 else ("ring", "ulysses", "tp")
        self.group = device_mesh[group]._flatten("group").get_group()
        self.leader = dist.get_process_group_ranks(self.group)[0]

    @property
    def ring(self) -> int:
        return self.spec.ring

    @property
    def ulysses(self) -> int:
        return self.spec.ulysses

    @property
    def layout(self) -> str:
        return self.spec.layout

    @property
    def cp_rank(self) -> int:
        return self.ring_rank * self.spec.ulysses + self.ulysses_rank

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the norm, the head and the loss."""
        return self.pp_rank == self.spec.pp - 1

    @property
    def is_leader(self) -> bool:
        return dist.get_rank() == self.leader

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return torch.device(self.device_type, torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")
