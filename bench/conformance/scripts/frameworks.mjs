// Frameworks and routers for JavaScript. One function for each, named on the command line.
import { BASE_URL, CAPITAL, KEY, MESSAGES, MODEL, QUESTION, WEATHER } from "./cases.mjs";
import { errors, expect, expectCapital, expectWeather, run, textOf } from "./cases.mjs";

const twoVectors = (vectors) => expect(vectors.length === 2 && vectors[0].length > 1, vectors.length);

const variants = {
  async genkit() {
    const { genkit, z } = await import("genkit");
    const { compatOaiModelRef, defineCompatOpenAIModel, openAICompatible } = await import("@genkit-ai/compat-oai");
    const info = { supports: { multiturn: true, tools: true, systemRole: true, output: ["text", "json"], constrained: "all" } };
    const resolver = (client, _, name) =>
      defineCompatOpenAIModel({ name: name.split("/").pop(), client, pluginOptions: { name: "ours" }, modelRef: compatOaiModelRef({ name, info }) });
    const ai = (apiKey = KEY) => genkit({ plugins: [openAICompatible({ name: "ours", apiKey, baseURL: BASE_URL, maxRetries: 0, resolver })] });
    const ask = (name = MODEL, key = KEY, more = {}) =>
      ai(key).generate({ model: `ours/${name}`, prompt: QUESTION, config: { maxOutputTokens: 128 }, ...more });
    return {
      chat: async () => expect((await ask()).text, "no text"),
      stream: () => textOf(ai().generateStream({ model: `ours/${MODEL}`, prompt: QUESTION, config: { maxOutputTokens: 16 } }).stream, (chunk) => chunk.text),
      structured: async () => expectCapital((await ask(MODEL, KEY, { output: { schema: z.object({ city: z.string() }), constrained: true } })).output),
      ...errors(ask),
    };
  },

  async huggingface() {
    const { InferenceClient } = await import("@huggingface/inference");
    const asked = (more = {}) => ({ model: MODEL, messages: MESSAGES, max_tokens: 128, ...more });
    const client = (key = KEY) => new InferenceClient(key, { endpointUrl: BASE_URL });
    const message = async (more) => (await client().chatCompletion(asked(more))).choices[0].message;
    const response_format = { type: "json_schema", json_schema: { name: "capital", schema: CAPITAL } };
    return {
      chat: async () => expect((await message()).content, "no text"),
      stream: () => textOf(client().chatCompletionStream(asked()), (chunk) => chunk.choices[0]?.delta?.content),
      tools: async () => expectWeather((await message({ tools: [WEATHER], tool_choice: "required" })).tool_calls[0].function.arguments),
      structured: async () => expectCapital((await message({ response_format })).content),
      ...errors((model, key) => client(key).chatCompletion(asked({ model }))),
    };
  },

  async langchain() {
    const { ChatOpenAI, OpenAIEmbeddings } = await import("@langchain/openai");
    const common = (apiKey) => ({ apiKey, configuration: { baseURL: BASE_URL }, maxRetries: 0, timeout: 120_000 });
    const model = (name = MODEL, key = KEY, more = {}) => new ChatOpenAI({ model: name, maxTokens: 128, ...common(key), ...more });
    return {
      chat: async () => expect((await model().invoke(QUESTION)).text, "no text"),
      stream: async () => textOf(await model().stream(QUESTION), (chunk) => chunk.text),
      tools: async () => expectWeather((await model().bindTools([WEATHER], { tool_choice: "required" }).invoke(QUESTION)).tool_calls[0].args),
      structured: async () => expectCapital(await model().withStructuredOutput(CAPITAL, { name: "capital", method: "jsonSchema" }).invoke(QUESTION)),
      responses: async () => expect((await model(MODEL, KEY, { useResponsesApi: true }).invoke(QUESTION)).text, "no text"),
      embeddings: async () => twoVectors(await new OpenAIEmbeddings({ model: MODEL, ...common(KEY) }).embedDocuments(["one", "two"])),
      ...errors((name, key) => model(name, key).invoke(QUESTION)),
    };
  },

  async llamaindex() {
    const { OpenAI, OpenAIEmbedding } = await import("@llamaindex/openai");
    const common = (apiKey) => ({ apiKey, baseURL: BASE_URL, maxRetries: 0, timeout: 120_000 });
    const model = (name = MODEL, key = KEY) => new OpenAI({ model: name, maxTokens: 64, ...common(key) });
    return {
      chat: async () => expect((await model().chat({ messages: MESSAGES })).message.content, "no text"),
      stream: async () => textOf(await model().chat({ messages: MESSAGES, stream: true }), (chunk) => chunk.delta),
      embeddings: async () => twoVectors(await new OpenAIEmbedding({ model: MODEL, ...common(KEY) }).getTextEmbeddings(["one", "two"])),
      ...errors((name, key) => model(name, key).chat({ messages: MESSAGES })),
    };
  },

  async mastra() {
    const { Agent } = await import("@mastra/core/agent");
    const { createTool } = await import("@mastra/core/tools");
    const { z } = await import("zod");
    const called = [];
    const weather = createTool({
      id: "weather",
      description: "The weather in a city.",
      inputSchema: z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) }),
      execute: async (input) => (called.push(input.context ?? input), "21 degrees"),
    });
    const agent = (name = MODEL, apiKey = KEY, more = {}) =>
      new Agent({ id: "one", name: "one", instructions: "Be short.", maxRetries: 0, model: { id: `ours/${name}`, url: BASE_URL, apiKey }, ...more });
    const limits = { modelSettings: { maxOutputTokens: 128, maxRetries: 0 }, maxSteps: 2 };
    return {
      chat: async () => expect((await agent().generate(QUESTION, limits)).text, "no text"),
      stream: async () => textOf((await agent().stream(QUESTION, limits)).textStream),
      tools: async () => {
        await agent(MODEL, KEY, { tools: { weather } }).generate(QUESTION, { ...limits, maxSteps: 1, toolChoice: "required" });
        expectWeather(called[0]);
      },
      structured: async () => expectCapital((await agent().generate(QUESTION, { ...limits, structuredOutput: { schema: z.object({ city: z.string() }) } })).object),
      ...errors((name, key) => agent(name, key).generate(QUESTION, limits)),
    };
  },

  async multi_llm() {
    const { igniteEngine, Message } = await import("multi-llm-ts");
    const engine = (apiKey = KEY) => igniteEngine("openai", { apiKey, baseURL: BASE_URL });
    const asked = [new Message("system", "Be short."), new Message("user", QUESTION)];
    const model = (id) => ({ id, name: id, capabilities: { tools: true, vision: false, reasoning: false, caching: false } });
    return {
      chat: async () => expect((await engine().complete(model(MODEL), asked, { maxTokens: 64 })).content, "no text"),
      stream: () => textOf(engine().generate(model(MODEL), asked, { maxTokens: 16 }), (chunk) => chunk.text),
      ...errors((name, key) => engine(key).complete(model(name), asked)),
    };
  },

  async openai_agents() {
    const { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, setTracingDisabled, tool } = await import("@openai/agents");
    const { default: OpenAI } = await import("openai");
    const { z } = await import("zod");
    setTracingDisabled(true);
    const called = [];
    const weather = tool({
      name: "weather",
      description: "The weather in a city.",
      parameters: z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) }),
      execute: async (input) => (called.push(input), "21 degrees"),
    });
    const agent = (name = MODEL, apiKey = KEY, more = {}, Kind = OpenAIChatCompletionsModel) =>
      new Agent({ name: "one", model: new Kind(new OpenAI({ baseURL: BASE_URL, apiKey, maxRetries: 0 }), name), modelSettings: { maxTokens: 128 }, ...more });
    const ask = async (...given) => (await new Runner().run(agent(...given), QUESTION)).finalOutput;
    return {
      chat: async () => expect(await ask(), "no text"),
      stream: async () => textOf((await new Runner().run(agent(), QUESTION, { stream: true })).toTextStream()),
      tools: async () => {
        await ask(MODEL, KEY, { tools: [weather], modelSettings: { toolChoice: "required", maxTokens: 128 } });
        expectWeather(called[0]);
      },
      structured: async () => expectCapital(await ask(MODEL, KEY, { outputType: z.object({ city: z.string() }) })),
      responses: async () => expect(await ask(MODEL, KEY, {}, OpenAIResponsesModel), "no text"),
      ...errors(ask),
    };
  },

  async token_js() {
    const { TokenJS } = await import("token.js");
    const client = (apiKey = KEY) => new TokenJS({ baseURL: BASE_URL, apiKey });
    const ask = (model = MODEL, key = KEY, more = {}) =>
      client(key).chat.completions.create({ provider: "openai-compatible", model, messages: MESSAGES, max_tokens: 256, temperature: 0, ...more });
    return {
      chat: async () => expect((await ask()).choices[0].message.content, "no text"),
      stream: async () => textOf(await ask(MODEL, KEY, { stream: true }), (chunk) => chunk.choices[0]?.delta?.content),
      tools: async () => expectWeather((await ask(MODEL, KEY, { tools: [WEATHER], tool_choice: "required" })).choices[0].message.tool_calls[0].function.arguments),
      ...errors(ask),
    };
  },
};

await run(await variants[process.argv[2]]());
