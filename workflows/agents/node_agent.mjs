// An agent in JavaScript with npm's `openai`. It reads a question from its arguments and prints the result.
import OpenAI from "openai";

const client = new OpenAI(); // OPENAI_BASE_URL and OPENAI_API_KEY
const [question, stream] = process.argv.slice(2);
const integer = { type: "integer" };
const parameters = { type: "object", properties: { a: integer, b: integer }, required: ["a", "b"] };
const schema = { type: "object", properties: { result: integer }, required: ["result"] };
const request = {
  model: "default",
  messages: [{ role: "user", content: question }],
  tools: [{ type: "function", function: { name: "multiply", description: "Multiply two whole numbers.", parameters } }],
  response_format: { type: "json_schema", json_schema: { name: "result", schema } },
};

async function ask() {
  const completion = stream
    ? await client.chat.completions.stream(request).finalChatCompletion()
    : await client.chat.completions.create(request);
  return completion.choices[0].message;
}

for (let call = 0; call < 4; call++) {
  const answer = await ask();
  if (!answer.tool_calls?.length) {
    console.log(JSON.parse(answer.content).result);
    break;
  }
  request.messages.push(answer);
  for (const { id, function: { arguments: text } } of answer.tool_calls) {
    const { a, b } = JSON.parse(text);
    request.messages.push({ role: "tool", tool_call_id: id, content: String(a * b) });
  }
}
