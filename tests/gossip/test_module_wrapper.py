"""Functions of torch and of other libraries on a trainer: it has the names of its module."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as checkpoints
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from pyparallel import GossipDataParallel
from pyparallel.compression import Int8
from pyparallel.gossip import SGP, AllReduce, GossipState
from pyparallel.gossip.topology import OnePeerExponential, Ring
from pyparallel.pipeline import OneForwardOneBackward, PipelineTrainer
from pyparallel.training import clone_tensors_for_torch_save
from tests.gossip.loops import step, wrap
from tests.workers import on_ranks


class Model(nn.Sequential):
    """With what a Hugging Face model has beside its parameters."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.config = {"layers": 4}

    def forward(self, inputs):
        return super().forward(inputs) * self.scale

    @torch.no_grad()
    def generate(self, inputs, steps):
        return [self(inputs) for _ in range(steps)]


def build(kind="plain"):
    torch.manual_seed(0)
    model = Model()
    if kind == "with a compiled layer":
        model[0] = torch.compile(model[0], backend="eager")
    return torch.compile(model, backend="eager") if kind == "compiled" else model


KINDS = ["plain", "compiled", "with a compiled layer"]
KEYS = list(build().state_dict())


def equal(left, right):
    return set(left) == set(right) and all(torch.equal(left[key], right[key]) for key in left)


# ------------------------------------------------------------------ one rank: names and conversions


def names(rank, kind):
    bare = build(kind)
    model, optimizer = wrap(SGP(Ring(1)), bare)
    inner = model.module
    step(model, optimizer)
    assert model.get_parameter("0.weight") is inner[0].weight
    assert model.get_parameter("scale") is model.scale is inner.scale
    assert model.get_buffer("1.running_mean") is inner[1].running_mean
    assert model.get_submodule("3") is inner[3] is model.get_submodule("module.3")
    assert model.config is inner.config
    inputs = torch.ones(2, 4)
    model.eval()
    assert torch.equal(model.generate(inputs, 2)[1], model(inputs))
    assert list(model.named_parameters(recurse=False)) == []
    for absent in ("absent", "_absent"):
        assert not hasattr(model, absent)
    with pytest.raises(AttributeError, match="object has no attribute 'absent'"):
        _ = model.absent
    assert list(checkpoints.get_model_state_dict(model)) in (
        KEYS,
        [*KEYS[:1], *KEYS[3:], *KEYS[1:3]],
    )
    full = checkpoints.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert sorted(full) == sorted(KEYS)
    states = checkpoints.get_state_dict(model, optimizer)
    parameters = {name for name, _ in build().named_parameters()}
    assert set(states[1]["state"]) == parameters
    if kind != "with a compiled layer":  # whose keys torch's functions alone rename
        assert list(model.state_dict()) == KEYS
        assert {name for name, _ in model.named_parameters()} == parameters
    storage = inner[0].weight.data_ptr()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert inner[0].weight.data_ptr() == storage
    with pytest.raises(ValueError, match="assign must be False"):
        model.load_state_dict(model.state_dict(), assign=True)
    assert "SGP(topology=Ring(1), overlap=0, compressor=None)" in repr(model)
    fields = str(model.config_fields)
    assert "_orig_mod" not in fields
    for other in KINDS:  # also those that torch saves of a compiled model
        saved = {key: value + 1 for key, value in build(other).state_dict().items()}
        model.load_state_dict(saved)
        loaded = checkpoints.get_model_state_dict(model)
        assert equal(loaded, {key: value + 1 for key, value in build().state_dict().items()})
    return fields


def test_names_and_keys_are_the_modules_own(ranks):
    (plain,), *others = [ranks.run(1, names, kind) for kind in KINDS]
    assert others == [[plain], [plain]]


class Derived(GossipDataParallel):
    @property
    def broken(self):
        return (1).typo


@on_ranks(1)
def test_a_conversion_that_changes_nothing_is_accepted(rank):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2).bfloat16())
    module.to(memory_format=torch.channels_last)
    module.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
    model = Derived(module, torch.optim.SGD(module.parameters(), lr=0.1), SGP(Ring(1)))
    with pytest.raises(AttributeError, match="'int' object has no attribute 'typo'"):
        _ = model.broken
    before = {name: (p, p.data_ptr()) for name, p in module.named_parameters()}
    for change_nothing in (
        lambda: model.to("cpu"),
        lambda: model.to(torch.device("cpu:1")),
        lambda: model.to(device=torch.device("cpu:0")),
        lambda: model.to(torch.device("cpu"), non_blocking=True),
        model.cpu,
        lambda: model.to(memory_format=torch.channels_last),
        lambda: nn.Sequential(model).cpu()[0],
    ):
        assert change_nothing() is model
    assert before == {name: (p, p.data_ptr()) for name, p in module.named_parameters()}
    for move in (
        model.double,
        model.half,
        model.float,  # a layer is bfloat16
        lambda: model.to("meta"),
        lambda: model.to(torch.bfloat16),
        lambda: model.to(memory_format=torch.contiguous_format),
        lambda: model.to_empty(device="cpu"),
        model.share_memory,
    ):
        with pytest.raises(RuntimeError, match="must be moved or converted before it is wrapped"):
            move()


