#!/usr/bin/env python3
"""Writes smollm2.json and smollm2_tokenizer.json: what transformers says of SmolLM2-135M-Instruct.

Usage: make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf   (launch/fetch_model.sh brings the file)

transformers de-quantises the file's weights and computes in float32. The tokenizer is the one of
Hugging Face's tokenizers with the vocabulary and merges of the GGUF file and SmolLM2's own rules,
which transformers' GGUF reader does not know: digits stand alone before GPT-2's split.
"""

import pathlib
import sys

import torch
from gguf import GGUFReader
from oracle import describe, perplexity, write_json
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

GOLDEN_DIR = pathlib.Path(__file__).parent
CONTINUATION_TOKENS = 64
PERPLEXITY_WINDOW = 1024
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


def chat(user: str) -> str:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


PROMPTS = {
    "one-word": "The",
    "capital": "The capital of France is",
    "weather": "It was a bright cold day in April, and",
    "recipe": "To bake a simple loaf of bread you need flour, water, salt and",
    "history": "In 1789 the people of Paris stormed the Bastille. The revolution that followed",
    "science": "Photosynthesis is the process by which plants turn sunlight into",
    "dialogue": '"Where have you been?" she asked.\n"Out," he said.\n"Out where?"\n',
    "numbered-list": "Three ways to save energy at home:\n1. Turn off the lights\n2.",
    "bullet-list": "Shopping list:\n- apples\n- pears\n- bananas\n-",
    "counting": "1 2 3 4 5 6 7 8 9 10 11 12",
    "arithmetic": "2 + 2 = 4\n3 + 5 = 8\n7 + 6 =",
    "python": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "cpp": "#include <vector>\n\n// Sum of all elements.\nint sum(const std::vector<int>& values) {\n",
    "sql": "SELECT name, COUNT(*) FROM orders\nWHERE",
    "json": '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "known_for":',
    "html": "<html>\n<head><title>My page</title></head>\n<body>\n",
    "email": "Dear Mr. Smith,\n\nThank you for your letter of 12 March. I am writing to",
    "french": "Bonjour, je m'appelle Marie et j'habite à",
    "accents": "Café, naïve, Zürich – the words with accents",
    "poem": "Roses are red,\nViolets are blue,\n",
    "chat-capital": chat("What is the capital of Italy?"),
    "chat-explain": chat("Explain gravity to a child in two sentences."),
    "chat-list": chat("List five animals that live in the sea."),
    "chat-code": chat("Write a Python function that reverses a string."),
    "long": (
        "A loom is a machine for weaving cloth. The threads that run along its length are the "
        "warp, and the thread that is passed between them is the weft. Heddles lift some warp "
        "threads and leave others down, so that a gap, the shed, opens for the shuttle. When the "
        "shuttle has carried the weft through, a reed beats it against the cloth already woven. "
        "Then the heddles change places and the shuttle returns. The order in which the heddles "
        "rise makes the pattern: lifting every second thread gives plain weave, while lifting "
        "them in a staggered order gives twill, which is the weave of denim. In the eighteenth "
        "century"
    ),
}

