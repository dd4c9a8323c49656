// @anthropic-ai/sdk: Anthropic's client for JavaScript.
import Anthropic from "@anthropic-ai/sdk";
import { MESSAGES, MODEL, ROOT_URL, KEY, WEATHER, WRONG_KEY, run, expect, expectError, expectWeather } from "./cases.mjs";

const clientOf = (apiKey) => new Anthropic({ baseURL: ROOT_URL, apiKey, maxRetries: 0, timeout: 120_000 });
const client = clientOf(KEY);
const asked = (more = {}) => ({ model: MODEL, messages: MESSAGES, max_tokens: 16, ...more });
const tools = [{ name: "weather", description: "The weather in a city.", input_schema: WEATHER.function.parameters }];

await run({
  async messages() {
    const answer = await client.messages.create(asked({ system: "Be short." }));
    expect(answer.content[0].text && answer.usage.output_tokens <= 16, answer);
    expect((await client.messages.stream(asked()).finalMessage()).content[0].text, "no text");
  },
  async count_tokens() {
    expect((await client.messages.countTokens({ model: MODEL, messages: MESSAGES })).input_tokens > 0, "no count");
  },
  async tools() {
    const answer = await client.messages.create(asked({ tools, tool_choice: { type: "tool", name: "weather" }, max_tokens: 128 }));
    expectWeather(answer.content.find((part) => part.type === "tool_use").input);
  },
  async tools_stream() {
    const answer = await client.messages.stream(asked({ tools, tool_choice: { type: "any" }, max_tokens: 128 })).finalMessage();
    expectWeather(answer.content.find((part) => part.type === "tool_use").input);
  },
  async unknown_model() {
    await expectError(Anthropic.NotFoundError, () => client.messages.create(asked({ model: "claude-9" })));
  },
  async wrong_key() {
    await expectError(Anthropic.AuthenticationError, () => clientOf(WRONG_KEY).messages.create(asked()));
  },
  async bad_request() {
    await expectError(Anthropic.BadRequestError, () => client.messages.create(asked({ max_tokens: -1 })));
  },
  async cancel() {
    const stream = client.messages.stream(asked({ max_tokens: 256 }));
    for await (const _ of stream) break;
    stream.abort();
    expect((await client.messages.create(asked())).content[0].text, "no text");
  },
});
