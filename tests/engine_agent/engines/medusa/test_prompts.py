"""Prompts for training and for evaluation have no product in common, and are the same every time."""

import pytest

from engine_agent.engines.medusa.prompts import FAMILIES, PLANNER, Prompt, products, prompts


def test_products_are_split_and_none_is_lost() -> None:
    training, evaluation = products(held_out=False), products(held_out=True)
    assert not set(training) & set(evaluation)
    assert len({*training, *evaluation}) == len(training) + len(evaluation) == 64
    assert len(evaluation) == 16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("held_out", [False, True])
def test_a_number_of_prompts_is_the_beginning_of_a_larger_one(family: str, held_out: bool) -> None:
    many = prompts(family, 100, held_out=held_out)
    assert prompts(family, 10, held_out=held_out) == many[:10]
    others = products(held_out=not held_out)
    texts = [prompt.text.removeprefix(PLANNER) for prompt in many]
    assert not [text for text in texts if any(f" {name}" in text for name in others)]
    assert len(set(texts)) > 90


def test_a_plan_is_asked_for_by_example_and_a_chat_through_the_models_template() -> None:
    (plan,), (chat,) = prompts("plan", 1, held_out=True), prompts("chat", 1, held_out=True)
    assert plan.text.endswith("\nPlan:")
    assert (plan.is_chat, chat.is_chat) == (False, True)
    assert chat == Prompt("chat", "What should I look for when I buy a running shoes?")
