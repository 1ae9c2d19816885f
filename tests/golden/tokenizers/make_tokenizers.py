#!/usr/bin/env python3
"""Writes the tokenizer fixtures: what Hugging Face's tokenizers and sentencepiece
say of each family's rules. README.md tells what the files hold.

usage: make_tokenizers.py REAL_DIR [NAME...]
REAL_DIR holds deepseek_v3/ and qwen3/, each with tokenizer.json and tokenizer_config.json.
"""

import io
import json
import lzma
import pathlib
import random
import sys

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import texts

HERE = pathlib.Path(__file__).parent
NUM_MERGES = 1500
MARKER = "\u2581"

GPT4_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RULE = GPT4_RULE % "{1,3}"
QWEN2_RULE = GPT4_RULE % ""


def corpus(test_texts):
    """Licences for ordinary English, and test texts for everything else."""
    licences = [
        pathlib.Path("/usr/share/common-licenses", name).read_text()
        for name in ("GPL-3", "Apache-2.0", "GFDL-1.3", "MPL-2.0", "Artistic")
    ]
    return licences + test_texts * 8


def write_xz(path, data):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def read_xz(path):
    return lzma.decompress(path.read_bytes())


def dump(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


# --- Byte-level families ---------------------------------------------------------


def train_byte_level(pre_tokenizer, normalizer=None, num_merges=NUM_MERGES):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + num_merges,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(
        corpus(texts.curated_texts() + texts.random_texts(120, 1)), trainer
    )
    return tokenizer


def byte_level(**options):
    return pre_tokenizers.ByteLevel(
        add_prefix_space=options.pop("add_prefix_space", False), **options
    )


def split(rule, behavior="isolated", invert=False):
    return pre_tokenizers.Split(rule if isinstance(rule, str) else Regex(rule[0]), behavior, invert)


def gpt2():
    tokenizer = train_byte_level(byte_level())
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer, {
        "add_prefix_space": False,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
    }


def smollm():
    tokenizer = train_byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()])
    )
    tokenizer.add_special_tokens(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>"]
    )
    return tokenizer, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def llama3():
    tokenizer = train_byte_level(
        pre_tokenizers.Sequence([split((LLAMA3_RULE,)), byte_level(use_regex=False)])
    )
    tokenizer.add_special_tokens(
        [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ]
    )
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
            ),
        ]
    )
    # Some tokens that no merge makes, so that it shows whether merges are ignored.
    data = json.loads(tokenizer.to_str())
    data["model"]["ignore_merges"] = True
    data["model"]["merges"] = [
        merge for i, merge in enumerate(data["model"]["merges"]) if i % 5 != 4
    ]
    return Tokenizer.from_str(json.dumps(data)), {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
    }