WORDS = [
    "", " ", "  ", "   ", "a", " a", "a ", " a ", "  a", "a  b", "Hello", "Hello world", "Hello, world!",
    "hello   world", "HELLO WORLD", "camelCaseWords", "snake_case_words", "kebab-case-words",
    "don't", "I'm you're he's we've they'll she'd", "DON'T I'M YOU'RE", "can’t won’t", "o'clock 'tis",
    "The quick brown fox jumps over the lazy dog.", "exfoliation Mama ectable", "antidisestablishmentarianism",
    "e.g. i.e. etc.", "Mr. & Mrs. O'Neill-Smith", "U.S.A.", "wait... what?!", "—em-dash—", "“quoted” ‘text’",
    "a/b\\c|d", "user@example.org", "https://example.org/a?b=c&d=e#f", "C:\\Windows\\System32", "~/.bashrc",
    "(parentheses) [brackets] {braces} <angles>", "*bold* _italic_ `code`", "# Heading\n## Sub\n", "1st 2nd 3rd",
]  # fmt: skip
NUMBERS = [
    "0", "7", "42", "123", "1234", "12345678901234567890", "3.14159", "-1", "+1", "1,000,000", "1_000", "0x1F",
    "1e-5", "12:34:56", "2024-02-29", "$9.99", "100%", "a1b2c3", "1 2 3", " 1", "1 ", "  12  34", "½ ¼ ¾", "x² + y³",
    "①②③", "Ⅳ Ⅻ", "٣٤٥", "१२३", "１２３", "零一二", "〇", "5'10\"", "v1.2.3-rc4", "3rd-2nd", "1'000", "𝟙𝟚𝟛", "௧௨",
]  # fmt: skip
WHITESPACE = [
    "\n", "\n\n", "\n\n\n", "\t", "\t\t", " \n", "\n ", " \t \n", "\r\n", "\r", "a\nb", "a\n\nb", "a \n b", "a\tb",
    "a\t b", "    indented", "\tindented", "\n    indented\n        more\n", "trailing   ", "trailing\n", "trailing \n ",
    "a\u00a0b", "a\u2003b", "a\u3000b", "\u2009x", "\u200bzero\u200bwidth", "\v\f", "  \n  \n  ", " " * 17, "x" + " " * 9 + "y",
    "a\u2028b\u2029c", "\u00a0\u00a0", "\ufeffbom", "line1\r\nline2\r\n", "\u0085next",
]  # fmt: skip
SCRIPTS = [
    "naïve café résumé", "Ångström Łódź Ñandú", "Straße GROẞ", "œuvre Æsir", "Ελληνικά κείμενο", "Привет, мир!",
    "Съешь же ещё этих мягких французских булок", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก",
    "你好，世界！", "中文字符测试", "こんにちは世界", "カタカナ", "안녕하세요 세계", "日本語とEnglish混在", "漢字かな交じり文", "Tiếng Việt",
    "ქართული", "Հայերեն", "አማርኛ", "தமிழ்", "e\u0301 vs \u00e9", "a\u0308o\u0308u\u0308", "ﬁ ﬂ ligatures", "ＦＵＬＬＷＩＤＴＨ",
    "ß ẞ ſ", "ı İ i I", "Ω Ω", "µ μ", "\u0300\u0301", "א\u05b8", "𐍈𐌰", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "\U0001d11e", "\ue000 private",
    "\ufffd\ufffd", "\ufffe\uffff", "\U0010ffff",
]  # fmt: skip
EMOJI = [
    "😀", "😀😃", "I ❤️ you", "👍🏽", "👩‍💻", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "☃ ☂", "1️⃣2️⃣", "🙂 smile", "text😂text", "⭐️⭐️",
    "♻️", "→ ← ↑ ↓", "✓ ✗", "∑ ∫ √ ∞ ≈ ≠ ≤", "€ £ ¥ ₹ ₿", "© ® ™", "° ± × ÷", "█▓▒░", "┌─┐", "♠♥♦♣", "🤖🤖🤖 beep",
]  # fmt: skip
CODE = [
    "int main() { return 0; }", "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}", "if x == 1:\n    pass\nelse:\n    y = 2",
    "std::vector<std::pair<int, float>> v;", "a->b.c()[d] <<= ~e ^ f;", "x = lambda y: y**2  # square", "'''doc'''",
    "const f = async () => { await g?.(); };", "let mut s = String::from(\"hi\");", "printf(\"%5.2f\\n\", x);",
    "#define MAX(a,b) ((a)>(b)?(a):(b))", "SELECT * FROM t WHERE a='b';", "<div class=\"c\">&nbsp;</div>", "/* c */ // d",
    "{\"k\": [1, 2.5, null, true]}", "key: value\n- item\n", "!!! ??? ...", "$HOME ${VAR} $(cmd)", "a&&b||!c", "@decorator",
    "\\frac{a}{b} \\alpha", "=====", "-----", "______", "//////", "......", "''''''", '""""""', "```python\nx\n```",
]  # fmt: skip
# Some bytes have no token of their own and leave nothing behind.
BYTES = [
    "\x00", "\x01\x02\x03", "\x04", "a\x04b", "\x06\x13\x14\x16\x1d", "x\x1dy z", "\x7f", "\x1b[31mred\x1b[0m",
    "\U00040000", "\U00080000", "a\U000fffffb", "\u0100 \u0143",
]  # fmt: skip


def golden_strings(added_tokens: list) -> list:
    strings = WORDS + NUMBERS + WHITESPACE + SCRIPTS + EMOJI + CODE + BYTES
    strings += [f"{token}" for token in added_tokens]
    strings += [f"a {token} b" for token in added_tokens]
    strings += [
        "".join(added_tokens),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|><|im_end|><|im_start|>",
        "<|im_start|",
        "<|IM_START|>",
        "<| im_start |>",
        "<<|im_end|>>",
        " <file_sep>  <filename>1",
        "<reponame><repo_name>",
        *PROMPTS.values(),
    ]
    assert len(strings) == len(set(strings)), "a string stands twice"
    return strings


def read_tokenizer(path: pathlib.Path) -> Tokenizer:
    fields = GGUFReader(path).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def main() -> None:
    path = pathlib.Path(sys.argv[1]).resolve()
    torch.set_num_threads(2)
    tokenizer = read_tokenizer(path)

    def encode(text: str) -> list:
        return tokenizer.encode(text, add_special_tokens=False).ids

    added_tokens = sorted(
        (token.content for token in tokenizer.get_added_tokens_decoder().values()),
        key=tokenizer.token_to_id,
    )
    rows = []
    for text in golden_strings(added_tokens):
        ids = encode(text)
        rows.append(
            {
                "text": text,
                "ids": ids,
                "decoded": tokenizer.decode(ids, skip_special_tokens=False),
            }
        )
    write_json(GOLDEN_DIR / "smollm2_tokenizer.json", {}, "strings", rows)
    print(len(rows), "strings")

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = []
    for key, text in PROMPTS.items():
        prompts.append(describe(model, key, text, encode(text), CONTINUATION_TOKENS))
        print(key, repr(tokenizer.decode(prompts[-1]["greedy_token_ids"]))[:90], flush=True)
    gaps = [gap for prompt in prompts for gap in prompt["greedy_top2_gaps"]]
    clear = sum(gap >= 1e-3 for gap in gaps) / len(gaps)
    print(f"{len(prompts)} prompts, {clear:.2%} of positions have a clear winner")
    text_file = "text/jargon.txt"
    jargon = encode((GOLDEN_DIR / text_file).read_text())
    head = {"perplexity": perplexity(model, jargon, text_file, PERPLEXITY_WINDOW)}
    print(head)
    write_json(GOLDEN_DIR / "smollm2.json", head, "prompts", prompts)


if __name__ == "__main__":
    main()
