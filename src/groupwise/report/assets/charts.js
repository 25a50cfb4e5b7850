// Line charts: SVG drawn at the width it is shown at, so that type keeps its size on a phone.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function html(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function accentOf(label, labels) {
  const place = labels.indexOf(label);
  return place < 0 ? "base" : `a${place % 6}`;
}

function shortNumber(value, share) {
  if (value === null || value === undefined) return "–";
  if (share) return `${(100 * value).toFixed(1)} %`;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 10000) return Math.round(value).toLocaleString("en-US");
  if (size >= 100) return value.toFixed(0);
  return size >= 0.001 ? String(+value.toPrecision(3)) : value.toExponential(1).replace(".0e", "e");
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) {
    found.push(Math.abs(t) < step * 1e-6 ? 0 : +t.toPrecision(12));
  }
  return found;
}

// Axis limits come from the curves; a band may run out of the picture, a curve never does.
function limits(chart) {
  if (chart.share) return [0, 1];
  let low = Infinity, high = -Infinity;
  for (const line of chart.lines) {
    for (const values of [line.mean, ...line.thin]) {
      for (const value of values) {
        if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
      }
    }
  }
  if (low > high) return [0, 1];
  if (low >= 0 && low < 0.6 * high) low = 0;
  const pad = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low === 0 ? 0 : low - pad, high + pad];
}