def qwen2():
    tokenizer = train_byte_level(
        pre_tokenizers.Sequence([split((QWEN2_RULE,)), byte_level(use_regex=False)]),
        normalizers.NFC(),
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)]
    )
    return tokenizer, {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>"}


def added_flags():
    """Every flag of added tokens, where the normaliser changes them too."""
    tokenizer = train_byte_level(
        pre_tokenizers.Sequence([split((QWEN2_RULE,)), byte_level(use_regex=False)]),
        normalizers.NFC(),
        300,
    )
    tokenizer.add_special_tokens(
        [
            AddedToken("<left>", lstrip=True),
            AddedToken("<right>", rstrip=True),
            AddedToken("<both>", lstrip=True, rstrip=True),
            AddedToken("<word>", single_word=True),
            AddedToken("word", single_word=True),
            AddedToken("<leftright>", lstrip=True),
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken("e\u0301tude"),
            AddedToken("\u00e0x"),
            AddedToken("a\u0300y", normalized=False),
            AddedToken("<a"),
            AddedToken("<a>"),
            AddedToken("<ab>>"),
            AddedToken("  "),
            AddedToken("\n\n\n"),
            AddedToken("你好"),
            AddedToken("plain", rstrip=True),
            "Ġodd",
        ]
    )
    return tokenizer, {}


# --- Sentencepiece families ------------------------------------------------------


def train_sentencepiece(**options):
    # Without files, whose paths would go into the model.
    model = io.BytesIO()
    lines = "\n".join(corpus(texts.curated_texts())).replace("\0", "").split("\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        max_sentence_length=100000,
        **options,
    )
    return model.getvalue()


def llama_model():
    """As Llama 2's was trained: no normalisation, bytes for what is rare."""
    return train_sentencepiece(
        model_type="bpe",
        vocab_size=256 + 3 + NUM_MERGES,
        character_coverage=0.99,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
    )


def small_model():
    return train_sentencepiece(
        model_type="bpe",
        vocab_size=600,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )


def unigram_model():
    """Sentencepiece's defaults, which change the text, and symbols of its own."""
    return train_sentencepiece(
        model_type="unigram",
        vocab_size=500,
        character_coverage=0.98,
        user_defined_symbols=["<sep>", "<a b>"],
        normalization_rule_name="nmt_nfkc_cf",
    )


def merges_of(model):
    """The pairs that make each piece, by falling score, as transformers derives them."""
    ids = {
        model.id_to_piece(i): i
        for i in range(model.get_piece_size())
        if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))
    }
    merges = []
    for piece, i in ids.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = sorted(
            (pair for pair in pairs if pair[0] in ids and pair[1] in ids),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )
        merges += [(pair, model.get_score(i)) for pair in pairs]
    return [pair for pair, score in sorted(merges, key=lambda merge: -merge[1])]


def from_sentencepiece(serialized):
    model = sentencepiece.SentencePieceProcessor(model_proto=serialized)
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges_of(model), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(MARKER, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def llama2():
    tokenizer = from_sentencepiece(read_xz(HERE / "sp_llama/tokenizer.model.xz"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARKER), normalizers.Replace(" ", MARKER)]
    )
    return tokenizer, {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
    }


def mistral():
    tokenizer = from_sentencepiece(read_xz(HERE / "sp_llama/tokenizer.model.xz"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(MARKER, prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(
        [AddedToken("[INST]", normalized=False), AddedToken("[/INST]", normalized=False)]
    )
    return tokenizer, {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}


def metaspace(scheme, split_words):
    def make():
        tokenizer = from_sentencepiece(read_xz(HERE / "sp_small/tokenizer.model.xz"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            MARKER, prepend_scheme=scheme, split=split_words
        )
        tokenizer.decoder = decoders.Metaspace(MARKER, prepend_scheme=scheme, split=split_words)
        return tokenizer, {}

    return make


def unknown_characters(fuse):
    """Neither bytes nor all characters: unknown ones remain."""

    def make():
        tokenizer = from_sentencepiece(read_xz(HERE / "sp_small/tokenizer.model.xz"))
        data = json.loads(tokenizer.to_str())
        data["model"] |= {"byte_fallback": False, "fuse_unk": fuse}
        data["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
        data["normalizer"] = {
            "type": "Replace",
            "pattern": {"Regex": "[aeiou]{2,}"},
            "content": "e",
        }
        data["decoder"] = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": MARKER}, "content": " "},
                {"type": "Fuse"},
            ],
        }
        return Tokenizer.from_str(json.dumps(data)), {}

    return make


def prepended_added_tokens():
    """Normalised added tokens are found only as the normaliser spells them."""
    tokenizer = from_sentencepiece(read_xz(HERE / "sp_small/tokenizer.model.xz"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARKER), normalizers.Replace(" ", MARKER)]
    )
    tokenizer.add_tokens(
        [
            AddedToken("<n>", normalized=True),
            AddedToken("two words", normalized=True),
            AddedToken("<raw>", normalized=False),
        ]
    )
    return tokenizer, {}


# --- Split rules -----------------------------------------------------------------


def split_rule(*rules):
    def make():
        steps = [split(*rule) for rule in rules]
        return (
            train_byte_level(
                pre_tokenizers.Sequence(steps + [byte_level(use_regex=False)]), num_merges=200
            ),
            {},
        )

    return make


def prefix_space():
    return (
        train_byte_level(
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(False), byte_level(add_prefix_space=True)]
            ),
            num_merges=200,
        ),
        {},
    )


