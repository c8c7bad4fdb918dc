"""Reinforcement learning of language models on TPU pods and GPU meshes, with scaling that can be predicted."""
