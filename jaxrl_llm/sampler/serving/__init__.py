"""Servers in front of a SamplerService: gRPC (JetStream's service and our own) and OpenAI-compatible HTTP."""