REAL = ("deepseek_v3", "qwen3")
SENTENCEPIECE_MODELS = {
    "sp_llama": llama_model,
    "sp_small": small_model,
    "sp_unigram": unigram_model,
}
FAMILIES = {
    "gpt2": gpt2,
    "smollm": smollm,
    "llama3": llama3,
    "qwen2": qwen2,
    "llama2": llama2,
    "mistral": mistral,
}
RULES = {
    "added_flags": added_flags,
    "added_prepended": prepended_added_tokens,
    "metaspace_always_split": metaspace("always", True),
    "metaspace_first_split": metaspace("first", True),
    "metaspace_never_whole": metaspace("never", False),
    "unknown_fused": unknown_characters(True),
    "unknown_apart": unknown_characters(False),
    "prefix_space": prefix_space,
    "split_removed": split_rule((r"[\s\d]+",), (("[aeiou]",), "removed")),
    "split_previous": split_rule((("[.,!?\n ]",), "merged_with_previous")),
    "split_next": split_rule((" ", "merged_with_next"), (("[A-Z]",), "merged_with_next")),
    "split_contiguous": split_rule((("[0-9]",), "contiguous"), (r"\p{Lu}",)),
    "split_inverted": split_rule(
        ((r"\p{Han}|[a-z]+",), "removed", True), (("a",), "isolated", True)
    ),
    "split_lines": split_rule(
        ((r"^[^\S\n]+|\s+$",),), ((r"(?<=a)b?(?=c|)|(?>x+)|y++|\u3042|\x41",),)
    ),
    "deepseek_v2": split_rule(
        (("[\r\n]",),),
        ((r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳ]+",),),
        ((r"\s?[!-/:-~！-／：-～‘-‟　-。]+",),),
        ((r"\s+$",),),
        (("[一-龥ࠀ-一가-퟿]+",),),
    ),
}


# --- What they say ---------------------------------------------------------------


def added_texts(tokenizer):
    """Every added token alone, in words, between spaces and beside another."""
    result = []
    added = [token["content"] for token in json.loads(tokenizer.to_str())["added_tokens"]]
    for i, token in enumerate(added):
        other = added[(i + 1) % len(added)]
        result += [f"{token}user{other}x {token} y"]
        if len(added) < 50:
            result += [
                token,
                token + token,
                f" {token}",
                f"{token} ",
                f"  {token}  ",
                f"a{token}b",
                f"\n{token}\n",
                f"{token[:-1]} {token}{other}",
                f"e\u0301{token}é",
                f"{token}  {other}  ",
                f" \t\u3000{token} \u2029\n x",
                f"_{token}_",
                f"你{token}好",
                f"{token}\u0301",
            ]
    return [text.encode() for text in result]


def encodings(encode, some_texts):
    # Text that is not UTF-8 reaches Python's tokenizers as decoded like this.
    return [
        {"hex": text.hex(), "ids": encode(text.decode(errors="replace"))} for text in some_texts
    ]


def random_ids(tokenizer, encoded):
    """Id lists to decode: whole texts, pieces of them, and any ids."""
    rng = random.Random(2)
    vocab_size = tokenizer.get_vocab_size()
    special = [token["id"] for token in json.loads(tokenizer.to_str())["added_tokens"]]
    lists = [ids for ids in rng.sample(encoded, 60) if ids]
    for _ in range(60):
        ids = rng.choice(encoded)
        lists.append(ids[rng.randint(0, len(ids)) :][: rng.randint(1, 12)])
    for _ in range(120):
        pool = [range(vocab_size), range(min(600, vocab_size)), special or [0]]
        lists.append([rng.choice(rng.choice(pool)) for _ in range(rng.randint(0, 12))])
    return lists


def heddle_agrees(data, tokenizer, ids):
    """False where Heddle decodes differently from tokenizers, on purpose: a run of
    byte tokens that is not UTF-8 (tokenizers gives up the whole run, but some of it
    has gone out already), and added tokens that look like byte-level letters."""
    if data["decoder"]["type"] == "ByteLevel":
        letters = set(pre_tokenizers.ByteLevel.alphabet())
        added = {token["id"] for token in data["added_tokens"]}
        spelled = [tokenizer.id_to_token(i) for i in ids if i in added]
        return not any(set(token) <= letters and not token.isascii() for token in spelled)
    if "ByteFallback" not in json.dumps(data["decoder"]):
        return True
    run = bytearray()
    for token in [tokenizer.id_to_token(i) or "" for i in ids] + [""]:
        if len(token) == 6 and token.startswith("<0x"):
            run.append(int(token[3:5], 16))
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run.clear()
    return True


def expectations(tokenizer, some_texts):
    data = json.loads(tokenizer.to_str())
    encoded = encodings(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        some_texts + added_texts(tokenizer),
    )
    special = {token["id"] for token in data["added_tokens"] if token["special"]}
    lists = [
        ids
        for ids in random_ids(tokenizer, [encoding["ids"] for encoding in encoded])
        if heddle_agrees(data, tokenizer, ids)
        and heddle_agrees(data, tokenizer, [i for i in ids if i not in special])
    ]
    return {
        "encodings": encoded,
        "decodings": [
            {
                "ids": ids,
                "text": tokenizer.decode(ids, skip_special_tokens=False),
                "text_without_special": tokenizer.decode(ids, skip_special_tokens=True),
            }
            for ids in lists
        ],
    }


def write_tokenizer(name, tokenizer_json, config, some_texts):
    folder = HERE / name
    write_xz(folder / "tokenizer.json.xz", tokenizer_json)
    if config:
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, ensure_ascii=False, indent=1) + "\n"
        )
    expected = expectations(Tokenizer.from_str(tokenizer_json.decode()), some_texts)
    write_xz(folder / "expect.json.xz", dump(expected))
    print(name, len(expected["encodings"]), "texts,", len(expected["decodings"]), "id lists")


