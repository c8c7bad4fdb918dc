from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_RUNNING: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_STOP_STRING: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
    FINISH_REPETITION: _ClassVar[Finish]
    FINISH_ABORTED: _ClassVar[Finish]
FINISH_RUNNING: Finish
FINISH_STOP: Finish
FINISH_STOP_STRING: Finish
FINISH_LENGTH: Finish
FINISH_REPETITION: Finish
FINISH_ABORTED: Finish

class ThinkingBudget(_message.Message):
    __slots__ = ("lowest", "highest", "answer_tokens")
    LOWEST_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lowest: int
    highest: int
    answer_tokens: int
    def __init__(self, lowest: _Optional[int] = ..., highest: _Optional[int] = ..., answer_tokens: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "min_new_tokens", "stop_ids", "stop_strings", "banned_ids", "thinking", "repetition_limit", "logit_bias")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    BANNED_IDS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    REPETITION_LIMIT_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_new_tokens: int
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    banned_ids: _containers.RepeatedScalarFieldContainer[int]
    thinking: ThinkingBudget
    repetition_limit: int
    logit_bias: _containers.RepeatedCompositeFieldContainer[Bias]
    def __init__(self, max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., min_new_tokens: _Optional[int] = ..., stop_ids: _Optional[_Iterable[int]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., banned_ids: _Optional[_Iterable[int]] = ..., thinking: _Optional[_Union[ThinkingBudget, _Mapping]] = ..., repetition_limit: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[Bias, _Mapping]]] = ...) -> None: ...

class Bias(_message.Message):
    __slots__ = ("id", "bias")
    ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    id: int
    bias: float
    def __init__(self, id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Draw(_message.Message):
    __slots__ = ("seed", "stream", "sibling", "ledger_id", "first")
    SEED_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SIBLING_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    seed: int
    stream: int
    sibling: int
    ledger_id: str
    first: int
    def __init__(self, seed: _Optional[int] = ..., stream: _Optional[int] = ..., sibling: _Optional[int] = ..., ledger_id: _Optional[str] = ..., first: _Optional[int] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("prompt", "sampling", "draws", "whole")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    draws: _containers.RepeatedCompositeFieldContainer[Draw]
    whole: bool
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., draws: _Optional[_Iterable[_Union[Draw, _Mapping]]] = ..., whole: _Optional[bool] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("draw", "ledger_id", "request_id", "tokens", "logprobs", "versions", "forced", "finish")
    DRAW_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    draw: int
    ledger_id: str
    request_id: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedScalarFieldContainer[int]
    forced: _containers.RepeatedScalarFieldContainer[bool]
    finish: Finish
    def __init__(self, draw: _Optional[int] = ..., ledger_id: _Optional[str] = ..., request_id: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[int]] = ..., forced: _Optional[_Iterable[bool]] = ..., finish: _Optional[_Union[Finish, str]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted", "finished")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, aborted: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[int]] = ...) -> None: ...

class WeightsHeader(_message.Message):
    __slots__ = ("version", "leaves")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    version: int
    leaves: int
    def __init__(self, version: _Optional[int] = ..., leaves: _Optional[int] = ...) -> None: ...

class LeafHeader(_message.Message):
    __slots__ = ("path", "dtype", "shape", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    sha256: bytes
    def __init__(self, path: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class WeightsChunk(_message.Message):
    __slots__ = ("header", "leaf", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: WeightsHeader
    leaf: LeafHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[WeightsHeader, _Mapping]] = ..., leaf: _Optional[_Union[LeafHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("state", "version", "in_flight", "slots", "max_prompt_tokens", "max_new_tokens", "vocab_size", "error")
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    state: str
    version: int
    in_flight: int
    slots: int
    max_prompt_tokens: int
    max_new_tokens: int
    vocab_size: int
    error: str
    def __init__(self, state: _Optional[str] = ..., version: _Optional[int] = ..., in_flight: _Optional[int] = ..., slots: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class MetricsResponse(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("protocol", "run", "session", "facts", "silence_s")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run: str
    session: str
    facts: _containers.ScalarMap[str, str]
    silence_s: float
    def __init__(self, protocol: _Optional[int] = ..., run: _Optional[str] = ..., session: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ..., silence_s: _Optional[float] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("refusal", "slots", "version", "digest")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    slots: int
    version: int
    digest: str
    def __init__(self, refusal: _Optional[str] = ..., slots: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("session", "version", "digest", "source", "transfer", "patience_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    session: str
    version: int
    digest: str
    source: str
    transfer: bool
    patience_s: float
    def __init__(self, session: _Optional[str] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., source: _Optional[str] = ..., transfer: _Optional[bool] = ..., patience_s: _Optional[float] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("failure", "superseded", "digest", "bytes", "pull_s", "load_s", "fallback")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    failure: str
    superseded: bool
    digest: str
    bytes: int
    pull_s: float
    load_s: float
    fallback: str
    def __init__(self, failure: _Optional[str] = ..., superseded: _Optional[bool] = ..., digest: _Optional[str] = ..., bytes: _Optional[int] = ..., pull_s: _Optional[float] = ..., load_s: _Optional[float] = ..., fallback: _Optional[str] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "version", "verify")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    session: str
    version: int
    verify: bool
    def __init__(self, session: _Optional[str] = ..., version: _Optional[int] = ..., verify: _Optional[bool] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("version", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("state", "version", "in_flight", "error")
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    state: str
    version: int
    in_flight: int
    error: str
    def __init__(self, state: _Optional[str] = ..., version: _Optional[int] = ..., in_flight: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("session", "finished")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    session: str
    finished: bool
    def __init__(self, session: _Optional[str] = ..., finished: _Optional[bool] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("version", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("path", "shape", "start")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    path: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, path: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., start: _Optional[_Iterable[int]] = ...) -> None: ...

class LendResponse(_message.Message):
    __slots__ = ("address", "id", "parts")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    id: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, address: _Optional[str] = ..., id: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class ReturnRequest(_message.Message):
    __slots__ = ("id", "failed")
    ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    id: int
    failed: bool
    def __init__(self, id: _Optional[int] = ..., failed: _Optional[bool] = ...) -> None: ...

class ReturnResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("protocol", "address", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    address: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, protocol: _Optional[int] = ..., address: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...
