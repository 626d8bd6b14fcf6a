"""Running statistics recomputed for the full model."""

import pytest
import torch
from torch import nn

from pyparallel.subnets import recalibrate


def model():
    return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_statistics_are_those_of_all_values():
    batches = [torch.randn(5, 3) + 2, torch.randn(9, 3)]
    net = model()
    net[3].eval()
    recalibrate(net, batches)
    values = torch.cat(batches)
    torch.testing.assert_close(net[0].running_mean, values.mean(0))
    torch.testing.assert_close(net[0].running_var, values.var(0))
    inner = [
        net[2](nn.functional.batch_norm(b, None, None, *affine(net[0]), True)) for b in batches
    ]
    torch.testing.assert_close(net[3].running_mean, torch.cat(inner).mean(0))
    assert net.training
    assert net[0].training
    assert not net[3].training
    assert not net[0]._forward_pre_hooks


def affine(norm):
    return norm.weight, norm.bias


def test_images_and_tuples_of_inputs():
    net = nn.Sequential(nn.BatchNorm2d(2))
    images = torch.randn(4, 2, 5, 5)
    recalibrate(net, [(images,)])
    torch.testing.assert_close(net[0].running_var, images.transpose(0, 1).flatten(1).var(1))


def test_no_batches_are_an_error():
    with pytest.raises(ValueError, match=r"at least two values per unit .* got 0"):
        recalibrate(model(), [])


def test_a_module_without_norms_runs_nothing():
    recalibrate(nn.Linear(2, 2), [torch.zeros(1, 7)])
