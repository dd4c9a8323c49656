"""Clients of the Open Inference Protocol over gRPC: Triton's and KServe's."""

import asyncio
import json
import os
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
from cases import (
    BEGINNING,
    KEY,
    MESSAGES,
    MODEL,
    UNKNOWN_MODEL,
    WRONG_KEY,
    case,
    expect,
    expect_error,
    features,
    variant,
)

ADDRESS = os.environ["CONFORMANCE_GRPC"]
"""HOST:PORT of the ingress."""
MANY = 50


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Triton:
    """Calls by Triton's client."""

    def __init__(self) -> None:
        import tritonclient.grpc
        from tritonclient.utils import InferenceServerException

        self.grpc, self.error = tritonclient.grpc, InferenceServerException
        self.client = tritonclient.grpc.InferenceServerClient(ADDRESS)

    def tensor(self, name: str, *texts: str) -> Any:
        made = self.grpc.InferInput(name, [len(texts)], "BYTES")
        made.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
        return made

    def infer(self, *inputs: Any, model: str = MODEL, key: str = KEY, **parameters: Any) -> Any:
        parameters = {"max_tokens": 32, **parameters}
        return self.client.infer(model, list(inputs), headers=bearer(key), parameters=parameters)

    def ask(self, **more: Any) -> Any:
        return self.infer(self.tensor("messages", json.dumps(MESSAGES)), **more)

    def answer(self, **more: Any) -> str:
        return self.text(self.ask(**more))

    def text(self, result: Any) -> str:
        return result.as_numpy("text_output")[0].decode()

    def streamed(self, count: int = 1, leave_after: int = 0) -> Iterator[tuple[str, str]]:
        """(request, text) of each response to so many requests of one stream."""
        responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        own = self.grpc.InferenceServerClient(ADDRESS)
        own.start_stream(lambda result, error: responses.put((result, error)), headers=bearer(KEY))
        for number in range(count):
            prompt = [self.tensor("text_input", BEGINNING)]
            own.async_stream_infer(MODEL, prompt, request_id=f"s-{number}", parameters={"max_tokens": 16})
        left, seen = count, 0
        while left:
            result, error = responses.get(timeout=120)
            expect(error is None, error)
            response = result.get_response()
            seen += 1
            left -= response.parameters["triton_final_response"].bool_param
            yield response.id, self.text(result)
            if seen == leave_after:
                own.stop_stream(cancel_requests=True)
                return
        own.stop_stream()

    def embeddings(self) -> Any:
        outputs = [self.grpc.InferRequestedOutput("embedding")]
        prompts = [self.tensor("text_input", "one", "two")]
        return self.client.infer(MODEL, prompts, headers=bearer(KEY), outputs=outputs).as_numpy("embedding").tolist()

    def two_answers(self) -> str:
        found = self.infer(self.tensor("text_input", BEGINNING, BEGINNING)).as_numpy("text_output")
        expect(found.shape == (2,), found)
        return b"".join(found).decode()

    def concurrent(self) -> None:
        texts: dict[str, str] = {}
        for request, part in self.streamed(MANY):
            texts[request] = texts.get(request, "") + part
        expect(len(texts) == MANY and all(texts.values()), texts)

    def models(self) -> None:
        client = self.client
        expect(client.is_server_live() and client.is_server_ready(), "not ready")
        expect(client.is_model_ready(MODEL) and not client.is_model_ready(UNKNOWN_MODEL), "wrong models are ready")
        expect(client.get_server_metadata().name == "switchyard", client.get_server_metadata())
        metadata = client.get_model_metadata(MODEL, headers=bearer(KEY))
        expect("text_input" in [each.name for each in metadata.inputs], metadata)

    def leave(self) -> None:
        expect(len(list(self.streamed(leave_after=1))) == 1, "more than one response")
        expect(self.answer().strip(), "no answer after a stream that was left")

    def refused(self, status: str, **more: Any) -> None:
        error = expect_error(self.error, lambda: self.ask(**more))
        expect(status in str(error), error)


def triton() -> None:
    own = Triton()
    features(
        chat=own.answer,
        completions=own.two_answers,
        stream=lambda: "".join(part for _, part in own.streamed()),
        embeddings=own.embeddings,
    )
    case("models")(own.models)
    case("stop")(lambda: expect(own.ask(max_tokens=1).as_numpy("finish_reason")[0] == b"length", "no length"))
    case("seed")(lambda: expect(own.answer(seed=7) == own.answer(seed=7), "two answers of one seed differ"))
    case("cancel")(own.leave)
    case("concurrent")(own.concurrent)
    case("unknown_model")(lambda: own.refused("NOT_FOUND", model=UNKNOWN_MODEL))
    case("wrong_key")(lambda: own.refused("UNAUTHENTICATED", key=WRONG_KEY))
    case("bad_request")(lambda: own.refused("INVALID_ARGUMENT", temperature=99.0))


def kserve() -> None:
    import grpc
    from kserve import InferenceGRPCClient, InferInput, InferRequest

    def call(model: str = MODEL, key: str = KEY, **parameters: Any) -> Any:
        async def answer() -> Any:
            async with InferenceGRPCClient(ADDRESS, timeout=120, retries=0) as client:
                made = InferInput("messages", [1], "BYTES", data=[json.dumps(MESSAGES)])
                request = InferRequest(model, [made], parameters={"max_tokens": 32, **parameters})
                return await client.infer(request, headers=(("authorization", f"Bearer {key}"),))

        return asyncio.run(answer())

    def text(result: Any) -> str:
        output = next(each for each in result.outputs if each.name == "text_output")
        first = output.data[0]
        return first.decode() if isinstance(first, bytes) else str(first)

    @case("models")
    def models() -> None:
        async def answer() -> tuple[bool, bool, bool]:
            async with InferenceGRPCClient(ADDRESS) as client:
                return await client.is_server_live(), await client.is_server_ready(), await client.is_model_ready(MODEL)

        found = asyncio.run(answer())
        expect(all(found), found)

    @case("chat")
    def chat() -> None:
        expect(text(call()).strip(), "no text")

    @case("seed")
    def seed() -> None:
        expect(text(call(seed=7)) == text(call(seed=7)), "two answers of one seed differ")

    @case("unknown_model")
    def unknown_model() -> None:
        error = expect_error(grpc.RpcError, lambda: call(model=UNKNOWN_MODEL))
        expect(error.code() is grpc.StatusCode.NOT_FOUND, error)

    @case("wrong_key")
    def wrong_key() -> None:
        error = expect_error(grpc.RpcError, lambda: call(key=WRONG_KEY))
        expect(error.code() is grpc.StatusCode.UNAUTHENTICATED, error)

    @case("bad_request")
    def bad_request() -> None:
        error = expect_error(grpc.RpcError, lambda: call(temperature=99))  # it sends no parameters with a fraction
        expect(error.code() is grpc.StatusCode.INVALID_ARGUMENT, error)


variant({"triton": triton, "kserve": kserve})
