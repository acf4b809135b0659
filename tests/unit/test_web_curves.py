"""The curves of metrics on the page, polled once a second."""

from __future__ import annotations

from agent.links.queries import LiveRank, LiveRanks
from agent.web.curves import MAX_POINTS, Curve, Curves, Point


def answer(group: int, step: int, **metrics: float | None) -> dict[str, LiveRanks]:
    """Return what two nodes answer, of which one has rank 0."""
    first = LiveRank(rank=0, step=step + 3, state="training", metrics_step=step, metrics=metrics)
    other = LiveRank(rank=1, step=step + 3, state="training")
    return {
        node_id: LiveRanks(group=group, ranks=(rank,), is_alive=True, lease_left_s=None, etcd_s=None)
        for node_id, rank in (("a", first), ("b", other))
    }


def test_each_step_is_one_point_and_a_replayed_one_is_another() -> None:
    curves = Curves()
    polls = [answer(1, 10, loss=0.5), answer(1, 10, loss=0.5), answer(1, 20, loss=None), answer(2, 10, loss=0.5)]
    new = [curves.note(float(now), poll) for now, poll in enumerate(polls)]
    assert [sorted(points) for points in new] == [["loss"], [], ["loss"], ["loss"]]
    assert curves.points() == {"loss": [Point(0.0, 1, 10, 0.5), Point(2.0, 1, 20, None), Point(3.0, 2, 10, 0.5)]}


def test_a_node_that_answers_for_an_older_group_is_not_taken_for_rank_0() -> None:
    curves = Curves()
    stale = {"c": answer(1, 90, loss=9.0)["a"]}
    assert curves.note(0.0, {**stale, **answer(2, 10, loss=0.5)}) == {"loss": Point(0.0, 2, 10, 0.5)}


def test_before_the_first_metrics_there_is_no_curve() -> None:
    curves = Curves()
    assert curves.note(0.0, answer(1, 0)) == curves.points() == {}


def test_a_curve_of_a_long_run_stays_small_and_even() -> None:
    curve = Curve()
    kept = [point for second in range(20_000) if curve.add(point := Point(float(second), 1, second, 1.0))]
    assert len(curve.points) <= MAX_POINTS
    gaps = [after.at - before.at for before, after in zip(curve.points, curve.points[1:], strict=False)]
    assert curve.points[0].at == 0.0
    assert curve.points[-1].at > 20_000 - 100
    assert max(gaps) <= 4 * min(gaps)
    assert set(curve.points) <= set(kept)
