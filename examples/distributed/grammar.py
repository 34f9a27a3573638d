"""Text that a grammar makes: simple English, in which a verb agrees with a noun that may stand far before it.

    the old dogs that the cat sees sleep .

A sentence is made in one way only, by choices of known probability. So its probability is known, and with it the
perplexity of the grammar itself, below which no model comes on new text.
"""

import math
import random

import numpy as np

NOUNS = ["bird", "cat", "child", "doctor", "dog", "farmer", "friend", "horse", "king", "lion", "queen", "singer", "writer"]
ADJECTIVES = ["clever", "green", "happy", "hungry", "old", "quiet", "small", "tall", "tired", "young"]
ALONE = ["dance", "dream", "laugh", "run", "sing", "sleep", "swim", "wait"]
WITH_OBJECT = ["admire", "call", "find", "follow", "help", "know", "like", "see"]
ONE, MANY = ["the", "a", "every"], ["the", "some", "many"]


def _plural(noun: str) -> str:
    return "children" if noun == "child" else f"{noun}s"


PADDING, BEGIN, END = 0, 1, 2
_WORDS = {*NOUNS, *map(_plural, NOUNS), *ADJECTIVES, *ALONE, *WITH_OBJECT, *ONE, *MANY, "that"}
_WORDS |= {f"{verb}s" for verb in ALONE + WITH_OBJECT}
VOCABULARY = ["<padding>", "<begin>", ".", *sorted(_WORDS)]
_NUMBERS = {word: number for number, word in enumerate(VOCABULARY)}


class _Sentence:
    """One sentence as it is made: its words, and the logarithm of the probability of the choices so far."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.words: list[str] = []
        self.log_probability = 0.0
        is_plural = self._phrase(depth=0)
        self._predicate(is_plural, depth=0)
        self.words.append(".")

    def _happens(self, probability: float) -> bool:
        answer = self._draw.random() < probability
        self.log_probability += math.log(probability if answer else 1 - probability)
        return answer

    def _word(self, words: list[str]) -> str:
        self.log_probability -= math.log(len(words))
        return self._draw.choice(words)

    def _phrase(self, depth: int) -> bool:
        """Add a noun with its adjectives and clauses; return True for a plural."""
        is_plural = self._happens(0.5)
        self.words.append(self._word(MANY if is_plural else ONE))
        if self._happens(0.3):
            self.words.append(self._word(ADJECTIVES))
        noun = self._word(NOUNS)
        self.words.append(_plural(noun) if is_plural else noun)
        if depth < 2 and self._happens(0.3):
            self.words.append("that")
            if self._happens(0.5):
                self._predicate(is_plural, depth + 1)
            else:
                self._verb(WITH_OBJECT, self._phrase(depth + 1))
        return is_plural

    def _predicate(self, is_plural: bool, depth: int) -> None:
        if self._happens(0.5):
            self._verb(ALONE, is_plural)
        else:
            self._verb(WITH_OBJECT, is_plural)
            self._phrase(depth + 1)

    def _verb(self, verbs: list[str], is_plural: bool) -> None:
        verb = self._word(verbs)
        self.words.append(verb if is_plural else f"{verb}s")


def make_sentences(number: int, seed: int) -> tuple[list[np.ndarray], float]:
    """Sentences as numbers of words, and their perplexity under the grammar.

    Returns:
        Arrays of int64, each from `BEGIN` to `END`; and exp(-log probability / tokens), where `BEGIN`, which is given, is
        no token.
    """
    draw = random.Random(seed)
    sentences = [_Sentence(draw) for _ in range(number)]
    tokens = sum(len(sentence.words) for sentence in sentences)
    perplexity = math.exp(-sum(sentence.log_probability for sentence in sentences) / tokens)
    return [np.array([BEGIN, *map(_NUMBERS.get, sentence.words)], np.int64) for sentence in sentences], perplexity
