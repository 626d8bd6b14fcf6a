"""The comparison of language models in a pipeline with unsplit ones: its rows."""

import pytest

from benchmarks.language_models.bench import CONTESTANTS, Run, perform


@pytest.mark.nightly
@pytest.mark.slow  # imports transformers in each rank
def test_a_flushed_pipeline_has_the_losses_of_the_unsplit_model():
    rows = [perform(Run("GPT-2", schedule, 0, steps=3)) for schedule in CONTESTANTS]
    unsplit, flushed, streamed = rows
    assert unsplit["parameters"] > 10_000_000
    for name in ("training_bits", "held_out_bits"):
        assert float(flushed[name]) == pytest.approx(float(unsplit[name]), rel=1e-4)
    first = [row["losses"].split()[0] for row in rows]
    assert len(set(first)) == 1  # PipeOptim's first batch is read by the initial weights too
    assert streamed["losses"] != unsplit["losses"]
