"use strict";
// Sorting, filtering, copying and words at figure points. Everything on the page is there without it.
const units = { kB: 1e3, MB: 1e6, GB: 1e9, M: 1e6 };

function number(text) {
  const found = /^(-?[\d.]+)\s*([kMG]B|M)?/.exec(text);
  return found ? parseFloat(found[1]) * (units[found[2]] || 1) : NaN;
}

function sortBy(head) {
  const table = head.closest("table"), body = table.tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending", numeric = !head.classList.contains("l");
  for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const keyed = [...body.rows].map((row) => {
    const text = row.cells[head.cellIndex].textContent;
    return [numeric ? number(text) : text, row];
  });
  keyed.sort(([a], [b]) => {
    if (!numeric) return up ? a.localeCompare(b) : b.localeCompare(a);
    if (isNaN(a) || isNaN(b)) return isNaN(a) - isNaN(b); // what is missing comes last either way
    return up ? a - b : b - a;
  });
  body.append(...keyed.map(([, row]) => row));
}

for (const head of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => sortBy(head));
}

const form = document.getElementById("filter");
if (form) {
  form.hidden = false;
  const lines = document.querySelectorAll("table[data-filter] tr[data-at], details[data-at]");
  form.addEventListener("change", () => {
    const wanted = [...form.querySelectorAll("select")].map((s) => s.value);
    for (const line of lines) {
      const own = line.dataset.at.split(".");
      line.hidden = wanted.some((w, i) => w !== "" && own[i] !== "" && own[i] !== w);
    }
    const cells = document.querySelectorAll("#cells table tr[data-at]:not([hidden])").length / 2;
    document.getElementById("shown").textContent = `${cells} cells in the tables`;
  });
}

for (const box of document.querySelectorAll(".command")) {
  const button = document.createElement("button"), text = box.querySelector("pre");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text); // no clipboard here: what is selected can be copied
      button.textContent = "Selected";
    }
  });
  box.append(button);
}

const tip = document.getElementById("tip");
for (const drawing of document.querySelectorAll(".panel svg")) {
  const points = [...drawing.querySelectorAll(".p")];
  drawing.addEventListener("pointermove", (event) => {
    let best = null, least = 18 * 18; // pixels
    for (const point of points) {
      const box = point.getBoundingClientRect();
      const dx = Math.max(box.left - event.clientX, 0, event.clientX - box.right);
      const dy = Math.max(box.top - event.clientY, 0, event.clientY - box.bottom);
      if (dx * dx + dy * dy < least) [best, least] = [point, dx * dx + dy * dy];
    }
    tip.hidden = !best;
    if (!best) return;
    tip.textContent = best.firstElementChild.textContent;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
  });
  drawing.addEventListener("pointerleave", () => (tip.hidden = true));
}
