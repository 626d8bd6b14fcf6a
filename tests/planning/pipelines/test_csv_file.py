"""CSV files of schedules: torch reads ours, and we read torch's."""

import csv
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from pyparallel.pipeline import GPipe, Interleaved, OneForwardOneBackward, ZeroBubble, parse_action
from pyparallel.planning.pipelines import read_csv, without_updates, write_csv
from tests.pipeline.every_schedule import EVERY_SCHEDULE

NOT_SIMULATED = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"}
SIZES = [(1, 1), (1, 4), (2, 2), (2, 8), (4, 4), (4, 8), (4, 3), (3, 9)]  # ranks, microbatches


def torch_stages(num_ranks, per_rank=1, rank=0):
    """Return stand-ins with the attributes that torch's schedules read before they run."""
    return [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_ranks * per_rank,
            group_size=num_ranks,
            group_rank=rank,
            is_last=index == num_ranks * per_rank - 1,
            has_backward=True,
            submod=torch.nn.Identity(),
        )
        for index in range(rank, num_ranks * per_rank, num_ranks)
    ]


def torch_actions(order):
    """Return torch's computations as our actions."""
    words = [
        [str(action) for action in order[rank] if action is not None] for rank in sorted(order)
    ]
    return tuple(
        tuple(parse_action(word) for word in rank if "REDUCE" not in word) for rank in words
    )


def counted_from_0(action):
    if action is None or action.computation_type is not theirs.FORWARD:
        return action
    return action._replace(microbatch_index=action.microbatch_index - 1)


def test_round_trip(tmp_path, subtests):
    for schedule in EVERY_SCHEDULE:
        with subtests.test(schedule=schedule):
            actions = schedule.actions(4, 6, 2, steps=2)
            write_csv(actions, tmp_path / "schedule.csv")
            assert read_csv(tmp_path / "schedule.csv") == actions


def test_torch_loads_our_files(tmp_path, subtests):
    for schedule in EVERY_SCHEDULE:
        for stages in [4, 8]:
            with subtests.test(schedule=schedule, stages=stages):
                ours = without_updates(schedule.actions(stages, 8, 4))
                write_csv(ours, tmp_path / "schedule.csv")
                runtime = theirs._PipelineScheduleRuntime(torch_stages(4, stages // 4), 8)
                runtime._load_csv(str(tmp_path / "schedule.csv"))
                assert torch_actions(runtime.pipeline_order) == ours
                # Torch's own search for deadlocks, which knows only computation and communication.
                lowered = {
                    rank: [
                        action
                        for action in order
                        if not NOT_SIMULATED & {action.computation_type.value}
                    ]
                    for rank, order in runtime.pipeline_order_with_comms.items()
                }
                theirs._simulate_comms_compute(
                    lowered, runtime.stage_index_to_group_rank.get, stages
                )


ON_SEVERAL_STAGES = [
    (theirs.ScheduleInterleaved1F1B, Interleaved()),
    (theirs.ScheduleInterleavedZeroBubble, ZeroBubble()),
]


def test_torch_runs_the_same_actions_on_several_stages(tmp_path, subtests):
    for kind, ours in ON_SEVERAL_STAGES:
        for per_rank in [1, 2, 3]:
            with subtests.test(ours=ours, per_rank=per_rank):
                for ranks, microbatches in SIZES:
                    schedule = kind(
                        torch_stages(ranks, per_rank), microbatches, loss_fn=lambda *_: None
                    )
                    expected = without_updates(ours.actions(ranks * per_rank, microbatches, ranks))
                    assert torch_actions(schedule.pipeline_order) == expected
                    for form in ["compute_only", "compute_comms"]:
                        schedule._dump_csv(str(tmp_path / "torch.csv"), format=form)
                        assert read_csv(tmp_path / "torch.csv") == expected


@pytest.mark.parametrize(
    ("kind", "ours"),
    [(theirs.ScheduleGPipe, GPipe()), (theirs.Schedule1F1B, OneForwardOneBackward())],
    ids=["GPipe", "1F1B"],
)
def test_torch_runs_the_same_actions_on_one_stage(tmp_path, kind, ours):
    # The pipeline_order of torch's 1F1B has forwards that do not exist with fewer microbatches
    # than ranks, and counts those of the last rank from 1. Its execution is correct.
    for ranks, microbatches in [size for size in SIZES if size[0] <= size[1]]:
        (stage,) = torch_stages(ranks)
        order = kind(stage, microbatches, loss_fn=lambda *_: None).pipeline_order
        expected = without_updates(ours.actions(ranks, microbatches))
        if ours == OneForwardOneBackward():
            order[ranks - 1] = [counted_from_0(action) for action in order[ranks - 1]]
        assert torch_actions(order) == expected
        with (tmp_path / "torch.csv").open("w", newline="") as file:
            csv.writer(file).writerows(order[rank] for rank in sorted(order))
        assert read_csv(tmp_path / "torch.csv") == expected


def test_an_overlapped_pair_is_read_as_two_actions_and_waits_are_dropped(tmp_path):
    (tmp_path / "torch.csv").write_text("0F0,0F1,(0B0;0F2)OVERLAP_F_B,,0WAIT_SEND_F1,0B1,0B2\n")
    (rank,) = read_csv(tmp_path / "torch.csv")
    assert " ".join(map(str, rank)) == "0F0 0F1 0B0 0F2 0B1 0B2"


def test_the_error_names_line_and_column_of_a_bad_entry(tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1F0,1Q0\n")
    with pytest.raises(ValueError, match=r"bad\.csv, line 2, column 2: an action must .* '1Q0'$"):
        read_csv(tmp_path / "bad.csv")
