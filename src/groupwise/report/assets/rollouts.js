// The rollout browser. The data arrive as columns; a view of a group is made only when it is shown.

const PAGE = 12;

async function readRollouts() {
  const block = document.getElementById("rollout-data");
  if (!block) return null;
  if (block.type === "application/json") return JSON.parse(block.textContent);
  const bytes = Uint8Array.from(atob(block.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// [run, step, id, text, answer, completions] rows become groups that know where theirs begin.
function groupsOf(data) {
  let first = 0;
  return data.groups.map(([run, step, id, text, answer, count]) => {
    const group = { run, step, id, text, answer, first, count };
    first += count;
    return group;
  });
}

const isRight = (data, i) => data.correct[i] !== null && data.correct[i] >= 0.5;
const judged = (data, i) => data.strings[data.status[i]] === "ok" && data.reward[i] !== null;

// Of a reward that only pays, nobody says which answers are right.
const told = (data, i) => data.correct[i] !== null;

const FILTERS = {
  "all groups": () => true,
  "right and wrong": (d, g) => { const n = rightIn(d, g); return n > 0 && n < g.count; },
  "all right": (d, g) => g.count > 0 && rightIn(d, g) === g.count,
  "none right": (d, g) => rightIn(d, g) === 0,
  "cut off": (d, g) => some(g, (i) => d.strings[d.finish[i]] === "length"),
  "not judged": (d, g) => some(g, (i) => !judged(d, i)),
};

const ABOUT_RIGHT = ["right and wrong", "all right", "none right"];

function some(group, test) {
  for (let i = group.first; i < group.first + group.count; i++) if (test(i)) return true;
  return false;
}

function rightIn(data, group) {
  let count = 0;
  for (let i = group.first; i < group.first + group.count; i++) count += isRight(data, i);
  return count;
}

function startBrowser(data, runs, labels) {
  const section = document.getElementById("rollouts");
  const groups = groupsOf(data);
  const present = [...new Set(groups.map((g) => g.run))];
  const steps = [...new Set(groups.map((g) => g.step))].sort((a, b) => a - b);
  const lower = data.strings.map((s) => s.toLowerCase());
  const state = { run: present.length > 1 ? -1 : present[0], step: steps.length - 1, filter: "all groups", query: "", colour: false, diff: false, limit: PAGE };

  const update = (change) => {
    Object.assign(state, { limit: PAGE }, change);
    render(section, { data, groups, runs, labels, steps, lower, present }, state, update);
  };
  controls(section.querySelector(".controls"), { data, runs, labels, steps, present }, state, update);
  update({});
}

function controls(place, view, state, update) {
  const { data, runs, labels, steps, present } = view;
  if (present.length > 1) {
    const tabs = html("div", "tabs");
    const choose = (run) => {
      [...tabs.children].forEach((b) => b.setAttribute("aria-pressed", String(Number(b.dataset.run) === run)));
      update({ run });
    };
    for (const run of [-1, ...present]) {
      const button = html("button", run < 0 ? "" : accentOf(runs[run].label, labels), run < 0 ? "Side by side" : runs[run].label);
      button.type = "button";
      button.dataset.run = run;
      button.setAttribute("aria-pressed", String(run === state.run));
      button.addEventListener("click", () => choose(run));
      tabs.append(button);
    }
    place.append(tabs);
  }
  const slider = html("input");
  Object.assign(slider, { type: "range", min: 0, max: steps.length - 1, value: state.step, id: "step" });
  const label = html("label", "step", "");
  const name = html("span", "", `Step ${steps[state.step]}`);
  label.append(name, slider);
  slider.addEventListener("input", () => {
    name.textContent = `Step ${steps[slider.value]}`;
    update({ step: Number(slider.value) });
  });
  const filter = html("select");
  filter.setAttribute("aria-label", "Filter groups");
  const anyTold = data.correct.some((value) => value !== null);
  for (const key of Object.keys(FILTERS)) {
    if (anyTold || !ABOUT_RIGHT.includes(key)) filter.append(html("option", "", key));
  }
  filter.addEventListener("change", () => update({ filter: filter.value }));
  const search = html("input");
  Object.assign(search, { type: "search", placeholder: "Search all steps…" });
  search.setAttribute("aria-label", "Search prompts and completions of all steps");
  let timer;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => update({ query: search.value.trim().toLowerCase() }), 120);
  });
  place.append(label, filter, search);
  if (data.levels.some((l) => data.strings[l] !== "")) {
    place.append(check("token surprise", (colour) => update({ colour })));
  }
  if (present.length > 1) place.append(check("differences", (diff) => update({ diff })));
}

function check(name, changed) {
  const box = html("input");
  box.type = "checkbox";
  const label = html("label", "check");
  label.append(box, ` ${name}`);
  box.addEventListener("change", () => changed(box.checked));
  return label;
}

