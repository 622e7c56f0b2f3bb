"""What answers at a federation's door, asked on a node's machine beside its ca.pem (bench/namespaces.py).

    python bench/door.py HOST LINK PATH ...
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys

host, link, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
for path in paths:
    line = http.client.HTTPSConnection(host, 443, timeout=10, context=ssl.create_default_context(cafile="ca.pem"))
    line.request("POST", path, b"", {"Content-Type": "application/protobuf"})
    print(line.getresponse().status, path)
plain = http.client.HTTPConnection(host, 443, timeout=10)
plain.request("POST", "/", b"")
print(plain.getresponse().status, "in plain text")
with socket.socket() as direct:
    print("open" if not direct.connect_ex((host, link)) else "refused", link)
