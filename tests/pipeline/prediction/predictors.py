"""Small stages for the tests of prediction: parameters in flat buffers, and their gradients."""

import copy
import io
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyparallel.pipeline import Prediction, WeightPredictor
from pyparallel.training import FlatBuckets

SHAPES = [(7, 5), (3,), (), (2, 3, 4), (0,), (130,)]


class OneStage:
    """Parameters of one or more groups, their optimizer, and its predictor."""

    def __init__(
        self,
        make: Callable[..., Optimizer],
        prediction: Prediction,
        groups: Sequence[dict] = ({},),
        dtypes: Sequence[torch.dtype] = (torch.float32,),
        shapes: Sequence[tuple[int, ...]] = SHAPES,
    ) -> None:
        torch.manual_seed(0)
        self.groups = [
            {"params": [parameter(shape, dtypes[i % len(dtypes)]) for i, shape in rows], **options}
            for options in groups
            for rows in [list(enumerate(shapes))]
        ]
        self.parameters = [each for group in self.groups for each in group["params"]]
        self.make = make
        self.optimizer = make(self.groups)
        self.weights = [FlatBuckets(group["params"], 1 << 62) for group in self.groups]
        self.buffers = [buffer for each in self.weights for buffer in each.buffers]
        self.predictor: WeightPredictor = prediction.attach(self.optimizer, self.weights)

    def step(self, gradients: Sequence[Tensor | None], *options) -> None:
        for each, gradient in zip(self.parameters, gradients, strict=True):
            each.grad = None if gradient is None else gradient.clone()
        self.predictor.step(*options)

    def outputs(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [torch.full_like(buffer, 77, dtype=dtype) for buffer in self.buffers]

    def predicted(self, horizon: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return one tensor for each parameter."""
        out = self.outputs(dtype)
        self.predictor.predict(horizon, out)
        return self.parts(out)

    def parts(self, out: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(out)
        return [
            view for each in self.weights for view in each.views([next(rest) for _ in each.buffers])
        ]

    def values(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.parameters]

    def twin(self) -> "Twin":
        return Twin(self)


class Twin:
    """A copy of the parameters with torch's optimizer alone, as a reference."""

    def __init__(self, stage: OneStage) -> None:
        groups = [
            {**group, "params": [nn.Parameter(each.detach().clone()) for each in group["params"]]}
            for group in stage.optimizer.param_groups
        ]
        self.parameters = [each for group in groups for each in group["params"]]
        self.optimizer = stage.make(groups)
        self.optimizer.load_state_dict(copy.deepcopy(stage.optimizer.state_dict()))

    def step(self, gradients: Sequence[Tensor | None], times: int = 1) -> list[Tensor]:
        for _ in range(times):
            for each, gradient in zip(self.parameters, gradients, strict=True):
                each.grad = None if gradient is None else gradient.clone()
            self.optimizer.step()
        return [each.detach() for each in self.parameters]


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(dtype))


def gradients_of(stage: OneStage, seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn_like(each) for each in stage.parameters]


def assert_close(got: Sequence[Tensor], expected: Sequence[Tensor], **tolerance: float) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, check_dtype=False, **tolerance)


def assert_equal(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert_close(got, expected, rtol=0.0, atol=0.0)


def assert_same_state(got: dict, expected: dict) -> None:
    """Compare state dicts of optimizers bitwise."""
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for key, entries in got["state"].items():
        assert entries.keys() == expected["state"][key].keys()
        assert_equal(list(entries.values()), list(expected["state"][key].values()))


def assert_resumes_bitwise(build: Callable[[], OneStage], horizon: int = 3) -> None:
    """Save a stage's optimizer to a file, load it into another stage, and go on with both."""
    stage, other = build(), build()
    is_fused = any(group.get("fused") for group in stage.optimizer.param_groups)
    for seed in range(2):
        gradients = gradients_of(stage, seed)
        if not is_fused:  # torch's SGD loads no state without a momentum buffer
            gradients[0] = None
        stage.step(gradients)
        stage.predicted(horizon)
    file = io.BytesIO()
    torch.save(stage.optimizer.state_dict(), file)
    num_bytes = sum(each.nbytes for each in stage.buffers)
    assert file.tell() < 8 * num_bytes + 20_000  # a view is saved without its buffer
    file.seek(0)
    other.step(gradients_of(stage, 7))  # a state to be replaced
    other.predicted(horizon)
    for mine, its in zip(other.parameters, stage.parameters, strict=True):
        mine.data.copy_(its.data)
    other.optimizer.load_state_dict(torch.load(file))
    for seed in range(3, 6):
        assert_equal(other.predicted(horizon), stage.predicted(horizon))
        for each in (stage, other):
            each.step(gradients_of(stage, seed))
        assert_equal(other.values(), stage.values())
    assert_same_state(other.optimizer.state_dict(), stage.optimizer.state_dict())
