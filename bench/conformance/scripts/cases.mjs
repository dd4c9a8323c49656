// How a script of one client says what it tried: a JSON line for each feature.
const given = (name) => process.env[`CONFORMANCE_${name}`];
export const BASE_URL = given("BASE_URL"), MODEL = given("MODEL"), KEY = given("KEY");
export const QUESTION = "What is the capital of France?";
export const MESSAGES = [{ role: "user", content: QUESTION }];
const REASON_LETTERS = 400;
const parameters = {
  type: "object",
  properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
export const WEATHER = { type: "function", function: { name: "weather", description: "The weather in a city.", parameters } };

export async function run(cases) {
  for (const [feature, tried] of Object.entries(cases)) {
    let reason = "";
    try {
      await tried();
    } catch (error) {
      reason = `${error?.name}: ${error?.message}`.slice(0, REASON_LETTERS);
    }
    console.log(JSON.stringify({ feature, reason }));
  }
}

export function expect(isSo, what) {
  if (!isSo) throw new Error(`unexpected: ${JSON.stringify(what)}`);
}

export function expectWeather(said) {
  const { city, unit } = typeof said === "string" ? JSON.parse(said) : said;
  expect(typeof city === "string" && ["celsius", "fahrenheit"].includes(unit), said);
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
