// autocannon: 200 requests over 10 connections.
import autocannon from "autocannon";
import { BASE_URL, KEY, MESSAGES, MODEL, expect, run } from "./cases.mjs";

await run({
  async load() {
    const { "2xx": answered, non2xx, errors } = await autocannon({
      url: `${BASE_URL}/chat/completions`,
      method: "POST",
      headers: { authorization: `Bearer ${KEY}`, "content-type": "application/json" },
      body: JSON.stringify({ model: MODEL, messages: MESSAGES, max_tokens: 4 }),
      connections: 10,
      amount: 200,
      timeout: 120,
    });
    expect(answered === 200 && non2xx === 0 && errors === 0, { answered, non2xx, errors });
  },
});