function render(section, view, state, update) {
  const { data, groups, steps, lower, present } = view;
  let hits = null;
  if (state.query) {
    hits = new Uint8Array(lower.length);
    lower.forEach((s, i) => { if (s.includes(state.query)) hits[i] = 1; });
  }
  const test = FILTERS[state.filter];
  const matches = (g) =>
    (state.run < 0 || g.run === state.run) &&
    (hits ? hits[g.text] || hits[g.id] || some(g, (i) => hits[data.text[i]]) : g.step === steps[state.step]) &&
    test(data, g);
  // Side by side, the groups of one prompt at one step stand together if any of them matches.
  const cards = new Map();
  for (const g of groups.filter(matches)) {
    const key = state.run < 0 ? `${g.step}\u0000${g.id}\u0000${g.text}` : String(g.first);
    if (!cards.has(key)) cards.set(key, []);
    cards.get(key).push(g);
  }
  if (state.run < 0) {
    for (const g of groups) {
      const mates = cards.get(`${g.step}\u0000${g.id}\u0000${g.text}`);
      if (mates && !mates.includes(g)) mates.push(g);
    }
    for (const mates of cards.values()) mates.sort((a, b) => a.run - b.run);
  }
  const all = [...cards.values()];
  const what = state.run < 0 && present.length > 1 ? "prompt" : "group";
  section.querySelector(".count").textContent =
    `${all.length.toLocaleString("en-US")} ${what}${all.length === 1 ? "" : "s"}` +
    (hits ? ` match “${state.query}”` : ` at step ${steps[state.step]}`);
  const place = section.querySelector(".groups");
  place.replaceChildren(...all.slice(0, state.limit).map((mates) => groupCard(mates, view, state)));
  if (all.length > state.limit) {
    const more = html("button", "more", `Show ${Math.min(PAGE, all.length - state.limit)} more`);
    more.type = "button";
    more.addEventListener("click", () => update({ limit: state.limit + PAGE }));
    place.append(more);
  }
}

function groupCard(mates, view, state) {
  const { data, runs, labels } = view;
  const card = html("article", "card");
  const prompt = html("div", "prompt", data.strings[mates[0].text]);
  if (data.strings[mates[0].answer]) prompt.append(html("span", "answer", `answer ${data.strings[mates[0].answer]}`));
  if (state.query) prompt.append(html("span", "answer", `step ${mates[0].step}`));
  if (state.diff && mates.length > 1) {
    card.append(prompt, ...pairs(mates, view));
    return card;
  }
  const columns = html("div", "columns");
  for (const group of mates) {
    const column = html("div", accentOf(runs[group.run].label, labels));
    const list = html("ol", "samples");
    const largest = largestIn(data, group);
    for (const [i, count] of folded(data, group)) list.append(sampleRow(data, i, largest, state.colour, count));
    column.append(groupHead(group, view), list);
    columns.append(column);
  }
  card.append(prompt, columns);
  return card;
}

function groupHead(group, view) {
  const head = html("h3"), label = view.runs[group.run].label;
  head.append(html("i"), `${label} `, html("small", "", summaryOf(view.data, group)));
  return head;
}

function summaryOf(data, group) {
  if (some(group, (i) => told(data, i))) return `${rightIn(data, group)} of ${group.count} right`;
  const rewards = data.reward.slice(group.first, group.first + group.count).filter((value) => value !== null);
  if (!rewards.length) return "not judged";
  return `mean reward ${shortNumber(rewards.reduce((sum, value) => sum + value, 0) / rewards.length, false)}`;
}

// Completions that are alike in text, verdict and advantage are one row with their number.
const ALIKE = ["text", "reward", "correct", "status", "part", "finish", "tokens", "calls", "advantage", "levels"];

function folded(data, group) {
  const rows = new Map();
  for (let i = group.first; i < group.first + group.count; i++) {
    const key = JSON.stringify(ALIKE.map((column) => data[column][i]));
    if (!rows.has(key)) rows.set(key, [i, 0]);
    rows.get(key)[1] += 1;
  }
  return [...rows.values()];
}

function largestIn(data, group) {
  return Math.max(1e-12, ...Array.from({ length: group.count }, (_, k) => Math.abs(data.advantage[group.first + k] ?? 0)));
}

