"""On PYTHONPATH with FALLOW_NET_LOG set: every Python process refuses and notes whatever looks outside of this machine."""

import os
import sys

LOG, HERE = os.environ.get("FALLOW_NET_LOG"), ("127.", "localhost", "::1", "0.0.0.0")


def look(event: str, args: tuple) -> None:
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else str(host or "")
    if host and not host.startswith(HERE):
        with open(LOG or os.devnull, "a", encoding="utf-8") as f:
            f.write(f"{os.path.basename(sys.argv[0])} {event} {host}\n")
        raise OSError(f"loopback only: {event} {host}")


if LOG:
    sys.addaudithook(look)
