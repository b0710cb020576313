"""Programs run as discrete events: hand-made timelines, laws that hold for any programs, refusals."""

import itertools
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from balancer.simulator.engine import Timeline, run
from balancer.simulator.program import Op, Program, Wait
from omni_pipeline.core.errors import PlanError


def compute(name: str, seconds: float, *members: int) -> Op:
    return Op((name,), "llm", seconds, members)


def collective(name: str, seconds: float, *members: int, stream: str = "net") -> Op:
    return Op((name,), "exchange", seconds, members, stream)


def programs(*entries: list[Op | Wait]) -> list[Program]:
    return [Program((rank,), items) for rank, items in enumerate(entries)]


def ends(timeline: Timeline) -> dict[str, float]:
    return {str(name[0]): end for name, end in timeline.ends.items()}


def test_a_collective_waits_for_the_slowest_and_runs_beside_compute_until_waited_for() -> None:
    exchange = collective("exchange", 2, 0, 1)
    timeline = run(
        programs(
            [compute("a", 1, 0), exchange, compute("b", 3, 0), Wait(("exchange",)), compute("c", 1, 0)],
            [compute("d", 5, 1), exchange, Wait(("exchange",))],
        )
    )
    assert ends(timeline) == {"a": 1, "b": 4, "d": 5, "exchange": 7, "c": 8}
    assert timeline.starts["exchange",] == 5
    assert timeline.finish_s.tolist() == [8, 7]
    assert timeline.busy_s["llm"].tolist() == [5, 5]
    assert timeline.busy_s["exchange"].tolist() == [2, 2]
    assert timeline.idle_fraction == 1 - 5 / 8


def test_operations_of_one_stream_follow_each_other_and_other_streams_do_not_wait() -> None:
    timeline = run(
        programs(
            [
                collective("first", 4, 0),
                collective("second", 1, 0),
                collective("other", 2, 0, stream="other"),
                compute("a", 1, 0),
                Wait(("second",)),
            ]
        )
    )
    assert ends(timeline) == {"first": 4, "second": 5, "other": 2, "a": 1}


def test_compute_of_several_ranks_starts_when_all_are_ready() -> None:
    joint = compute("joint", 2, 0, 1)
    timeline = run(programs([compute("a", 3, 0), joint], [joint, compute("b", 1, 1)]))
    assert ends(timeline) == {"a": 3, "joint": 5, "b": 6}


def test_a_message_leaves_without_its_receiver_which_waits_for_it() -> None:
    timeline = run(
        programs(
            [compute("a", 1, 0), collective("send", 2, 0), compute("b", 9, 0)],
            [Wait(("send",)), compute("c", 1, 1)],
        )
    )
    assert ends(timeline) == {"a": 1, "send": 3, "b": 10, "c": 4}


def test_ranks_with_one_program_are_simulated_once_with_the_times_of_each() -> None:
    joint, late, last = compute("joint", 2, 0, 1), compute("late", 5, 2), collective("last", 1, 0, 1, 2)
    alike: list[Op | Wait] = [joint, last, Wait(("last",))]
    folded = run([Program((0, 1), alike), Program((2,), [late, last])])
    unfolded = run([Program((0,), alike), Program((1,), alike), Program((2,), [late, last])])
    assert folded.ends == unfolded.ends
    assert folded.ranks == unfolded.ranks == (0, 1, 2)
    assert folded.finish_s.tolist() == unfolded.finish_s.tolist()
    assert {kind: busy.tolist() for kind, busy in folded.busy_s.items()} == {
        kind: busy.tolist() for kind, busy in unfolded.busy_s.items()
    }


def test_a_circle_of_waits_names_ranks_and_operations() -> None:
    one, two = collective("one", 1, 0, 1), collective("two", 1, 0, 1)
    with pytest.raises(PlanError) as error:
        run(programs([one, Wait(("one",)), two, Wait(("two",))], [two, Wait(("two",)), one, Wait(("one",))]))
    assert error.value.what == (
        "ranks wait for each other in a circle: rank 0 waits for one; rank 1 waits for two"
    )
    assert error.value.where == "2 of 2 programs"


