"""The byte-level BPE of the tiny model: DeepSeek-V3's split rule, merges learnt on its own text."""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 3072
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
BOS_ID, EOS_ID = 0, 1

DIGITS = r"\p{N}{1,3}"
CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def train_tokenizer(chapters: list) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(rule), "isolated") for rule in (DIGITS, CJK, WORDS)]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (BOS, EOS)]
    tokenizer.train_from_iterator(
        chapters,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    assert (tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)) == (BOS_ID, EOS_ID)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: pathlib.Path, max_length: int) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def chapter_ids(tokenizer: Tokenizer, chapters: list) -> list:
    """Of a stream in which each chapter stands between BOS and EOS."""
    ids = []
    for encoding in tokenizer.encode_batch(chapters, add_special_tokens=False):
        ids += [BOS_ID, *encoding.ids, EOS_ID]
    return ids
