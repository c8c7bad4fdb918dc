"""The OpenAI-compatible endpoints in front of a SamplerService, as an ASGI application."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl_llm.sampler.reply import Reply
from jaxrl_llm.sampler.service import SamplerClosedError, SamplerService
from jaxrl_llm.sampler.serving.access import Access, is_loopback
from jaxrl_llm.sampler.serving.openai_reply import Answer, error_body, error_event
from jaxrl_llm.sampler.serving.openai_request import Asked, Limits, RefusedFieldError, read_chat, read_completion
from jaxrl_llm.sampler.serving.prometheus import CONTENT_TYPE, prometheus_text
from jaxrl_llm.text.chat import ChatTemplate
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import QueueFullError, UserError

BODY_BYTES = 4 << 20
"""Of one request's body."""

BODY_S = 30.0
"""Within which a body must have come: a call that dawdles would keep others out."""


@dataclass(frozen=True)
class Served:
    """What the endpoints serve: `name` is the model's, as clients must give it."""

    service: SamplerService
    tokenizer: Tokenizer
    template: ChatTemplate
    name: str
    max_choices: int


class _HttpError(Exception):
    def __init__(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None):
        super().__init__(body["error"]["message"])
        self.response = JSONResponse(body, status, headers)


def http_app(served: Served, access: Access, *, max_calls: int) -> ASGIApp:
    """The application; at most `max_calls` requests at a time, others get status 429."""

    def read(body: dict[str, Any], *, chat: bool) -> Asked:
        engine = served.service.engine
        limits = Limits(engine.max_new_tokens, served.max_choices, engine.top_logprobs)
        if chat:
            return read_chat(body, served.tokenizer, served.template, limits)
        return read_completion(body, served.tokenizer, limits)

    def endpoint(*, chat: bool) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = await _json(request)
            if body.get("model") != served.name and isinstance(body.get("model"), str):
                message = f"there is no model {body['model']!r} here; this server has {served.name!r}"
                raise _HttpError(
                    404, error_body(message, "invalid_request_error", param="model", code="model_not_found")
                )
            # Tokenizing a long text would hold up everybody's stream.
            asked = await asyncio.to_thread(read, body, chat=chat)
            reply = served.service.submit(asked.requests, stream=asked.stream)
            try:
                await asyncio.wrap_future(reply.accepted)
                result = Answer(asked, served.tokenizer, chat=chat)
                if asked.stream:
                    return _Events(_events(reply, result), reply)
                if not await _collect(request, reply, result):
                    return Response(status_code=499)  # nobody is there to read it
            except BaseException:
                reply.close()
                raise
            # Thousands of alternatives take a while to write down.
            return await asyncio.to_thread(lambda: JSONResponse(result.whole()))

        return answer

    async def models(_: Request) -> Response:
        entry = {"id": served.name, "object": "model", "created": 0, "owned_by": "jaxrl_llm"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(_: Request) -> Response:
        seen = served.service.health
        return JSONResponse({"status": seen.state}, 200 if seen.ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(prometheus_text(served.service.metrics), media_type=CONTENT_TYPE)

    routes = [
        Route("/v1/completions", endpoint(chat=False), methods=["POST"]),
        Route("/v1/chat/completions", endpoint(chat=True), methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    handlers: Any = {
        _HttpError: lambda _, error: error.response,
        404: lambda request, _: JSONResponse(
            error_body(f"no such path: {request.url.path}", "invalid_request_error"), 404
        ),
        405: lambda request, _: JSONResponse(
            error_body(f"{request.url.path} does not take {request.method}", "invalid_request_error"), 405
        ),
        UserError: _refused,
        QueueFullError: lambda _, error: _busy(str(error)),
        SamplerClosedError: lambda _, error: JSONResponse(error_body(str(error), "server_error"), 503),
        ClientDisconnect: lambda *_: Response(status_code=499),
    }
    return _Gate(Starlette(routes=routes, exception_handlers=handlers), access, max_calls)


class _Gate:
    """Lets requests in: this machine's own names on an open server, the token on a closed one, never too many."""

    def __init__(self, app: ASGIApp, access: Access, max_calls: int):
        self._app, self._access, self._free = app, access, max_calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if refusal := self._refusal(scope["path"], headers):
            await refusal(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif not self._free:
            await _busy("the server answers as many calls as it may; try again")(scope, receive, send)
        else:
            self._free -= 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._free += 1

    def _refusal(self, path: str, headers: dict[str, str]) -> Response | None:
        token = self._access.token
        if token is not None:
            if path == "/health" or token.admits(headers.get("authorization")):
                return None
            body = error_body("missing or wrong token: send 'Authorization: Bearer ...'", "authentication_error")
            return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        # Without a token only this machine may come in, and a web page open on this machine is not it: its requests
        # carry its own site's name here (DNS rebinding).
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
        if is_loopback(name):
            return None
        return JSONResponse(
            error_body(f"this server does not answer for the host {host!r}", "invalid_request_error"), 403
        )


async def _json(request: Request) -> dict[str, Any]:
    # A web page may post plain text anywhere without asking; JSON it may not.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise _HttpError(415, error_body("the body must be application/json", "invalid_request_error"))
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                raw += part
                if len(raw) > BODY_BYTES:
                    message = f"the body is longer than {BODY_BYTES} bytes"
                    raise _HttpError(413, error_body(message, "invalid_request_error"))
    except TimeoutError:
        message = f"the body did not come within {BODY_S:.0f} seconds"
        raise _HttpError(408, error_body(message, "invalid_request_error")) from None
    try:
        body = json.loads(raw.decode())
        if b"\\u" in raw:  # half of a surrogate pair can be written so; it has no bytes
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _HttpError(400, error_body(f"the body is not JSON: {error}", "invalid_request_error")) from None
    if not isinstance(body, dict):
        raise _HttpError(400, error_body("the body must be a JSON object", "invalid_request_error"))
    return body


async def _collect(request: Request, reply: Reply, result: Answer) -> bool:
    """Wait for the whole answer; False, and everything aborted, if the client goes away before it."""

    async def gather() -> None:
        async for index, delta in reply:
            result.choices[index].add(delta)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting, leaving = asyncio.ensure_future(gather()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if collecting.done():
            collecting.result()
            return True
        return False
    finally:
        for task in (collecting, leaving):
            task.cancel()
        reply.close()


async def _events(reply: Reply, result: Answer) -> AsyncIterator[bytes]:
    for event in result.first_events():
        yield event
    try:
        async for index, delta in reply:
            if (event := result.event(index, delta)) is not None:
                yield event
    except SamplerClosedError as error:
        yield error_event(str(error))
        return
    for event in result.last_events():
        yield event


class _Events(StreamingResponse):
    """Server-sent events; whichever way the response ends, what still runs of the reply is aborted."""

    def __init__(self, events: AsyncIterator[bytes], reply: Reply):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.close()


def _refused(_: Request, error: Exception) -> Response:
    field = error.field if isinstance(error, RefusedFieldError) else None
    return JSONResponse(error_body(str(error), "invalid_request_error", param=field), 400)


def _busy(message: str) -> Response:
    return JSONResponse(error_body(message, "rate_limit_error", code="rate_limit_exceeded"), 429, {"Retry-After": "1"})
