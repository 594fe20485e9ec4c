"""A process that takes the place of a lost worker goes on where that one was: on a server, and in the new worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.worker.going_on import first_step
from aiokv.errors import MembershipError, SumOverflowError, UnknownKeyError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.types import Key
    from tests.core.conftest import Asked, Like, Server, Worker

NEXT = 50
"""The connection of the next process of rank 0."""


def respawning(server: Server) -> Server:
    """Let the view say that lost workers are replaced."""
    server.publish()
    renew(server, 1)
    return server


def renew(server: Server, incarnation: int) -> None:
    """Let the view have a process of rank 0."""
    view = server.machine._joiner.view
    assert view is not None
    server.epoch += 1
    first, *others = view.workers
    workers = (structs.replace(first, incarnation=incarnation), *others)
    view = structs.replace(view, epoch=server.epoch, workers=workers, on_worker_loss="respawn")
    server.handle(st.Received(SCHEDULER, 0, view))


def replace(server: Server) -> None:
    """Let another process take the place of rank 0."""
    renew(server, 2)
    assert server.attach(0, peer=NEXT, incarnation=2).answer == m.Done()


def ask(server: Server, key: Key = "w") -> Any:
    """Let the new process ask how often its key was pushed."""
    return server.ask(0, m.GetPushes(key, (1,), "float32", 0, 1, 5.0), peer=NEXT).answer


def pull(server: Server, at_least: int, key: Key = "w") -> Asked:
    """Let the new process read what its next push is computed from."""
    message = m.Pull(key, (1,), "float32", 0, 1, at_least, 5.0, 0, 0, 0, at_least + 1)
    return server.ask(0, message, peer=NEXT)


@pytest.fixture
def two(make_server: type[Server]) -> Server:
    """A server of two workers which may be replaced, with a key."""
    server = respawning(make_server(2))
    server.init()
    return server


def step(server: Server, *ranks: int) -> None:
    """Let ranks push 1 once more."""
    for rank in ranks:
        server.push(rank, 1.0, clock=10 + server.pushed.get((rank, "w"), 0))


# --- a server ---


def test_new_process_hears_how_many_pushes_of_its_place_are_made(two: Server) -> None:
    step(two, 0, 1)
    step(two, 0, 1)
    replace(two)
    assert ask(two) == m.Pushes(2, 11, "bsp")


def test_push_in_an_open_round_is_to_be_made_again_for_it_is_lost_with_its_server(two: Server) -> None:
    step(two, 0, 1)
    step(two, 0)
    replace(two)
    assert ask(two) == m.Pushes(1, 10, "bsp")


@pytest.mark.parametrize("policy", ["k_sync:2", "k_async:2"])
def test_step_in_a_round_of_some_that_is_open_is_to_be_made_again(make_server: type[Server], policy: str) -> None:
    server = respawning(make_server(2))
    server.init(policy=policy)
    step(server, 0, 1)
    assert server.push(0, clock=11, read_version=1).pending
    replace(server)
    assert ask(server) == m.Pushes(1, 10, policy)


@pytest.mark.parametrize("policy", ["asp", "k_batch_async:2"])
def test_push_of_which_its_worker_has_heard_is_not_made_again(make_server: type[Server], policy: str) -> None:
    server = respawning(make_server(2))
    server.init(policy=policy)
    step(server, 0)
    replace(server)
    assert ask(server) == m.Pushes(1, 10, policy)


def test_nothing_was_pushed_in_a_new_job(two: Server) -> None:
    replace(two)
    assert ask(two) == m.Pushes(0, 0, "bsp")


def test_value_from_which_an_open_round_is_computed_is_the_current_one(two: Server) -> None:
    step(two, 0, 1)
    step(two, 0)
    replace(two)
    assert pull(two, 1).payload == 2.0


def test_value_from_which_the_last_round_was_computed_is_kept(two: Server) -> None:
    step(two, 0, 1)
    step(two, 0, 1)
    replace(two)
    before = pull(two, 1)
    assert (before.payload, before.answer) == (2.0, m.Value(1))
    assert pull(two, 2).payload == 4.0
    assert two.kept["w", 0] == [1]


def test_one_value_more_is_kept_and_no_more_than_that(two: Server) -> None:
    for number in range(1, 5):
        step(two, 0, 1)
        assert two.kept["w", 0] == [number - 1]


def test_nothing_is_kept_where_nobody_can_be_replaced(server: Server) -> None:
    server.init()
    for _ in range(2):
        for rank in range(3):
            server.push(rank)
    assert server.kept["w", 0] == []
    assert server.machine._catalog.chunks["w", 0].clocks == {}


def test_value_is_waited_for_while_the_round_before_is_open(two: Server) -> None:
    step(two, 0)
    replace(two)
    reading = pull(two, 1)
    assert reading.pending
    step(two, 1)
    assert reading.payload == 2.0


def test_update_that_was_not_made_leaves_the_same_value(two: Server) -> None:
    step(two, 0, 1)
    two.hold = True
    for version in (2, 3):
        step(two, 0, 1)
        slot = two.applying.pop().slot
        assert slot is not None
        del two.slots[slot]
        two.values["w", 0][version] = two.values["w", 0][version - 1]
        two.handle(st.Applied("w", 0, version, SumOverflowError("too large")))
    assert two.kept["w", 0] == []
    replace(two)
    assert pull(two, 2).payload == 2.0


def test_value_is_read_from_all_keys_of_a_bundle(make_server: type[Server]) -> None:
    server = respawning(make_server(2))
    server.bundle_size = 2
    for rank in range(2):
        digests = (b"" if rank else b"0",) * 2
        init = m.InitBundle(("a", "w"), ((1,), (1,)), "float32", "bsp", 5.0, (), digests)
        server.ask(rank, init, None if rank else 0.0)
        server.ask(rank, m.PushBundle(0, 1, 0, False, 5.0, 0, 1), 1.0)
    server.ask(1, m.PushBundle(0, 2, 0, False, 5.0, 0, 2), 1.0)
    server.push(0, 1.0, sequence=2, clock=2)
    replace(server)
    assert [ask(server, key) for key in ("a", "w")] == [m.Pushes(1, 1, "bsp"), m.Pushes(2, 2, "bsp")]
    both = server.ask(0, m.PullBundle(0, 1, 5.0, 0, 0, 2), peer=NEXT)
    assert both.payload == [2.0, 2.0]
    assert server.value("w") == 4.0
    again = server.ask(0, m.PushBundle(0, 2, 0, True, 5.0, 0, 2), 1.0, peer=NEXT)
    assert again.payload == [4.0, 4.0]


def test_sums_are_read_as_they_are(make_server: type[Server]) -> None:
    server = respawning(make_server(2, "sum"))
    server.init()
    step(server, 0, 1)
    replace(server)
    assert pull(server, 0).payload == 2.0
    assert server.kept["w", 0] == []


def test_rows_are_read_as_they_were(make_server: type[Server]) -> None:
    server = respawning(make_server(2))
    server.init_rows()
    for _ in range(2):
        for rank in range(2):
            server.push_rows(rank, {1: 1.0, 3: 2.0})
    renew(server, 2)
    assert server.attach(0, incarnation=2).answer == m.Done()
    for at_least, expected in ((1, [2.0, 0.0]), (2, [4.0, 0.0])):
        assert server.pull_rows(0, 1, 2, at_least=at_least, before=at_least + 1).payload == expected


def test_value_that_nobody_has_kept_is_refused(make_server: type[Server]) -> None:
    """The round was made when nobody could be replaced yet."""
    server = make_server(2)
    server.init()
    step(server, 0, 1)
    respawning(server)
    replace(server)
    error = pull(server, 0).error
    assert isinstance(error, MembershipError)
    assert "key 'w': the value before push 1 of rank 0 is not kept" in str(error)


def test_async_values_are_the_current_ones(make_server: type[Server]) -> None:
    server = respawning(make_server(2, "asp"))
    server.init()
    step(server, 0, 1)
    replace(server)
    assert pull(server, 0).payload == 2.0


def test_key_that_goes_over_to_another_policy_keeps_nothing(two: Server) -> None:
    step(two, 0, 1)
    for rank in range(2):
        two.ask(rank, m.SetPolicy("asp", ("w",), "bsp", (), 5.0, 1))
    assert two.kept["w", 0] == []


# --- which step ---


def counts(**made: tuple[int, int]) -> list[tuple[Key, m.Pushes]]:
    """Return what servers have of keys: pushes, and the clock of the last one."""
    return [(key, m.Pushes(*each, "bsp")) for key, each in made.items()]


@pytest.mark.parametrize(
    ("made", "step"),
    [
        (counts(a=(0, 0), b=(0, 0)), (0, 0)),
        (counts(a=(1, 1), b=(0, 0)), (0, 0)),
        (counts(a=(3, 8), b=(4, 9)), (3, 8)),
        (counts(a=(4, 9), b=(4, 9), never=(0, 0)), (4, 9)),
    ],
    ids=["a new job", "in the first step", "in a later one", "between two"],
)
def test_step_is_the_first_that_is_not_complete(made: list[tuple[Key, m.Pushes]], step: tuple[int, int]) -> None:
    assert first_step(made) == step


def test_nobody_can_go_on_where_keys_are_pushed_more_often_than_others() -> None:
    with pytest.raises(MembershipError, match="key 'b' was pushed 5 times, but key 'a' 2 times") as caught:
        first_step(counts(a=(2, 2), b=(5, 5)))
    assert caught.value.details == {"keys": ["b", "a"]}


# --- the new worker ---


def go_on(worker: Worker, *answers: m.Pushes) -> Any:
    """Let the worker ask, and the servers answer."""
    call = worker.call(st.GoOn, timeout=10.0)
    for send, answer in zip(call.sends, answers, strict=True):
        assert isinstance(send.message, m.GetPushes)
        worker.answer(send, answer)
    return call


def ready(make_worker: type[Worker], *keys: str) -> Worker:
    """Return a worker that has initialised keys, each of one chunk and in no bundle."""
    worker = make_worker(servers=1)
    for key in keys:
        worker.finish(worker.transfer("init", key))
    return worker


def test_worker_counts_from_the_first_step_that_is_not_complete(make_worker: type[Worker], like: type[Like]) -> None:
    worker = ready(make_worker, "a", "b")
    call = go_on(worker, m.Pushes(3, 3, "bsp"), m.Pushes(4, 4, "bsp"))
    assert call.outcome == "done"
    assert ef.Complete(call.number, 3) in worker.effects
    reading = worker.finish(worker.transfer("pull", "a", "b"))
    assert reading.messages == [like(m.Pull, at_least=3, before=4)] * 2
    pushes = worker.finish(worker.transfer("push", "a", "b"))
    assert pushes.messages == [like(m.Push, sequence=4, clock=4)] * 2
    assert worker.transfer("pull", "a").messages == [like(m.Pull, at_least=4, before=0)]


def test_clock_goes_on_too(make_worker: type[Worker], like: type[Like]) -> None:
    worker = ready(make_worker, "a")
    go_on(worker, m.Pushes(3, 10, "bsp"))
    assert worker.transfer("push", "a").messages == [like(m.Push, sequence=4, clock=11)]
    assert worker.machine.clock == 11


def test_bundle_goes_on_as_one(make_worker: type[Worker], like: type[Like]) -> None:
    worker = make_worker(servers=1)
    worker.finish(worker.transfer("init", "a", "b"))
    go_on(worker, m.Pushes(3, 3, "bsp"), m.Pushes(3, 3, "bsp"))
    assert worker.finish(worker.transfer("pull", "a", "b")).messages == [like(m.PullBundle, at_least=3, before=4)]
    assert worker.transfer("push", "a", "b").messages == [like(m.PushBundle, sequence=4, clock=4)]


def test_rows_go_on_too(make_worker: type[Worker], like: type[Like]) -> None:
    worker = make_worker(servers=1)
    worker.finish(worker.transfer_rows("init", st.Rows([0])))
    go_on(worker, m.Pushes(3, 3, "bsp"))
    pull = worker.transfer_rows("pull", st.Rows([1], bytes(8)))
    assert pull.messages == [like(m.PullRows, at_least=3, before=4)]
    assert worker.transfer_rows("push", st.Rows([0])).messages == [like(m.PushRows, sequence=4, clock=4)]


def test_in_a_new_job_nothing_is_different(make_worker: type[Worker], like: type[Like]) -> None:
    worker = ready(make_worker, "a")
    call = go_on(worker, m.Pushes(0, 0, "bsp"))
    assert ef.Complete(call.number, 0) in worker.effects
    assert worker.transfer("pull", "a").messages == [like(m.Pull, at_least=0, before=0)]


def test_first_step_may_have_been_begun(make_worker: type[Worker], like: type[Like]) -> None:
    worker = ready(make_worker, "a", "b")
    go_on(worker, m.Pushes(1, 1, "bsp"), m.Pushes(0, 0, "bsp"))
    assert worker.transfer("pull", "a", "b").messages == [like(m.Pull, before=1), like(m.Pull, before=0)]


def test_worker_without_keys_can_not_go_on(make_worker: type[Worker]) -> None:
    assert isinstance(go_on(make_worker()).error, UnknownKeyError)


def test_worker_that_has_pushed_can_not_go_on(make_worker: type[Worker]) -> None:
    worker = ready(make_worker, "a")
    worker.transfer("push", "a")
    assert isinstance(go_on(worker).error, MembershipError)


def test_worker_is_told_when_there_is_no_such_step(make_worker: type[Worker]) -> None:
    worker = ready(make_worker, "a", "b")
    assert isinstance(go_on(worker, m.Pushes(3, 3, "bsp"), m.Pushes(5, 5, "bsp")).error, MembershipError)
    assert worker.transfer("push", "a").messages[0].sequence == 1