// The n-th answers of all runs together: they were drawn with the same random numbers, so where
// they part the policies do.
function pairs(mates, view) {
  const { data, runs, labels } = view;
  const count = Math.max(...mates.map((g) => g.count));
  const list = html("ol", "samples");
  let different = 0;
  for (let k = 0; k < count; k++) {
    const there = mates.filter((g) => k < g.count);
    const texts = there.map((g) => data.strings[data.text[g.first + k]]);
    const same = there.length === mates.length && texts.every((text) => text === texts[0]);
    different += !same;
    const cuts = common(texts);
    const row = html("li", "pair"), columns = html("div", "columns");
    row.append(html("small", "", `answer ${k + 1}${same ? ", the same in all" : ""}`), columns);
    there.forEach((group, at) => {
      const cell = html("div", accentOf(runs[group.run].label, labels));
      const sample = sampleRow(data, group.first + k, largestIn(data, group), false);
      if (!same) markDifference(sample.querySelector(".text"), texts[at], cuts);
      cell.append(sample);
      columns.append(cell);
    });
    list.append(row);
  }
  const heads = html("div", "columns");
  for (const group of mates) {
    const cell = html("div", accentOf(runs[group.run].label, labels));
    cell.append(groupHead(group, view));
    heads.append(cell);
  }
  return [heads, html("p", "note", `${different} of ${count} answers differ.`), list];
}

const words = (text) => text.match(/[\p{L}\p{M}]+|\p{N}+|\s+|[^]/gu) ?? [];

// How many characters all texts share at the beginning and at the end, in whole words.
function common(texts) {
  const lists = texts.map(words), least = Math.min(...lists.map((l) => l.length));
  let first = 0, last = 0, head = 0, tail = 0;
  while (first < least && lists.every((l) => l[first] === lists[0][first])) head += lists[0][first++].length;
  while (last < least - first && lists.every((l) => l.at(-1 - last) === lists[0].at(-1 - last))) tail += lists[0].at(-1 - last++).length;
  return { head, tail };
}

function markDifference(place, text, { head, tail }) {
  place.replaceChildren(text.slice(0, head), html("mark", "", text.slice(head, text.length - tail)), text.slice(text.length - tail));
}

function sampleRow(data, i, largest, colour, count = 1) {
  const row = html("li", "sample");
  const side = html("div", "verdict");
  const ok = judged(data, i), right = isRight(data, i);
  if (!ok) side.append(html("span", "unknown", "?"));
  else if (told(data, i)) side.append(html("span", right ? "right" : "wrong", right ? "✓" : "✗"));
  side.append(html("b", "", ok ? shortNumber(data.reward[i], false) : data.strings[data.status[i]]));
  for (const [name, value] of data.parts[data.part[i]]) {
    if (value !== null) side.append(html("small", "", `${name} ${shortNumber(value, false)}`));
  }
  const notes = [];
  if (data.tokens[i] !== null) notes.push(`${data.tokens[i]} tokens`);
  if (data.calls[i] !== null) notes.push(`${data.calls[i]} ${data.calls[i] === 1 ? "call" : "calls"}`);
  if (data.strings[data.finish[i]] !== "stop") notes.push(data.strings[data.finish[i]] === "length" ? "cut off" : data.strings[data.finish[i]]);
  if (count > 1) notes.push(`${count} times`);
  if (notes.length) side.append(html("small", "", notes.join(", ")));
  const text = html("div", "text");
  fillText(text, data, i, colour);
  row.append(side, text);
  if (data.advantage[i] !== null) {
    const bar = html("div", "bars"), line = html("div");
    const size = 48 * data.advantage[i] / largest;
    const picture = svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
    svg("line", { x1: 50, x2: 50, y1: 0, y2: 8 }, picture);
    svg("rect", { x: 50 + Math.min(0, size), y: 1, width: Math.abs(size), height: 6 }, picture);
    line.append(html("span", "", "advantage"), picture, html("b", "", data.advantage[i].toFixed(3).replace("-", "−")));
    bar.append(line);
    row.append(bar);
  }
  return row;
}

// What an environment put into a completion is read by the model and not learned: it is grey.
function greyInjected(place, text, spans) {
  let at = 0;
  for (const span of spans.split(" ")) {
    const [first, last] = span.split("-").map(Number);
    const given = html("span", "injected", text.slice(first, last));
    given.title = "from the environment: read, not learned";
    place.append(text.slice(at, first), given);
    at = last;
  }
  place.append(text.slice(at));
}

// Surprise of every token: as the background of its text where the pieces are known, else a strip.
function fillText(place, data, i, colour) {
  const text = data.strings[data.text[i]], levels = data.strings[data.levels[i]], pieces = data.strings[data.pieces[i]];
  if (data.strings[data.injected[i]]) { greyInjected(place, text, data.strings[data.injected[i]]); return; }
  if (!colour || !levels) { place.textContent = text; return; }
  if (pieces) {
    let at = 0;
    [...pieces].forEach((piece, k) => {
      const length = parseInt(piece, 36);
      place.append(html("span", `surprise l${levels[k]}`, text.slice(at, at + length)));
      at += length;
    });
    return;
  }
  place.textContent = text;
  const strip = html("div", "strip");
  strip.title = "one cell per token: the darker, the less likely it was";
  for (const level of levels) strip.append(html("span", `surprise l${level}`));
  place.append(strip);
}
