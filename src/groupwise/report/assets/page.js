// Starts the page: theme, legend, charts at once, rollouts once everything else is on screen.
// `data-ready` then tells how many milliseconds that took.

function startTheme() {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : window.matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}

function startCharts(data) {
  const byKey = new Map(data.charts.map((chart) => [chart.key, chart]));
  const hidden = new Set(), widths = new Map();
  const draw = (figure) => {
    if (figure.clientWidth > 0) {
      widths.set(figure, figure.clientWidth);
      drawChart(figure, byKey.get(figure.dataset.chart), data.labels, hidden);
    }
  };
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) if (widths.get(target) !== target.clientWidth) draw(target);
  });
  figures.forEach((figure) => watcher.observe(figure));
  for (const key of document.querySelectorAll(".legend .key")) {
    key.addEventListener("click", () => {
      const label = key.dataset.label;
      if (!hidden.delete(label)) hidden.add(label);
      key.setAttribute("aria-pressed", String(!hidden.has(label)));
      figures.forEach(draw);
    });
  }
}

async function startRollouts(data) {
  const section = document.getElementById("rollouts");
  try {
    if (section) startBrowser(await readRollouts(), data.runs, data.labels);
  } catch (error) {
    section.querySelector(".count").textContent = `The rollouts cannot be shown: ${error.message}`;
  }
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

const reportData = JSON.parse(document.getElementById("report-data").textContent);
startTheme();
startCharts(reportData);
requestAnimationFrame(() => setTimeout(() => startRollouts(reportData), 0));
