// What the reader does with the page: choose what is counted, sort and search runs, check those to draw.
// Text from runs only ever becomes text nodes and Vega's data; nothing here writes HTML.
"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const by = (id) => document.getElementById(id);
  const rows = [...document.querySelectorAll("#runs tbody tr")];
  const night = matchMedia("(prefers-color-scheme: dark)");
  const state = { task: 0, quantity: "nonzeros", scale: "linear", checked: new Set(), histogram: null, counted: "sqrt" };
  const tables = {};
  const drawing = {};

  const task = () => report.tasks[state.task];
  const theme = () => (night.matches ? report.themes.dark : report.themes.light);
  const number = (value, digits) =>
    value === null || value === undefined
      ? "–"
      : value.toLocaleString("en", { maximumFractionDigits: digits ?? 3, minimumFractionDigits: digits ?? 0 });
  const colour = (look) => (typeof look === "number" ? theme().colours[look] : theme()[look]);

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };

  // -- drawing ------------------------------------------------------------------------------------------------------

  const filled = (chart, values) => {
    if (Array.isArray(chart)) return chart.map((part) => filled(part, values));
    if (chart === null || typeof chart !== "object") return chart;
    const keys = Object.keys(chart);
    if (keys.length === 1 && keys[0] === "slot") return values[chart.slot];
    return Object.fromEntries(keys.map((key) => [key, filled(chart[key], values)]));
  };

  // Vega interprets its expressions, as the page's policy forbids eval; it reports errors, and no empty layers.
  const options = { actions: false, renderer: "svg", ast: true, logLevel: 1, tooltip: { theme: "custom" } };
  const room = (id) => Math.max(240, by(id).clientWidth);

  // As many names side by side as fit, none of them cut short, in rows of about one length.
  const measure = document.createElement("canvas").getContext("2d");
  const legendColumns = (labels, wide) => {
    if (!labels.length) return 1;
    measure.font = `12.5px ${getComputedStyle(document.body).fontFamily}`;
    const longest = Math.max(...labels.map((label) => measure.measureText(label).width));
    const fit = Math.max(1, Math.min(labels.length, Math.floor(wide / (longest + 46))));
    return Math.ceil(labels.length / Math.ceil(labels.length / fit));
  };

  const draw = async (id, datasets, values, words, headings, cells) => {
    by(`${id}-words`).textContent = words;
    tables[id] = { headings, cells };
    fillTable(id);
    const turn = (drawing[id] = (drawing[id] ?? 0) + 1);
    if (!Object.values(datasets).some((found) => found.length)) {
      by(id).replaceChildren(element("p", { textContent: words }));
      return;
    }
    const wide = room(id);
    const labels = values.labels ?? [];
    const columns = legendColumns(labels, wide - 90);
    const sizes = { width: wide, height: wide < 500 ? 300 : 380, columns, limit: wide - 90 };
    const chart = { ...filled(report.charts[id], { ...theme(), ...sizes, ...values }), datasets };
    const place = element("div");
    const made = await vegaEmbed(place, chart, options);
    if (drawing[id] !== turn) return made.finalize(); // the reader was faster
    by(id).made?.finalize();
    by(id).made = made;
    by(id).replaceChildren(place);
  };

  const drawTradeoff = () => {
    const quantity = state.quantity;
    const { points, references, looks, scales, axes, extras } = task();
    const others = extras[quantity];
    const here = points.filter((point) => point[quantity] !== null);
    const elsewhere = references.filter((point) => point[quantity] !== null);
    const used = new Set([...here, ...elsewhere].map((point) => point.series));
    const keep = looks.labels.map((label) => used.has(label));
    const only = (list) => list.filter((_, at) => keep[at]);
    const low = `${quantity}_low`;
    const missing = points.length - here.length;
    by("tradeoff-note").textContent = missing ? `${missing} of ${points.length} points have no such count.` : "";
    const look = new Map(looks.labels.map((label, at) => [label, { colour: colour(looks.colours[at]), shape: looks.shapes[at], dash: looks.dashes[at] }]));
    const dressed = (point) => ({ ...point, ...look.get(point.series) });
    const shown = here.map((point) => ({ ...dressed(point), front: point.fronts.includes(quantity) ? "yes" : "no" }));
    const values = {
      quantity, title: report.quantities[quantity], low, high: `${quantity}_high`, wide: { field: low, valid: true },
      ...scales[state.scale], ...axes[quantity], size: shown.length > 80 ? 80 : 150,
      labels: [...only(looks.labels), ...others.labels], colours: [...only(looks.colours), ...others.colours].map(colour),
      shapes: [...only(looks.shapes), ...others.shapes],
    };
    const best = shown.filter((point) => point.front === "yes").map((p) => `${p.called}: ${number(p.error, 2)} %`);
    return draw(
      "tradeoff", { points: shown, references: elsewhere.map(dressed) }, values,
      shown.length ? `${shown.length} points. On the Pareto front: ${best.join("; ")}.` : "No run has this count.",
      ["method", "asked", "seeds", "error %", "lowest", "highest", report.quantities[quantity], "Pareto front"],
      [
        ...shown.map((p) => [p.method, p.level, p.seeds, number(p.error, 2), number(p.low, 2), number(p.high, 2), number(p[quantity], 0), p.front]),
        ...elsewhere.map((p) => [p.series, p.label, "", number(p.error, 2), "", "", number(p[quantity], 0), ""]),
      ],
    );
  };

  // Runs in the order of the report, with looks given out in turn: the first of each method match the chart above.
  const chosen = () => {
    const turns = { dense: 0, pruned: 0 };
    const first = task().shown.filter((id) => state.checked.has(id));
    const others = [...state.checked].filter((id) => !first.includes(id) && report.runs[id].task === state.task).sort((a, b) => a - b);
    return [...first, ...others].map((id) => {
      const run = report.runs[id];
      const kind = run.unpruned ? "dense" : "pruned";
      const at = turns[kind]++;
      const shapes = report.shapes[kind];
      return {
        id, label: run.label, detail: report.details[id], shape: shapes[at % shapes.length], dash: report.dashes[at % report.dashes.length],
        colour: run.unpruned ? (at ? "muted" : "ink") : at % theme().colours.length,
      };
    });
  };

  const ofRuns = (lines) => ({
    labels: lines.map((line) => line.label), colours: lines.map((line) => colour(line.colour)),
    shapes: lines.map((line) => line.shape), dashes: lines.map((line) => line.dash),
  });

  const epochRows = (line) => line.detail.epochs.map(([epoch, error, sparsity, target]) => ({ run: line.label, dash: line.dash, epoch, error, sparsity, target }));

  // Whole epochs at a round step.
  const epochTicks = (found) => {
    const last = Math.max(1, ...found.map((row) => row.epoch));
    const step = [1, 10, 100, 1e3, 1e4, 1e5].flatMap((ten) => [ten, 2 * ten, 5 * ten]).find((size) => last <= 8 * size);
    return Array.from({ length: Math.floor(last / step) + 1 }, (_, at) => at * step);
  };

  const nothing = "Check runs in the table to draw them here.";

  const drawEpochs = (lines) => {
    const tested = lines.flatMap(epochRows).filter((row) => row.error !== null);
    const tops = lines.map((line) => {
      const errors = line.detail.epochs.map((row) => row[1]).filter((error) => error !== null).sort((a, b) => a - b);
      return errors[Math.min(errors.length - 1, Math.floor(0.9 * errors.length))] ?? 0;
    });
    const [low, top] = [Math.min(...tested.map((row) => row.error)), Math.max(...tops)];
    const domain = top > low ? [low, top] : [low - 1, low + 1];
    const ends = lines.map((line) => `${line.label} ends at ${number(line.detail.epochs.filter((row) => row[1] !== null).at(-1)?.[1], 2)} %`);
    const pruned = lines.filter((line) => line.detail.layers.length);
    const reached = pruned.map((line) => {
      const last = line.detail.epochs.at(-1) ?? [];
      return `${line.label} ends at ${number(last[2])} %${last[3] === null ? "" : ` of ${number(last[3])} % asked`}`;
    });
    const zeros = pruned.flatMap(epochRows).filter((row) => row.sparsity !== null);
    return Promise.all([
      draw("convergence", { epochs: tested }, { ...ofRuns(lines), domain, epochs: epochTicks(tested) }, lines.length ? `Error: ${ends.join("; ")}.` : nothing,
        ["run", "epoch", "error %"], tested.map((row) => [row.run, row.epoch, number(row.error, 2)])),
      draw("sparsity", { epochs: zeros }, { ...ofRuns(pruned), epochs: epochTicks(zeros) }, pruned.length ? `Zeros: ${reached.join("; ")}.` : nothing,
        ["run", "epoch", "zeros %", "asked %"], zeros.map((row) => [row.run, row.epoch, number(row.sparsity), number(row.target)])),
    ]);
  };

  const drawLayers = (lines) => {
    const pruned = lines.filter((line) => line.detail.layers.length);
    const found = pruned.flatMap((line) => line.detail.layers.map(([layer, zeros, size], place) => ({ run: line.label, layer, zeros, size, place })));
    const order = [...new Set(found.map((row) => row.layer))];
    const narrow = room("layers") < 500;
    const values = { ...ofRuns(pruned), order, names: narrow ? 110 : 260, height: Math.max(180, order.length * (order.length > 60 ? 14 : 22)) };
    return draw("layers", { layers: found }, values, pruned.length ? `${order.length} layers of ${pruned.length} runs.` : nothing,
      ["run", "layer", "weights", "zeros %"], found.map((row) => [row.run, row.layer, number(row.size, 0), number(row.zeros)]));
  };

  const drawHistograms = (lines) => {
    const able = lines.filter((line) => line.detail.histograms.length);
    const picker = by("histogram-run");
    picker.replaceChildren(...able.map((line) => element("option", { value: String(line.id), textContent: line.label })));
    const pruned = able.find((line) => line.detail.layers.length);
    const one = able.find((line) => line.id === state.histogram) ?? pruned ?? able[0];
    if (one) picker.value = String(one.id);
    picker.disabled = !one;
    const found = (one?.detail.histograms ?? []).map((layer) => ({ ...layer, bins: layer.counts.length }));
    const fit = Math.max(1, Math.min(4, Math.floor(room("histograms") / 250)));
    const panels = Math.max(1, Math.ceil(found.length / Math.ceil(found.length / fit)));
    const lacking = { "latent, pruned": "latents", bound: "threshold" };
    const parts = Object.keys(report.parts).filter((part) => !(part in lacking) || found.some((row) => row[lacking[part]]));
    const values = {
      // The panels, the room for numbers to the left of each, and a little at the right.
      order: found.map((row) => row.layer), panels, width: Math.floor((room("histograms") - 56 * panels - 12) / panels),
      counted: report.counted[state.counted], parts, paints: parts.map((part) => theme()[report.parts[part]]),
      columns: room("histograms") < 500 ? 2 : parts.length,
    };
    return draw("histograms", { histograms: found }, values, one ? `${found.length} layers of ${one.label}.` : nothing,
      ["layer", "weights", "kept", "σ", "bound"],
      found.map((row) => [row.layer, number(row.size, 0), number(row.nonzeros, 0), number(row.sigma, 5), number(row.threshold, 5)]));
  };

  const drawRuns = () => {
    const lines = chosen();
    return Promise.all([drawEpochs(lines), drawLayers(lines), drawHistograms(lines)]);
  };

  // -- tables under the charts ----------------------------------------------------------------------------------------

  const fillTable = (id) => {
    const folded = document.querySelector(`details[data-table="${id}"]`);
    folded.querySelector(".scroll")?.remove();
    if (!folded.open || !tables[id]) return;
    const { headings, cells } = tables[id];
    const text = headings.map((_, at) => cells.some((row) => typeof row[at] === "string" && !/^[-–\d.,]*$/.test(row[at])));
    const cell = (tag, content, at) => element(tag, { textContent: String(content ?? "–"), className: text[at] ? "text" : "" });
    const head = element("tr", {}, ...headings.map((name, at) => Object.assign(cell("th", name, at), { scope: "col" })));
    const body = cells.map((row) => element("tr", {}, ...row.map((content, at) => cell("td", content, at))));
    const made = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
    const scroll = element("div", { className: "scroll", tabIndex: 0 }, made);
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", folded.querySelector("summary").textContent);
    folded.append(scroll);
  };

  // -- the table of runs ------------------------------------------------------------------------------------------------

  const idOf = (row) => Number(row.dataset.run);

  const closeRecipe = (row) => {
    if (!row.recipe) return;
    row.recipe.remove();
    row.recipe = null;
    row.querySelector(".unfold").setAttribute("aria-expanded", "false");
  };

  const openRecipe = (row) => {
    const own = report.recipes.own[idOf(row)] ?? {};
    const entries = Object.entries({ ...report.recipes.common, ...own });
    const list = element("dl", { className: "recipe" });
    for (const [key, value] of entries) {
      const shown = value === null ? "null" : typeof value === "object" ? JSON.stringify(value) : String(value);
      const line = element("div", { className: key in own ? "own" : "" });
      line.append(element("dt", { textContent: key }), element("dd", { textContent: shown }));
      list.append(line);
    }
    const about = element("p", { className: "about", textContent: report.made[report.runs[idOf(row)].made] });
    const told = element("p", { className: "about", textContent: "In bold: what differs between runs on this page." });
    row.recipe = element("tr", { className: "more" }, element("td", { colSpan: row.cells.length }, element("div", {}, about, told, list)));
    row.after(row.recipe);
    row.querySelector(".unfold").setAttribute("aria-expanded", "true");
  };

  const showRows = () => {
    const words = by("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const frontOnly = by("only-front").checked;
    let shown = 0;
    for (const row of rows) {
      const front = row.dataset.fronts.split(" ").includes(state.quantity);
      const mark = row.querySelector(".front");
      mark.dataset.sort = front ? 1 : 0;
      mark.querySelector(".star").classList.toggle("hidden", !front);
      row.lookup ??= row.textContent.toLowerCase();
      const fits = Number(row.dataset.task) === state.task && (!frontOnly || front) && words.every((word) => row.lookup.includes(word));
      row.classList.toggle("hidden", !fits);
      if (!fits) closeRecipe(row);
      shown += fits;
    }
    by("said").textContent = `${shown} runs listed, ${chosen().length} drawn`;
  };

  // Names are compared part by part, numbers in them by their value: 0.05 before 0.1, and 95 before 100.
  const compared = (one, two) => {
    const [left, right] = [one, two].map((name) => name.split(/(\d+(?:\.\d+)?)/));
    for (let at = 0; at < Math.min(left.length, right.length); at++) {
      const order = at % 2 ? Number(left[at]) - Number(right[at]) : left[at].localeCompare(right[at], "en");
      if (order) return order;
    }
    return left.length - right.length;
  };

  const sort = (heading) => {
    const up = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const at = heading.cellIndex;
    const value = (row) => {
      const cell = row.cells[at];
      if (cell.dataset.sort === undefined) return cell.textContent.trim();
      return cell.dataset.sort === "" ? null : Number(cell.dataset.sort);
    };
    rows.forEach(closeRecipe);
    rows.sort((a, b) => {
      const [one, two] = [value(a), value(b)];
      if (one === null || two === null) return (one === null) - (two === null); // unknown ones last, either way
      const order = typeof one === "number" ? one - two : compared(one, two);
      return up ? order : -order;
    });
    document.querySelector("#runs tbody").append(...rows);
  };

  const check = (box) => {
    const id = idOf(box.closest("tr"));
    if (box.checked && state.checked.size >= report.most) {
      box.checked = false;
      by("said").textContent = `No more than ${report.most} runs are drawn at once.`;
      return;
    }
    box.checked ? state.checked.add(id) : state.checked.delete(id);
    by("said").textContent = `${chosen().length} runs drawn`;
    drawRuns();
  };

  const showTask = () => {
    state.checked = new Set(task().shown);
    state.histogram = null;
    for (const row of rows) {
      const box = row.querySelector('input[type="checkbox"]');
      if (box) box.checked = state.checked.has(idOf(row));
    }
    document.querySelectorAll("[data-summary]").forEach((found) => found.classList.toggle("hidden", Number(found.dataset.summary) !== state.task));
    const points = [...task().points, ...task().references];
    for (const choice of document.querySelectorAll('input[name="quantity"]')) {
      choice.disabled = !points.some((point) => point[choice.value] !== null);
      if (choice.disabled) choice.nextElementSibling.title = "No run of this task has this count.";
      choice.checked = choice.value === state.quantity;
    }
    // A logarithmic axis has no zero.
    document.querySelector('input[name="scale"][value="log"]').disabled = points.some((point) => point.error <= 0 || point.low <= 0);
    showRows();
    return Promise.all([drawTradeoff(), drawRuns()]);
  };

  // -- events -----------------------------------------------------------------------------------------------------------

  by("quantity").addEventListener("change", (event) => { state.quantity = event.target.value; showRows(); drawTradeoff(); });
  by("scale").addEventListener("change", (event) => { state.scale = event.target.value; drawTradeoff(); });
  by("task")?.addEventListener("change", (event) => { state.task = Number(event.target.value); state.quantity = "nonzeros"; showTask(); });
  by("counted").addEventListener("change", (event) => { state.counted = event.target.value; drawHistograms(chosen()); });
  by("histogram-run").addEventListener("change", (event) => { state.histogram = Number(event.target.value); drawHistograms(chosen()); });
  by("find").addEventListener("input", showRows);
  by("only-front").addEventListener("change", showRows);
  by("none").addEventListener("click", () => {
    state.checked.clear();
    document.querySelectorAll('#runs input[type="checkbox"]').forEach((box) => { box.checked = false; });
    by("said").textContent = "0 runs drawn";
    drawRuns();
  });
  by("runs").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const row = button.closest("tr");
    if (button.closest("thead")) sort(button.closest("th"));
    else row.recipe ? closeRecipe(row) : openRecipe(row);
  });
  by("runs").addEventListener("change", (event) => { if (event.target.type === "checkbox") check(event.target); });
  document.querySelectorAll("details[data-table]").forEach((found) => found.addEventListener("toggle", () => fillTable(found.dataset.table)));

  const again = () => Promise.all([drawTradeoff(), drawRuns()]);
  night.addEventListener("change", again);
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar came or went
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(again, 150);
  });

  if (!report.tasks.length) document.querySelectorAll("main > section:not(#problems), main > .pair").forEach((part) => part.classList.add("hidden"));
  const drawn = report.tasks.length ? showTask() : Promise.resolve();
  drawn.then(() => { document.documentElement.dataset.drawn = "yes"; });
})();
