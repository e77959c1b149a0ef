"use strict";
// What our pages share: elements, the sources of tokens, bar charts.
const SOURCES = {
  accepted: "drafted and accepted", corrected: "corrected: in place of a rejected draft",
  bonus: "bonus: after drafts that were all accepted", undrafted: "no draft in its round",
  grammar: "forced by the grammar", delimiter: "forced by a reasoning delimiter", budget: "forced by the thinking budget",
};

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children.filter(child => child !== null));
  return made;
}

// Cards of [name, value]. The number of columns, --columns, divides their number, so that rows are even.
function cards(rows) {
  return element("dl", {class: "facts"}, ...rows.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {"data-figure": name}, String(value)))));
}

function legend(tokens) {
  const counts = {};
  for (const token of tokens) counts[token.source] = (counts[token.source] || 0) + 1;
  return element("ul", {class: "legend"}, ...Object.keys(SOURCES).filter(name => counts[name]).map(name =>
    element("li", {}, element("span", {class: "token " + name, "aria-hidden": "true"}, "\u00a0ab\u00a0"),
      ` ${SOURCES[name]}: ${counts[name]}`)));
}

function tokenSpan(token, attributes) {
  const parts = token.text === "" ? ["⋯"] : token.text.split(/(?=\n)/).flatMap(part =>
    part.startsWith("\n") ? [element("span", {class: "mark"}, "↵"), part] : [part]);
  const classes = `token ${token.source} is-${token.role || "end"}${token.text === "" ? " half" : ""}`;
  return element("span", {class: classes, "data-token": token.id, ...attributes}, ...parts);
}

// Bars of {value, behind, label, tick, title}: `behind` is a paler bar in the back, `label` is above, `tick` below.
// A value above `top` is cut off, with a mark across its bar.
function bars(entries, about, top, classes) {
  const width = 480, height = 150, left = 8, bottom = 22, high = 18, room = height - bottom - high;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", about);
  const add = (name, attributes, text) => {
    const made = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text || "";
    svg.append(made);
    return made;
  };
  const step = (width - 2 * left) / Math.max(1, entries.length), wide = Math.max(.5, step - Math.min(6, step / 5));
  const tall = value => value > 0 ? Math.max(1, room * Math.min(1, value / Math.max(1e-9, top))) : 0;
  const every = Math.ceil(entries.length / 16);
  entries.forEach((entry, at) => {
    const x = left + at * step, middle = x + wide / 2, most = Math.max(entry.value, entry.behind || 0);
    const draw = (value, kind) => add("rect", {x, y: height - bottom - tall(value), height: tall(value), width: wide,
      class: kind}).append(Object.assign(document.createElementNS(svg.namespaceURI, "title"), {textContent: entry.title}));
    if (entry.behind !== undefined) draw(entry.behind, "drafted");
    draw(entry.value, classes || "");
    if (entry.value > top) add("path", {d: `M${x - 1} ${high + 14}l${wide / 2 + 1} -5l${wide / 2 + 1} 5`});
    const write = (y, words) => {  // within the picture also at its sides
      const [place, anchor] = middle < 24 ? [x, "start"] : middle > width - 14 ? [x + wide, "end"] : [middle, "middle"];
      add("text", {x: place, y, "text-anchor": anchor}, words);
    };
    if (entry.label !== undefined && (every === 1 || entry.value > top)) write(height - bottom - tall(most) - 4, entry.label);
    if (at % every === 0 && entry.tick !== "") write(height - 7, entry.tick);
  });
  return svg;
}
