"""What applications meet: the official OpenAI client against both regions."""

import openai
import pytest

from tests.asking import CLIENT
from tests.scenarios.running_fleet import REGIONS, AskedFleet

pytestmark = [pytest.mark.scenario, pytest.mark.vllm, pytest.mark.timeout(900)]

MODELS = ["smollm2", pytest.param("sim-70b", marks=pytest.mark.anywhere)]
"""A laboratory has the simulated one alone."""
QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


def client(fleet: AskedFleet, region: str = REGIONS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.ingress(region)}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("region", REGIONS)
def test_real_tokens_stream_through_either_region(fleet: AskedFleet, region: str) -> None:
    stream = client(fleet, region).chat.completions.create(
        model="smollm2", messages=QUESTION, stream=True, temperature=0, max_tokens=24
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 3
    assert "Paris" in "".join(pieces)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("model", MODELS)
def test_whole_answers_count_their_tokens(fleet: AskedFleet, region: str, model: str) -> None:
    answer = client(fleet, region).chat.completions.create(model=model, messages=QUESTION, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


@pytest.mark.parametrize("model", MODELS)
def test_plain_completions_answer_too(fleet: AskedFleet, model: str) -> None:
    answer = client(fleet).completions.create(model=model, prompt="The capital of France is", max_tokens=4)
    assert answer.choices[0].text


@pytest.mark.anywhere
def test_a_plain_curl_without_a_content_type_is_understood(fleet: AskedFleet) -> None:
    body = b'{"model": "sim-70b", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}'
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = CLIENT.post(f"{fleet.ingress()}/v1/chat/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("region", REGIONS)
def test_every_region_lists_every_model(fleet: AskedFleet, region: str) -> None:
    assert {model.id for model in client(fleet, region).models.list()} == {"smollm2", "sim-70b"}


@pytest.mark.anywhere
def test_an_unknown_model_is_a_404_that_names_it(fleet: AskedFleet) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as refused:
        client(fleet).chat.completions.create(model="gpt-9", messages=QUESTION)
    assert refused.value.code == "model_not_found"


@pytest.mark.anywhere
def test_a_body_that_is_no_json_is_a_400(fleet: AskedFleet) -> None:
    answer = CLIENT.post(f"{fleet.ingress()}/v1/chat/completions", content=b'{"model": ')
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]


@pytest.mark.anywhere
def test_a_body_beyond_the_limit_is_a_413(fleet: AskedFleet) -> None:
    huge = [{"role": "user", "content": "x" * (5 * 1024 * 1024)}]
    answer = CLIENT.post(f"{fleet.ingress()}/v1/chat/completions", json={"model": "sim-70b", "messages": huge})
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]


@pytest.mark.anywhere
def test_the_answering_cell_is_named(fleet: AskedFleet) -> None:
    answer = client(fleet).chat.completions.with_raw_response.create(model="sim-70b", messages=QUESTION, max_tokens=2)
    # Of either region: one that was without its cells gets its requests back a minute later, in steps.
    assert answer.headers["x-switchyard-cell"] in fleet.cells(deployment="sim-70b")
