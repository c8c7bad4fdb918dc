"""A client of our own gRPC service, blocking."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from jaxrl_llm.sampler.proto import MESSAGE_BYTES, rl_pb2
from jaxrl_llm.sampler.proto.methods import calls
from jaxrl_llm.sampler.reply import Delta, join
from jaxrl_llm.sampler.serving.access import is_loopback
from jaxrl_llm.sampler.serving.weights_stream import weights_chunks
from jaxrl_llm.types import Completion, FinishReason, Params, Sampling, UserError

_FINISHES: dict[int, FinishReason | None] = {
    rl_pb2.FINISH_RUNNING: None,
    rl_pb2.FINISH_STOP: "stop",
    rl_pb2.FINISH_STOP_STRING: "stop_string",
    rl_pb2.FINISH_LENGTH: "length",
    rl_pb2.FINISH_REPETITION: "repetition",
    rl_pb2.FINISH_ABORTED: "aborted",
}


class SamplerClient:
    """Speaks to one server; usable as a context manager. Every method raises grpc.RpcError as the server refuses it.

    `certificate` is the PEM file of the authority that signed the server's certificate; without it the connection is
    plain. `token` goes with every call. Raises UserError for a token that would leave this machine over a plain one.
    """

    def __init__(self, target: str, *, token: str | None = None, certificate: Path | None = None):
        options = [("grpc.max_receive_message_length", MESSAGE_BYTES)]
        if certificate is None:
            if token is not None and not is_loopback(target.rpartition(":")[0]):
                raise UserError(f"a token for {target} would travel unencrypted; name the server's TLS certificate")
            self._channel = grpc.insecure_channel(target, options)
        else:
            credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
            self._channel = grpc.secure_channel(target, credentials, options)
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._calls = calls(self._channel)

    def __enter__(self) -> "SamplerClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def pieces(self, prompt: Sequence[int], sampling: Sampling, draws: Sequence[rl_pb2.Draw]) -> Iterator[rl_pb2.Piece]:
        """The stream of one Sample call; its `cancel()` aborts what still runs."""
        request = rl_pb2.SampleRequest(prompt=prompt, sampling=sampling_message(sampling), draws=draws)
        return self._calls["Sample"](request, metadata=self._metadata)

    def sample(self, prompt: Sequence[int], sampling: Sampling, draws: Sequence[rl_pb2.Draw]) -> list[Completion]:
        """Wait for all completions of one Sample call, in the order of its draws."""
        deltas: list[list[Delta]] = [[] for _ in draws]
        for piece in self.pieces(prompt, sampling, draws):
            deltas[piece.draw].append(_delta(piece))
        return [join(parts) for parts in deltas]

    def update_weights(self, params: Params, version: int) -> None:
        self._calls["UpdateWeights"](weights_chunks(params, version), metadata=self._metadata)

    def abort(self, request_ids: Sequence[int]) -> rl_pb2.AbortResponse:
        return self._calls["Abort"](rl_pb2.AbortRequest(request_ids=request_ids), metadata=self._metadata)

    def pause(self) -> None:
        self._calls["Pause"](rl_pb2.PauseRequest(), metadata=self._metadata)

    def resume(self) -> None:
        self._calls["Resume"](rl_pb2.ResumeRequest(), metadata=self._metadata)

    def drain(self) -> None:
        """Returns when nothing is in flight any more."""
        self._calls["Drain"](rl_pb2.DrainRequest(), metadata=self._metadata)

    def health(self) -> rl_pb2.HealthResponse:
        return self._calls["Health"](rl_pb2.HealthRequest(), metadata=self._metadata)

    def metrics(self) -> dict[str, float]:
        return dict(self._calls["Metrics"](rl_pb2.MetricsRequest(), metadata=self._metadata).values)


def sampling_message(sampling: Sampling) -> rl_pb2.Sampling:
    """The message of a Sampling."""
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    thinking = fields.pop("thinking")
    biases = [rl_pb2.Bias(id=id, bias=bias) for id, bias in fields.pop("logit_bias")]
    message = rl_pb2.Sampling(**fields, logit_bias=biases)
    if thinking is not None:
        message.thinking.CopyFrom(
            rl_pb2.ThinkingBudget(
                lowest=thinking.lowest, highest=thinking.highest, answer_tokens=thinking.answer_tokens
            )
        )
    return message


def completion_of(piece: rl_pb2.Piece) -> Completion:
    """Of a draw that was asked for whole: its one piece."""
    return join([_delta(piece)])


def _delta(piece: rl_pb2.Piece) -> Delta:
    return Delta(
        np.array(piece.tokens, np.int32),
        np.array(piece.logprobs, np.float32),
        np.array(piece.versions, np.int32),
        np.array(piece.forced, bool),
        _FINISHES[piece.finish],
    )
