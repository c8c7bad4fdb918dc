"""`jaxrl data inspect`: rows as the model will see them, token counts, what is left out, and overlaps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.cli.assemble import with_tokenizer
from jaxrl_llm.cli.tasks import encoded, pools
from jaxrl_llm.config import RunConfig
from jaxrl_llm.data.prompts import fingerprint, plain_text
from jaxrl_llm.data.sources import apart, find_overlaps, read_sources
from jaxrl_llm.types import PromptTask


def inspect_data(config: RunConfig, *, rows: int) -> dict[str, Any]:
    """What `config` makes of its sources. Nothing is refused for being too long or held out twice: it is counted.

    Raises UserError for files, values, tokenizers and templates that cannot work.
    """
    data = config.data.model_copy(update={"too_long": "drop"})
    read = read_sources(data.sources, seed=data.seed)
    sources = apart(read, "drop")
    config, tokenizer = with_tokenizer(config.model_copy(update={"data": data}), sources)
    tasks = encoded(config, tokenizer, sources)
    used = pools(config, tasks)
    share = {pool.name: pool.weight / sum(other.weight for other in used) for pool in used}
    found = {}
    for source, encoded_source, pool in zip(sources, tasks, used, strict=True):
        repeated = Counter(plain_text(problem.prompt) for problem in source.split.train)
        found[source.how.name] = {
            "kind": source.how.kind,
            "reward": source.how.reward,
            "share": share[pool.name],
            "train": len(encoded_source.train),
            "train_used": len(pool.tasks),
            "heldout": len(encoded_source.heldout),
            "too_long": encoded_source.too_long,
            "held_out_elsewhere": source.overlapping,
            "repeated_prompts": sum(count - 1 for count in repeated.values()),
            "prompt_tokens": _spread([len(task.tokens_T) for task in encoded_source.train]),
            "answer_characters": _spread([len(task.answer) for task in encoded_source.train]),
            "rows": [_row(task, tokenizer.decode) for task in pool.tasks[:rows]],
            "heldout_rows": [_row(task, tokenizer.decode) for task in encoded_source.heldout[:rows]],
        }
    everything = [task for pool in used for task in pool.tasks] + [t for one in tasks for t in one.heldout]
    return {
        "fingerprint": fingerprint(everything),
        "overlaps": [
            {"train": name, "heldout": other, "prompts": count} for (name, other), count in find_overlaps(read).items()
        ],
        "sources": found,
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """`inspect_data` as text."""
    yield f"fingerprint {found['fingerprint'][:16]}"
    for name, source in found["sources"].items():
        yield ""
        yield (
            f"{name} ({source['kind']}, reward {source['reward']}, {source['share']:.1%} of the mixture): "
            f"{source['train']} training prompts ({source['train_used']} used), {source['heldout']} held out"
        )
        yield (
            f"  left out: {source['too_long']} too long, {source['held_out_elsewhere']} held out too; "
            f"{source['repeated_prompts']} repeat another prompt"
        )
        for what in ("prompt_tokens", "answer_characters"):
            low, mean, high = (source[what][key] for key in ("min", "mean", "max"))
            yield f"  {what.replace('_', ' ')}: {low} to {high}, mean {mean:.1f}"
        for side, rows in (("train", source["rows"]), ("held out", source["heldout_rows"])):
            for row in rows:
                yield f"  {side} {row['task_id']} ({len(row['tokens'])} tokens): {row['prompt']!r} -> {row['answer']!r}"
                if row["gold"] not in (None, row["answer"]):
                    yield f"    right completion {row['gold']!r}"
                yield f"    ids {' '.join(map(str, row['tokens'][:32]))}{' ...' if len(row['tokens']) > 32 else ''}"
                yield f"    read back {row['decoded']!r}"
    yield ""
    for pair in found["overlaps"]:
        yield f"overlap: {pair['prompts']} training prompts of {pair['train']} are held out by {pair['heldout']}"
    if not found["overlaps"]:
        yield "no training prompt is held out"


def _row(task: PromptTask, decode) -> dict[str, Any]:
    ids = task.tokens_T.tolist()
    return {
        "task_id": task.task_id,
        "prompt": task.prompt,
        "answer": task.answer,
        "gold": task.gold,
        "tokens": ids,
        "decoded": decode(ids),
    }


def _spread(counts: Sequence[int]) -> dict[str, float]:
    return {"min": min(counts), "mean": float(np.mean(counts)), "max": max(counts)}
