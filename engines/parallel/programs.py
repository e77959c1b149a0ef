"""Run a program that ends with this process, however this process ends."""

from collections.abc import Mapping, Sequence
from subprocess import PIPE, CompletedProcess, Popen

# The shell leads the program's process group, and kills the group at the end of its standard input: a signal to a
# compiler alone would not reach the processes that the compiler starts.
_LEAD = """
exec 3<&0 </dev/null
{ read -r _ <&3; kill -KILL -$$; } >/dev/null 2>&1 &
"$@" 3<&-
status=$?
kill $!
exit $status
"""


def run_program(
    command: Sequence[str], *, timeout_s: float | None = None, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run ``command`` in a process group of its own, and return its output.

    The group is killed after ``timeout_s``, when this process ends, and at an interrupt of the terminal. Raises
    TimeoutExpired, and OSError if no process can start.
    """
    lead = ["/bin/sh", "-c", _LEAD, "sh", *command]
    # ``cat`` ends with this process, and at an interrupt, which comes to this process's group.
    with (
        Popen(["cat"], stdin=PIPE, stdout=PIPE) as alive,
        Popen(
            lead, stdin=alive.stdout, stdout=PIPE, stderr=PIPE, text=True, env=environment, start_new_session=True
        ) as program,
    ):
        try:
            output, errors = program.communicate(timeout=timeout_s)
        finally:
            alive.kill()
    return CompletedProcess(command, program.returncode, output, errors)
