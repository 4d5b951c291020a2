"""What the end of a component means."""

from __future__ import annotations

from rollstream.cli.launcher.restarts import STEADY, WINDOW, Ended, GiveUp, Restart, RestartPolicy, describe


def test_delays_grow_to_a_bound_and_start_anew_after_a_steady_life() -> None:
    policy = RestartPolicy(max_restarts=20, finite=False)
    delays = []
    for _ in range(7):
        decision = policy.decide(-9, started=0.0, now=1.0)
        assert isinstance(decision, Restart)
        delays.append(decision.delay)
    assert delays == [0.5, 1, 2, 4, 8, 15, 15]
    assert policy.decide(1, started=1.0, now=1.0 + STEADY) == Restart(0.5)


def test_restarts_are_counted_in_a_window() -> None:
    policy = RestartPolicy(max_restarts=2, finite=True)
    assert isinstance(policy.decide(1, 0, 1), Restart)
    assert isinstance(policy.decide(-9, 1, 2), Restart)
    refused = policy.decide(-9, 2, 3)
    assert isinstance(refused, GiveUp) and refused.exit_code == 1 and "SIGKILL after 2 restarts" in refused.reason
    assert isinstance(policy.decide(1, 3, 2 + WINDOW), Restart)


def test_failures_in_a_row_end_it_however_long_each_took() -> None:
    policy = RestartPolicy(max_restarts=20, finite=False)
    for life in range(4):
        assert isinstance(policy.decide(1, started=life * 300, now=life * 300 + 299), Restart)
    refused = policy.decide(1, started=1200, now=1499)
    assert isinstance(refused, GiveUp) and refused.reason == "it has failed 5 times in a row"
    patient = RestartPolicy(max_restarts=20, finite=False)
    for life in range(20):
        assert isinstance(patient.decide(1, started=life * 700, now=life * 700 + WINDOW), Restart)


def test_codes_with_a_meaning() -> None:
    assert RestartPolicy(5, finite=True).decide(0, 0, 1) == Ended()
    assert isinstance(RestartPolicy(5, finite=False).decide(0, 0, 1), Restart)
    for finite in (True, False):
        usage, stale = (RestartPolicy(5, finite).decide(code, 0, 1) for code in (2, 4))
        assert isinstance(usage, GiveUp) and usage.exit_code == 2
        assert isinstance(stale, GiveUp) and stale.exit_code == 4
    assert isinstance(RestartPolicy(0, finite=False).decide(1, 0, 1), GiveUp)


def test_statuses_in_words() -> None:
    assert (describe(3), describe(-15), describe(-64)) == ("exit code 3", "SIGTERM", "SIGRTMAX")
