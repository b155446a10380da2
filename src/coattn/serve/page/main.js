// The chat. What the engine does beside it is live.js.

import * as api from "/page/api.js";
import * as store from "/page/store.js";
import { render } from "/page/markdown.js";
import { follow } from "/page/live.js";

const at = (id) => document.getElementById(id);
const LARGEST = 8 << 20;
let all = store.load();
let now = all[0] || store.create();
let files = [];
let running = null;

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(text, act) {
  const made = element("button", "", text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

function note(text, wrong = false) {
  at("note").textContent = text;
  at("note").classList.toggle("wrong", wrong);
}

function keep() {
  all = [now, ...all.filter((each) => each.id !== now.id)];
  store.save(all.filter((each) => each.messages.length));
  list();
}

function list() {
  at("list").replaceChildren(...all.filter((each) => each.messages.length).map((each) => {
    const line = element("li", each.id === now.id ? "now" : "");
    line.append(button(store.title(each), () => { if (!running) { now = each; show(); list(); open(""); } }));
    const drop = button("×", () => {
      if (running) return;
      all = all.filter((one) => one.id !== each.id);
      if (now.id === each.id) now = store.create();
      store.save(all.filter((one) => one.messages.length));
      show();
      list();
    });
    drop.setAttribute("aria-label", "Delete");
    line.append(drop);
    return line;
  }));
}

function show() {
  const hello = "Ask the model something, or attach a text and ask about it. Conversations stay in this browser.";
  at("talk").replaceChildren(...(now.messages.length ? now.messages.map(view) : [element("p", "hello", hello)]));
  at("talk").scrollTop = at("talk").scrollHeight;
}

function view(message, index) {
  const made = element("article", `message ${message.role}`);
  const body = element("div", "body");
  if (message.role === "user") body.textContent = message.shown;
  else body.append(render(message.content));
  const foot = element("div", "foot");
  if (message.role === "user") {
    for (const name of message.files || []) foot.append(element("span", "", `${name} `));
    if (!running) foot.append(button("Edit", () => edit(index)));
  } else {
    if (!running && index === now.messages.length - 1) foot.append(button("Regenerate", regenerate));
    foot.append(element("span", "", message.stats || ""));
  }
  made.append(body, foot);
  return made;
}

function edit(index) {
  if (running) return;
  at("text").value = now.messages[index].shown;
  now.messages = now.messages.slice(0, index);
  keep();
  show();
  at("text").focus();
}

function regenerate() {
  if (running) return;
  now.messages.pop();
  answer();
}

function send() {
  const shown = at("text").value.trim();
  if (running || (!shown && !files.length)) return;
  const content = [...files.map((each) => each.text), shown].join("\n\n");
  now.messages.push({ role: "user", content, shown, files: files.map((each) => each.name) });
  at("text").value = "";
  files = [];
  showFiles();
  answer();
}

function asked() {
  const said = now.messages.map(({ role, content }) => ({ role, content }));
  const system = at("system").value.trim();
  return {
    messages: system ? [{ role: "system", content: system }, ...said] : said,
    temperature: at("temperature").value === "" ? undefined : Number(at("temperature").value),
    max_completion_tokens: Number(at("most").value) || undefined,
    stream: true,
    return_progress: true,
    stream_options: { include_usage: true },
  };
}

async function answer() {
  const body = asked();
  const own = now;
  const message = { role: "assistant", content: "", stats: "" };
  own.messages.push(message);
  running = new AbortController();
  show();
  const target = at("talk").lastElementChild.querySelector(".body");
  at("stop").hidden = false;
  at("send").disabled = true;
  note("waiting");
  let due = 0;
  const draw = () => {
    const low = at("talk").scrollHeight - at("talk").scrollTop - at("talk").clientHeight < 60;
    target.replaceChildren(render(message.content));
    if (low) at("talk").scrollTop = at("talk").scrollHeight;
  };
  let failed = false;
  try {
    for await (const chunk of api.chat(body, running.signal)) {
      if (chunk.prompt_progress) {
        note(`reading ${chunk.prompt_progress.processed.toLocaleString()} of ${chunk.prompt_progress.total.toLocaleString()} tokens`);
      }
      const delta = chunk.choices[0]?.delta;
      if (delta?.content) {
        if (!message.content) note("");
        message.content += delta.content;
      }
      if (delta?.reasoning_content) note("thinking");
      if (chunk.coattn) message.stats = stats(chunk.coattn, chunk.choices[0].finish_reason);
      if (performance.now() > due) {
        draw();
        due = performance.now() + 80;
      }
    }
    note("");
  } catch (error) {
    if (running.signal.aborted) note("stopped");
    else {
      failed = true;
      note(error.message, true);
    }
  }
  running = null;
  at("stop").hidden = true;
  at("send").disabled = false;
  if (failed && !message.content) own.messages.pop();
  keep();
  show();
}

function stats(about, reason) {
  const one = about.choices[0];
  const speed = one.timings.tokens_per_s === null ? "" : `, ${one.timings.tokens_per_s.toFixed(1)} tokens/s`;
  const first = one.timings.first_token_ms === null ? "" : `first token after ${(one.timings.first_token_ms / 1000).toFixed(2)} s`;
  const over = one.audit?.over_target ? `; the error is ${one.audit.over_target.toFixed(1)} times what the quality allows` : "";
  return `${about.method}, ${about.exact ? "exact" : "lossy"}; ${first}${speed}${over}${reason === "length" ? "; cut off at the longest" : ""}`;
}

function showFiles() {
  at("files").replaceChildren(...files.map((each, index) => {
    const line = element("li", "", `${each.name} (${each.text.length.toLocaleString()} characters) `);
    line.append(button("remove", () => { files.splice(index, 1); showFiles(); }));
    return line;
  }));
}

at("attach").addEventListener("change", async (event) => {
  for (const file of event.target.files) {
    try {
      if (file.size > LARGEST) throw new Error(`${file.name} is larger than ${LARGEST >> 20} MiB.`);
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      files.push({ name: file.name, text });
    } catch (error) {
      note(error instanceof TypeError ? `${file.name} is not a text in UTF-8.` : error.message, true);
    }
  }
  event.target.value = "";
  showFiles();
});
at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => {
  if (running) return;
  now = store.create();
  show();
  list();
  open("");
  at("text").focus();
});
// On a narrow screen the bars at the sides are opened by buttons, one at a time.
const BARS = [["menu", "side"], ["look", "live"]];
function open(wanted) {
  for (const [opens, bar] of BARS) {
    at(bar).classList.toggle("open", opens === wanted);
    at(opens).setAttribute("aria-expanded", opens === wanted);
  }
}
for (const [opens, bar] of BARS) {
  at(opens).addEventListener("click", () => open(at(bar).classList.contains("open") ? "" : opens));
}
at("key").addEventListener("change", (event) => { api.setKey(event.target.value); follow(); });

list();
show();
follow();