def test_two_orders_of_one_stream_are_a_circle_though_nobody_waits() -> None:
    one, two = collective("one", 1, 0, 1), collective("two", 1, 0, 1)
    with pytest.raises(PlanError, match="rank 0 is at one; rank 1 is at two"):
        run(programs([one, two], [two, one]))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (([collective("x", 1, 0, 1)], []), r"x is never issued by its members \[1\]"),
        (([collective("x", 1, 1)], [collective("x", 1, 1)]), "rank 0 issues x and is no member of it"),
        (([compute("x", 1, 0), compute("x", 1, 0)],), "rank 0 issues x twice"),
        (([Wait(("x",))],), "rank 0 waits for x, which no rank does"),
        (([compute("x", 1, 0, 7)],), "x has 2 members; programs that hold them have 1 ranks"),
        (
            ([collective("x", 1, 0, 1)], [collective("x", 2, 0, 1)]),
            "x is exchange of 2 ranks for 1 s on stream 'net' on one member and exchange of 2 ranks for 2 s",
        ),
    ],
)
def test_operations_that_do_not_fit_together_are_refused(
    entries: tuple[list[Op | Wait], ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        run(programs(*entries))


def test_a_rank_with_two_programs_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 0 has two programs"):
        run([Program((0,), []), Program((0, 1), [])])


@st.composite
def any_programs(draw: st.DrawFn) -> list[Program]:
    """Rounds of own compute and collectives of any members, in one order for all, waited for or not."""
    num_ranks = draw(st.integers(1, 4))
    entries: list[list[Op | Wait]] = [[] for _ in range(num_ranks)]
    for number in range(draw(st.integers(0, 6))):
        for rank in range(num_ranks):
            entries[rank].append(compute(f"c{number}.{rank}", draw(st.integers(0, 9)), rank))
        members = sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)))
        stream = draw(st.sampled_from(["compute", "net", "other"]))
        op = collective(f"o{number}", draw(st.integers(0, 9)), *members, stream=stream)
        for rank in members:
            entries[rank].append(op)
            if stream != "compute" and draw(st.booleans()):
                entries[rank].append(Wait(op.name))
    return [Program((rank,), items) for rank, items in enumerate(entries)]


@given(any_programs())
def test_a_step_is_never_shorter_than_its_busiest_stream_and_its_parts_add_up(items: list[Program]) -> None:
    timeline = run(items)
    ops = [[entry for entry in program.entries if isinstance(entry, Op)] for program in items]
    for rank, own in enumerate(ops):
        for stream in ("compute", "net", "other"):
            assert timeline.step_s >= sum(op.seconds for op in own if op.stream == stream)
        for kind in ("llm", "exchange"):
            busy = timeline.busy_s.get(kind)
            expected = sum(op.seconds for op in own if op.kind == kind)
            assert (0 if busy is None else busy[rank]) == expected
        for stream in ("compute", "net", "other"):
            in_order = [op for op in own if op.stream == stream]
            for before, after in itertools.pairwise(in_order):
                assert timeline.starts[after.name] >= timeline.ends[before.name]
    for program in items:
        for op in (entry for entry in program.entries if isinstance(entry, Op)):
            assert timeline.ends[op.name] == timeline.starts[op.name] + op.seconds


@given(any_programs(), st.randoms(use_true_random=False))
def test_times_do_not_depend_on_the_order_of_programs(items: list[Program], random: Random) -> None:
    shuffled = list(items)
    random.shuffle(shuffled)
    assert run(shuffled).ends == run(items).ends


@given(any_programs(), st.integers(1, 3))
def test_shorter_operations_never_make_a_longer_step(items: list[Program], factor: int) -> None:
    faster = [
        Program(
            program.ranks,
            [
                Op(entry.name, entry.kind, entry.seconds / factor, entry.members, entry.stream)
                if isinstance(entry, Op) and entry.kind == "exchange"
                else entry
                for entry in program.entries
            ],
        )
        for program in items
    ]
    assert run(faster).step_s <= run(items).step_s
