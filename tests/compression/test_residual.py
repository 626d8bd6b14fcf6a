import torch

from pyparallel.compression.residual import add_residual, clear_non_finite, update_residual

INF, NAN = float("inf"), float("nan")


def test_without_a_residual_nothing_is_copied():
    x = torch.ones(3)
    assert add_residual(x, None) is x
    assert add_residual(x.bfloat16(), None).dtype == torch.float32


def test_the_error_is_kept():
    x, residual = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])
    total = add_residual(x, residual)
    assert total.tolist() == [1.5, 2.25]
    update_residual(residual, total, torch.tensor([1.0, 2.0]))
    assert residual.tolist() == [0.5, 0.25]


def test_non_finite_entries_are_not_kept():
    residual = torch.zeros(4)
    update_residual(
        residual, torch.tensor([NAN, INF, -INF, 1.0]), torch.tensor([NAN, INF, 2.0, 0.25])
    )
    assert residual.tolist() == [0, 0, 0, 0.75]


def test_a_buffer_is_cleaned_if_the_largest_entries_are_not_finite():
    buffer = torch.tensor([NAN, 1.0, INF])
    clear_non_finite(buffer, torch.tensor([NAN]))
    assert buffer.tolist() == [0, 1, 0]


def test_the_old_residual_stays_where_a_message_is_not_finite():
    residual = torch.tensor([0.5, 0.5, 0.5])
    update_residual(residual, torch.tensor([NAN, INF, 1.0]), torch.tensor([NAN, INF, 0.75]))
    assert residual.tolist() == [0.5, 0.5, 0.25]
