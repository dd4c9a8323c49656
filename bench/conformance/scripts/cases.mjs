// How a client's script reports what it tried: a JSON line per feature.
const given = (name) => process.env[`CONFORMANCE_${name}`];
export const BASE_URL = given("BASE_URL"), MODEL = given("MODEL"), KEY = given("KEY");
export const ROOT_URL = BASE_URL.replace(/\/v1$/, "");
export const QUESTION = "What is the capital of France?";
export const WEATHER_QUESTION = "What is the weather in Paris?";
export const MESSAGES = [{ role: "user", content: QUESTION }];
export const WRONG_KEY = "sw_000000000000_wrong";
const REASON_LETTERS = 400, CASE_WITHIN_MS = 240_000;
const parameters = {
  type: "object",
  properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
export const WEATHER = { type: "function", function: { name: "weather", description: "The weather in a city.", parameters } };
export const CAPITAL = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };

export async function run(cases) {
  for (const [feature, tried] of Object.entries(cases)) {
    let reason = "";
    try {
      await within(tried());
    } catch (error) {
      reason = `${error?.name}: ${error?.message}`.slice(0, REASON_LETTERS);
    }
    console.log(JSON.stringify({ feature, reason }));
  }
  process.exit(0); // some clients leave timers behind
}

// The two errors that every client can meet, of a call that asks with a model's name and a key.
export const errors = (ask) => ({
  unknown_model: () => expectStatus(404, () => ask("gpt-9", KEY)),
  wrong_key: () => expectStatus(401, () => ask(MODEL, WRONG_KEY)),
});

export function expect(isSo, what) {
  if (!isSo) throw new Error(`unexpected: ${JSON.stringify(what)}`);
}

export function expectWeather(said) {
  const { city, unit } = typeof said === "string" ? JSON.parse(said) : said;
  expect(typeof city === "string" && ["celsius", "fahrenheit"].includes(unit), said);
}

export function expectCapital(said) {
  expect(typeof (typeof said === "string" ? JSON.parse(said) : said).city === "string", said);
}

export async function expectError(kind, call) {
  let said;
  try {
    said = await call();
  } catch (error) {
    if (kind.isInstance ? kind.isInstance(error) : error instanceof kind) return error;
    throw error;
  }
  throw new Error(`no ${kind.name}, but ${JSON.stringify(said)}`);
}

export async function expectStatus(status, call) {
  let said;
  try {
    said = await call();
  } catch (error) {
    for (let each = error, depth = 0; each && depth < 9; each = each.cause, depth += 1) {
      const found = [each.status, each.statusCode, each.code, each.httpResponse?.status];
      if (found.includes(status) || `${each.message}`.includes(`${status}`)) return;
    }
    throw error;
  }
  throw new Error(`no error of status ${status}, but ${JSON.stringify(said)}`);
}

export async function textOf(pieces, take = (piece) => piece) {
  let text = "";
  for await (const piece of pieces) text += take(piece) ?? "";
  expect(text, "no text");
}

function within(promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no result within ${CASE_WITHIN_MS / 1000} s`)), CASE_WITHIN_MS);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
