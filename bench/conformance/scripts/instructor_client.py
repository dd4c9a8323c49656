"""instructor: answers as objects, by each of the ways that an engine may offer."""

from typing import Literal

import instructor
import openai
from cases import BASE_URL, KEY, MESSAGES, MODEL, case, expect, main
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=120)


class Capital(BaseModel):
    city: str
    size: Literal["small", "large"]


def said(mode: instructor.Mode) -> None:
    answer = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Capital, max_tokens=128, max_retries=0
    )
    expect(isinstance(answer, Capital), answer)


@case("structured")
def structured() -> None:
    said(instructor.Mode.JSON_SCHEMA)


@case("tools")
def tools() -> None:
    said(instructor.Mode.TOOLS)


main()
