"""Worker shares: every client makes progress, regardless of the load from other clients."""

import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.validation.errors import Closed, QueueFull
from tandemrt.runtime.workers.clients import MAX_USERS, UNNAMED, Client, ServiceOrder
from tandemrt.runtime.workers.fair import MAX_BLOCKED, FairExecutor, WorkerShares
from tandemrt.runtime.workers.sandbox.pool import wait_for
from tests.waiting import PATIENCE_S, eventually

CLIENTS = [UNNAMED, Client("a"), Client("a", "x"), Client("a", "y"), Client("b"), Client(user="x"), Client(user="y")]
steps = st.one_of(st.sampled_from(CLIENTS), st.just(1), st.just(-1))


@given(workers=st.integers(1, 4), script=st.lists(steps, max_size=60))
def test_the_client_with_the_fewest_workers_is_next_and_one_worker_stays_reserved(workers: int, script: list) -> None:
    shares: WorkerShares[int] = WorkerShares(workers)
    waiting: list[tuple[Client, int]] = []
    working: list[Client] = []
    for number, step in enumerate(script):
        if isinstance(step, Client):
            shares.add(step, number)
            waiting.append((step, number))
        elif step == -1 and working:
            shares.done(working.pop(0))
        elif step == 1 and len(working) < workers:
            names, users = Counter(client.name for client in working), Counter(working)
            able = [
                client
                for client, _ in waiting
                if client == UNNAMED or (names[client.name] if client.name else users[client]) < max(1, workers - 1)
            ]
            taken = shares.take()
            assert (taken is None) == (not able)
            if taken is not None:
                client, _ = taken
                assert names[client.name] == min(names[each.name] for each in able)
                assert users[client] == min(users[each] for each in able if each.name == client.name)
                assert taken == next(each for each in waiting if each[0] == client), "its oldest work"
                waiting.remove(taken)
                working.append(client)
        assert len(shares) == len(waiting)


def test_a_sender_that_uses_many_names_delays_another_address_by_one_task() -> None:
    shares: WorkerShares[int] = WorkerShares(2)
    for number in range(1000):
        shares.add(Client("address", f"user {number}"), number)
    shares.add(Client("other address"), -1)
    first, second = shares.take(), shares.take()
    assert {first, second} == {(Client("address", "user 0"), 0), (Client("other address"), -1)}
    assert shares.take() is None


def test_users_of_one_name_take_turns() -> None:
    shares: WorkerShares[int] = WorkerShares(2)
    for number, user in enumerate("aaaabbc"):
        shares.add(Client("address", user), number)
    served = []
    while taken := shares.take():
        served.append(taken[0].user)
        shares.done(taken[0])
    assert "".join(served) == "abcabaa"


@pytest.mark.parametrize("quiet", [Client("address", "quiet"), Client("address")])
def test_a_sender_that_changes_its_user_delays_other_users_by_a_bounded_number_of_tasks(quiet: Client) -> None:
    shares: WorkerShares[int] = WorkerShares(2)
    for number in range(2):
        shares.add(quiet, number)
    for number in range(2, 5 * MAX_USERS):
        shares.add(Client("address", f"user {number}"), number)
    served = []
    while taken := shares.take():
        served.append(taken[1])
        shares.done(taken[0])
    assert served[0] == 0
    assert served.index(1) <= MAX_USERS + 2, "after one task of each user with a share, and one of all others"
    assert sorted(served) == list(range(5 * MAX_USERS))


def test_a_client_without_a_user_has_a_share_however_many_users_came_before_it() -> None:
    shares: WorkerShares[int] = WorkerShares(2)
    for number in range(5 * MAX_USERS):
        shares.add(Client("address", f"user {number}"), number)
    shares.add(Client("address"), -1)
    served = []
    while taken := shares.take():
        served.append(taken[1])
        shares.done(taken[0])
    assert served.index(-1) == MAX_USERS + 1


