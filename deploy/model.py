"""The demo's model as a service of the composition: answers the containers beside it until it is stopped.

Takes the port to listen at.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from subagent_tasks.demo.local_model import find_weights
from subagent_tasks.demo.model_server import start


def stop(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    # A container's first process gets no signal that it does not handle.
    signal.signal(signal.SIGTERM, stop)
    server = start(str(find_weights()), host="0.0.0.0", port=int(sys.argv[1]))
    print(f"model ready at {server.listening_address}", flush=True)
    signal.pause()
