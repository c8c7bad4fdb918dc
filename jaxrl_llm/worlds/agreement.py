"""What a trainer and its samplers must have in common."""

from collections.abc import Mapping

PROTOCOL = 2
"""Of World, Weights, Trainer and Sampler in rl.proto; goes up with every change that an older side would misread."""

Facts = Mapping[str, str]


def disagreement(facts: Facts, protocol: int, theirs: Facts, their_protocol: int, *, them: str) -> str:
    """Why the two do not belong together, in words; empty if they do. `them` names the other side."""
    if their_protocol != protocol:
        return (
            f"{them} speaks version {their_protocol} of the protocol, this side version {protocol}; install the same "
            "version of jaxrl_llm on both"
        )
    differing = [name for name in sorted({*facts, *theirs}) if facts.get(name) != theirs.get(name)]
    if not differing:
        return ""
    shown = ", ".join(
        f"{name} ({theirs.get(name, 'nothing')} there, {facts.get(name, 'nothing')} here)" for name in differing[:4]
    )
    more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
    return f"{them} has another {shown}{more}; start both from the same configuration and files"
