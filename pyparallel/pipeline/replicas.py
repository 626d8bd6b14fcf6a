"""The replicas of a pipeline: whole pipelines, whose stages average with each other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm import Call, Collectives, Run, gather_json
from ..training import Algorithm, Place
from ..training.arguments import check_type, require
from .messages.format import Refusal, RefusalKind
from .runtime.clipping import device_for
from .runtime.replicated_predictor import ReplicatedPredictor
from .schedules.schedule import Schedule

REPLICATE, STAGE = "replicate", "stage"  # dimensions of a mesh
_NAMES = f'"{REPLICATE}" and "{STAGE}"'


def check_mesh(mesh: Any, algorithm: Any, process_group: object) -> None:
    """Raise a ValueError or TypeError for a trainer's ``mesh`` and ``replicas``, if it has any."""
    if mesh is None and algorithm is None:
        return
    got = "replicas alone" if mesh is None else "mesh alone"
    fix = 'pass mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "stage")) and '
    fix += "replicas=AllReduce() or a gossip algorithm"
    is_both = mesh is not None and algorithm is not None
    require(is_both, "mesh and replicas must be given together", got, fix)
    check_type("mesh", mesh, DeviceMesh, f"a DeviceMesh with the dimensions {_NAMES}")
    names = mesh.mesh_dim_names or ()
    require(set(names) == {REPLICATE, STAGE}, f"mesh must have the dimensions {_NAMES}", names)
    count = dist.get_world_size()
    require(mesh.size() == count, f"mesh must have all {count} ranks", mesh.size())
    rule = "process_group must be None with mesh, whose group it is"
    require(process_group is None, rule, process_group)
    check_type("replicas", algorithm, Algorithm, "an object such as AllReduce() or SGP()")
    algorithm.bind(mesh.size(names.index(REPLICATE)))


def place_of_replicas(
    schedule: Schedule, num_replicas: int, dtypes: Iterable[torch.dtype] = ()
) -> Place:
    """Return the place of an algorithm that averages replicas with parameters of some dtypes."""
    return Place(
        num_replicas,
        size_rule=f"replicas must be for the mesh's {num_replicas}: ",
        dtypes=frozenset(dtypes),
        schedule=type(schedule).__name__,
        flushes=schedule.flushes,
    )


@dataclass(frozen=True)
class Replicas:
    """This rank's replica among the others.

    Args:
        algorithm: of gossip, or ``AllReduce()``, of gradients.
        run: of all ranks of the mesh.
        members: the ranks of the mesh that hold the same stages, this rank's of each replica.
    """

    algorithm: Algorithm
    run: Run
    members: Sequence[int]

    def metrics(self) -> dict[str, float]:
        """Return what was sent to other replicas and waited for them since the trainer began."""
        stats = self.run.stats
        return {
            "rank/bytes_sent_to_replicas": stats.wire_bytes,
            "rank/waited_for_replicas_seconds": stats.waiting_seconds,
        }

    def agree_on_split(self, split: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first replica's split, which was measured there."""
        own = torch.tensor(split, dtype=torch.int64, device=device_for([], self.run))
        Collectives(self.run).broadcast_(own, 0)
        return tuple(own.tolist())

    def start(
        self, stages: Sequence[ReplicatedPredictor], frozen: Sequence[nn.Module]
    ) -> "GradientAverage | None":
        """Begin with the first replica's weights; return what averages gradients, if any does.

        ``frozen`` are the stages without parameters to train.
        """
        run, averages_gradients = self.run.within(self.members), self.algorithm.averages_gradients
        for module in frozen:
            for tensor in [*module.parameters(), *module.buffers()]:
                Collectives(run).broadcast_(tensor.detach(), 0)
        for stage in stages:
            start = None if averages_gradients else self.algorithm.start
            stage.start(start, run if averages_gradients else self.run.within(self.members))
        return GradientAverage(run, stages) if averages_gradients else None


class GradientAverage:
    """The mean of the replicas' gradients, which all of them wait for before an update."""

    def __init__(self, run: Run, stages: Sequence[ReplicatedPredictor]) -> None:
        self._run, self._collectives = run, Collectives(run, run.stats)
        self._parameters = [p for stage in stages for p in stage.parameters]
        self._device = device_for(self._parameters, run)

    def average_(
        self, weight: float, refusals: Sequence[Refusal], *, skips: bool
    ) -> list[Refusal] | None:
        """Average the gradients in place, unless a replica skips the update, as all then must.

        ``weight`` is that of this replica's batch in the mean; all skip if none has one. Return
        None, or why a replica skips the update, of any number of refusals. A parameter without a
        gradient on any replica keeps none.
        """
        has_gradient = [p.grad is not None for p in self._parameters]
        counts = self._run.row(self._device)
        own = [weight, skips, *has_gradient]
        flags = torch.tensor(own, dtype=torch.float64, device=self._device)
        rows = self._collectives.all_gather(torch.cat([counts, flags]))
        self._run.compare_all(rows[:, : len(counts)].tolist())
        total = float(rows[:, len(counts)].sum())
        is_skipped, *found = rows[:, len(counts) + 1 :].any(0).tolist()
        if is_skipped or not total:
            return self._exchange(refusals)
        gradients: dict[torch.dtype, list[Tensor]] = {}
        for parameter, is_needed in zip(self._parameters, found, strict=True):
            if is_needed:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                gradients.setdefault(dtype, []).append(parameter.grad)
        for dtype, each in gradients.items():
            flat = torch.cat([gradient.flatten().to(dtype) for gradient in each])
            flat.mul_(weight / total)
            self._collectives.all_reduce_(flat)
            for gradient, mean in zip(each, flat.split([g.numel() for g in each]), strict=True):
                gradient.copy_(mean.view_as(gradient))
        return None

    def _exchange(self, refusals: Sequence[Refusal]) -> list[Refusal]:
        own = [[each.kind, each.text] for each in refusals]
        what = "refusals of an update"
        of_replicas = gather_json(own, self._run.group, what, what, _parse_refusals, Call.STEP)
        return [refusal for replica in of_replicas for refusal in replica]


def _parse_refusals(sent: Any) -> list[Refusal]:
    """Return what a replica has sent; a TypeError or a ValueError if it sent something else."""
    return [Refusal(RefusalKind(kind), str(text)) for kind, text in sent]
