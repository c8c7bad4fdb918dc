"""The lengths that sequences are padded to, so that few programs serve all of them."""

_SMALLEST = 32


def length_buckets(longest: int) -> tuple[int, ...]:
    """32, 64, ... below `longest`, and `longest`."""
    buckets, size = [], _SMALLEST
    while size < longest:
        buckets.append(size)
        size *= 2
    return (*buckets, longest)
