// The AI SDK, by its provider for whatever is compatible with OpenAI.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import { QUESTION, MODEL, BASE_URL, KEY, WEATHER, run, expect, expectError, expectWeather } from "./cases.mjs";

const provider = (apiKey) => createOpenAICompatible({ name: "switchyard", baseURL: BASE_URL, apiKey, supportsStructuredOutputs: true });
const ask = (more = {}, key = KEY) => ({ model: provider(key)(more.name ?? MODEL), prompt: QUESTION, maxOutputTokens: 16, maxRetries: 0, ...more });

await run({
  async chat() {
    const { text, usage } = await generateText(ask());
    expect(text && usage.outputTokens <= 16, { text, usage });
  },
  async stream() {
    let text = "";
    for await (const piece of streamText(ask()).textStream) text += piece;
    expect(text, "no text");
  },
  async tools() {
    const weather = tool({ description: "The weather in a city.", inputSchema: jsonSchema(WEATHER.function.parameters) });
    const { toolCalls } = await generateText(ask({ tools: { weather }, toolChoice: "required", maxOutputTokens: 128 }));
    expectWeather(toolCalls[0].input);
  },
  async structured() {
    const schema = jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false });
    const { object } = await generateObject(ask({ schema, maxOutputTokens: 128 }));
    expect(typeof object.city === "string", object);
  },
  async embeddings() {
    const { embeddings } = await embedMany({ model: provider(KEY).embeddingModel(MODEL), values: ["one", "two"], maxRetries: 0 });
    expect(embeddings.length === 2, embeddings.length);
  },
  async unknown_model() {
    const error = await expectError(APICallError, () => generateText(ask({ name: "gpt-9" })));
    expect(error.statusCode === 404, error);
  },
  async wrong_key() {
    const error = await expectError(APICallError, () => generateText(ask({}, "sw_000000000000_wrong")));
    expect(error.statusCode === 401, error);
  },
});
