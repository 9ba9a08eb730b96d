"""The gate: AReaL's capacity, over any sequence of events."""

from __future__ import annotations
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.rollout.episodes.admission_gate import AdmissionGate


def gate(**changes: int | None) -> AdmissionGate:
    return AdmissionGate(**({"max_concurrent": None, "max_staleness": 0, "batch_size": 2} | changes))  # type: ignore[arg-type]


def fill(gate: AdmissionGate) -> int:
    started = 0
    while gate.may_start_training():
        gate.start(training=True)
        started += 1
    return started


def test_on_policy_starts_one_batch_and_then_waits_for_the_version() -> None:
    g = gate()
    assert fill(g) == 2
    g.end(training=True, accepted=True)
    g.end(training=True, accepted=True)
    assert fill(g) == 0
    g.set_version(1)
    assert fill(g) == 2


def test_a_rejected_group_frees_its_place_and_an_accepted_one_keeps_it() -> None:
    g = gate(max_staleness=1)
    assert fill(g) == 4
    g.end(training=True, accepted=False)
    g.end(training=True, accepted=True)
    assert fill(g) == 1


def test_a_stale_group_gives_its_place_back() -> None:
    g = gate()
    fill(g)
    g.end(training=True, accepted=True)
    g.give_back()
    assert fill(g) == 1


def test_evaluation_ignores_the_staleness_bound_but_not_concurrency() -> None:
    g = gate(max_concurrent=3)
    fill(g)
    assert g.may_start()
    g.start(training=False)
    assert not g.may_start()


def test_a_jump_of_the_version_does_not_open_the_gate_for_the_steps_in_between() -> None:
    g = gate()
    g.set_version(50)
    assert fill(g) == 2


def test_the_gate_says_why_nothing_starts() -> None:
    g = gate()
    g.start(training=True)
    assert g.describe() == "1 groups are running"
    fill(g)
    assert "2 groups were started for version 0" in g.describe() and "call set_version()" in g.describe()
    g.paused = True
    assert "call resume()" in g.describe()


@given(
    concurrency=st.one_of(st.none(), st.integers(1, 5)),
    staleness=st.integers(0, 3),
    batch=st.integers(1, 4),
    events=st.lists(st.sampled_from(["start", "accept", "reject", "version", "pause", "resume", "eval"]), max_size=80),
)
def test_capacity_is_areals_formula_after_any_history_with_a_batch_per_version(
    concurrency: int | None, staleness: int, batch: int, events: list[str]
) -> None:
    g = AdmissionGate(max_concurrent=concurrency, max_staleness=staleness, batch_size=batch)
    running = accepted = evaluating = version = 0
    paused = False
    for event in events:
        free = concurrency is None or running + evaluating < concurrency
        places = (staleness + version + 1) * batch - (accepted + running)
        assert g.may_start_training() == (free and places > 0 and not paused)
        assert g.may_start() == (free and not paused)
        if event == "start" and g.may_start_training():
            g.start(training=True)
            running += 1
        elif event == "eval" and g.may_start():
            g.start(training=False)
            evaluating += 1
        elif event in ("accept", "reject") and running:
            g.end(training=True, accepted=event == "accept")
            running -= 1
            accepted += event == "accept"
        elif event == "version":
            version += 1
            g.set_version(version)
            accepted = max(accepted, version * batch - running)  # a version stands for a batch
        elif event in ("pause", "resume"):
            paused = g.paused = event == "pause"
