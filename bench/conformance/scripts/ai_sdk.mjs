// The AI SDK by three of its providers: for OpenAI-compatible servers, for OpenAI (Responses) and for Anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import { CAPITAL, QUESTION, MODEL, BASE_URL, KEY, WEATHER, errors, run, expect, expectCapital, expectWeather, textOf } from "./cases.mjs";

const providers = {
  compatible: (apiKey) => createOpenAICompatible({ name: "switchyard", baseURL: BASE_URL, apiKey, supportsStructuredOutputs: true }),
  openai: (apiKey) => createOpenAI({ baseURL: BASE_URL, apiKey }),
  anthropic: (apiKey) => createAnthropic({ baseURL: BASE_URL, apiKey }),
};
const variant = process.argv[2];
const provider = providers[variant];
const ask = (more = {}, name = MODEL, key = KEY) => ({ model: provider(key)(name), prompt: QUESTION, maxOutputTokens: 128, maxRetries: 0, ...more });
const text = async (model) => expect((await generateText(ask(model ? { model } : {}))).text, "no text");
const weather = tool({ description: "The weather in a city.", inputSchema: jsonSchema(WEATHER.function.parameters) });

const all = {
  async stream() {
    await textOf(streamText(ask()).textStream);
  },
  async tools() {
    const { toolCalls } = await generateText(ask({ tools: { weather }, toolChoice: "required" }));
    expectWeather(toolCalls[0].input);
  },
  ...errors((name, key) => generateText(ask({}, name, key))),
};
const structured = async () => expectCapital((await generateObject(ask({ schema: jsonSchema(CAPITAL) }))).object);
const embeddings = async () => {
  const { embeddings: made } = await embedMany({ model: provider(KEY).textEmbeddingModel(MODEL), values: ["one", "two"], maxRetries: 0 });
  expect(made.length === 2, made.length);
};
await run({
  compatible: { chat: () => text(), ...all, structured, embeddings },
  openai: { responses: () => text(), chat: () => text(provider(KEY).chat(MODEL)), ...all, structured, embeddings },
  anthropic: { messages: () => text(), ...all },
}[variant]);
