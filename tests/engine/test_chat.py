"""``tandemrt chat`` in a pseudoterminal: keys and output."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, receive_interrupts
from tools.demo.corpus import held_out

# In a session of its own, whose terminal is the pseudoterminal: so Ctrl-C there is what it is in a shell.
START = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from tandemrt.cli import main
main()
"""
CTRL_C, CTRL_D = "\x03", "\x04"
DIM, UNDERLINED = "\x1b[2", "\x1b[4m"
PROMPT = r"\n(\x1b\[\?2004h)?> $"
SENTENCE = held_out(1)[0].prompt_messages()[-1]["content"]
LONG = '{"type": "array", "items": {"type": "integer"}, "minItems": 400}'


class Terminal:
    """A command in a pseudoterminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
        environment.pop("NO_COLOR", None)
        command = [sys.executable, "-c", START, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment,
            preexec_fn=receive_interrupts,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str, *, again: str = "") -> str:
        """What appears up to the first match of ``pattern``, that included; keys are typed ``again`` where none does.

        An interpreter may lose an interrupt on its way into a wait; a person presses the keys again, too.
        """
        seen, end = "", time.monotonic() + PATIENCE_S
        while not (match := re.search(pattern, seen)):
            assert time.monotonic() < end, f"{pattern!r} never came: {seen!r}"
            if select.select([self._master], [], [], 3)[0]:
                seen += os.read(self._master, 1 << 16).decode(errors="replace")
            else:
                self.type(again)
        assert not seen[match.end() :].strip(), "nothing is lost"
        return seen

    def ask(self, line: str) -> str:
        """Type a line and wait for the next prompt: what was said in between."""
        self.type(line + "\n")
        return self.until(PROMPT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(demo_bundle: Path) -> Iterator[Terminal]:
    opened = Terminal("chat", str(demo_bundle), "--threads", "1")
    try:
        opened.until("> $")
        yield opened
    finally:
        opened.close()


def test_a_chat_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    answer = terminal.ask(SENTENCE)
    assert DIM in answer, "reasoning is dim"
    assert UNDERLINED in answer, "what was drafted is underlined"
    assert '"kind":' in re.sub(r"\x1b\[[\d;]*m", "", answer)
    assert "/budget N" in terminal.ask("/help")

    assert UNDERLINED not in terminal.ask("/drafts 0") + terminal.ask(SENTENCE), "nothing was drafted"
    assert "num_draft_tokens: this runtime drafts at most 4 tokens" in terminal.ask("/drafts 5")
    assert "/budget many: must be followed by a number" in terminal.ask("/budget many")
    assert "/think: is no command" in terminal.ask("/think")

    (tmp_path / "long.json").write_text(LONG)
    terminal.ask("/new")
    terminal.ask("/budget 0")
    terminal.ask(f"/schema {tmp_path / 'long.json'}")
    terminal.type(SENTENCE + "\n")
    terminal.until(r"\[\d[\s\S]*$")
    terminal.type(CTRL_C)
    assert "finish: cancelled" in terminal.until(PROMPT, again=CTRL_C), "the answer, not the program"
    terminal.type("half a line")
    terminal.until("half a line$")
    terminal.type(CTRL_C)
    terminal.until(PROMPT, again=CTRL_C)
    terminal.ask("/new")
    terminal.ask("/schema")
    assert DIM not in terminal.ask(SENTENCE), "the budget is still 0"

    terminal.type(CTRL_D)
    assert terminal.process.wait(PATIENCE_S) == 0


def test_settings_of_a_chat_last_and_new_forgets_every_message(terminal: Terminal, tmp_path: Path) -> None:
    def saved(name: str) -> list[dict[str, str]]:
        assert f"saved to {tmp_path / name}" in terminal.ask(f"/save {tmp_path / name}")
        messages: list[dict[str, str]] = json.loads((tmp_path / name).read_text())["messages"]
        return messages

    assert saved("empty.json") == []
    terminal.ask("/system Answer in JSON.")
    terminal.ask("/schema")
    terminal.ask("/budget 0")
    terminal.ask("the first question")
    terminal.ask("the second question")
    messages = saved("two.json")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages if message["role"] == "user"] == [
        "the first question",
        "the second question",
    ]
    assert "/save: must be followed by a new file, received" in terminal.ask(f"/save {tmp_path / 'two.json'}")
    assert "/save: must be followed by a new file, received nothing" in terminal.ask("/save")
    assert len(saved("again.json")) == 5
    terminal.ask("/new")
    assert [message["role"] for message in saved("new.json")] == ["system"]
    terminal.ask("/system")
    terminal.ask("the third question")
    assert [message["role"] for message in saved("third.json")] == ["user", "assistant"]

    answers = {terminal.ask("/new") + terminal.ask("/temperature 2") + terminal.ask(SENTENCE) for _ in range(3)}
    assert len(answers) > 1
    assert "temperature: must be at least 0.0" in terminal.ask("/temperature -1")
    assert "/temperature hot: must be followed by a number" in terminal.ask("/temperature hot")


def test_a_full_context_is_reported_and_exit_leaves(tiny_bundle: Path) -> None:
    terminal = Terminal("chat", str(tiny_bundle), "--threads", "1")
    full = "The context of 96 tokens is full: /new starts a new chat."
    try:
        terminal.until("> $")
        terminal.ask("/drafts 0")
        assert full not in terminal.ask("x" * 200), "a message of its own that is too long is no full context"
        assert full in terminal.ask("x"), "the random model never stops"
        later = terminal.ask("x" * 200)
        assert "ContextLengthExceeded" in later
        assert full in later
        terminal.ask("/new")
        terminal.type("/exit\n")
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()
