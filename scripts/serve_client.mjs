// OpenAI's client of npm against a running server: `node serve_client.mjs URL`, beside its node_modules.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "I have a dog that is three years old." }];
const ask = { model, messages, temperature: 0, max_completion_tokens: 48 };
const parameters = {
  type: "object",
  properties: { kind: { enum: ["cat", "dog"] }, age: { type: "integer", minimum: 0, maximum: 30 } },
  required: ["kind", "age"],
  additionalProperties: false,
};

const whole = await client.chat.completions.create(ask);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, whole.choices[0].message.content);

const form = { type: "json_schema", json_schema: { name: "pet", strict: true, schema: parameters } };
const pet = JSON.parse((await client.chat.completions.create({ ...ask, response_format: form })).choices[0].message.content);
assert.ok(["cat", "dog"].includes(pet.kind) && Number.isInteger(pet.age));

const tools = [{ type: "function", function: { name: "add_pet", strict: true, parameters } }];
const asked = { ...ask, tools, tool_choice: "required", parallel_tool_calls: false };
const stream = client.chat.completions.stream(asked);
const call = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
assert.equal(call.function.name, "add_pet");
assert.ok(Number.isInteger(JSON.parse(call.function.arguments).age));

const given = { model, input: messages, temperature: 0, max_output_tokens: 48 };
const answer = await client.responses.create(given);
assert.equal(answer.output_text, whole.choices[0].message.content);
let said = "";
for await (const event of await client.responses.create({ ...given, stream: true })) if (event.type === "response.output_text.delta") said += event.delta;
assert.equal(said, answer.output_text);
await assert.rejects(client.chat.completions.create({ ...ask, model: "none" }), OpenAI.NotFoundError);
console.log(`openai ${VERSION} of npm: chat, stream, schemas, tools, responses, errors`);
