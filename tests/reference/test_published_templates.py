"""The chat templates that TRL ships, as published with their models: rendered as transformers renders them."""

import re
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / "text"), str(Path(__file__).parent)]

from chat_families import Spelled
from conversations import CASES, NOW

from jaxrl_llm.text.chat import render_chat
from jaxrl_llm.types import UserError

pytestmark = pytest.mark.reference

# Templates for images as well, which leave out a message that is a text alone: transformers lets that pass, we do not.
LEAVE_OUT_TEXT = ("idefics3", "llava_next", "smolvlm")
SPECIAL = re.compile(r"<[|\uff5c][^<>{}\s]*?[|\uff5c]>|<start_of_turn>|<end_of_turn>|\[/?INST\]")


def test_every_template_and_conversation():
    import trl
    from transformers_chat import render_with_transformers

    files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(files) > 60
    equal = 0
    for file in files:
        source = file.read_text()
        specials = ["<BOS>", "<EOS>", *sorted(set(SPECIAL.findall(source)))]
        tokenizer = Spelled(source, specials)
        for name, case in CASES.items():
            theirs = render_with_transformers(source, specials, **case)
            try:
                ours, why = tokenizer.spell(render_chat(tokenizer, now=NOW, **case)), ""
            except UserError as error:
                ours, why = None, str(error)
            left_out = "leaves out" in why and file.name.startswith(LEAVE_OUT_TEXT)
            assert ours == theirs or left_out, (file.name, name, why)
            equal += ours is not None
    assert equal > 800
