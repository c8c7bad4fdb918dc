"""Samplers in processes of their own: what they and the trainer tell each other, and how weights reach them.

Trainer: `fleet` keeps a `link` to every sampler; `trainer_server` is where samplers register and fetch weights.
Sampler: `sampler_world` is its state, `servicers` its doors, `registration` its way to the trainer.
"""
