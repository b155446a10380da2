// A model's Markdown as nodes that run nothing.

import { marked } from "/page/vendor/marked.js";
import DOMPurify from "/page/vendor/purify.js";

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

const RULES = {
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "dialog"],
  FORBID_ATTR: ["style", "id", "name", "class"],
  RETURN_DOM_FRAGMENT: true,
};

export function render(text) {
  const made = DOMPurify.sanitize(marked.parse(text, { async: false, gfm: true }), RULES);
  for (const code of made.querySelectorAll("pre")) {
    const box = document.createElement("div");
    box.className = "code";
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = "Copy";
    copy.addEventListener("click", async () => { copy.textContent = (await copied(code)) ? "Copied" : "Press Ctrl+C"; });
    code.replaceWith(box);
    box.append(code, copy);
  }
  return made;
}

// A page that did not come over https has no clipboard: then the code is selected, for the old way or the keyboard.
async function copied(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(code);
    return document.execCommand("copy");
  }
}
