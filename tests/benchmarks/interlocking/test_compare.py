"""The comparison of windows: what it trains, its rows, its table and its picture."""

from dataclasses import replace

import pytest

from benchmarks.harness.pictures import drawn
from benchmarks.harness.rows import read_rows
from benchmarks.interlocking import compare as compare_interlocking
from benchmarks.interlocking.compare import runs_of
from benchmarks.interlocking.picture import PICTURES
from benchmarks.interlocking.table import BITS, markdown, order_of
from benchmarks.interlocking.tasks import NUM_STAGES, TRIALS
from benchmarks.pipeline.table import ACCURACY
from benchmarks.pipeline.tasks import FIELDS, train
from tests.benchmarks.pipeline.test_compare import plain_losses

DIGITS, BYTES, _, SUMS, _ = TRIALS
FEW_BYTES = replace(BYTES, task=replace(BYTES.task, batch_size=2, num_held_out=4))
UPDATES = 3
NAMES = ["1", "2", "3", "4", "2 mean", "3 mean", "1 deep", "2 deep", "3 deep"]


@pytest.mark.slow  # 4 seconds
def test_the_widest_window_is_training_end_to_end_and_the_others_are_not():
    for trial in (DIGITS, FEW_BYTES):
        found = {
            run.name: train(trial.task, run.contestant, run.rate, run.seed, UPDATES).losses
            for run in runs_of(trial, NAMES, seed=3)
        }
        assert list(found) == NAMES
        whole = found[str(NUM_STAGES)]
        alone, _ = plain_losses(trial.task, trial.task.main_rate, 3, UPDATES)
        assert whole == pytest.approx(alone, rel=1e-4), trial.task.name
        firsts = [losses[0] for losses in found.values()]
        same = pytest.approx([whole[0]] * len(firsts), rel=1e-5)  # the same weights
        assert firsts == same, trial.task.name
        assert len({f"{losses[-1]:.6f}" for losses in found.values()}) == len(NAMES)


def make_row(window=1, seed=0, trial=DIGITS, accuracy="0.97", loss=0.5, rate=None):
    return {
        **dict.fromkeys(FIELDS, "1"), "task": trial.task.name, "schedule": str(window),
        "seed": str(seed), "rate": f"{rate or trial.task.main_rate:g}", "training_loss": str(loss),
        "held_out_loss": str(loss), "held_out_accuracy": accuracy, "losses": f"2.0 {loss}",
    }  # fmt: skip


def test_an_order_is_claimed_where_the_gap_exceeds_both_standard_deviations():
    local = [make_row(1, seed, accuracy=str(each)) for seed, each in enumerate((0.90, 0.92))]
    whole = [make_row(4, seed, accuracy=str(each)) for seed, each in enumerate((0.95, 0.95))]
    order = order_of(local, whole, ACCURACY)
    assert order.gap == pytest.approx(4)
    assert order.spread == pytest.approx(2**0.5)
    assert order.is_claimed
    near = [make_row(4, seed, accuracy=str(each)) for seed, each in enumerate((0.91, 0.93))]
    assert not order_of(local, near, ACCURACY).is_claimed
    assert order_of(local, whole[:1], ACCURACY) is None


def test_without_accuracy_less_loss_is_better():
    rows = [make_row(window, seed, BYTES, "", 3 - window / 10 + seed / 100)
            for window in (1, 2) for seed in (0, 1)]  # fmt: skip
    assert order_of(rows[:2], rows[2:], BITS).gap == pytest.approx(-0.1)
    _, orders = markdown(rows).split("\n\n")
    assert orders.endswith("| window 2 | window 1 (local) | 0.1 | 0.0141 |\n")
    near = [{**row, "held_out_loss": "2.9"} for row in rows]
    assert "\n\n" not in markdown(near)  # no order is claimed


def test_of_the_sums_each_window_has_its_own_best_rate():
    low, high = (f"{rate:g}" for rate in SUMS.task.rates)
    scores = {(1, low): 0.8, (1, high): 0.7, (4, low): 0.9, (4, high): 0.95}
    rows = [make_row(window, seed, SUMS, str(score + seed / 100), rate=float(rate))
            for (window, rate), score in scores.items() for seed in (0, 1)]  # fmt: skip
    windows, orders = markdown(rows).split("\n\n")
    assert windows.splitlines()[2].startswith("| window 1 (local) | 80.50% ± 0.71%")
    assert [line.split("|")[-2].strip() for line in windows.splitlines()[2:]] == [low, high]
    assert "| window 4 (end to end) | window 1 (local) | 15 points |" in orders
    worse = make_row(1, 2, SUMS, "0.3", rate=float(low))  # a seed that the other rate does not have
    assert markdown([*rows, worse]).splitlines()[2].startswith("| window 1 (local) | 63.67%")


def test_a_pair_of_digits_has_their_sum_as_label():
    images, labels = next(SUMS.task.batches(3))
    singles, names, *_ = SUMS.task.load()
    labeled = zip(singles, names, strict=True)
    of_image = {image.numpy().tobytes(): int(label) for image, label in labeled}
    for pair, label in zip(images, labels, strict=True):
        left, right = (of_image[half.contiguous().numpy().tobytes()] for half in pair.chunk(2, -1))
        assert (left + right) % 10 == label


@pytest.mark.slow  # 5 seconds
def test_a_few_updates_make_rows_a_table_and_a_picture(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    arguments = ["--windows", "1", "4", "--seeds", "1", "--out", str(path)]
    trials = [replace(each, task=replace(each.task, updates=2)) for each in (DIGITS, FEW_BYTES)]
    monkeypatch.setattr(compare_interlocking, "TRIALS", trials)
    monkeypatch.setattr("sys.argv", ["compare_interlocking", *arguments])
    compare_interlocking.main()
    rows = read_rows(path)
    assert [(row["task"], row["schedule"]) for row in rows] == [
        ("bytes", "1"), ("bytes", "4"), ("digits", "1"), ("digits", "4"),
    ]  # fmt: skip
    assert "Interlocking(window=4, heads=PooledHead(num_outputs=10" in rows[-1]["options"]
    assert drawn(PICTURES, rows, tmp_path) == ["accuracy-digits", "accuracy-bytes", "losses"]
