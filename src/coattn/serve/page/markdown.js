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
  return DOMPurify.sanitize(marked.parse(text, { async: false, gfm: true }), RULES);
}
