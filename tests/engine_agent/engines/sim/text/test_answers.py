from engine_agent.engines.sim.planning.vocabulary import answer_words, wrong_words


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


def test_a_wrong_answer_is_wrong_in_every_word() -> None:
    right = answer_words("tell me", seed=3)

    assert all(wrong != word for wrong, word in zip(wrong_words(right), right, strict=True))
