"""Policy objectives as pure functions: arrays in, arrays out, masks and segment ids explicit (see docs/losses.md)."""
