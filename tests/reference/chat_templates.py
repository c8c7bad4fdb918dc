"""What transformers makes of the chat templates of tests/text/chat_families.py, stored as text. See README.md."""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "text"), str(Path(__file__).parent)]

from chat_families import TEMPLATES  # noqa: E402
from conversations import CASES  # noqa: E402
from transformers_chat import render_with_transformers  # noqa: E402

OUT = TESTS / "data" / "chat_renderings.json"


def main() -> None:
    stored = {
        name: {case: render_with_transformers(template, specials, **asked) for case, asked in CASES.items()}
        for name, (template, specials) in TEMPLATES.items()
    }
    OUT.write_text(json.dumps(stored, indent=1) + "\n")
    texts = [text for cases in stored.values() for text in cases.values()]
    print(f"{len(texts)} conversations, {texts.count(None)} refused; wrote {OUT} ({OUT.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