def test_unnamed_users_beyond_the_bound_have_the_limits_of_one_client() -> None:
    shares: WorkerShares[int] = WorkerShares(3)
    for number in range(MAX_USERS + 9):
        shares.add(Client(user=f"user {number}"), number)
    assert shares.waiting(Client(user="user 0")) == shares.waiting(Client(user=f"user {MAX_USERS - 1}")) == 1
    assert shares.waiting(Client(user=f"user {MAX_USERS}")) == shares.waiting(Client(user="new")) == 9


def test_a_client_with_busy_workers_does_not_block_another_client() -> None:
    held_workers = threading.Event()
    executor = FairExecutor(2, "test")
    flood = [executor.submit(Client("attacker"), held_workers.wait, PATIENCE_S) for _ in range(5)]
    assert executor.submit(Client("victim"), int, "7").result(PATIENCE_S) == 7
    assert not any(future.done() for future in flood)
    held_workers.set()
    assert all(future.result(PATIENCE_S) for future in flood)
    executor.shutdown(wait=True)


def test_tasks_that_wait_for_another_process_leave_their_workers_to_other_clients() -> None:
    answer: Future[int] = Future()
    executor = FairExecutor(3, "test")
    tasks = [executor.submit(Client(name), wait_for, answer, "work", None) for name in ("a", "b") for _ in range(5)]
    for name in "cd":
        assert executor.submit(Client(name), int, "7").result(PATIENCE_S) == 7
    assert len(executor) == 2 * (5 - 2), "a client has as many tasks at once as if none waited"
    answer.set_result(1)
    assert [task.result(PATIENCE_S) for task in tasks] == [1] * len(tasks)
    executor.shutdown(wait=True)


def test_a_bounded_number_of_threads_waits_for_other_processes() -> None:
    answer: Future[int] = Future()
    executor = FairExecutor(2, "test")
    tasks = [executor.submit(UNNAMED, wait_for, answer, "work", None) for _ in range(MAX_BLOCKED + 7)]
    assert eventually(lambda: len(executor) == 7 - 2)
    answer.set_result(1)
    assert [task.result(PATIENCE_S) for task in tasks] == [1] * len(tasks)
    assert executor.submit(UNNAMED, int, "7").result(PATIENCE_S) == 7
    executor.shutdown(wait=True)


def test_no_more_tasks_run_at_once_after_a_wait_than_there_are_workers() -> None:
    answer: Future[int] = Future()
    executor, lock, now, most = FairExecutor(2, "test"), threading.Lock(), 0, 0

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= 1

    tasks = [executor.submit(UNNAMED, wait_for, answer, "work", None) for _ in range(6)]
    tasks += [executor.submit(UNNAMED, work) for _ in range(20)]
    answer.set_result(1)
    for task in tasks:
        task.result(PATIENCE_S)
    executor.shutdown(wait=True)
    assert most <= 2


def test_shutdown_cancels_queued_work() -> None:
    held_workers = threading.Event()
    executor = FairExecutor(1, "test")
    begun, waiting = executor.submit(UNNAMED, held_workers.wait, PATIENCE_S), executor.submit(UNNAMED, int)
    threading.Timer(0.05, held_workers.set).start()
    executor.shutdown(wait=True)
    assert begun.result() is True
    with pytest.raises(Closed):
        waiting.result(0)
    with pytest.raises(Closed):
        executor.submit(UNNAMED, int)


def test_cancelled_work_leaves_the_queue_at_once() -> None:
    held_workers = threading.Event()
    executor = FairExecutor(1, "test")
    begun = executor.submit(UNNAMED, held_workers.wait, PATIENCE_S)
    for _ in range(1000):
        assert executor.submit(Client("a"), pytest.fail).cancel()
    assert len(executor) == 0
    held_workers.set()
    assert begun.result(PATIENCE_S) is True
    executor.shutdown(wait=True)


