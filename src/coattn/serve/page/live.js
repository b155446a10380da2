// The picture of the tiers: bars, strips of blocks, and the last step.

import * as api from "/page/api.js";

const at = (id) => document.getElementById(id);
const PLACES = { g: "on the GPU", h: "in DRAM", s: "in a shared prefix", x: "forgotten" };
const STATES = { decoding: "writing" };
const CELL = 7, GAP = 1, WIDTH = 340;
const RATE = 8;
let stop = null;
let before = null;
let gpu = true;

export async function follow() {
  stop?.abort();
  const own = (stop = new AbortController());
  for (;;) {
    try {
      let known = "";
      for await (const state of api.live(RATE, own.signal)) {
        if (state.state !== known) about(await api.get("/v1/coattn/status"));
        known = state.state;
        if (!document.hidden) draw(state);
      }
    } catch (error) {
      if (own.signal.aborted) return;
      at("state").textContent = error.message;
    }
    await new Promise((go) => setTimeout(go, 2000));
    if (own.signal.aborted) return;
  }
}

function about(status) {
  at("method").textContent = status.method ? `${status.model} under ${status.method}` : "loading";
  at("state").dataset.kind = !status.method ? "" : status.exact ? "exact: nothing is left out" : "lossy: part is approximated";
  gpu = !status.device || status.device.startsWith("cuda");
  PLACES.g = gpu ? "on the GPU" : "beside the model";
  at("where").hidden = gpu;
}

function draw(state) {
  const speed = speeds(state);
  const parts = [state.state, at("state").dataset.kind, speed].filter(Boolean);
  at("state").textContent = state.reason || parts.join("; ");
  tiers(state.tiers);
  strips(state.requests);
  step(state.step);
}

function speeds(state) {
  const last = before;
  if (last && state.time - last.time < 0.9) return last.text;
  const counts = state.counts;
  let text = "";
  if (last && counts.new_tokens >= last.made) {
    const seconds = state.time - last.time;
    const made = (counts.new_tokens - last.made) / seconds, read = (counts.prefill_tokens - last.read) / seconds;
    text = [made && `${made.toFixed(1)} tokens/s written`, read && `${read.toFixed(0)} tokens/s read`].filter(Boolean).join(", ");
  }
  before = { time: state.time, made: counts.new_tokens || 0, read: counts.prefill_tokens || 0, text };
  return text;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit++;
  }
  return `${count.toFixed(unit && count < 100 ? 1 : 0)} ${units[unit]}`;
}

function tiers(found) {
  const rows = [];
  for (const tier of ["gpu", "host"]) {
    const each = found[tier];
    if (!each) continue;
    const whole = each.capacity_bytes ?? each.held_bytes;
    const used = each.used_bytes ?? each.held_bytes;
    if (!whole && !used) continue;
    const line = document.createElement("div");
    const name = tier === "host" ? "DRAM" : gpu ? "GPU" : "Beside the model";
    const most = each.capacity_bytes === null ? `used of the ${bytes(whole)} taken so far` : `used of ${bytes(whole)}`;
    line.textContent = `${name}: ${bytes(used)} ${most}`;
    const bar = document.createElement("div");
    bar.className = "bar";
    const part = document.createElement("div");
    part.className = tier;
    part.style.width = `${whole ? Math.min(100, (100 * used) / whole) : 0}%`;
    bar.append(part);
    rows.push(line, bar);
  }
  at("tiers").replaceChildren(...rows);
}

function strips(requests) {
  const old = new Map([...at("strips").children].map((each) => [each.dataset.id, each]));
  const rows = requests.slice(0, 12).map((request) => {
    const id = String(request.id);
    const made = old.get(id) || blank(id);
    fill(made, request);
    return made;
  });
  at("strips").replaceChildren(...rows);
  const letters = new Set(requests.flatMap((request) => [...(request.cells?.where || "")]));
  if (!letters.size) return;
  at("legend").replaceChildren(...Object.keys(PLACES).filter((letter) => letters.has(letter)).map((letter) => {
    const part = document.createElement("span"), colour = document.createElement("i");
    colour.className = letter;
    part.append(colour, PLACES[letter]);
    return part;
  }), "bright: attended in the last step");
}

function blank(id) {
  const made = document.createElement("div");
  made.className = "strip";
  made.dataset.id = id;
  made.append(document.createElement("div"), document.createElement("canvas"));
  made.lastChild.setAttribute("role", "img");
  return made;
}