function pathOf(xs, ys, x, y) {
  let path = "", pen = false;
  ys.forEach((value, i) => {
    if (value === null) { pen = false; return; }
    path += `${pen ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  });
  return path;
}

function bandOf(xs, low, high, x, y) {
  let path = "", run = [];
  const close = () => {
    if (run.length > 1) {
      const up = run.map((i) => `${x(xs[i]).toFixed(1)} ${y(high[i]).toFixed(1)}`);
      const down = run.map((i) => `${x(xs[i]).toFixed(1)} ${y(low[i]).toFixed(1)}`).reverse();
      path += `M${up.join("L")}L${down.join("L")}Z`;
    }
    run = [];
  };
  xs.forEach((_, i) => (low[i] === null || high[i] === null ? close() : run.push(i)));
  close();
  return path;
}

function drawChart(figure, chart, labels, hidden) {
  const hero = figure.classList.contains("hero");
  const width = Math.max(240, figure.clientWidth), height = hero ? Math.min(380, 180 + width / 4) : 170;
  const narrow = width < 560;
  const box = { left: 52, right: hero && !narrow ? 116 : 12, top: 12, bottom: 26 };
  const xs = chart.steps, [low, high] = limits(chart);
  const first = xs[0], last = xs[xs.length - 1];
  const x = (v) => box.left + (last > first ? (v - first) / (last - first) : 0.5) * (width - box.left - box.right);
  const y = (v) => height - box.bottom - ((v - low) / (high - low)) * (height - box.top - box.bottom);

  figure.replaceChildren();
  if (!hero) {
    const caption = html("figcaption", chart.meaning ? "explained" : "", chart.title);
    if (chart.meaning) caption.title = chart.meaning;
    figure.append(caption);
  }
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, role: "img" });
  root.setAttribute("aria-label", `${chart.title} by ${chart.axis}. Arrow keys read values.`);
  const clip = `clip-${chart.key.replace(/[^a-zA-Z0-9]/g, "-")}`;
  const frame = svg("clipPath", { id: clip }, root);
  svg("rect", { x: box.left - 2, y: box.top - 3, width: width - box.left - box.right + 4, height: height - box.top - box.bottom + 6 }, frame);

  for (const t of ticks(low, high, hero ? 5 : 3)) {
    svg("line", { class: t === low || t === 0 ? "axis" : "grid", x1: box.left, x2: width - box.right, y1: y(t), y2: y(t) }, root);
    const label = svg("text", { class: "tick", x: box.left - 8, y: y(t) + 3.5, "text-anchor": "end" }, root);
    label.textContent = chart.share ? `${+(100 * t).toFixed(1)}%` : shortNumber(t, false);
  }
  const marks = last > first ? ticks(first, last, narrow ? 4 : hero ? 8 : 4).filter(Number.isInteger) : [first];
  for (const t of marks) {
    const label = svg("text", { class: "tick", x: x(t), y: height - 8, "text-anchor": "middle" }, root);
    label.textContent = t;
  }

  const plot = svg("g", { "clip-path": `url(#${clip})` }, root);
  const shown = chart.lines.filter((line) => !hidden.has(line.label));
  for (const line of shown) {
    const colour = accentOf(line.label, labels);
    svg("path", { class: `band ${colour}`, d: bandOf(xs, line.low, line.high, x, y) }, plot);
    for (const values of line.thin) svg("path", { class: `thin ${colour}`, d: pathOf(xs, values, x, y) }, plot);
  }
  for (const line of shown) {
    const colour = accentOf(line.label, labels);
    svg("path", { class: `bold ${colour}`, d: pathOf(xs, line.mean, x, y) }, plot);
  }
  if (hero && !narrow) nameLines(root, shown, labels, width - box.right, y);
  figure.append(root);
  addCursor(figure, root, { chart, labels, shown, x, y, box, width, height });
}

// Names at the ends of the lines, pushed apart where they would overlap.
function nameLines(root, lines, labels, edge, y) {
  const ends = lines
    .map((line) => ({ line, value: line.mean.filter((v) => v !== null).at(-1) }))
    .filter((end) => end.value !== undefined)
    .sort((a, b) => b.value - a.value);
  let above = -Infinity;
  for (const end of ends) {
    const at = Math.max(y(end.value) + 4, above + 17);
    above = at;
    const text = svg("text", { class: `name ${accentOf(end.line.label, labels)}`, x: edge + 10, y: at }, root);
    text.textContent = end.line.label.length > 13 ? `${end.line.label.slice(0, 12)}…` : end.line.label;
  }
}

function addCursor(figure, root, view) {
  const { chart, labels, shown, x, y, box, width, height } = view;
  const cursor = svg("g", { class: "cursor" }, root);
  const tip = html("div", "tip");
  figure.append(tip);
  let at = -1;
  const show = (i) => {
    at = Math.max(0, Math.min(chart.steps.length - 1, i));
    const px = x(chart.steps[at]);
    cursor.replaceChildren();
    svg("line", { x1: px, x2: px, y1: box.top, y2: height - box.bottom }, cursor);
    tip.replaceChildren(html("b", "", `${shortNumber(chart.steps[at], false)} ${chart.axis}`));
    for (const line of shown) {
      const value = line.mean[at];
      if (value === null) continue;
      svg("circle", { class: accentOf(line.label, labels), cx: px, cy: y(value), r: 3.5 }, cursor);
      const row = html("div", accentOf(line.label, labels));
      row.append(html("i"), html("span", "", line.label), html("b", "", shortNumber(value, chart.share)));
      if (line.low[at] !== null && line.low[at] !== undefined) {
        row.append(html("small", "", `[${shortNumber(line.low[at], chart.share)}, ${shortNumber(line.high[at], chart.share)}]`));
      }
      tip.append(row);
    }
    tip.style.display = "block";
    const space = figure.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(space, px < width / 2 ? px + 14 : px - tip.offsetWidth - 14))}px`;
  };
  const hide = () => { cursor.replaceChildren(); tip.style.display = "none"; };
  root.addEventListener("pointermove", (event) => {
    const px = event.clientX - root.getBoundingClientRect().left;
    let best = 0;
    chart.steps.forEach((s, i) => { if (Math.abs(x(s) - px) < Math.abs(x(chart.steps[best]) - px)) best = i; });
    show(best);
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) { event.preventDefault(); show(at < 0 ? 0 : at + move); }
  });
}
