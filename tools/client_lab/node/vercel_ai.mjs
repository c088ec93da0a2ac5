// The Vercel AI SDK: its OpenAI (chat, responses), OpenAI-compatible and Anthropic providers.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import { z } from "zod";

const URL = process.env.LAB_URL;
const MODEL = "local";
const FIRST = "What is the weather in Paris? Use the tool.";
const SECOND = "And in Rome?";
const WEATHER = { Paris: "21 degrees and sunny", Rome: "17 degrees and rain" };
const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => WEATHER[city],
  }),
};

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const models = {
  "chat": openai.chat(MODEL),
  "responses": openai.responses(MODEL),
  "compatible": createOpenAICompatible({
    name: "lab",
    baseURL: `${URL}/v1`,
    supportsStructuredOutputs: true,
  })(MODEL),
  "messages": createAnthropic({ baseURL: `${URL}/v1`, apiKey: "none" })(MODEL),
};
for (const [name, model] of Object.entries(models)) {
  const options = { model, tools, stopWhen: stepCountIs(5), maxOutputTokens: 1000 };
  const messages = [{ role: "user", content: FIRST }];
  const first = await generateText({ ...options, messages });
  assert.equal(first.text, `The tool said: ${WEATHER.Paris}`, name);
  messages.push(...first.response.messages, { role: "user", content: SECOND });
  const second = streamText({ ...options, messages, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of second.textStream) text += piece;
  assert.equal(text, `The tool said: ${WEATHER.Rome}`, name);
  const { object } = await generateObject({
    model,
    schema: z.object({ name: z.string(), population: z.number().int() }),
    prompt: "Describe the City of Paris as JSON.",
    maxOutputTokens: 1000,
  });
  assert.deepEqual(object, { name: "Paris", population: 2100000 }, name);
}
