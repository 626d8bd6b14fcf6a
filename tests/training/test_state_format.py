"""Checksums see every flipped bit, whatever the tensor; states are compared with one's own."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from pyparallel.training import (
    FORMAT,
    check_format,
    check_like,
    check_optimizer_kinds,
    check_optimizer_state,
    checksum,
    clone_tensors_for_torch_save,
    seal,
)

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint16,
    torch.uint8, torch.bool,
]  # fmt: skip


def bytes_of(tensor):
    return tensor.view(-1).view(torch.uint8)


def test_a_state_of_another_format_is_refused():
    for other in (None, FORMAT - 1, FORMAT + 1, "x"):
        sentence = f"format must be {FORMAT}, .*, got {other!r}; load it with the version that has"
        with pytest.raises(ValueError, match=sentence):
            check_format({"format": other})
    with pytest.raises(ValueError, match=r"format must be .*, got None; load it with the version"):
        check_format({})
    with pytest.raises(ValueError, match="the state must have checksums, got none"):
        check_format({"format": FORMAT})


def test_every_flipped_bit_changes_the_checksum(subtests):
    for dtype in DTYPES:
        for shape in ((), (1,), (5,), (0,)):
            tensor = torch.randint(0, 2, shape).to(dtype)
            before, raw = checksum(tensor), bytes_of(tensor)
            with subtests.test(f"{dtype} {shape}"):
                for place in range(raw.numel()):
                    for bit in range(8):
                        raw[place] ^= 1 << bit
                        assert checksum(tensor) != before, (place, bit)
                        raw[place] ^= 1 << bit
                assert checksum(tensor) == before


def test_bits_of_long_tensors_change_the_checksum():
    tensor = torch.randn(5003)  # several rows of words, single words, and bytes
    before, raw = checksum(tensor), bytes_of(tensor)
    for place in [*range(0, raw.numel(), 131), *range(raw.numel() - 16, raw.numel())]:
        raw[place] ^= 1 << place % 8
        assert checksum(tensor) != before, place
        raw[place] ^= 1 << place % 8
    assert checksum(tensor) == before


def test_what_compares_equal_may_have_other_bits():
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum(nans[:1]) != checksum(nans[1:])
    # The exclusive or of an even number of equal words is 0.
    assert checksum(torch.ones(4096)) != checksum(torch.zeros(4096))


def test_the_checksum_is_of_the_values_in_order_not_of_their_layout():
    tensor = torch.randn(4, 3, 6, 2)
    expected = checksum(tensor)
    assert checksum(tensor.to(memory_format=torch.channels_last)) == expected
    assert checksum(tensor.transpose(0, 1).contiguous().transpose(0, 1)) == expected
    assert checksum(torch.cat([torch.zeros(1), tensor.flatten()])[1:]) == expected  # not aligned
    assert checksum(tensor.to_sparse()) == expected
    assert checksum(tensor.clone().requires_grad_()) == expected
    tensor = torch.randn(6, dtype=torch.complex64)
    assert checksum(tensor.conj()) == checksum(tensor.conj().resolve_conj())


STATE = {
    "module": {"0.weight": torch.randn(3), "1.weight": torch.randn(2, 2)},
    "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "name": "all", "on": True}],
    "state": {0: {"step": torch.tensor(3.0)}},
    "round": 3,
    "nothing": [],
}


def test_a_sealed_state_is_the_same_after_saving_and_in_any_order():
    sealed = seal(STATE)
    check_format(sealed)
    file = io.BytesIO()
    torch.save(sealed, file)
    file.seek(0)
    check_format(torch.load(file))
    check_format(copy.deepcopy(sealed))
    check_format(dict(reversed(sealed.items())))
    assert seal(sealed)["checksums"] == sealed["checksums"]


def test_a_sealed_state_is_a_copy():
    weight = torch.zeros(3)
    state = seal({"weight": weight, "tied": weight, "groups": [{"lr": 0.1}], "epoch": 7})
    assert state["tied"] is state["weight"]
    weight.add_(1)
    check_format(state)
    assert not state["weight"].any()
    assert state["checksums"].keys() == {"tensors", "others"}
    check_format(clone_tensors_for_torch_save(state))
    state["epoch"] = 8
    with pytest.raises(ValueError, match=r"pyparallel.training.seal\(\) is due"):
        check_format(state)
    check_format(seal(state))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_the_checksums_of_what_it_writes(tmp_path):
    state = seal(STATE)
    dcp.save({"state": state}, checkpoint_id=tmp_path)
    loaded = seal(STATE)
    loaded["module"]["0.weight"].zero_()
    loaded["checksums"]["others"] = 0
    dcp.load({"state": loaded}, checkpoint_id=tmp_path)
    assert loaded["checksums"] == state["checksums"]
    check_format(loaded)
    loaded["module"]["0.weight"][0] += 1
    with pytest.raises(ValueError, match=r"module.0.weight has other bits"):
        check_format(loaded)


def changes():
    def change(function):
        state = seal(STATE)
        function(state)
        return state

    yield "module.0.weight", change(lambda s: bytes_of(s["module"]["0.weight"])[5].bitwise_xor_(4))
    yield "state.0.step", change(lambda s: s["state"][0]["step"].add_(1))
    others = [
        lambda s: s["groups"][0].update(lr=0.1 + 2**-55),
        lambda s: s["groups"][0].update(fused=False),
        lambda s: s["groups"][0].update(on=1),
        lambda s: s["groups"][0].update(betas=(0.9, 0.998)),
        lambda s: s.update(round=2),
        lambda s: s.update(round="3"),
        lambda s: s.pop("nothing"),
        lambda s: s.update(nothing={}),
        lambda s: s["module"].update({"0.weight": torch.zeros(4)}),
        lambda s: s["module"].update({"0.weight": torch.zeros(3, dtype=torch.int32)}),
        lambda s: s["state"].update({"0": s["state"].pop(0)}),
        lambda s: s["module"].update({"2.weight": s["module"].pop("1.weight")}),
        lambda s: s["checksums"].update(others=0),
    ]
    for other in others:
        yield "a key, a number or a shape of the state is not what was saved", change(other)
    yield "must have checksums, got none", change(lambda s: s.pop("checksums"))


def test_a_changed_state_is_refused_by_its_path(subtests):
    for number, (text, state) in enumerate(changes()):
        with subtests.test(f"{number} {text}"), pytest.raises(ValueError, match=text):
            check_format(state)


def test_states_are_compared_with_ones_own():
    own = {"steps": 3, "lr": 0.1, "slow": [torch.zeros(3)], "unknown": None, "empty": {}}
    check_like({**own, "steps": 0, "unknown": 7, "empty": {"a": 1}}, own, "outer")
    for path, changed in (
        ("outer.steps must be an integer, at least 0, got -1", {"steps": -1}),
        ("outer.steps must be an integer", {"steps": True}),
        ("outer.lr must be of type float, got None", {"lr": None}),
        ("outer.slow must be a list of 1, got an empty list", {"slow": []}),
        (r"outer.slow.0 must be a tensor of shape \[3\] and torch", {"slow": [torch.zeros(2)]}),
        (
            r"outer.slow.0 must be .* torch.float32, got .*float64",
            {"slow": [torch.zeros(3).double()]},
        ),
        ("outer must be a dict with keys", {"more": 1}),
    ):
        with pytest.raises(ValueError, match=path):
            check_like({**own, **changed}, own, "outer")


def optimizer_of(make, step=True):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    if step:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return optimizer


def test_an_optimizers_state_is_compared_with_its_parameters():
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.1)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    saved = optimizer_of(adamw).state_dict()
    for stepped in (True, False):
        fresh = optimizer_of(adamw, stepped)
        check_optimizer_state(fresh, saved, "optimizer")
        wrong = copy.deepcopy(saved)
        wrong["state"][1]["exp_avg"] = torch.zeros(3)
        text = r"optimizer.state.1.exp_avg must be a tensor of shape \[2\], got a tensor of"
        with pytest.raises(ValueError, match=text):
            check_optimizer_state(fresh, wrong, "optimizer")
    for kinds, got in ((["AdamW"], "AdamW"), (["SGD", "SGD"], "SGD, SGD"), (None, "None")):
        with pytest.raises(ValueError, match=f"the same optimizers, SGD, got {got}$"):
            check_optimizer_kinds([optimizer_of(sgd)], kinds)
