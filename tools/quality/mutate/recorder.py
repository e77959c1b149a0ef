"""A pytest plugin that records which test runs which line: ``-p tools.quality.mutate.recorder``.

The folder in the environment variable ``TANDEMRT_RECORD`` receives, per process, coverage's data (one context per test)
and a JSON file with the tests. A fixture that tests share has a context of its own: every test that uses it runs its
lines. The processes that tests start are recorded too.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

FOLDER = "TANDEMRT_RECORD"
TEST = "TANDEMRT_RECORDED_TEST"  # the context of the processes that a test starts
IMPORT = "import"
TOPS = ("engines", "export", "plugins", "runtime")
_CONFIG = f"""[run]
parallel = true
data_file = {{folder}}/lines
context = ${{{{{TEST}}}}}
include = {{include}}
disable_warnings = no-data-collected, module-not-measured, couldnt-parse
"""


def shared_fixture(name: str, base: str) -> str:
    """The context of a fixture; ``base``: the start of the ids of all tests that can use it."""
    return f"fixture {name} {base}"


class Recorder:
    """Switches coverage's context to the running test or shared fixture, and notes outcomes and durations."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._file = folder / f"tests-{os.getpid()}.json"
        self._tests: dict[str, dict[str, Any]] = {}
        self._fixtures: dict[str, float] = {}
        config = folder / f"config-{os.getpid()}"
        include = ", ".join(str(root / top / "*") for top in TOPS)
        config.write_text(_CONFIG.format(folder=folder, include=include))
        os.environ[TEST] = IMPORT
        self._coverage = coverage.Coverage(config_file=str(config), context="")
        self._coverage.start()
        self._switch(IMPORT)
        os.environ["COVERAGE_PROCESS_START"] = str(config)

    def _switch(self, context: str) -> None:
        os.environ[TEST] = context
        self._coverage.switch_context(context)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        fixtures = list(getattr(item, "fixturenames", []))
        self._tests[item.nodeid] = {"seconds": 0.0, "passed": True, "fixtures": fixtures}
        self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch(IMPORT)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        outer, start = os.environ[TEST], time.perf_counter()
        context = shared_fixture(fixturedef.argname, fixturedef.baseid)
        self._switch(context)
        try:
            return (yield)
        finally:
            self._fixtures[context] = time.perf_counter() - start
            self._switch(outer)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (test := self._tests.get(report.nodeid)) is not None:
            test["passed"] &= report.passed
            test["seconds"] += report.duration * (report.when == "call")

    def pytest_sessionfinish(self) -> None:
        os.environ.pop("COVERAGE_PROCESS_START")
        self._coverage.stop()
        self._coverage.save()
        self._file.write_text(json.dumps({"tests": self._tests, "fixtures": self._fixtures}))


def pytest_configure(config: pytest.Config) -> None:
    distributes = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not distributes:  # the processes that run tests
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER]), config.rootpath.resolve()))
