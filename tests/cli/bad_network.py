"""A TCP relay that holds bytes back and cuts connections in the middle of what they carry."""

import contextlib
import random
import socket
import threading
import time


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Relay:
    """Everything sent to `address` arrives at 127.0.0.1:`port`, and answers come back, each up to `delay_s` later.

    Once so many bytes of answers as `cut_after()` says have passed, all connections are cut; then it is asked again.
    """

    def __init__(self, port, *, delay_s=0.0, cut_after=lambda: float("inf"), seed=0):
        self._port, self._delay_s, self._cut_after, self._random = port, delay_s, cut_after, random.Random(seed)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.cuts, self._left, self._pairs = 0, cut_after(), []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.close()
        self._cut()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                try:
                    behind = socket.create_connection(("127.0.0.1", self._port), timeout=10)
                except OSError:
                    client.close()
                    continue
                behind.settimeout(None)
                with self._lock:
                    self._pairs.append((client, behind))
                for source, sink, answers in ((client, behind, False), (behind, client, True)):
                    threading.Thread(target=self._carry, args=(source, sink, answers), daemon=True).start()

    def _carry(self, source, sink, answers):
        with contextlib.suppress(OSError):
            while data := source.recv(2**14):
                if self._delay_s:
                    time.sleep(self._random.uniform(0, self._delay_s))
                sink.sendall(data)
                if answers and self._over(len(data)):
                    self._cut()
            sink.shutdown(socket.SHUT_WR)

    def _over(self, count):
        with self._lock:
            self._left -= count
            if self._left > 0:
                return False
            self.cuts, self._left = self.cuts + 1, self._cut_after()
            return True

    def _cut(self):
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
