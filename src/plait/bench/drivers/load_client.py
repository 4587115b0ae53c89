"""Streaming completions over raw sockets, all from one process that does as little as a client can.

Reads {"host", "port", "bodies": [text, ...]} from stdin, sends all requests at once, and prints {"seconds", "cpu_s",
"texts", "first_s"}: from the first byte sent to the last received, its own CPU time, what came, and when it began to.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time


def main() -> None:
    work = json.load(sys.stdin)
    host, port = work["host"], work["port"]
    requests = []
    for body in work["bodies"]:
        data = body.encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        requests.append(head.encode() + data)
    connections = [socket.create_connection((host, port), timeout=600) for _ in requests]
    selector = selectors.DefaultSelector()
    received: list[list[bytes]] = [[] for _ in requests]
    first = [0.0] * len(requests)
    cpu, start = time.process_time(), time.perf_counter()
    for i, (connection, request) in enumerate(zip(connections, requests, strict=True)):
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ, i)
    left = len(requests)
    while left:
        for key, _ in selector.select():
            data = connections[key.data].recv(1 << 16)
            if data:
                if not received[key.data]:
                    first[key.data] = time.perf_counter() - start
                received[key.data].append(data)
            else:
                selector.unregister(connections[key.data])
                left -= 1
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    texts = [b"".join(parts).decode("utf-8", "replace") for parts in received]
    json.dump({"seconds": seconds, "cpu_s": cpu_s, "texts": texts, "first_s": first}, sys.stdout)


if __name__ == "__main__":
    main()
