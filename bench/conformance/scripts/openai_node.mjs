// openai-node: the official client for JavaScript.
import OpenAI from "openai";
import { QUESTION, MESSAGES, MODEL, BASE_URL, KEY, WEATHER, run, expect, expectError, expectWeather } from "./cases.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const chat = (more) => client.chat.completions.create({ model: MODEL, messages: MESSAGES, max_tokens: 16, ...more });

await run({
  async models() {
    const found = [];
    for await (const model of client.models.list()) found.push(model.id);
    expect(found.includes(MODEL), found);
    expect((await client.models.retrieve(MODEL)).id === MODEL, found);
  },
  async chat() {
    const answer = await chat();
    expect(answer.choices[0].message.content && answer.usage.completion_tokens <= 16, answer);
  },
  async stream() {
    let text = "", usage;
    for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    expect(text && usage.completion_tokens > 0, { text, usage });
  },
  async completions() {
    expect((await client.completions.create({ model: MODEL, prompt: "The capital of France is", max_tokens: 8 })).choices[0].text, "no text");
  },
  async tools() {
    const answer = await chat({ tools: [WEATHER], tool_choice: "required", max_tokens: 128 });
    expectWeather(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  async structured() {
    const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
    const response_format = { type: "json_schema", json_schema: { name: "capital", strict: true, schema } };
    const answer = await chat({ response_format, max_tokens: 128 });
    expect(typeof JSON.parse(answer.choices[0].message.content).city === "string", answer);
  },
  async responses() {
    expect((await client.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: 16 })).output_text, "no text");
    const kinds = new Set();
    for await (const event of await client.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: 16, stream: true })) {
      kinds.add(event.type);
    }
    expect(kinds.has("response.completed") || kinds.has("response.incomplete"), [...kinds]);
  },
  async embeddings() {
    expect((await client.embeddings.create({ model: MODEL, input: ["one", "two"] })).data.length === 2, "not two");
  },
  async unknown_model() {
    await expectError(OpenAI.NotFoundError, () => chat({ model: "gpt-9" }));
  },
  async wrong_key() {
    const stranger = new OpenAI({ baseURL: BASE_URL, apiKey: "sw_000000000000_wrong", maxRetries: 0 });
    await expectError(OpenAI.AuthenticationError, () => stranger.chat.completions.create({ model: MODEL, messages: MESSAGES }));
  },
  async bad_request() {
    await expectError(OpenAI.BadRequestError, () => chat({ max_tokens: -1 }));
  },
  async cancel() {
    const stream = await chat({ stream: true, max_tokens: 256 });
    for await (const _ of stream) break;
    stream.controller.abort();
    expect((await chat()).choices[0].message.content, "no text");
  },
});
