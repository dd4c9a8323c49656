"""Tokens and their ids, and answers that depend only on prompt and seed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.planning.vocabulary import (
    TokenTexts,
    answer_words,
    count_tokens,
    prompt_text,
    split_tokens,
    token_id,
    wrong_words,
)


@pytest.mark.parametrize(("text", "tokens"), [("", 1), ("one", 1), ("one two\nthree", 3)])
def test_tokens_are_words(text: str, tokens: int) -> None:
    assert count_tokens(text) == tokens


@given(st.text())
def test_the_tokens_of_a_text_are_as_many_as_are_counted_and_make_the_text_again(text: str) -> None:
    tokens = split_tokens(text)

    assert len(tokens) == count_tokens(text)
    assert "".join(tokens) == text


def test_an_id_says_the_same_in_every_process() -> None:
    assert token_id(" story") == 258011853


def test_ids_of_words_that_the_simulator_says_have_their_text_everywhere() -> None:
    assert prompt_text([token_id(token) for token in split_tokens("The answer. is good")]) == "The answer. is good"
    assert prompt_text([5, 6, 7]) == "5 6 7"


@given(st.text())
def test_what_was_made_tokens_here_is_made_a_text_again(text: str) -> None:
    texts = TokenTexts()

    if all(len(token) <= 64 for token in split_tokens(text)):
        assert texts.text_of(texts.ids_of(split_tokens(text))) == text


def test_texts_of_a_client_do_not_pile_up() -> None:
    texts = TokenTexts()

    texts.ids_of(f"w{number}" for number in range(70_000))

    assert texts.text_of([token_id("w0")]) == f" {token_id('w0')}"
    assert texts.text_of([token_id("w69999")]) == "w69999"
    texts.ids_of(["x" * 65])
    assert texts.text_of([token_id("x" * 65)]).strip().isdecimal()


def test_the_same_prompt_and_seed_give_the_same_answer() -> None:
    assert answer_words("tell me", seed=3) == answer_words("tell me", seed=3)


def test_another_prompt_or_seed_gives_another_answer() -> None:
    assert len({answer_words("tell me", 3), answer_words("tell me", 4), answer_words("tell us", 3)}) == 3


def test_a_golden_prompt_has_a_fixed_answer_for_every_seed() -> None:
    assert answer_words("Ping ", seed=1) == answer_words("ping", seed=2) == ("pong",)


def test_an_answer_of_exact_length_begins_like_the_natural_one() -> None:
    natural = answer_words("tell me", seed=3)
    exact = answer_words("tell me", seed=3, tokens_wanted=500)

    assert len(exact) == 500
    assert exact[: len(natural)] == natural


def test_an_answer_that_is_cut_begins_like_the_natural_one() -> None:
    natural = answer_words("tell me", seed=3)

    assert answer_words("tell me", seed=3, at_most=5) == natural[:5]
    assert answer_words("tell me", seed=3, at_most=len(natural) + 1) == natural


def test_a_wrong_answer_is_wrong_in_every_word() -> None:
    right = answer_words("tell me", seed=3)

    assert all(wrong != word for wrong, word in zip(wrong_words(right), right, strict=True))
