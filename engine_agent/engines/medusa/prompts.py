"""Prompts of an online shop, made by code: some that heads learn from, and others that they are judged by.

Two families. `chat`: customers' questions, answered freely. `plan`: a query planner shown a few examples, which turns a
search into fields. A product is either learnt from or judged by, never both. Pure: one number gives one prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

FAMILIES = ("chat", "plan")
HELD_OUT_EVERY = 4
"""Every fourth product is judged by."""
PRODUCTS = """
    running shoes|espresso machine|yoga mat|office chair|mountain bike|wireless headphones|winter jacket|desk lamp
    electric kettle|hiking backpack|coffee grinder|camping tent|water bottle|mechanical keyboard|cast iron pan
    leather wallet|garden hose|baby stroller|dog bed|air purifier|cordless drill|rain boots|standing desk
    table tennis bat|digital camera|picnic blanket|fountain pen|bread maker|wool scarf|ski goggles|kitchen scale
    travel pillow|bicycle helmet|bluetooth speaker|chess set|sleeping bag|sewing machine|hair dryer|vacuum cleaner
    soup pot|fishing rod|cat tree|reading glasses|tool box|cotton sheets|wall clock|folding table|swim goggles
    rice cooker|snow shovel|jump rope|laptop sleeve|ceramic vase|bath towel|memory card|gardening gloves|beach umbrella
    alarm clock|electric toothbrush|acoustic guitar|drawing tablet|wine glasses|shower curtain|step ladder
"""
QUESTIONS = (
    "What should I look for when I buy a {product}?",
    "How do I choose the right {product} for a beginner?",
    "Write a short product description of a {colour} {product}.",
    "Is a {product} made of {material} a good choice, and why?",
    "Give me three reasons to buy a new {product} this year.",
    "How do I clean and care for a {product}?",
    "What is a fair price for a {colour} {product}, and what drives it?",
    "Compare a cheap {product} with an expensive one.",
    "Which accessories go well with a {product}?",
    "My {product} broke after a month. What can I do?",
    "Write a friendly review of a {colour} {product} of {material}.",
    "Can I give a {product} as a present to my father?",
    "What are common mistakes people make with a {product}?",
    "How long does a {product} of {material} usually last?",
)
COLOURS = ("black", "red", "blue", "green", "white", "grey", "yellow", "brown")
MATERIALS = ("steel", "wood", "cotton", "plastic", "leather", "aluminium", "wool", "glass")
PRICES = (20, 35, 50, 75, 100, 150, 250, 400)
ORDERS = ("price", "rating", "newest", "popularity")
SEARCHES = (
    "{colour} {product} under {price} dollars",
    "best {product} made of {material}",
    "cheap {colour} {product} for a present",
    "{product} of {material} below {price} dollars, {order} first",
    "top rated {colour} {product}",
    "{material} {product} in {colour} up to {price} dollars",
)
EXAMPLES = (
    (
        "blue tea pot under 40 dollars",
        "{category: tea pot, color: blue, material: any, max_price: 40, sort_by: rating, limit: 10, in_stock: true}",
    ),
    (
        "best garden bench made of wood",
        "{category: garden bench, color: any, material: wood, max_price: any, sort_by: rating, limit: 10, "
        "in_stock: true}",
    ),
    (
        "steel thermos in black up to 60 dollars",
        "{category: thermos, color: black, material: steel, max_price: 60, sort_by: rating, limit: 10, in_stock: true}",
    ),
)
PLANNER = "Turn each search of a shop into a plan with the fields of the index.\n\n" + "".join(
    f"Search: {search}\nPlan: {plan}\n\n" for search, plan in EXAMPLES
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """`is_chat`: `text` is a user's message, to be put into the model's chat template; else it is the prompt itself,
    and the answer ends with an empty line."""

    family: str
    text: str

    @property
    def is_chat(self) -> bool:
        return self.family == "chat"


def products(*, held_out: bool) -> tuple[str, ...]:
    """Those that are judged by, or those that are learnt from."""
    every = [name.strip() for line in PRODUCTS.strip().splitlines() for name in line.split("|")]
    return tuple(name for place, name in enumerate(every) if (place % HELD_OUT_EVERY == 0) == held_out)


def prompts(family: str, count: int, *, held_out: bool) -> tuple[Prompt, ...]:
    """The first so many prompts of a family, at most as many as there are. Products come in turns, so that few prompts
    have many of them."""
    return tuple(islice(_endless(family, products(held_out=held_out)), count))


def _endless(family: str, names: tuple[str, ...]) -> Iterator[Prompt]:
    forms = QUESTIONS if family == "chat" else SEARCHES
    for turn in range(len(forms) * (len(COLOURS) if family == "plan" else 2)):
        for place, name in enumerate(names):
            text = forms[(turn + place) % len(forms)].format(
                product=name,
                colour=COLOURS[(turn * 3 + place) % len(COLOURS)],
                material=MATERIALS[(turn * 5 + place * 3) % len(MATERIALS)],
                price=PRICES[(turn + place * 5) % len(PRICES)],
                order=ORDERS[(turn + place) % len(ORDERS)],
            )
            yield Prompt(family, text if family == "chat" else f"{PLANNER}Search: {text}\nPlan:")
