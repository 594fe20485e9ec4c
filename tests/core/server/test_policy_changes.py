"""Another policy for keys that are there: who has to ask, when servers go over, and what ends otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import (
    BarrierTimeoutError,
    KeyDeletedError,
    MembershipError,
    OptimizerError,
    PolicyError,
    UnknownKeyError,
    WorkerLostError,
)
from aiokv.types import TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Server, Worker

SPEC = TensorSpec((2, 3), "float32")


def ask(server: Server, rank: int, policy: str, *keys: str, **fields: Any) -> Asked:
    """Let a worker ask for another policy of keys, of "w" unless others are given."""
    options: dict[str, Any] = {"old": server.policy, "group": (), "timeout": 5.0, "clock": 0} | fields
    return server.ask(rank, m.SetPolicy(policy, keys or ("w",), **options))


@pytest.fixture
def two(make_server: type[Server]) -> Server:
    """A server with two workers and the key "w" under bsp."""
    server = make_server(2)
    server.init()
    return server


# --- going over ---


def test_server_goes_over_when_all_have_asked(two: Server) -> None:
    first = ask(two, 0, "asp")
    assert first.pending
    second = ask(two, 1, "asp")
    assert first.answer == second.answer == m.Done()
    assert two.push(0).answer == m.Done(1), "nobody is waited for now"


def test_pushes_before_it_follow_the_old_policy_and_are_waited_for(two: Server) -> None:
    two.hold = True
    two.push(0, 1.0)
    two.push(1, 2.0)
    asked = [ask(two, rank, "asp") for rank in range(2)]
    assert asked[0].pending
    two.finish()
    assert [one.answer for one in asked] == [m.Done()] * 2
    assert two.seen(ef.Apply)[0].ranks == [0, 1]


def test_old_policy_waits_no_longer_for_who_has_asked(two: Server) -> None:
    pushed = two.push(1, 4.0)
    assert pushed.pending
    ask(two, 0, "asp")
    assert pushed.answer == m.Done(1)
    assert two.value() == 4.0


def test_new_policy_counts_from_the_change_on(two: Server) -> None:
    for _ in range(2):
        two.push(0, 1.0)
    for rank in range(2):
        ask(two, rank, "ssp:0")
    for rank in range(2):
        ask(two, rank, "bsp", old="ssp:0")
    assert two.push(0).pending, "its third push is in the first round of two"
    assert two.push(1).answer == m.Done(3)
    assert two.seen(ef.Apply)[-1].ranks == [0, 1]


def test_what_was_read_under_the_policy_before_is_as_new_as_what_the_change_has_found(
    make_server: type[Server],
) -> None:
    """Also where the keys come back to a policy under which rounds were made before."""
    server = make_server(2, "ringmaster:2")
    server.init()
    for version in range(3):
        server.push(0, read_version=version)
    for rank in range(2):
        ask(server, rank, "asp")
    server.push(0)
    for rank in range(2):
        ask(server, rank, "ringmaster:2", old="asp")
    assert server.push(1, read_version=3).answer == m.Done(5), "nothing was made since that it could have missed"
    assert server.push(0, read_version=4).answer == m.Done(6)
    assert server.push(1, read_version=4).answer == m.Done(6, "stale"), "two rounds were"


def test_read_that_the_old_policy_holds_back_goes_on(make_server: type[Server]) -> None:
    server = make_server(2, "ssp:0")
    server.init()
    held = server.push(0, want_value=True)
    assert held.pending
    ask(server, 1, "asp")
    assert held.answer == m.Value(1), "rank 1 is waited for no longer"
    ask(server, 0, "asp")
    assert server.push(0, want_value=True).answer == m.Value(2)


def test_read_that_waits_for_the_one_who_asks_last_goes_on_with_the_change(make_server: type[Server]) -> None:
    server = make_server(2, "pssp:1:0")
    server.init()
    held = server.push(0, want_value=True)
    asked = ask(server, 0, "asp")
    assert held.pending
    ask(server, 1, "asp")
    assert held.answer == m.Value(1)
    assert asked.answer == m.Done()


def test_versions_that_a_rule_had_kept_are_dropped(make_server: type[Server]) -> None:
    server = make_server(2, "asp")
    server.init()
    server.ask(0, m.SetOptimizer("dcasgd", {}, "sum", 5.0))
    server.push(0)
    server.push(1)
    assert server.kept["w", 0]
    for rank in range(2):
        ask(server, rank, "bsp")
    assert not server.kept["w", 0]
    server.push(0)
    server.push(1)
    assert server.seen(ef.Apply)[-1].read is None


def test_keys_of_a_bundle_go_alone_from_then_on(two: Server) -> None:
    two.bundle_size = 2
    message = m.InitBundle(("a", "b"), ((1,), (1,)), "float32", "bsp", 5.0, (), (b"a", b"b"))
    two.ask(0, message, 0.0, length=8)
    two.hold = True
    push = m.PushBundle(0, 1, 0, want_value=False, timeout=5.0, clock=1)
    for rank in range(2):
        two.ask(rank, push, 1.0, length=8)
    asked = [ask(two, rank, "asp", "a", "b") for rank in range(2)]
    assert asked[1].pending, "while the bundle is being updated it stays one"
    two.finish()
    assert [one.answer for one in asked] == [m.Done()] * 2
    two.pushed |= {(0, "a"): 1}
    two.hold = False
    assert two.push(0, key="a").answer == m.Done(2)


def test_server_without_the_keys_has_nothing_to_wait_for(two: Server) -> None:
    assert ask(two, 0, "asp", "elsewhere").answer == m.Done()


def test_later_init_has_to_agree_with_the_new_policy(two: Server) -> None:
    for rank in range(2):
        ask(two, rank, "asp")
    assert isinstance(two.init(rank=1).answer, PolicyError)
    assert two.init(rank=1, policy="asp").answer == m.Done()


def test_rounds_that_are_decided_begin_with_the_change(two: Server) -> None:
    two.push(0)
    two.push(1)
    for rank in range(2):
        ask(two, rank, "k_sync:1")
    assert two.push(1, read_version=1).answer == m.Done(2)
    assert two.push(0, read_version=1).answer == m.Done(2, "late")


def test_round_that_is_open_is_closed_with_who_is_there(make_server: type[Server]) -> None:
    server = make_server(2, "k_batch_async:3")
    server.init()
    server.push(0)
    ask(server, 0, "asp")
    assert server.value() == 0.0
    assert ask(server, 1, "asp").answer == m.Done()
    assert server.value() == 1.0


def test_rounds_of_keys_that_stay_wait_for_all_again_after_the_change(make_server: type[Server]) -> None:
    server = make_server(2, "k_batch_sync:2")
    for key in "wv":
        server.init(key)
    for rank in range(2):
        ask(server, rank, "asp")
    assert server.ask(0, m.Switched(("w",), "k_batch_sync:2", (), 5.0)).answer == m.Done()
    server.push(0, key="v")
    assert server.value("v") == 0.0
    server.push(1, key="v")
    assert server.value("v") == 2.0
    assert server.ask(1, m.Switched(("w",), "k_sync:9", (), 5.0)).answer == m.Done(), "nothing was known of those"


def test_server_that_does_not_decide_lets_the_other_one_close_what_is_open(make_server: type[Server]) -> None:
    server = make_server(2, "k_batch_async:3", index=1, servers=2)
    server.init()
    assert ask(server, 0, "asp").pending
    assert ask(server, 1, "asp").answer == m.Done()


# --- what can't be ---


@pytest.mark.parametrize(
    ("policy", "fields", "error", "text"),
    [
        ("nonsense", {}, PolicyError, "unknown policy"),
        ("sum", {}, PolicyError, "policy bsp can't become sum"),
        ("bsp", {"old": "sum"}, PolicyError, "policy sum can't become bsp"),
        ("asp", {"old": "ssp:1"}, PolicyError, "key 'w' is kept under policy bsp, not ssp:1"),
        ("asp", {"group": (0,)}, MembershipError, r"key 'w' belongs to ranks all, not \[0\]"),
    ],
)
def test_what_can_not_be_is_refused(two: Server, policy: str, fields: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        raise ask(two, 0, policy, **fields).error
    assert two.push(0).pending, "it is as it was"


def test_only_ranks_of_the_group_can_ask(make_server: type[Server]) -> None:
    server = make_server(3)
    server.init(group=(0, 1))
    with pytest.raises(MembershipError, match=r"belongs to ranks \[0, 1\]"):
        raise ask(server, 2, "asp", group=(0, 1)).error
    for rank in range(2):
        answer = ask(server, rank, "asp", group=(0, 1))
    assert answer.answer == m.Done()


def test_policy_under_which_the_rule_can_not_update_a_cut_key_is_refused(two: Server) -> None:
    two.init("cut", shape=(4,))
    two.ask(0, m.SetOptimizer("lamb", {}, "sum", 5.0))
    with pytest.raises(OptimizerError, match=r"lamb.*key 'cut'.*asp"):
        raise ask(two, 0, "asp", "cut").error


def test_different_policies_are_refused_and_both_are_named(two: Server) -> None:
    first = ask(two, 0, "asp")
    with pytest.raises(PolicyError, match=r"rank 1 \(worker-1\) asks for policy ssp:1, but rank 0 .* for asp"):
        raise ask(two, 1, "ssp:1").error
    assert first.pending
    assert ask(two, 1, "asp").answer == m.Done()


def test_worker_may_ask_for_something_else_while_nobody_else_has_asked(two: Server) -> None:
    ask(two, 0, "asp")
    ask(two, 0, "ssp:0")
    assert ask(two, 1, "ssp:0").answer == m.Done()
    assert two.push(0, want_value=True).pending


def test_push_of_a_rank_that_has_asked_is_refused(two: Server) -> None:
    ask(two, 0, "asp")
    with pytest.raises(PolicyError, match=r"rank 0 \(worker-0\) has asked for another policy"):
        raise two.push(0).error


# --- calls that end otherwise ---


def test_who_has_not_called_is_named_and_what_was_asked_stays_so(two: Server) -> None:
    first = ask(two, 0, "asp")
    two.tick(5.0)
    with pytest.raises(BarrierTimeoutError, match=r"'asp' of key 'w': rank 1 \(worker-1\) did not call") as caught:
        raise first.error
    assert caught.value.details["ranks"] == [1]
    assert ask(two, 1, "asp").answer == m.Done()
    assert ask(two, 0, "asp").answer == m.Done(), "it has that already"


def test_update_that_takes_too_long_is_what_was_waited_for(two: Server) -> None:
    two.hold = True
    two.push(0)
    ask(two, 0, "asp")
    second = ask(two, 1, "asp")
    two.tick(5.0)
    with pytest.raises(BarrierTimeoutError, match="what was pushed is not made"):
        raise second.error
    two.finish()
    assert ask(two, 1, "asp").answer == m.Done()


def test_asking_for_the_policy_that_is_there_takes_back_what_was_asked(two: Server) -> None:
    ask(two, 0, "asp")
    two.tick(5.0)
    assert ask(two, 0, "bsp").answer == m.Done()
    assert two.push(1).pending, "rank 0 is waited for again"
    assert two.push(0).answer == m.Done(1)
    assert ask(two, 0, "bsp").answer == m.Done(), "there is nothing to take back"


def test_taking_back_while_others_wait_lets_them_wait(make_server: type[Server]) -> None:
    server = make_server(2, "k_batch_async:2")
    server.init()
    server.hold = True
    for _ in range(2):
        server.push(0)
    pushed = server.push(1)
    others = ask(server, 1, "asp")
    ask(server, 0, "asp")
    assert ask(server, 0, "k_batch_async:2").answer == m.Done()
    server.finish()
    server.finish()
    assert isinstance(pushed.answer, m.Done)
    assert others.pending
    assert ask(server, 0, "asp").answer == m.Done()
    assert others.answer == m.Done()


def test_lost_worker_that_has_not_asked_can_not_be_waited_for(two: Server) -> None:
    first = ask(two, 0, "asp")
    two.lose(1)
    assert isinstance(first.error, WorkerLostError)
    assert isinstance(ask(two, 0, "asp").error, WorkerLostError)


def test_lost_worker_that_has_asked_is_no_obstacle(two: Server) -> None:
    ask(two, 1, "asp")
    two.lose(1)
    assert ask(two, 0, "asp").answer == m.Done()


def test_worker_that_leaves_is_waited_for_no_longer(two: Server) -> None:
    first = ask(two, 0, "asp")
    two.leave(1)
    assert first.answer == m.Done()


def test_nobody_answers_a_connection_that_is_over(two: Server) -> None:
    first = ask(two, 0, "asp")
    two.lose_peer(0)
    assert ask(two, 1, "asp").answer == m.Done()
    assert first.pending


def test_key_that_is_deleted_ends_the_calls_that_wait_for_it(two: Server) -> None:
    two.init("v")
    first = ask(two, 0, "asp")
    two.ask(1, m.Delete(("v",), 5.0))
    assert first.pending
    two.ask(1, m.Delete(("w",), 5.0))
    assert isinstance(first.error, KeyDeletedError)
    assert ask(two, 1, "asp").answer == m.Done(), "the server knows no such key"


# --- a worker ---


def test_worker_asks_every_server_behind_its_pushes_and_later_calls_wait(worker: Worker) -> None:
    worker.finish(worker.transfer("init", "w"))
    push = {"operation": st.Operation.PUSH, "tensors": [("w", SPEC)], "timeout": 9.0}
    low = worker.call(st.Transfer, **push, priority=-3)
    call = changed(worker, "ssp:2")
    *trials, fence = call.sends
    assert (fence.peer, fence.priority) == (low.sends[0].peer, -3)
    assert [one.message for one in trials] == [m.SetPolicy("ssp:2", ("w",), "bsp", (), 9.5, 0, trial=True)] * 2
    for trial in trials:
        worker.answer(trial, m.Done(), 0)
    later = worker.transfer("push", "w")
    assert not later.sends
    asks = [one for one in worker.answer(fence, m.RulesState("", {}, "sum", (), 0), 0) if isinstance(one, ef.Send)]
    assert [one.message for one in asks] == [m.SetPolicy("ssp:2", ("w",), "bsp", (), 9.5, 1)] * 2
    sent = [effect for send in asks for effect in worker.answer(send, m.Done(), 0)]
    assert call.outcome == "done"
    assert [type(effect.message) for effect in sent if isinstance(effect, ef.Send)] == [m.Push]
    assert [record.options.policy for record in worker.machine.records] == ["ssp:2"]


def changed(worker: Worker, policy: str, *keys: str) -> Any:
    """Let a worker ask for another policy."""
    return worker.call(st.ChangePolicy, policy=policy, keys=list(keys), timeout=10.0)


@pytest.fixture
def trained(worker: Worker) -> Worker:
    """A worker with the keys "w" and "v" under bsp."""
    worker.finish(worker.transfer("init", "w", "v"))
    return worker


def test_deciding_server_is_told_that_keys_have_left_its_rounds(make_worker: type[Worker]) -> None:
    worker = make_worker(policy="k_sync:1")
    worker.finish(worker.transfer("init", "w"))
    call = worker.agree(changed(worker, "bsp"))
    first, second = call.sends
    worker.answer(first, m.Done(), 0)
    (told,) = [effect for effect in worker.answer(second, m.Done(), 0) if isinstance(effect, ef.Send)]
    assert (told.peer, told.message) == (0, m.Switched(("w",), "k_sync:1", (), 9.5))
    assert call.outcome is None
    worker.answer(told, m.Done(), 0)
    assert call.outcome == "done"


def test_nothing_is_asked_where_keys_have_the_policy(trained: Worker) -> None:
    assert changed(trained, "bsp").outcome == "done"


def test_pushes_after_a_call_in_vain_are_refused_until_it_is_called_again(trained: Worker) -> None:
    call = trained.agree(changed(trained, "asp", "w"))
    waiting = trained.transfer("push", "w")
    for send in call.sends:
        trained.refuse(send, BarrierTimeoutError("late", ranks=[1]))
    assert isinstance(call.error, BarrierTimeoutError)
    assert isinstance(waiting.error, PolicyError)
    assert isinstance(trained.transfer("push", "w").error, PolicyError)
    trained.finish(trained.transfer("push", "v"))
    assert trained.transfer("pull", "w").sends
    again = trained.agree(changed(trained, "bsp", "w"))
    assert again.messages == [m.SetPolicy("bsp", ("w",), "bsp", (), 9.5, 1)] * 2, "it takes back what was asked"
    trained.finish(again)
    assert trained.transfer("push", "w").sends


def test_keys_of_a_bundle_go_alone_once_their_policy_is_asked_for(make_worker: type[Worker]) -> None:
    worker = make_worker(servers=1)
    worker.finish(worker.transfer("init", "a", "b"))
    together = worker.transfer("push", "a", "b")
    assert [type(message) for message in together.messages] == [m.PushBundle]
    worker.finish(together)
    worker.finish(changed(worker, "asp", "a"))
    assert [type(message) for message in worker.transfer("push", "a", "b").messages] == [m.Push] * 2


def test_key_that_was_deleted_meanwhile_is_not_remembered(trained: Worker) -> None:
    call = trained.agree(changed(trained, "asp", "w"))
    trained.call(st.DeleteKeys, keys=["w"], timeout=5.0)
    trained.finish(call)
    assert [record.key for record in trained.machine.records] == ["v"]


@pytest.mark.parametrize(
    ("policy", "key", "error"),
    [
        ("nonsense", "w", PolicyError),
        ("sum", "w", PolicyError),
        ("asp", "all", PolicyError),
        ("asp", "x", UnknownKeyError),
    ],
)
def test_worker_refuses_what_can_not_be(trained: Worker, policy: str, key: str, error: type) -> None:
    spec = [("all", SPEC)]
    options = st.KeyOptions("sum")
    trained.finish(trained.call(st.Transfer, operation=st.Operation.INIT, tensors=spec, timeout=9.0, options=options))
    assert isinstance(changed(trained, policy, key).error, error)


def test_keys_of_other_ranks_can_not_be_changed_and_are_left_out(trained: Worker) -> None:
    record = st.KeyRecord("theirs", SPEC, False, st.KeyOptions("bsp", (1,)))
    trained.call(st.Adopt, records=[record])
    assert isinstance(changed(trained, "asp", "theirs").error, MembershipError)
    assert [message.keys for message in changed(trained, "asp").messages] == [("w", "v")] * 2