def write_sentencepiece(name, serialized):
    folder = HERE / name
    write_xz(folder / "tokenizer.model.xz", serialized)
    model = sentencepiece.SentencePieceProcessor(model_proto=serialized)
    rng = random.Random(3)
    lists = [
        model.encode(text.decode(errors="replace")) for text in rng.sample(texts.all_texts(), 100)
    ]
    for top in (model.get_piece_size(), min(300, model.get_piece_size())):
        lists += [[rng.randrange(top) for _ in range(rng.randint(0, 12))] for _ in range(100)]
    write_xz(
        folder / "expect.json.xz",
        dump(
            {
                "encodings": encodings(model.encode, texts.all_texts()),
                "decodings": [
                    {"ids": ids, "text_without_special": model.decode(ids)} for ids in lists
                ],
            }
        ),
    )
    print(name, len(texts.all_texts()), "texts,", len(lists), "id lists")


def main():
    real_dir, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    wanted = lambda name: not names or name in names
    for name, make in SENTENCEPIECE_MODELS.items():
        if wanted(name):
            write_sentencepiece(name, make())
    for name in filter(wanted, REAL):
        config = json.loads((real_dir / name / "tokenizer_config.json").read_text())
        for key in ("added_tokens_decoder", "chat_template"):
            config.pop(key, None)
        tokenizer_json = (real_dir / name / "tokenizer.json").read_bytes()
        write_tokenizer(name, tokenizer_json, config, texts.all_texts())
        license_text = (real_dir / name / "PACKAGE-LICENSE").read_bytes()
        (HERE / name / "LICENSE").write_bytes(license_text)
    for name, make in FAMILIES.items():
        if wanted(name):
            tokenizer, config = make()
            write_tokenizer(name, tokenizer.to_str().encode(), config, texts.all_texts())
    for name, make in RULES.items():
        if wanted(name):
            tokenizer, config = make()
            write_tokenizer(name, tokenizer.to_str().encode(), config, texts.plain_texts())


if __name__ == "__main__":
    main()