def size(value):
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@on_ranks(1)
def test_a_part_is_saved_without_its_bucket(rank):
    embedding = nn.Embedding(1000, 8)
    head = nn.Linear(8, 1000, bias=False)
    head.weight = embedding.weight
    module = nn.Sequential(
        embedding, nn.Linear(8, 8), nn.ModuleDict({"a": head, "b": nn.Linear(8, 8)})
    )
    alone = size(module[1].state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = GossipDataParallel(module, optimizer, SGP(Ring(1)))
    assert size(module[1].state_dict()) > 10 * alone  # the views' storage is the whole bucket
    clone = clone_tensors_for_torch_save(module[1].state_dict())
    assert size(clone) <= alone
    assert equal(clone, module[1].state_dict())
    tied = clone_tensors_for_torch_save([module.state_dict(), {"step": 3}])
    assert tied[0]["0.weight"] is tied[0]["2.a.weight"]
    assert tied[1] == {"step": 3}
    for state in (model.state_dict(), module.state_dict()):
        assert size({key: value for key, value in state.items() if key.startswith("1.")}) <= alone
    with torch.no_grad():
        module[1].weight += 1
    assert torch.equal(state["1.weight"], module[1].weight)  # still the live tensors


@on_ranks(1)
def test_a_compiled_layer_of_a_pipeline_has_plain_keys(rank):
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    compiled = [layers[0], torch.compile(copy.deepcopy(layers[1]), backend="eager")]
    states = []
    for each in (layers, compiled):
        trainer = PipelineTrainer(
            each, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1),
            OneForwardOneBackward(), num_microbatches=1, split=(),
        )  # fmt: skip
        states.append(trainer.state_dict())
    trainer.load_state_dict(states[0])
    plain, of_compiled = (list(each["0"]["module"]) for each in states)
    assert plain == of_compiled
    assert "1._orig_mod.weight" in trainer.stages[0].module.state_dict()


# ----------------------------------------------------------------- two ranks: saving and loading


def loads(rank, folder):
    """Load with torch's functions while a round is in flight, and before the first step."""
    model, optimizer = wrap(SGP(OnePeerExponential(2), overlap=1), build())
    step(model, optimizer)
    state, _ = copy.deepcopy(checkpoints.get_state_dict(model, optimizer))
    step(model, optimizer)
    mine = {key: value + rank for key, value in state.items()}
    checkpoints.set_model_state_dict(model, dict(mine))
    assert equal(model.state_dict(), mine)
    model.flush()  # nothing of the round before is merged into what was loaded
    assert equal(model.state_dict(), mine)
    assert model.push_sum_weight == 1
    # A new run's optimizer has no state: torch takes a step to create it, which is no round.
    for make in (torch.optim.SGD, torch.optim.AdamW):
        module = build()
        optimizer = make(module.parameters(), lr=0.1)
        model = GossipDataParallel(module, optimizer, SGP(OnePeerExponential(2)))
        checkpoints.set_model_state_dict(model, dict(mine))
        before = checkpoints.get_optimizer_state_dict(model, optimizer)
        checkpoints.set_optimizer_state_dict(model, optimizer, before)
        assert equal(model.state_dict(), mine)
        assert model.bytes_sent == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    checkpoints.set_model_state_dict(model, dict(mine) if rank == 0 else {}, options=options)
    assert equal(model.state_dict(), state)
    # DCP loads in place, and set_model_state_dict ends the round in flight.
    dcp.save(checkpoints.get_model_state_dict(model), checkpoint_id=folder)
    step(model, optimizer)
    found = checkpoints.get_model_state_dict(model)
    dcp.load(found, checkpoint_id=folder)
    checkpoints.set_model_state_dict(model, found)
    assert equal(model.state_dict(), state)


def test_loading_by_torchs_functions_merges_and_resets(ranks, tmp_path):
    ranks.run(2, loads, str(tmp_path))


@on_ranks(2)
def test_creating_the_state_of_a_fused_optimizer_is_no_round(rank):
    from pyparallel.optim import AdamW

    module = build()
    optimizer = AdamW(module.parameters(), lr=0.1)
    model = GossipDataParallel(module, optimizer, SGP(OnePeerExponential(2)))
    step(model, optimizer)
    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)
    sent = model.bytes_sent
    checkpoints.get_optimizer_state_dict(model, optimizer)
    assert model.bytes_sent == sent


def resumes_compiled(rank, algorithm):
    """States of a compiled model and of a plain one are exchanged, compressors' included."""
    states = []
    for kind in ("compiled", "plain"):
        model, optimizer = wrap(algorithm, build(kind))
        torch.manual_seed(5)
        step(model, optimizer)
        state = GossipState(model, optimizer)
        for each in states:
            state.load_state_dict(each)
        states.append(copy.deepcopy(state.state_dict()))
        assert "_orig_mod" not in str([vars(each) for each in states[-1].values()])


def test_states_of_compiled_and_plain_models_are_exchanged(ranks):
    for algorithm in (SGP(OnePeerExponential(2), compressor=Int8(seed=1)), AllReduce()):
        ranks.run(2, resumes_compiled, algorithm)


def saves_safetensors(rank, folder):
    import safetensors.torch

    module = build()
    module[0].bias = module[1].bias  # tied
    model, optimizer = wrap(SGP(OnePeerExponential(2), overlap=1), module)
    step(model, optimizer)
    path = f"{folder}/{rank}.safetensors"
    safetensors.torch.save_model(model, path)
    saved = copy.deepcopy(model.state_dict())
    step(model, optimizer)
    assert safetensors.torch.load_model(model, path) == (set(), [])
    assert equal(model.state_dict(), saved)
    fresh = build()
    fresh[0].bias = fresh[1].bias
    safetensors.torch.load_model(fresh, path)
    assert equal(fresh.state_dict(), saved)


def test_safetensors_saves_and_loads_a_trainer(ranks, tmp_path):
    pytest.importorskip("safetensors")
    ranks.run(2, saves_safetensors, str(tmp_path))
