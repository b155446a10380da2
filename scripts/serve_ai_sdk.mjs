// The AI SDK against a running server: `node serve_ai_sdk.mjs URL`, beside its node_modules.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const { data } = await (await fetch(`${baseURL}/models`)).json();
const name = data[0].id;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  compatible: createOpenAICompatible({ name: "coattn", baseURL, includeUsage: true, supportsStructuredOutputs: true })(name),
  chat: openai.chat(name),
  responses: openai.responses(name),
  messages: createAnthropic({ baseURL, apiKey: "none" })(name),
};
const Pet = z.object({ kind: z.enum(["cat", "dog"]), age: z.number().int().min(0).max(30) });
const tools = { add_pet: tool({ description: "Adds a pet.", inputSchema: Pet }) };

for (const [kind, model] of Object.entries(models)) {
  const ask = { model, temperature: 0, maxOutputTokens: 48, maxRetries: 0, system: "Be brief." };
  const messages = [{ role: "user", content: "I have a dog that is three years old. Describe my pet." }];
  const whole = await generateText({ ...ask, messages });
  const stream = streamText({ ...ask, messages });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, whole.text);
  assert.ok(whole.usage.inputTokens > 0 && (await stream.usage).outputTokens === whole.usage.outputTokens);
  const { output } = await generateText({ ...ask, messages, output: Output.object({ schema: Pet }) });
  Pet.parse(output);
  const asked = { ...ask, messages, tools, toolChoice: "required", maxOutputTokens: 300 };
  const called = await generateText(asked);
  Pet.parse(called.toolCalls[0].input);
  const again = streamText(asked);
  assert.deepEqual((await again.toolCalls).map((each) => each.input), called.toolCalls.map((each) => each.input));
  const results = called.toolCalls.map(({ toolCallId, toolName }) => ({ type: "tool-result", toolCallId, toolName, output: { type: "text", value: "added" } }));
  const told = [...messages, ...called.response.messages, { role: "tool", content: results }];
  assert.ok((await generateText({ ...ask, messages: told, tools })).usage.inputTokens > 0);
  console.log(`AI SDK, ${kind}: text, stream, schema, tools and their results`);
}
