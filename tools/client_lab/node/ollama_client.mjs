// The ollama package: chat with tools, generate, answers in a format, and the lists of models.

import assert from "node:assert";
import { Ollama } from "ollama";

const MODEL = "local";
const CITY = { name: "Paris", population: 2100000 };
const WEATHER = { Paris: "21 degrees and sunny", Rome: "17 degrees and rain" };
const ABOUT_CITY = "Describe the City of Paris as JSON.";
const tools = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: { type: "object", required: ["city"], properties: { city: { type: "string" } } },
  },
}];
const ollama = new Ollama({ host: process.env.LAB_URL });

async function answerOf(messages, stream) {
  const options = { model: MODEL, messages, tools, think: true };
  if (!stream) return await ollama.chat(options);
  const message = { role: "assistant", content: "", thinking: "", tool_calls: [] };
  let last;
  for await (const part of await ollama.chat({ ...options, stream: true })) {
    message.content += part.message.content;
    message.thinking += part.message.thinking ?? "";
    message.tool_calls.push(...(part.message.tool_calls ?? []));
    last = part;
  }
  return { ...last, message };
}

const messages = [];
for (const [question, stream, wanted] of [
  ["What is the weather in Paris? Use the tool.", false, WEATHER.Paris],
  ["And in Rome?", true, WEATHER.Rome],
]) {
  messages.push({ role: "user", content: question });
  for (;;) {
    const { message, ...end } = await answerOf(messages, stream);
    messages.push(message);
    assert.equal(end.done_reason, "stop");
    assert(end.eval_duration > 0 && end.total_duration >= end.eval_duration);
    if (!message.tool_calls?.length) break;
    assert.equal(message.thinking, "A tool knows that.");
    for (const { function: { name, arguments: { city } } } of message.tool_calls) {
      messages.push({ role: "tool", tool_name: name, content: WEATHER[city] });
    }
  }
  assert.equal(messages.at(-1).content, `The tool said: ${wanted}`);
}

const schema = {
  type: "object",
  required: ["name", "population"],
  properties: { name: { type: "string" }, population: { type: "integer" } },
};
for (const format of [schema, "json"]) {
  const options = { num_predict: 100, temperature: 0 };
  const answer = await ollama.generate({ model: MODEL, prompt: ABOUT_CITY, format, think: false, options });
  assert.deepEqual(JSON.parse(answer.response), CITY);
}

const [listed] = (await ollama.list()).models;
assert.equal(listed.model, `${MODEL}:latest`);
assert.equal((await ollama.ps()).models[0].model, listed.model);
const shown = await ollama.show({ model: listed.model });
assert.deepEqual(shown.capabilities, ["completion", "tools", "thinking"]);
assert.match((await ollama.version()).version, /^\d+\.\d+\.\d+$/);
await assert.rejects(ollama.chat({ model: "unknown" }), { status_code: 404 });
await assert.rejects(ollama.pull({ model: "other" }), { status_code: 501 });

// A client that leaves stops its answer.
const stream = await ollama.generate({ model: MODEL, prompt: "Say anything", raw: true, stream: true });
await assert.rejects(async () => {
  for await (const part of stream) stream.abort();
}, { name: "AbortError" });
