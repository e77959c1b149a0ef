"""What ranks run in tests; their processes import this module, so it imports little."""

import os
import signal
import time

import numpy as np

from tandemrt.plugins.operators.shared_ranks import SharedRanks
from tandemrt.plugins.operators.shared_ranks import shared_bytes as shared_bytes
from tandemrt.runtime.workers.ranks import Link
from tandemrt.runtime.workers.ranks import RankProcesses as RankProcesses

PART = 64  # bytes


def add_what_is_commanded(link: Link) -> None:
    """Add the commanded number and the rank's own to all ranks' numbers. 13 raises, 14 ends, 15 stops the process."""
    shared = SharedRanks(link.rank, link.parts, link.arrived)

    def run(command: np.ndarray) -> None:
        number = int(command[0])
        if number == 13:
            raise ValueError("thirteen")
        if number == 14:
            os._exit(3)
        if number == 15:
            os.kill(os.getpid(), signal.SIGSTOP)
        shared.exchange(np.array([number + link.rank]))

    link.opened()
    link.run_commands(run)


def open_one_after_another(link: Link) -> None:
    """Open half a second after the rank before, then run no command."""
    time.sleep(0.5 * link.rank)
    link.opened()
    link.run_commands(lambda _: None)


def fail_to_open(link: Link) -> None:
    raise ValueError(f"no weights for rank {link.rank}")
