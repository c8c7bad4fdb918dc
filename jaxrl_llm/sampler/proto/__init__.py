"""The sampler's own gRPC service: rl.proto and what protoc made of it (checked by a test)."""

MESSAGE_BYTES = 4 << 20
"""Of one message, either way; gRPC's own default, said aloud. Weights come in chunks of 1 MiB."""
