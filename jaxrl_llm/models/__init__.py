"""The policy: one decoder declared with Flax NNX, called as pure functions of a plain parameter tree."""
