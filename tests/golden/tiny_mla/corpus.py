"""The King James Version as chapters of plain text, and its parts for training and for judging."""

import pathlib
import re
from dataclasses import dataclass

# As the program `bible` abbreviates them, in its order.
BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy",
    "Josh": "Joshua", "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel",
    "1Ki": "1 Kings", "2Ki": "2 Kings", "1Chr": "1 Chronicles", "2Chr": "2 Chronicles",
    "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job", "Psa": "Psalms",
    "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea",
    "Joel": "Joel", "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah",
    "Nahum": "Nahum", "Hab": "Habakkuk", "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah",
    "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John",
    "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians",
    "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians",
    "1Th": "1 Thessalonians", "2Th": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy",
    "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter",
    "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John", "3Jn": "3 John", "Jude": "Jude",
    "Rev": "Revelation",
}  # fmt: skip

HELD_OUT_SHARE = 0.05  # of the bytes: the last chapters, never seen in training
VALIDATION_SHARE = 0.01  # the chapters before those: they choose the checkpoint, nothing else


@dataclass
class Corpus:
    """Chapters, each "BOOK NUMBER\\n\\nVERSE\\nVERSE\\n...", in the order of the text."""

    train: list
    validation: list
    held_out: list


def read_chapters(path: pathlib.Path) -> list:
    chapters, heading = [], None
    for line in path.read_text(encoding="ascii").splitlines():
        book, chapter, verse = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):\d+ (.+)", line).groups()
        if (book, chapter) != heading:
            heading = (book, chapter)
            chapters.append(f"{BOOKS[book]} {chapter}\n\n")
        chapters[-1] += verse + "\n"
    return chapters


def take_last(chapters: list, num_bytes: float) -> tuple:
    """The chapters without, and with only, the fewest last ones of at least `num_bytes`."""
    begin, taken = len(chapters), 0
    while taken < num_bytes:
        begin -= 1
        taken += len(chapters[begin])
    return chapters[:begin], chapters[begin:]


def join(chapters: list) -> str:
    """One text of them, an empty line between two chapters."""
    return "\n".join(chapters)


def read_corpus(path: pathlib.Path) -> Corpus:
    chapters = read_chapters(path)
    num_bytes = len(join(chapters))
    rest, held_out = take_last(chapters, HELD_OUT_SHARE * num_bytes)
    train, validation = take_last(rest, VALIDATION_SHARE * num_bytes)
    return Corpus(train, validation, held_out)
