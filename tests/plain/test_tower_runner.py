"""The vision tower in its thread: states are kept by image, and a request gets them together with its other work."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import numpy as np
import pytest

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.validation.errors import Closed
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import host_floats
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.requests import vision
from tandemrt.runtime.requests.images import Image, PromptImages
from tandemrt.runtime.requests.recent import Recent
from tandemrt.runtime.requests.vision import TowerRunner, tower_inputs
from tandemrt.runtime.workers.clients import UNNAMED
from tests.waiting import PATIENCE_S, eventually

ENTRY = VisionEntry(
    image_token=1, patch_values=1, patch_size=1, merge_size=1, resize="bounds", max_pixels=100, resample="bicubic",
    mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0),
)  # fmt: skip
WIDTH = 2
CPU = torch.device("cpu")


class Tower:
    """Its states are the first colour of the image, in float32. It notes that colour at each run."""

    def __init__(self) -> None:
        self.device = CPU
        self.contract = {"image_states": Binding("image_states", "float32", ("image_tokens", WIDTH))}
        self.seen: list[int] = []
        self.error: Exception | None = None

    def bind(self, tensors: dict[str, torch.Tensor]) -> Any:
        def run() -> None:
            if self.error is not None:
                raise self.error
            colour = int(tensors["pixels"][0, 0])
            self.seen.append(colour)
            tensors["image_states"].fill_(colour)

        return SimpleNamespace(run=run)


@pytest.fixture
def tower() -> Tower:
    return Tower()


@pytest.fixture
def run(tower: Tower) -> Iterator[Callable[..., list[Any]]]:
    """Run the tower over images of one token each, named by their colour; return their states."""
    runner = TowerRunner(cast("Any", tower), Streams(CPU), torch.bfloat16)

    def states(*colours: int, salt: str | None = None) -> list[Any]:
        images = prompt(*colours, salt=salt)
        ready: Future[str] = Future()
        (gate,), start = runner.run_before(images, [ready], lambda: ready.set_result("ready"), UNNAMED)
        start()
        assert gate.result(PATIENCE_S) == "ready"
        assert images.states is not None
        assert {(each.dtype, tuple(each.shape)) for each in images.states} == {(torch.bfloat16, (1, WIDTH))}
        return [float(each[0, 0]) for each in images.states]

    states.runner = runner  # type: ignore[attr-defined]
    yield states
    runner.close()


def prompt(*colours: int, salt: str | None = None) -> PromptImages:
    images = [Image(np.full((1, 3), colour, np.uint8), 1, 1, ENTRY, salt=salt) for colour in colours]
    return cast("PromptImages", SimpleNamespace(images=images, states=None))


def test_an_image_is_computed_once_and_each_gets_its_own_states(tower: Tower, run: Callable[..., list[Any]]) -> None:
    assert run(7, 9, 7) == [7, 9, 7]
    assert run(9, 5) == [9, 5]
    assert tower.seen == [7, 9, 5]


def test_only_prompts_of_one_salt_share_the_states_of_an_image(tower: Tower, run: Callable[..., list[Any]]) -> None:
    assert [run(7), run(7, salt="a"), run(7, salt="b"), run(7, salt="a"), run(7)] == [[7]] * 5
    assert tower.seen == [7, 7, 7]


def test_the_states_used_longest_ago_are_dropped_first(tower: Tower, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.runner, "_known", Recent(2 * 2 * WIDTH))  # of two images in bfloat16
    run(1, 2)
    run(1)  # 2 is the one used longest ago
    assert tower.seen == [1, 2]
    run(3)
    run(1)
    assert tower.seen == [1, 2, 3]
    run(2)
    assert tower.seen == [1, 2, 3, 2]
    monkeypatch.setattr(vision, "_KEPT_BYTES", 0)
    assert run(8, 8) == [8, 8]
    assert tower.seen == [1, 2, 3, 2, 8], "the newest states stay, however large they are"


def gates(run: Any, count: int) -> tuple[list[Future[int]], list[Future[int]], Callable[[], None]]:
    """Return futures of other work, those that wait for the tower too, and what starts both."""
    ready: list[Future[int]] = [Future() for _ in range(count)]
    gated, start = run.runner.run_before(prompt(4), ready, lambda: None, UNNAMED)
    return ready, gated, start


def test_each_future_has_its_own_result_once_the_other_work_is_done(run: Callable[..., list[Any]]) -> None:
    ready, gated, start = gates(run, 2)
    start()
    ready[1].set_result(11)
    assert gated[1].result(PATIENCE_S) == 11
    assert not gated[0].done()
    ready[0].set_exception(ValueError("no grammar"))
    with pytest.raises(ValueError, match="no grammar"):
        gated[0].result(PATIENCE_S)


def test_a_failure_of_the_tower_is_one_of_every_future(tower: Tower, run: Callable[..., list[Any]]) -> None:
    tower.error = RuntimeError("the tower failed")
    ready, gated, start = gates(run, 2)
    start()
    for future in ready:
        future.set_result(1)
    for future in gated:
        with pytest.raises(RuntimeError, match="the tower failed"):
            future.result(PATIENCE_S)
    run.runner.close()  # type: ignore[attr-defined]
    ready, gated, start = gates(run, 1)
    start()
    ready[0].set_result(1)
    assert gated[0].exception(PATIENCE_S) is not None, "a runner that was closed answers, too"


def test_a_cancelled_future_cancels_its_own_work_and_the_last_one_the_tower(
    tower: Tower, run: Callable[..., list[Any]]
) -> None:
    blocked: Future[None] = Future()
    run.runner._thread.submit(UNNAMED, blocked.result, PATIENCE_S)  # type: ignore[attr-defined]
    ready, gated, start = gates(run, 2)
    others, kept, start_others = gates(run, 2)
    start()
    start_others()
    assert gated[0].cancel()
    assert gated[1].cancel()
    assert kept[0].cancel()
    assert [future.cancelled() for future in (*ready, *others)] == [True, True, True, False]
    blocked.set_result(None)
    others[1].set_result(5)
    assert kept[1].result(PATIENCE_S) == 5
    assert tower.seen == [4], "no request waits for the first one any more"


def test_the_tower_runs_over_the_next_image_while_states_are_copied(
    tower: Tower, run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = run.runner  # type: ignore[attr-defined]
    to_host, release = runner._to_host, Event()

    def slowly(states: Any) -> Any:
        assert release.wait(PATIENCE_S)
        return to_host(states)

    monkeypatch.setattr(runner, "_to_host", slowly)
    many, ready = prompt(1, 1, 2, 3), Future[str]()
    (gate,), start = runner.run_before(many, [ready], lambda: None, UNNAMED)
    ready.set_result("ready")
    start()
    assert eventually(lambda: tower.seen == [1, 2])
    again, of_again = prompt(1), Future[str]()
    (gate_again,), start_again = runner.run_before(again, [of_again], lambda: None, UNNAMED)
    start_again()
    of_again.set_result("again")
    time.sleep(0.05)
    assert tower.seen == [1, 2], "the device has the states of two images, whose copies have not ended"
    assert not gate.done()
    release.set()
    assert (gate.result(PATIENCE_S), gate_again.result(PATIENCE_S)) == ("ready", "again")
    assert tower.seen == [1, 2, 3]
    assert [float(each[0, 0]) for images in (many, again) for each in images.states or ()] == [1, 1, 2, 3, 1]


def test_a_failed_copy_is_one_of_its_requests_alone(
    tower: Tower, run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, on_device = run.runner, list[ref[Event]]()  # type: ignore[attr-defined]

    def fails(_: Any) -> Any:
        converted = Event()
        on_device.append(ref(converted))
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "_to_host", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(6)
    assert [each() for each in on_device] == [None], "what a failure keeps has no memory of the device"
    assert run(6) == [6]
    assert tower.seen == [6, 6]


@pytest.mark.parametrize("copying", [False, True])
def test_a_runner_that_is_closed_while_it_works_says_so(
    run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, *, copying: bool
) -> None:
    runner, started, release = run.runner, Event(), Event()  # type: ignore[attr-defined]
    name = "_to_host" if copying else "_computed"
    work = getattr(runner, name)

    def slowly(of_image: Any) -> Any:
        started.set()
        assert release.wait(PATIENCE_S)
        return work(of_image)

    monkeypatch.setattr(runner, name, slowly)
    ready, (gate,), start = gates(run, 1)
    start()
    ready[0].set_result(1)
    assert started.wait(PATIENCE_S)
    runner.close()
    release.set()
    assert isinstance(gate.exception(PATIENCE_S), Closed)


def test_states_of_many_tokens_reach_the_host_whole(tower: Tower, run: Callable[..., list[Any]]) -> None:
    tokens = 2 * vision._STAGED_ROWS + 7
    rows = np.arange(tokens * WIDTH, dtype=np.float32).reshape(tokens, WIDTH) % 256
    tower.bind = lambda tensors: SimpleNamespace(  # type: ignore[method-assign]
        run=lambda: tensors["image_states"].copy_(torch.from_numpy(rows))
    )
    image = Image(np.zeros((tokens, 3), np.uint8), 1, tokens, ENTRY)
    states = run.runner._to_host(run.runner._computed(image))  # type: ignore[attr-defined]
    assert np.array_equal(host_floats(states), rows)


def test_states_of_a_gpu_reach_the_host_as_tensors_of_torch(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a GPU cannot copy from the tensors that stand for torch's on a CPU. Here torch's CPU is the GPU."""
    import torch as library

    def on_host(*shape: int, dtype: Any) -> library.Tensor:
        return library.zeros(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "_on_gpu", lambda device: isinstance(device, library.device))
    monkeypatch.setattr(vision, "device_of", lambda _: SimpleNamespace(host_zeros=on_host, synchronize=lambda: None))
    tower.device = library.device("cpu")
    runner = TowerRunner(cast("Any", tower), Streams(CPU), library.bfloat16)  # type: ignore[arg-type]
    states = runner._to_host(runner._computed(Image(np.full((1, 3), 7, np.uint8), 1, 1, ENTRY)))
    runner.close()
    assert isinstance(states, library.Tensor)
    assert states.tolist() == [[7, 7]]


@pytest.mark.parametrize("fails", [False, True])
def test_a_warm_up_runs_the_tower_once_and_lets_images_report_its_failure(
    tower: Tower, run: Callable[..., list[Any]], *, fails: bool
) -> None:
    tower.error = RuntimeError("no kernel") if fails else None
    run.runner.warm_up(ENTRY, 60)  # type: ignore[attr-defined]
    assert tower.seen == ([] if fails else [0])


def test_inputs_of_patches_have_those_of_the_padding() -> None:
    update = {"padded": True, "merge_size": 2, "window_side": 2, "grid_side": 4}
    image = Image(np.zeros((6 * 10, 3), np.uint8), 6, 10, ENTRY.model_copy(update=update))
    sizes = {name: len(array) for name, array in tower_inputs(image).items()}
    windows = {"windows": 6, "window_mask": 6}
    of_patches = ("pixels", "positions", "padding", "corners", "corner_weights", "window_places")
    assert sizes == dict.fromkeys(of_patches, 32 * 4) | windows
