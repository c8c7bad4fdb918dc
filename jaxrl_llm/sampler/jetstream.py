"""The only module that imports JetStream: its Engine interface, or the stand-in where the wheel is absent; its server's
protocol, where the wheel is there.

google-jetstream 0.2.2 asks for seqio, which pulls TensorFlow, for two class names that its engine interface only
mentions. Where seqio is absent an empty module with those two names stands in while JetStream is imported and leaves
again. Importing JetStream may raise the root logger's level; it is put back.
"""

import contextlib
import importlib.metadata
import importlib.util
import logging
import sys
import types
from collections.abc import Generator
from typing import TYPE_CHECKING, Any


@contextlib.contextmanager
def _seqio_stand_in() -> Generator[None]:
    if importlib.util.find_spec("seqio") is not None:
        yield
        return
    package, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
    vars(vocabularies).update({name: type(name, (), {}) for name in ("Vocabulary", "SentencePieceVocabulary")})
    vars(package)["vocabularies"] = vocabularies
    stand_ins = {"seqio": package, "seqio.vocabularies": vocabularies}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def _root_logger_kept() -> Generator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


# A type checker reads the stand-in: one interface, whether JetStream is installed or not.
if TYPE_CHECKING or importlib.util.find_spec("jetstream") is None:
    from jaxrl_llm.sampler.engine_api import Engine, ResultTokens, SlotData, tokenizer_pb2

    ENGINE_BASE = "stand-in"
    """Which base `PolicyEngine` has; written into environment.json."""
else:
    with _seqio_stand_in(), _root_logger_kept():
        from jetstream.engine import tokenizer_pb2
        from jetstream.engine.engine_api import Engine, ResultTokens, SlotData

    ENGINE_BASE = f"google-jetstream {importlib.metadata.version('google-jetstream')}"

__all__ = ["ENGINE_BASE", "Engine", "ResultTokens", "SlotData", "orchestrator_protocol", "tokenizer_pb2"]


def orchestrator_protocol() -> tuple[Any, Any] | None:
    """JetStream's own (jetstream_pb2, jetstream_pb2_grpc), the messages and the service its stock clients speak.

    None where the wheel is absent. Imported on demand: only a server needs gRPC.
    """
    if importlib.util.find_spec("jetstream") is None:
        return None
    with _root_logger_kept():
        from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
    return jetstream_pb2, jetstream_pb2_grpc
