"""The simulator's bets: each is predicted, then performed, and its error is that of the row."""

import pytest

from benchmarks.gossip import bets
from benchmarks.gossip.bets import ALGORITHMS, Bet, check, find_bets, predict, summarize


def test_bets_are_all_combinations_with_keys_of_their_own():
    found = list(find_bets([2, 4], True, links=bets.LINKS, computes=list(bets.COMPUTES),
                           stragglers=bets.STRAGGLERS, algorithms=list(ALGORITHMS)))  # fmt: skip
    assert len({each.key for each in found}) == len(found) == 2 * 3 * 2 * 3 * len(ALGORITHMS)
    assert len(found) >= 100


def test_the_summary_is_of_what_was_checked():
    rows = [{"error": text} for text in ("0.01", "-0.02", "0.03", "")]
    assert summarize(rows) == "3 runs: error of seconds a step 2.0% median, 2.8% at 90 %"
    assert summarize(rows[3:]) == "1 predictions, none of them checked"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["AllReduce", "SGP, int8", "NoLoCo(4)"])
def test_a_bet_is_predicted_and_checked(algorithm):
    bet = Bet(2, bets.LOOPBACK, "sleep 100 ms", "slow:0=2", algorithm, is_dry=True)
    predicted = predict(bet)
    assert 10 < float(predicted["computing_ms"]) < float(predicted["predicted_ms"])
    row = check(bet, predicted)
    error = float(row["predicted_ms"]) / float(row["measured_ms"]) - 1
    assert float(row["error"]) == pytest.approx(error, abs=1e-3)
    assert float(row["measured_ms"]) > float(row["measured_waiting_ms"])