function fill(made, request) {
  const [line, canvas] = made.children;
  const whole = request.prompt_tokens + request.new_tokens;
  const read = request.state === "reading" ? `, reading ${Math.round((100 * request.stored_tokens) / whole)}%` : "";
  const cells = request.cells;
  const size = cells ? `; a square is ${(cells.block * cells.per).toLocaleString()}` : "";
  line.textContent = `Request ${request.id}, ${STATES[request.state] || request.state}${read}: ${request.prompt_tokens.toLocaleString()} + ${request.new_tokens.toLocaleString()} tokens${size}`;
  const count = cells ? cells.where.length : 0;
  const columns = Math.floor(WIDTH / (CELL + GAP));
  const height = Math.max(1, Math.ceil(count / columns)) * (CELL + GAP);
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== WIDTH * scale || canvas.height !== height * scale) {
    canvas.width = WIDTH * scale;
    canvas.height = height * scale;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, WIDTH, height);
  const counts = {};
  const style = getComputedStyle(document.documentElement);
  for (let i = 0; i < count; i++) {
    const where = cells.where[i];
    counts[where] = (counts[where] || 0) + 1;
    pen.fillStyle = style.getPropertyValue(`--${where}`);
    pen.globalAlpha = 0.25 + (0.75 * Number(cells.attended[i])) / 9;
    pen.fillRect((i % columns) * (CELL + GAP), Math.floor(i / columns) * (CELL + GAP), CELL, CELL);
  }
  pen.globalAlpha = 1;
  const said = Object.entries(counts).map(([letter, n]) => `${n} ${PLACES[letter]}`);
  const per = cells && cells.per > 1 ? `, ${cells.per} blocks each` : "";
  canvas.setAttribute("aria-label", cells ? `${count} cells of ${cells.block} tokens${per}: ${said.join(", ")}` : "no blocks yet");
  canvas.title = cells ? `attended: ${cells.attended_from}` : "";
}

function step(found) {
  if (!found) return;
  const parts = found.bytes.dram > 0;
  const lanes = [gpu ? "GPU" : "model", ...(parts ? ["CPU"] : []), ...(parts && gpu ? ["PCIe"] : [])];
  const canvas = at("step");
  const scale = window.devicePixelRatio || 1;
  canvas.width = WIDTH * scale;
  canvas.height = lanes.length * 22 * scale;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  const style = getComputedStyle(document.documentElement);
  const from = 40, wide = WIDTH - from;
  const x = (ms) => from + (wide * Math.max(0, Math.min(ms, found.ms))) / found.ms;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  lanes.forEach((name, lane) => {
    pen.fillStyle = style.getPropertyValue("--mute");
    pen.fillText(name, 0, lane * 22 + 11);
    pen.fillStyle = style.getPropertyValue("--line");
    pen.fillRect(from, lane * 22 + 3, wide, 16);
  });
  const bar = (lane, begin, end, colour) => {
    if (lane >= lanes.length) return;
    pen.fillStyle = style.getPropertyValue(colour);
    pen.fillRect(x(begin), lane * 22 + 3, Math.max(0.5, x(end) - x(begin)), 16);
  };
  bar(0, 0, found.ms, "--g");
  for (const each of found.waits) bar(0, each.begin, each.end, "--line");
  for (const each of found.cpu) bar(1, each.begin, each.end, "--h");
  for (const each of found.pcie) bar(2, each.begin, each.end, "--s");
  const idle = Math.round(100 * found.gpu_idle), busy = Math.round(100 * found.cpu_busy);
  const shares = parts ? `; the ${lanes[0]} waits ${idle}%, the CPU attends to DRAM ${busy}%` : "";
  const one = found.sequences === 1 ? "request" : "requests";
  const kv = [`${bytes(found.bytes.hbm - found.weight_bytes)} ${PLACES.g}`];
  if (parts) kv.push(`${bytes(found.bytes.dram)} in DRAM`);
  if (parts && gpu) kv.push(`${bytes(found.bytes.pcie)} over PCIe`);
  canvas.setAttribute("aria-label", `${found.ms.toFixed(2)} ms${shares}`);
  at("numbers").textContent = `${found.ms.toFixed(2)} ms for ${found.sequences} ${one}${shares}. Read of this memory: ${kv.join(", ")}; of the model's weights: ${bytes(found.weight_bytes)}.`;
}
