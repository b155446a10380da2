// Conversations, kept in this browser.

const NAME = "coattn.conversations";

export function load() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME) || "[]");
    return Array.isArray(found) ? found.filter((each) => Array.isArray(each.messages)) : [];
  } catch {
    return [];
  }
}

// Leaves the oldest out when there is no more room.
export function save(all) {
  for (let count = all.length; count > 0; count--) {
    try {
      localStorage.setItem(NAME, JSON.stringify(all.slice(0, count)));
      return;
    } catch {
      // full: try with one less
    }
  }
  localStorage.removeItem(NAME);
}

export function create() {
  return { id: crypto.randomUUID ? crypto.randomUUID() : String(Date.now() + Math.random()), messages: [] };
}

export function title(conversation) {
  const first = conversation.messages.find((each) => each.role === "user");
  return first ? first.shown.slice(0, 60) || "…" : "New chat";
}
