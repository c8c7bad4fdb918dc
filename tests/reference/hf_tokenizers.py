"""Token ids of transformers for the small Hugging Face tokenizers of tests/text/hf_families.py, stored as digests.

See README.md in this folder. Of each string: its ids with special tokens in it taken for text (0 where transformers
makes a special token of it all the same, out of the pieces of its name), and with them parsed.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "text"))

from hf_families import FAMILIES, write_family  # noqa: E402
from tokenizer_strings import digests, strings  # noqa: E402

OUT = TESTS / "data" / "hf_tokenizers.npz"


def main() -> None:
    texts, stored = strings(2200), {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            theirs = PreTrainedTokenizerFast.from_pretrained(str(write_family(family, Path(folder))))
            names = [token.content for token in theirs.added_tokens_decoder.values() if token.special]
        untrusted = [theirs.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts]
        trusted = [theirs.encode(text, add_special_tokens=False) for text in texts]
        special = {theirs.convert_tokens_to_ids(name) for name in names}
        made = {text for text, ids in zip(texts, untrusted, strict=True) if special & set(ids)}
        # A model that holds the names as pieces lets them shape the text around them as well.
        unclear = [bool(made) and any(name in text for name in names) for text in texts]
        stored[f"{family}/text"] = np.where(unclear, 0, digests(untrusted)).astype(np.uint32)
        stored[f"{family}/trusted"] = digests(trusted)
        print(f"{family}: {len(texts)} strings, {sum(unclear)} left out")
    np.savez_compressed(OUT, **stored)
    print(f"wrote {OUT} ({OUT.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
