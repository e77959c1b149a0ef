"""Loops shorten Python's switch interval while they run, and restore the process's own value.

Each test runs in a process of its own: the interval belongs to the process, and other tests' loops would change it.
"""

import subprocess
import sys
from pathlib import Path

BEGIN = """
import sys
from math import isclose
from tandemrt import LLM, SamplingParams
from tandemrt.runtime.engine_loop.loop_thread import SWITCH_S

def reads(expected):
    return isclose(sys.getswitchinterval(), expected, abs_tol=2e-6)

def answer(llm):
    llm.generate("the text", SamplingParams(max_tokens=2))

bundle = sys.argv[1]
"""

LAST_OF_TWO = """
sys.setswitchinterval(0.004)
first, second = LLM(bundle, threads=1), LLM(bundle, threads=1)
assert reads(0.004), "no loop runs before the first request"
answer(first)
answer(second)
assert reads(SWITCH_S)
first.close()
assert reads(SWITCH_S)
second.close()
assert reads(0.004)
"""

CHANGED_MEANWHILE = """
with LLM(bundle, threads=1) as llm:
    answer(llm)
    sys.setswitchinterval(0.002)
assert reads(0.002)
"""

ALREADY_SHORTER = """
sys.setswitchinterval(0.00005)
with LLM(bundle, threads=1) as llm:
    answer(llm)
    assert reads(0.00005)
assert reads(0.00005)
"""


def in_a_process(script: str, bundle: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", BEGIN + script, str(bundle)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_switch_interval_is_restored_after_the_last_of_two_loops(ngram_bundle: Path) -> None:
    in_a_process(LAST_OF_TWO, ngram_bundle)


def test_an_interval_that_the_user_sets_meanwhile_stays(ngram_bundle: Path) -> None:
    in_a_process(CHANGED_MEANWHILE, ngram_bundle)


def test_a_shorter_interval_is_not_lengthened(ngram_bundle: Path) -> None:
    in_a_process(ALREADY_SHORTER, ngram_bundle)