def test_a_client_may_have_so_many_tasks_waiting_and_an_unnamed_one_any_number() -> None:
    held_workers = threading.Event()
    executor = FairExecutor(1, "test", most_waiting=3)
    tasks = [executor.submit(UNNAMED, held_workers.wait, PATIENCE_S)]
    tasks += [executor.submit(Client("a", str(number)), held_workers.wait, PATIENCE_S) for number in range(3)]
    with pytest.raises(QueueFull, match="at most 3 tasks of one client may wait"):
        executor.submit(Client("a", "another"), pytest.fail)
    tasks += [executor.submit(Client(user="a"), held_workers.wait, PATIENCE_S) for _ in range(3)]
    with pytest.raises(QueueFull):
        executor.submit(Client(user="a"), pytest.fail)
    tasks += [executor.submit(UNNAMED, held_workers.wait, PATIENCE_S) for _ in range(9)]
    assert tasks[1].cancel()
    tasks[1] = executor.submit(Client("a"), held_workers.wait, PATIENCE_S)
    held_workers.set()
    assert all(task.result(PATIENCE_S) for task in tasks)
    executor.shutdown(wait=True)


def test_cancelled_work_is_not_begun_and_exceptions_reach_the_future() -> None:
    held_workers = threading.Event()
    executor = FairExecutor(1, "test")
    begun, gone = executor.submit(UNNAMED, held_workers.wait, PATIENCE_S), executor.submit(UNNAMED, pytest.fail)
    failing: Future[int] = executor.submit(UNNAMED, int, "x")
    assert gone.cancel()
    held_workers.set()
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(PATIENCE_S)
    assert begun.result() is True
    executor.shutdown(wait=True)


def test_work_of_other_threads_gets_an_answer_while_the_interpreter_exits() -> None:
    program = (
        "import threading, time\n"
        "from tandemrt.runtime.workers.clients import UNNAMED\n"
        "from tandemrt.runtime.workers.fair import FairExecutor\n"
        "executor = FairExecutor(2, 'test')\n"
        "exiting = threading.Event()\n"
        "threading._register_atexit(exiting.set)\n"  # called before the pool's own function
        "slow = executor.submit(UNNAMED, lambda: exiting.wait() and time.sleep(0.1))\n"
        "def late():\n"
        "    exiting.wait(); time.sleep(0.05)\n"
        "    while_one_runs = executor.submit(UNNAMED, int, '8')\n"
        "    slow.result(); print(while_one_runs.result(10)); time.sleep(0.1)\n"
        "    print(executor.submit(UNNAMED, int, '9').exception(10))\n"
        "threading.Thread(target=late).start()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stderr == ""
    assert done.stdout.startswith("8\nworker: a thread could not start: cannot schedule new futures")


def test_a_worker_goes_on_after_a_callback_that_raises_a_base_exception(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: object) -> None:
        raise SystemExit

    executor, hold = FairExecutor(1, "test"), threading.Event()
    executor.submit(UNNAMED, hold.wait, PATIENCE_S).add_done_callback(fails)
    after = executor.submit(UNNAMED, int, "7")
    hold.set()
    assert after.result(PATIENCE_S) == 7
    assert executor.submit(UNNAMED, int, "8").result(PATIENCE_S) == 8
    executor.shutdown(wait=True)
    assert "a callback of finished work failed" in caplog.text


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        (["b/x", "b/y", "b/z", "a/x"], ["b/x", "a/x", "b/y", "b/z"]),
        (["b/x", "b/x", "b/y", "a/x", "a/x"], ["b/x", "a/x", "b/y", "a/x", "b/x"]),
        (["b/x", "b/x", "b/y"], ["b/x", "b/y", "b/x"]),
    ],
)
def test_turns_count_names_before_their_users(waiting: list[str], order: list[str]) -> None:
    clients = [Client(*each.split("/")) for each in waiting]
    turns = ServiceOrder().turns(clients, [])
    served = []
    while clients:
        client = min(clients, key=turns.key)
        clients.remove(client)
        turns.serve(client)
        served.append("/".join(client))
    assert served == order
