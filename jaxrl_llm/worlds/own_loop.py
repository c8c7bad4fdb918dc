"""A server's event loop, run by a thread of its own."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


def run_own_loop(
    loop: asyncio.AbstractEventLoop, serve: Callable[[], Coroutine[Any, Any, None]], started: Future
) -> None:
    """The body of that thread: `serve()` to its end, then the end of whatever it has left running.

    What goes wrong before `serve` has set `started` is its outcome; later it is the thread's own.
    """
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve())
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)
    finally:
        for task in (tasks := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
