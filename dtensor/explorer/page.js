// The script of a saved page. The plans are JSON in #data; contents.py documents its keys.
// Text is inserted with textContent only, so that names of parameters are never parsed as markup.
"use strict";
(() => {
const DATA = JSON.parse(document.getElementById("data").textContent);
const PLANS = DATA.plans;
const SVG = "http://www.w3.org/2000/svg";

// -- small things -------------------------------------------------------------------------------

function h(tag, attributes, ...children) {
  const svg = /^(svg|g|path|rect|circle|line|text|title|pattern|defs)$/.test(tag) && tag !== "title";
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    node.append(child instanceof Node ? child : document.createTextNode(child));
  }
  return node;
}
const byId = (id) => document.getElementById(id);
const sum = (list) => list.reduce((a, b) => a + b, 0);
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

function bytes(n) {
  let size = n;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return unit === "B" ? `${n} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
}
function seconds(s) {
  if (!s) return "0 s";
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])
    if (s >= scale) return `${(s / scale).toFixed(2)} ${unit}`;
  return `${(s * 1e9).toFixed(1)} ns`;
}
function flop(n) {
  let count = n;
  for (const unit of ["", "k", "M", "G", "T"]) {
    if (count < 1000) return unit ? `${count.toFixed(2)} ${unit}FLOP` : `${n} FLOP`;
    count /= 1000;
  }
  return `${count.toFixed(2)} PFLOP`;
}
const percent = (x) => (x && x < 0.001 ? "<0.1%" : `${(100 * x).toFixed(x && x < 0.1 ? 1 : 0)}%`);
const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

// Each axis has one colour in all plans of a page. The usual axes have the same colour on all pages.
const AXES = ["dp", "tp", "pp"];
for (const plan of PLANS) for (const [axis] of plan.mesh) if (!AXES.includes(axis)) AXES.push(axis);
const axisColor = (plan, axis) =>
  AXES.includes(axis) ? `var(--axis-${AXES.indexOf(axis) % 6})` : "var(--ink-3)";
// Return the text of a type, such as f32[8@tp,16], with each axis in its colour.
function typed(plan, text) {
  const names = [...plan.mesh.map(([name]) => name), "mb"];
  const pattern = new RegExp(`(?<=[@(,&])(${names.join("|")})(?=[,)*&\\]}]|$)`, "g");
  const node = h("span", { class: "type" });
  let done = 0;
  for (const found of text.matchAll(pattern)) {
    const at = text[found.index - 1] === "@" ? found.index - 1 : found.index;
    node.append(text.slice(done, at), h("b", { style: `color:${axisColor(plan, found[0])}` },
      text.slice(at, found.index + found[0].length)));
    done = found.index + found[0].length;
  }
  node.append(text.slice(done));
  return node;
}
const chip = (plan, axis, text) =>
  h("span", { class: "chip", style: `--c:${axisColor(plan, axis)}` }, text || axis);

// -- ranks --------------------------------------------------------------------------------------

function coordinates(plan, rank) {
  const found = {};
  for (const [axis, size] of [...plan.mesh].reverse()) {
    found[axis] = rank % size;
    rank = Math.floor(rank / size);
  }
  return found;
}
const rankOf = (plan, at) => plan.mesh.reduce((n, [axis, size]) => n * size + (at[axis] || 0), 0);
const numRanks = (plan) => plan.mesh.reduce((n, [, size]) => n * size, 1);

function intersect(a, b) {
  const found = [];
  for (const [lo, hi] of a) for (const [from, to] of b) {
    const start = Math.max(lo, from), end = Math.min(hi, to);
    if (start < end) found.push([start, end]);
  }
  return found;
}
// Return what the rank at these coordinates holds: the intervals of each dim, and the axes on which
// the value is pending. Microbatches are not split over ranks, so those of all are included.
function held(spec, at) {
  const dims = spec.s.map((size) => (size ? [[0, size]] : []));
  const split = {}, pending = [];
  for (const [axis, placed] of Object.entries(spec.p || {})) {
    if (placed[0] === "+") { pending.push([axis, placed[1]]); continue; }
    if (axis === "mb") continue;
    const own = placed[1][at[axis] || 0];
    dims[placed[0]] = intersect(dims[placed[0]], own[0]);
    (split[placed[0]] = split[placed[0]] || []).push(axis);
  }
  return { dims, split, pending };
}
const count = (intervals) => sum(intervals.map(([lo, hi]) => hi - lo));
function interval(list, size) {
  if (list.length === 1 && list[0][0] === 0 && list[0][1] === size) return `all ${size}`;
  if (!list.length) return "none";
  const shown = list.slice(0, 3).map(([lo, hi]) => `${lo}–${hi - 1}`).join(", ");
  return list.length > 3 ? `${shown} and ${list.length - 3} more` : shown;
}
// Return the two dims that are drawn: split dims first, then the last dims.
function drawnDims(spec) {
  const split = Object.entries(spec.p || {}).filter(([a, p]) => p[0] !== "+" && a !== "mb")
    .map(([, p]) => p[0]);
  const order = [...new Set([...split, ...spec.s.map((_, i) => spec.s.length - 1 - i)])].slice(0, 2);
  return order.sort((a, b) => a - b);
}
let patterns = 0;
function hatch(defs, color) {
  const id = `hatch${patterns++}`;
  defs.append(h("pattern", { id, width: 4, height: 4, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" }, h("line", { x1: 0, y1: 0, x2: 0, y2: 4,
    style: `stroke:${color};stroke-width:1.6` })));
  return `url(#${id})`;
}
// Draw the shard of one rank: the full tensor as an outline, the rank's part filled.
function shard(plan, spec, at, x, y, width, height, defs, absent) {
  const group = h("g", { class: absent ? "absent" : "" });
  group.append(h("rect", { x, y, width, height, rx: 1.5, class: "whole" }));
  if (absent) return group;
  const own = held(spec, at), dims = drawnDims(spec);
  const [down, across] = dims.length === 2 ? dims : [null, dims[0]];
  const line = (dim) => dim === null || dim === undefined ? [[0, 1, 1]]
    : own.dims[dim].map(([lo, hi]) => [lo, hi, spec.s[dim]]);
  const axes = [...(own.split[down] || []), ...(own.split[across] || [])];
  const color = axes.length ? axisColor(plan, axes[axes.length - 1]) : "var(--whole)";
  const fill = own.pending.length ? hatch(defs, axisColor(plan, own.pending[0][0])) : color;
  for (const [top, bottom, rows] of line(down)) for (const [left, right, columns] of line(across)) {
    group.append(h("rect", { x: x + (width * left) / columns, y: y + (height * top) / rows,
      width: Math.max(0.8, (width * (right - left)) / columns),
      height: Math.max(0.8, (height * (bottom - top)) / rows), rx: 1,
      style: `fill:${fill};fill-opacity:${own.pending.length ? 1 : axes.length ? 0.82 : 0.5}` }));
  }
  return group;
}
const cutInTime = (spec) => Boolean(spec.p && spec.p.mb && spec.p.mb[0] !== "+");
function rankText(plan, spec, rank) {
  const at = coordinates(plan, rank), own = held(spec, at);
  const where = plan.mesh.map(([axis]) => `${axis} ${at[axis]}`).join(", ");
  const dims = own.dims.map((list, i) => `dim ${i}: ${interval(list, spec.s[i])}`);
  const pending = own.pending.map(([axis, op]) => `a part of the ${op} over ${axis}`);
  const size = own.dims.reduce((n, list) => n * count(list), spec.z);
  const parts = cutInTime(spec) ? spec.mb : 1;
  return [`rank ${rank}${where ? ` (${where})` : ""}`, ...dims, ...pending, bytes(size / parts)
    + (parts > 1 ? ` in each of ${parts} microbatches` : "")].join("\n");
}

// Draw the mesh: the last axis horizontally, the axis before it vertically, the others as panels,
// stages first. For a large mesh, only the stages that hold the value are drawn.
function meshPicture(plan, spec, stages) {
  const wide = plan.mesh.filter(([, size]) => size > 1), isStage = ([axis]) => axis === plan.stage_axis;
  const axes = [...wide.filter(isStage), ...wide.filter((one) => !isStage(one))];
  const across = axes[axes.length - 1] || ["", 1], down = axes[axes.length - 2] || ["", 1];
  const outer = axes.slice(0, -2);
  let panels = [{}];
  for (const [axis, size] of outer)
    panels = panels.flatMap((p) => [...Array(size).keys()].map((i) => ({ ...p, [axis]: i })));
  const on = new Set(stages.map((s) => plan.stage_ranks[s])), large = numRanks(plan) > 16;
  const elsewhere = large && outer.some(isStage)
    ? [...Array(plan.mesh.find(isStage)[1]).keys()].filter((i) => !on.has(i)) : [];
  panels = panels.filter((panel) => !elsewhere.includes(panel[plan.stage_axis]));
  const most = Math.max(1, Math.floor(384 / (across[1] * down[1])));
  const left = panels.length - most;
  panels = panels.slice(0, most);
  const tall = spec.s.length < 2 ? 0.4 : 1;
  const cell = clamp(Math.floor(300 / across[1]), 26, 76), gap = 7;
  const high = Math.max(14, cell * 0.72 * tall);
  const stageAxis = plan.stage_axis;
  const box = h("div", { class: "mesh" });
  for (const panel of panels) {
    const width = 34 + across[1] * (cell + gap), top = outer.length ? 34 : 20;
    const height = top + down[1] * (high + 18 + gap);
    const defs = h("defs");
    const svg = h("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `shards of ${spec.t} by rank` }, defs);
    if (outer.length) {
      let x = 34;
      for (const [axis] of outer) {
        svg.append(h("text", { x, y: 11, class: "axis", style: `fill:${axisColor(plan, axis)}` },
          `${axis} ${panel[axis]}`));
        x += 12 + 7 * `${axis} ${panel[axis]}`.length;
      }
    }
    for (let j = 0; j < across[1]; j++) if (across[0])
      svg.append(h("text", { x: 34 + j * (cell + gap) + cell / 2, y: top - 7, class: "axis mid",
        style: `fill:${axisColor(plan, across[0])}` }, j ? `${j}` : `${across[0]} 0`));
    for (let i = 0; i < down[1]; i++) {
      const y = top + i * (high + 18 + gap);
      if (down[0]) svg.append(h("text", { x: 0, y: y + high / 2 + 4, class: "axis",
        style: `fill:${axisColor(plan, down[0])}` }, i ? `${i}`.padStart(down[0].length + 2, "\u2007")
        : `${down[0]} 0`));
      for (let j = 0; j < across[1]; j++) {
        const at = { ...panel, [down[0]]: i, [across[0]]: j };
        const rank = rankOf(plan, at), x = 34 + j * (cell + gap);
        const absent = (stageAxis && !on.has(at[stageAxis] || 0))
          || Object.entries(spec.on || {}).some(([axis, index]) => at[axis] !== index);
        const group = shard(plan, spec, at, x, y, cell, high, defs, absent);
        group.append(h("text", { x: x + cell / 2, y: y + high + 11, class: "rank mid" }, `${rank}`));
        hoverable(group, () => absent
          ? `rank ${rank} does not hold it: it is on another stage` : rankText(plan, spec, rank));
        svg.append(group);
      }
    }
    box.append(svg);
  }
  if (left > 0) box.append(h("p", { class: "note" }, `and ${left} more of ${most + left} panels`));
  if (elsewhere.length) box.append(h("p", { class: "note" },
    `ranks of ${stageAxis} ${elsewhere.join(", ")} do not hold it`));
  return box;
}

// Draw a collective between the ranks of one group: what each rank holds before and after.
function collectivePicture(plan, row, section) {
  const axis = row.a[0], size = (plan.mesh.find(([name]) => name === axis) || ["", 1])[1];
  const isTransfer = row.v === "transfer" && row.to;
  const base = {};
  if (plan.stage_axis) base[plan.stage_axis] = plan.stage_ranks[section.stage];
  let ranks = [...Array(size).keys()].map((i) => ({ ...base, [axis]: i }));
  if (isTransfer) ranks = row.to.map((s) => ({ ...base, [axis]: plan.stage_ranks[s] }));
  const all = ranks.length;
  ranks = ranks.slice(0, 8);
  const before = row.q && plan.specs[row.q[0]], after = row.q && plan.specs[row.q[1]];
  const width = clamp(300 / ranks.length - 10, 22, 64), step = width + 12;
  const high = before && before.s.length > 1 ? width * 0.7 : 12, far = 46;
  const total = ranks.length * step + (all > ranks.length ? 26 : 0), tall = 2 * high + far + 34;
  const defs = h("defs");
  const svg = h("svg", { width: total, height: tall, viewBox: `0 0 ${total} ${tall}`, role: "img",
    class: "exchange", "aria-label": `${row.v} between ${all} ranks along ${row.a.join(", ")}` }, defs);
  const color = axisColor(plan, axis), center = (i) => 4 + i * step + width / 2;
  ranks.forEach((_, i) => ranks.forEach((_, j) => {
    if (isTransfer ? i === 0 && j === 1 : true)
      svg.append(h("path", { d: `M${center(i)} ${16 + high}C${center(i)} ${16 + high + far / 2} `
        + `${center(j)} ${16 + high + far / 2} ${center(j)} ${16 + high + far}`,
        class: "flow", style: `stroke:${color};stroke-opacity:${i === j ? 0.35 : 0.75}` }));
  }));
  ranks.forEach((at, i) => {
    const rank = rankOf(plan, at), x = 4 + i * step;
    svg.append(h("text", { x: center(i), y: 11, class: "rank mid" }, `${rank}`));
    const parts = before ? [[before, 16, isTransfer && i], [after, 16 + high + far, isTransfer && !i]] : [];
    for (const [spec, y, absent] of parts) {
      const group = shard(plan, spec, at, x, y, width, high, defs, absent);
      hoverable(group, () => absent ? `not held by rank ${rank}` : rankText(plan, spec, rank));
      svg.append(group);
    }
    if (!before) for (const y of [16, 16 + high + far])
      svg.append(h("rect", { x, y, width, height: high, rx: 1.5, class: "whole" }));
  });
  if (all > ranks.length) svg.append(h("text", { x: total - 22, y: 11, class: "rank" }, `… ${all}`));
  return svg;
}
// Draw a collective as a small picture for a row of the table of steps.
function collectiveIcon(plan, row) {
  const axis = row.a[0], color = axisColor(plan, axis);
  const size = (plan.mesh.find(([name]) => name === axis) || ["", 2])[1];
  const num = row.v === "transfer" ? 2 : clamp(size, 2, 4);
  const at = (i) => 4 + (i * 20) / (num - 1);
  const svg = h("svg", { width: 28, height: 16, viewBox: "0 0 28 16", class: "glyph",
    "aria-hidden": "true" });
  const meets = { transfer: (i, j) => i === 0 && j === 1, shift: (i, j) => j === (i + 1) % num };
  for (let i = 0; i < num; i++) for (let j = 0; j < num; j++)
    if ((meets[row.v] || (() => true))(i, j))
      svg.append(h("line", { x1: at(i), y1: 3, x2: at(j), y2: 13, style: `stroke:${color}` }));
  for (let i = 0; i < num; i++) for (const y of [3, 13]) {
    const gives = y === 13 || ["reduce_scatter", "all_to_all", "shift"].includes(row.v);
    svg.append(h("circle", { cx: at(i), cy: y, r: 2, style: `stroke:${color};fill:${
      gives ? color : "var(--panel)"}` }));
  }
  return svg;
}

// -- the tip under the pointer --------------------------------------------------------------------

const tip = byId("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = !text;
  if (!text) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clamp(x + 14, 4, innerWidth - box.width - 8)}px`;
  tip.style.top = `${y + box.height + 24 > innerHeight ? y - box.height - 10 : y + 16}px`;
}
function hoverable(node, text) {
  node.addEventListener("pointermove", (event) => showTip(text(), event.clientX, event.clientY));
  node.addEventListener("pointerleave", () => showTip(""));
}

// -- what is derived of a plan once ---------------------------------------------------------------

function prepare(plan) {
  if (plan.ready) return plan;
  plan.ready = true;
  plan.children = plan.modules.map(() => []);
  plan.modules.forEach((part, i) => { if (part.u >= 0) plan.children[part.u].push(i); });
  plan.steps.forEach((row, i) => {
    const section = plan.sections[row.g];
    row.i = i;
    row.times = section.times;
    row.layers = row.r === undefined ? 1 : plan.runs[row.r].x;
    row.total = ((row.z || 0) + (row.y || 0)) * row.times * row.layers;
    row.sent = (row.b || 0) * row.times * row.layers;
  });
  plan.longest = Math.max(1e-12, ...plan.steps.map((row) => row.total));
  plan.comm = plan.steps.filter((row) => row.k === "comm");
  plan.values = new Map();
  for (const item of plan.inputs) plan.values.set(item.l, { spec: item.t, stages: item.s });
  for (const row of plan.steps) (row.t || []).forEach((spec, i) =>
    plan.values.set(row.n.split(", ")[i] || row.n, { spec, stages: [stageOf(plan, row)] }));
  return plan;
}
const stageOf = (plan, row) => row.to ? row.to[1] : plan.sections[row.g].stage;
function descendants(plan, node) {
  const found = new Set([node]);
  for (const one of found) for (const child of plan.children[one]) found.add(child);
  return found;
}

// -- the head -------------------------------------------------------------------------------------

const MEMORY = [["parameters", "parameters"], ["gradients", "gradients"],
  ["optimizer", "optimizer state"], ["masters", "float32 masters"],
  ["activations", "activations"], ["snapshots", "kept to undo a step"]];

function figures(plan) {
  const head = plan.head, memory = sum(Object.values(head.memory));
  const busy = head.compute + head.communication;
  const step = h("div", { class: "figure" }, h("label", {}, "predicted step"),
    h("strong", {}, seconds(head.seconds)),
    h("small", {}, head.host_bound ? `${head.hardware}, host-bound` : head.hardware));
  const shareOf = (took) => head.seconds ? Math.max(0, took) / head.seconds : 0;
  const share = shareOf(head.communication);
  const waiting = shareOf(head.waiting), host = shareOf(head.host);
  const bar = (parts) => h("div", { class: "bar" }, parts.map(([name, part, label, color]) =>
    h("i", { class: name, title: label, style: `width:${100 * clamp(part, 0, 1)}%${
      color ? `;background:${color}` : ""}` })));
  const along = new Map(); // seconds by axis
  for (const [axis, , , , took] of head.by_kind) along.set(axis, (along.get(axis) || 0) + took);
  const all = sum([...along.values()]) || 1;
  const talk = h("div", { class: "figure" }, h("label", {}, "communication"),
    h("strong", {}, percent(share)),
    bar([["compute", 1 - share - waiting - host, `compute ${seconds(head.compute)}`],
      ...[...along].map(([axis, took]) => ["comm", (share * took) / all,
        `over ${axis} ${seconds(took)}`, axisColor(plan, axis)]),
      ["wait", waiting, `waiting for ranks ${seconds(head.waiting)}`],
      ["wait", host, `waiting for the host ${seconds(head.host)}`]]),
    h("small", {}, `${bytes(head.sent)} in ${plural(head.collectives, "message")}`));
  const full = memory / head.device;
  const device = h("div", { class: "figure" }, h("label", {}, "memory, fullest rank"),
    h("strong", { class: full > 1 ? "over" : "" }, bytes(memory)),
    bar(MEMORY.map(([key, name]) => [`m-${key}`, head.memory[key] / Math.max(head.device, memory),
      `${name} ${bytes(head.memory[key])}`])),
    h("small", {}, `${percent(full)} of ${bytes(head.device)}`));
  const found = [step, talk, device];
  if (plan.num_stages > 1) found.splice(2, 0, h("div", { class: "figure" }, h("label", {}, "bubble"),
    h("strong", {}, percent(head.bubble)), h("small", {}, `${plan.num_stages} stages, ${
      plural(plan.microbatches, "microbatch").replace("batchs", "batches")}`)));
  if (!busy) found.splice(1, 1);
  return found;
}
function meshChips(plan, pick) {
  return h("div", { class: "chips" }, plan.mesh.map(([axis, size]) => h("button", {
    class: "chip", style: `--c:${axisColor(plan, axis)}`, title: `what ${axis} splits, and why`,
    onclick: () => pick && pick(axis) }, `${axis}`, h("b", {}, `${size}`))),
    h("span", { class: "quiet" }, plural(numRanks(plan), "rank")),
    plan.microbatches > 1 && h("span", { class: "quiet", title: plan.schedule },
      `${plan.microbatches} microbatches`));
}
function header(plan, view) {
  const top = byId("top");
  top.replaceChildren();
  if (PLANS.length > 1) top.append(h("nav", { "aria-label": "plans" },
    [["Side by side", -1], ...PLANS.map((p, i) => [p.label, i])].map(([name, i]) => h("button", {
      class: view === i ? "on" : "", "aria-current": view === i ? "page" : null,
      onclick: () => open(i) }, name))));
  if (plan) top.append(h("div", { class: "headline" },
    h("div", { class: "title" }, h("h1", {}, h("span", {}, "plan"), PLANS.length > 1 ? plan.label
      : plan.title), meshChips(plan, (axis) => showAxis(plan, axis))),
    h("div", { class: "figures" }, figures(plan))));
}

// -- the page of a plan ---------------------------------------------------------------------------

let state = null; // the state of the plan that is shown

function open(view) {
  showTip("");
  document.body.className = view < 0 ? "comparing" : "exploring";
  if (view < 0) return sideBySide();
  const plan = prepare(PLANS[view]);
  const kept = plan.kept || {};
  state = { plan, node: kept.node || 0, row: kept.row === undefined ? null : kept.row,
    views: kept.views === undefined ? plan.steps.length <= 120 : kept.views, filter: "",
    tab: kept.tab || "timeline", sort: kept.sort || "seconds", down: true };
  plan.kept = state;
  header(plan, view);
  const pane = (id, label, ...inside) => h("section", { id, "aria-label": label }, ...inside);
  byId("page").replaceChildren(
    pane("tree", "modules", h("h2", {}, "Modules"), h("div", { id: "modules", role: "tree",
      "aria-label": "modules", class: "scroll" })),
    divider("left", "x", "--left", 1),
    pane("center", "steps", stepsHead(plan), h("div", { id: "steps", role: "listbox", tabindex: 0,
      "aria-label": "steps", class: "scroll" })),
    divider("right", "x", "--right", -1),
    pane("side", "details", h("div", { id: "details", class: "scroll", tabindex: 0 })),
    divider("under", "y", "--under", -1),
    pane("bottom", "times", h("div", { class: "tabs", role: "tablist" }, TABS.map((name) => h("button", { role: "tab", id: `tab-${name}`,
        onclick: () => showTab(name), onkeydown: tabKeys }, name[0].toUpperCase() + name.slice(1)))),
    h("div", { id: "tab", role: "tabpanel" })));
  drawTree(plan);
  drawSteps();
  const dear = [...plan.comm].sort((a, b) => b.total - a.total)[0];
  const first = state.row === null ? (dear ? dear.i : null) : state.row;
  if (first === null) showModule(plan, 0);
  else select(first);
  showTab(state.tab);
}
// Make a divider that resizes a panel: by dragging, or with the arrow keys when it has the focus.
function divider(id, direction, property, sign) {
  const root = document.documentElement;
  const size = () => parseFloat(getComputedStyle(root).getPropertyValue(property));
  const set = (value) => {
    const most = direction === "x" ? innerWidth * 0.45 : innerHeight * 0.6;
    root.style.setProperty(property, `${clamp(value, 90, most)}px`);
    if (state && state.redraw) state.redraw();
  };
  const node = h("div", { id: `divide-${id}`, class: `divider ${direction}`, role: "separator",
    tabindex: 0, "aria-orientation": direction === "x" ? "vertical" : "horizontal",
    "aria-label": `resize ${id}` });
  node.addEventListener("pointerdown", (down) => {
    const from = direction === "x" ? down.clientX : down.clientY, was = size();
    node.setPointerCapture(down.pointerId);
    node.onpointermove = (move) =>
      set(was + sign * ((direction === "x" ? move.clientX : move.clientY) - from));
    node.onpointerup = () => { node.onpointermove = null; };
  });
  node.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -24, ArrowUp: -24, ArrowRight: 24, ArrowDown: 24 }[event.key];
    if (by) { set(size() + sign * by); event.preventDefault(); }
  });
  return node;
}

// -- the tree -------------------------------------------------------------------------------------

function drawTree(plan) {
  const tree = byId("modules"), whole = plan.modules[0].z + plan.modules[0].y || 1;
  if (!plan.opened) {
    plan.opened = new Set();
    let shown = 1;
    for (let level = [0]; level.length; level = level.flatMap((i) => plan.children[i]))
      for (const i of level) {
        const more = plan.children[i].length;
        const isOpen = i === 0 || plan.opened.has(plan.modules[i].u);
        if (more && isOpen && shown + more <= 26) { plan.opened.add(i); shown += more; }
      }
  }
  const rows = [];
  const add = (i, depth) => {
    const part = plan.modules[i], children = plan.children[i], isOpen = plan.opened.has(i);
    const cost = part.z + part.y;
    const row = h("div", { role: "treeitem", class: `node${i === state.node ? " on" : ""}`,
      "aria-level": depth + 1, "aria-selected": i === state.node ? "true" : "false",
      "aria-expanded": children.length ? String(isOpen) : null, "data-node": i,
      tabindex: i === state.node ? 0 : -1, style: `--depth:${depth}` },
      h("span", { class: "twist", "aria-hidden": "true" }, children.length ? (isOpen ? "▾" : "▸") : ""),
      h("span", { class: "label" }, part.l, part.x > 1 && h("em", {}, `×${part.x}`)),
      plan.num_stages > 1 && i > 0 && `${part.s}` !== `${plan.modules[part.u].s}`
        && h("span", { class: "stages", title: "stages" },
        part.s.length > 2 ? `${part.s[0]}–${part.s[part.s.length - 1]}` : part.s.join(" ")),
      h("span", { class: "cost" }, h("i", { class: "compute",
        style: `width:${(100 * part.z) / whole}%` }), h("i", { class: "comm",
        style: `width:${(100 * part.y) / whole}%` })),
      h("span", { class: "took" }, cost ? seconds(cost) : ""));
    hoverable(row, () => [part.l + (part.x > 1 ? ` ×${part.x}` : ""),
      `computes ${seconds(part.z)}, communicates ${seconds(part.y)} a step${
        part.s.length > 1 ? ", all stages together" : ""}`,
      part.f ? flop(part.f) : "", part.b ? `${bytes(part.b)} sent` : "",
      part.w ? `${bytes(part.w)} of parameters` : ""].filter(Boolean).join("\n"));
    row.addEventListener("click", (event) => {
      if (event.target.className === "twist" || i === state.node) toggle(i);
      pickModule(i);
    });
    rows.push(row);
    if (isOpen) for (const child of children) add(child, depth + 1);
  };
  const toggle = (i) => plan.opened.has(i) ? plan.opened.delete(i) : plan.opened.add(i);
  add(0, 0);
  tree.replaceChildren(...rows);
  tree.onkeydown = (event) => {
    const at = rows.findIndex((row) => row === document.activeElement), i = state.node;
    const go = (row) => row && pickModule(Number(row.dataset.node), true);
    const children = plan.children[i];
    if (event.key === "ArrowDown") go(rows[at + 1]);
    else if (event.key === "ArrowUp") go(rows[at - 1]);
    else if (event.key === "ArrowRight" && children.length) {
      if (plan.opened.has(i)) pickModule(children[0], true);
      else { plan.opened.add(i); pickModule(i, true); }
    } else if (event.key === "ArrowLeft") {
      if (plan.opened.delete(i)) pickModule(i, true);
      else if (plan.modules[i].u >= 0) pickModule(plan.modules[i].u, true);
    } else if (event.key === "Home") go(rows[0]);
    else if (event.key === "End") go(rows[rows.length - 1]);
    else if (event.key === "Enter" || event.key === " ") { toggle(i); pickModule(i, true); }
    else return;
    event.preventDefault();
  };
}
function pickModule(i, focus) {
  const moved = i !== state.node;
  state.node = i;
  drawTree(state.plan);
  if (moved) {
    state.row = null;
    state.inputs = false;
    drawSteps();
    showModule(state.plan, i);
    if (state.marked) state.marked();
  }
  if (focus) byId("modules").querySelector(".on").focus();
}

// -- steps ----------------------------------------------------------------------------------------

function stepsHead(plan) {
  const filter = h("input", { type: "search", id: "filter", placeholder: "filter steps",
    "aria-label": "filter steps", oninput: (e) => { state.filter = e.target.value; drawSteps(); } });
  const views = h("input", { type: "checkbox", id: "views" });
  views.checked = state.views;
  views.addEventListener("change", () => { state.views = views.checked; drawSteps(); });
  return h("h2", {}, h("span", { id: "where" }), h("span", { class: "tools" },
    h("label", { title: "permute, reshape, slice: what moves no bytes" }, views, " views"), filter));
}
function titleOf(plan, i) {
  const names = [];
  for (let at = i; at > 0; at = plan.modules[at].u) names.unshift(plan.modules[at].l);
  return names.join(".") || plan.modules[0].l;
}
const CHUNK = 250;
function drawSteps() {
  const { plan, node, filter, views } = state;
  byId("where").replaceChildren(titleOf(plan, node),
    plan.modules[node].x > 1 ? h("em", {}, `×${plan.modules[node].x}`) : "");
  const inside = descendants(plan, node), words = filter.trim().toLowerCase();
  const matches = (...texts) => !words || texts.some((t) => t && t.toLowerCase().includes(words));
  const items = [];
  const inputs = plan.inputs.filter((item) => inside.has(item.m)
    && matches(item.l, item.k, plan.specs[item.t].t));
  const few = inputs.length <= 12 || state.inputs || words;
  if (inputs.length) items.push(() => sectionRow("inputs", bytes(sum(inputs.map((i) => i.b))), few ? ""
    : h("button", { onclick: () => { state.inputs = true; state.row = null; drawSteps(); } },
      `show all ${inputs.length}`)));
  if (few) items.push(...inputs.map((item) => () => inputRow(plan, item)));
  const sections = new Map();
  for (const row of plan.steps) {
    if (!inside.has(row.m) || (!views && (row.k === "view" || row.k === "move") && !words)) continue;
    const types = (row.t || []).map((t) => plan.specs[t].t).join(" ");
    const source = row.o === undefined ? "" : plan.sources[row.o][0];
    if (!matches(row.n, row.c, types, source, row.v)) continue;
    if (!sections.has(row.g)) sections.set(row.g, []);
    sections.get(row.g).push(row);
  }
  for (const [number, rows] of sections) {
    const section = plan.sections[number];
    const cost = sum(rows.map((row) => row.total));
    items.push(() => sectionRow(section.name, [plan.num_stages > 1 ? `stage ${section.stage}` : "",
      section.times > 1 ? `each of ${section.times} microbatches` : ""].filter(Boolean).join(", "),
      cost ? seconds(cost) : ""));
    let run;
    for (const row of rows) {
      if (row.r !== run && row.r !== undefined) {
        const of = plan.runs[row.r];
        items.push(() => h("div", { class: "run" }, h("b", {}, of.l), h("em", {}, `×${of.x}`),
          h("span", {}, `alike; ${of.o} is shown`)));
      }
      run = row.r;
      items.push(() => stepRow(plan, row));
    }
  }
  const list = byId("steps");
  let done = 0;
  const more = () => {
    const end = h("div", { class: "end" });
    const next = items.slice(done, done + CHUNK).map((make) => make());
    done += next.length;
    list.append(...next);
    if (done < items.length) {
      list.append(end);
      new IntersectionObserver((seen, observer) => {
        if (!seen[0].isIntersecting) return;
        observer.disconnect();
        end.remove();
        more();
      }, { root: list, rootMargin: "600px" }).observe(end);
    }
  };
  list.replaceChildren();
  list.scrollTop = 0;
  if (items.length) more();
  else list.append(h("p", { class: "note" }, words ? `No step has “${filter}”.`
    : "No op of the plan stands in this module alone."));
  state.more = () => { while (done < items.length) { list.lastChild.remove(); more(); } };
  list.onkeydown = (event) => {
    const rows = [...list.querySelectorAll(".step")];
    const at = rows.findIndex((row) => row.classList.contains("on"));
    const to = { ArrowDown: at + 1, ArrowUp: at < 0 ? 0 : at - 1, Home: 0, End: rows.length - 1,
      PageDown: at + 12, PageUp: at - 12 }[event.key];
    if (to === undefined || !rows.length) return;
    event.preventDefault();
    rows[clamp(to, 0, rows.length - 1)].dispatchEvent(new CustomEvent("pick"));
  };
  mark();
}
const sectionRow = (name, words, cost) => h("div", { class: "section", role: "presentation" },
  h("b", {}, name), h("span", {}, words), h("span", { class: "took" }, cost));
function inputRow(plan, item) {
  const row = h("div", { class: "step input", role: "option", id: `input-${item.n}`,
    "aria-selected": "false" }, h("span", { class: "mark" }),
    h("span", { class: "name" }, item.l.split(".").slice(-2).join("."),
      item.x > 1 && h("em", {}, `×${item.x}`)),
    h("span", { class: "call" }, `${item.k}, ${bytes(item.b)}`), typed(plan, plan.specs[item.t].t),
    h("span", { class: "took" }), h("span", { class: "line" }));
  const pick = () => { markOnly(row); showInput(plan, item); };
  row.addEventListener("click", pick);
  row.addEventListener("pick", pick);
  return row;
}
function costOf(row) {
  const times = row.times * row.layers, took = (row.z || 0) + (row.y || 0);
  return took > 1e-10 ? `${seconds(took)}${times > 1 ? ` ×${times}` : ""}` : "";
}
function stepRow(plan, row) {
  const comm = row.k === "comm";
  const types = (row.t || []).map((t) => plan.specs[t].t);
  const node = h("div", { class: `step ${row.k}`, role: "option", id: `step-${row.i}`,
    "aria-selected": "false", style: comm ? `--c:${axisColor(plan, row.a[0])}` : null },
    h("span", { class: "mark" }, comm && collectiveIcon(plan, row)),
    h("span", { class: "name" }, row.n), h("span", { class: "call" }, row.c),
    types.length ? typed(plan, types[0] + (types.length > 1 ? `  +${types.length - 1}` : ""))
      : h("span", { class: "type" }, row.w || ""),
    h("span", { class: "took" }, h("i", { style: `width:${Math.sqrt(row.total / plan.longest) * 100}%` }),
      costOf(row)),
    h("span", { class: "line" }, row.o === undefined ? "" : plan.sources[row.o][0]));
  if (comm) hoverable(node, () => tooltipText(plan, row));
  node.addEventListener("click", () => select(row.i));
  node.addEventListener("pick", () => select(row.i));
  return node;
}
// Return the text of the tooltip of a collective.
function tooltipText(plan, row) {
  const times = row.times * row.layers;
  const found = [`${row.v} over ${row.a.join(", ")}: ${bytes(row.b)} sent, ${seconds(row.y)}`
    + (times > 1 ? ` each, ×${times}` : "")];
  if (row.d) found.push(`why: ${row.d}`);
  else if (row.e) found.push(`why: ${reasonOf(row)}`);
  if (row.p && row.p.length) found.push(`opened by: ${row.p.join(", ")}`);
  for (const [n, removes] of row.h || []) if (removes) {
    const hint = plan.hints[n];
    found.push(`removed by: "${hint.by}" with ${hint.axis}=${hint.opposite} (checked)`);
  }
  return found.join("\n");
}
function mark() {
  for (const old of byId("steps").querySelectorAll(".on")) markOff(old);
  const row = state.row === null ? null : byId(`step-${state.row}`);
  if (row) markOnly(row);
}
function markOff(row) { row.classList.remove("on"); row.setAttribute("aria-selected", "false"); }
function markOnly(row) {
  for (const old of byId("steps").querySelectorAll(".on")) markOff(old);
  row.classList.add("on");
  row.setAttribute("aria-selected", "true");
  byId("steps").setAttribute("aria-activedescendant", row.id);
  row.scrollIntoView({ block: "nearest" });
}
// Show the details of a step. If the step is not in the list, its module is opened first.
function select(i, reveal) {
  const { plan } = state, row = plan.steps[i];
  state.row = i;
  if (reveal && !byId(`step-${i}`)) {
    if (!descendants(plan, state.node).has(row.m)) { state.node = 0; drawTree(plan); }
    state.filter = "";
    byId("filter").value = "";
    drawSteps();
    if (!byId(`step-${i}`)) state.more();
  }
  mark();
  showStep(plan, row);
  if (state.marked) state.marked();
}

// -- details --------------------------------------------------------------------------------------

const part = (title, ...inside) => h("div", { class: "part" }, h("h3", {}, title), ...inside);
function details(...nodes) {
  byId("details").replaceChildren(...nodes.flat().filter(Boolean));
  byId("details").scrollTop = 0;
}
// Return the lines of plan.explain as a list, with the source lines set as code.
function why(lines) {
  return h("ul", { class: "why" }, lines.map((line) => {
    const [words, source] = line.split(/ {4,}(?=\S+:\d+)/);
    return h("li", {}, words, source && h("code", { class: "line" }, source));
  }));
}
function reasonOf(row) {
  const line = (row.e || "").split("\n").find((text) => text.includes(" sent"));
  const found = line && line.split(/ {4,}/)[0].match(/sent[^:]*: (.*)$/);
  return found ? found[1] : (row.e || "").split("\n")[0];
}
function sourcePart(plan, row) {
  if (row.o === undefined) return null;
  const [at, text] = plan.sources[row.o];
  return part("Your line", h("div", { class: "source" }, h("code", {}, text || at),
    text && h("small", {}, at)));
}
function fixes(plan, row) {
  const found = (row.h || []).map(([n, removes]) => [plan.hints[n], removes]);
  if (!found.length) return null;
  const text = ([hint, removes]) => h("div", { class: "fix" },
    h("code", {}, `"${hint.by}": dict(${hint.axis}=dt.${hint.opposite})`),
    h("p", {}, removes ? "Planned again with it, none of these is left: " : "Planned again with it: ",
      h("b", {}, seconds(hint.opposite_seconds)), ` a step instead of ${seconds(hint.seconds)}, `,
      `${bytes(hint.opposite_sent)} sent instead of ${bytes(hint.sent)}.`));
  const removing = found.filter(([, removes]) => removes), others = found.filter(([, r]) => !r);
  return [removing.length ? part("What would remove it", removing.map(text)) : null,
    others.length ? part("What would be cheaper", others.map(text)) : null];
}
function showStep(plan, row) {
  const section = plan.sections[row.g], times = row.times * row.layers, comm = row.k === "comm";
  const types = (row.t || []).map((t) => plan.specs[t]);
  const facts = [];
  if (comm) facts.push([bytes(row.b), "sent by a rank"], [seconds(row.y), "predicted"]);
  else if (row.z) facts.push([seconds(row.z), "predicted"]);
  if (row.f) facts.push([flop(row.f), "on a rank"]);
  if (times > 1) facts.push([`×${times}`, [row.layers > 1 ? `${row.layers} layers` : "",
    row.times > 1 ? `${row.times} microbatches` : ""].filter(Boolean).join(" × ")]);
  const lines = (row.e || "").split("\n").filter(Boolean);
  const kind = comm ? row.a.map((axis) => chip(plan, axis, `${row.v} over ${axis}`))
    : h("span", { class: "chip", style: "--c:var(--ink-3)" }, { op: "op", view: "view", end: "end of "
      + "the step", move: "moves nothing" }[row.k]);
  const tensors = [...(row.q && comm ? [["before", row.q[0]], ["after", row.q[1]]]
    : (row.t || []).map((t, i) => [row.n.split(", ")[i] || row.n, t]))];
  details(
    h("div", { class: "lead" }, h("div", { class: "chips" }, kind, h("span", { class: "quiet" },
      [section.name, plan.num_stages > 1 ? `stage ${section.stage}` : ""].filter(Boolean).join(", "))),
      h("h2", {}, row.n || row.c), h("code", { class: "call" }, row.c),
      types.map((spec) => h("div", {}, typed(plan, spec.t)))),
    facts.length && h("div", { class: "facts" }, facts.map(([big, small]) =>
      h("div", {}, h("strong", {}, big), h("small", {}, small)))),
    comm && part("Between ranks", collectivePicture(plan, row, section), h("small", { class: "note" },
      row.q ? `above: what each rank of one group holds before; below: after${
        cutInTime(plan.specs[row.q[1]]) ? "; all microbatches" : ""}` : "")),
    comm && part("Why it is here", why([row.d, row.q ? reasonOf(row) : "", ...(row.q && !row.of ? []
      : lines)].filter(Boolean)), row.of && h("p", { class: "note" }, `of ${row.of.join(", ")}`)),
    comm && ((row.p && row.p.length) || row.j) && part("Opened by",
      h("div", { class: "pins" }, [...(row.p || []), row.j].filter(Boolean).map((by) => h("code", {}, by)))),
    row.l && part("Meets the pins", h("div", { class: "pins" }, row.l.map((by) => h("code", {}, by)))),
    comm && fixes(plan, row),
    sourcePart(plan, row),
    tensors.length && shards(plan, tensors, [stageOf(plan, row)]),
    lines.length && part(comm ? "All that plan.explain says" : "Why it is so", why(lines)));
}
function showInput(plan, item) {
  state.row = null;
  const used = plan.specs[item.u], stored = plan.specs[item.t];
  details(h("div", { class: "lead" }, h("div", { class: "chips" },
    h("span", { class: "chip", style: "--c:var(--ink-3)" }, item.k)), h("h2", {}, item.l),
    h("div", {}, typed(plan, stored.t)),
    item.u !== item.t && h("div", { class: "quiet" }, "used as ", typed(plan, used.t))),
    h("div", { class: "facts" }, h("div", {}, h("strong", {}, bytes(item.b)), h("small", {},
      item.x > 1 ? `on a rank, all ${item.x}` : "on a rank"))),
    shards(plan, [[item.l, item.t], ...(item.u !== item.t ? [["as used", item.u]] : [])], item.s),
    part("Why it is so", why(item.e.split("\n"))));
}
function showModule(plan, i) {
  const own = plan.modules[i], inside = descendants(plan, i);
  const dear = plan.steps.filter((row) => inside.has(row.m) && row.total).sort((a, b) =>
    b.total - a.total).slice(0, 8);
  details(h("div", { class: "lead" }, h("h2", {}, titleOf(plan, i)), h("p", { class: "quiet" },
    [own.x > 1 ? `${own.x} modules that are alike` : "", own.s.length > 1
      ? `summed over stages ${own.s.join(", ")}` : ""].filter(Boolean).join("; "))),
    h("div", { class: "facts" }, [[seconds(own.z), "computing"], [seconds(own.y), "communicating"],
      own.b && [bytes(own.b), "sent"], own.w && [bytes(own.w), "of parameters"]].filter(Boolean)
      .map(([big, small]) => h("div", {}, h("strong", {}, big), h("small", {}, small)))),
    dear.length && part("What takes longest", h("div", { class: "dear" }, dear.map((row) => h("button", {
      onclick: () => select(row.i, true) }, h("span", {}, row.c),
      h("i", { class: row.k === "comm" ? "comm" : "compute",
        style: `width:${(70 * row.total) / dear[0].total}px` }), h("b", {}, seconds(row.total)))))));
}
function showAxis(plan, axis) {
  const own = plan.axes.find((one) => one.name === axis);
  const sent = plan.head.by_kind.filter(([name]) => name === axis);
  details(h("div", { class: "lead" }, h("div", { class: "chips" }, chip(plan, axis, `axis ${axis}`)),
    h("h2", {}, `${axis}: ${plural(own.size, "rank")}`)),
    axis === plan.stage_axis && part("Stages", h("p", {}, `It holds ${plan.num_stages} stages.`),
      h("ul", { class: "why" }, own.stages.map((patterns, i) => h("li", {}, `stage ${i}: `,
        h("code", {}, patterns.join(", ")))))),
    own.opened.length ? part("What it splits, and which pin opened it", h("ul", { class: "why" },
      own.opened.map((one) => h("li", {}, h("code", {}, one.of), ` dim ${one.dim} (${one.size})`,
        one.with && [", with ", h("code", {}, one.with)], "; opened by ", h("code", {}, one.by)))))
      : axis !== plan.stage_axis && h("p", { class: "note" }, "No pin opens a factor on it."),
    own.zero ? part("ZeRO", h("p", {}, `State is stored split over it, level ${own.zero}.`)) : null,
    sent.length && part("What is sent along it", h("ul", { class: "why" }, sent.map(
      ([, kind, times, size, took]) => h("li", {}, `${times} ${kind}: ${bytes(size)}, ${seconds(took)} a step`)))));
}
// Show the mesh with the shards of one of these tensors, or of another tensor chosen by name.
function shards(plan, tensors, stages) {
  const box = h("div", {});
  const draw = (spec, where) => box.replaceChildren(h("div", {}, typed(plan, plan.specs[spec].t)),
    meshPicture(plan, plan.specs[spec], where),
    cutInTime(plan.specs[spec]) ? h("small", { class: "note" }, "all microbatches together") : "");
  const buttons = tensors.map(([name, spec], i) => h("button", { class: i === tensors.length - 1
    ? "on" : "", onclick: (event) => { buttons.forEach((b) => b.classList.remove("on"));
      event.target.classList.add("on"); draw(spec, stages); } }, name));
  const other = h("input", { type: "search", list: "values", placeholder: "any tensor",
    "aria-label": "another tensor", class: "picker", oninput: () => {
      const found = plan.values.get(other.value);
      if (found) { buttons.forEach((b) => b.classList.remove("on")); draw(found.spec, found.stages); }
    } });
  let list = byId("values");
  if (!list || list.dataset.plan !== plan.label) {
    if (list) list.remove();
    list = h("datalist", { id: "values", "data-plan": plan.label },
      [...plan.values.keys()].map((value) => h("option", { value })));
    document.body.append(list);
  }
  draw(tensors[tensors.length - 1][1], stages);
  return part("Shards by rank", h("div", { class: "tools" }, buttons.length > 1 && h("span", {
    class: "segments" }, buttons), other), box);
}

// -- below: times, memory, collectives ------------------------------------------------------------

const TABS = ["timeline", "memory", "collectives", "legend"];
function tabKeys(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  const to = TABS[(TABS.indexOf(state.tab) + by + TABS.length) % TABS.length];
  showTab(to);
  byId(`tab-${to}`).focus();
}
function showTab(name) {
  state.tab = name;
  for (const one of TABS) {
    const tab = byId(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === name));
    tab.tabIndex = one === name ? 0 : -1;
    tab.classList.toggle("on", one === name);
  }
  byId("tab").setAttribute("aria-labelledby", `tab-${name}`);
  state.redraw = state.marked = null;
  if (name === "collectives") collectives(state.plan);
  else if (name === "legend") legend(state.plan);
  else drawChart(state.plan, name === "timeline" ? timeRows(state.plan) : memoryRows(state.plan));
}

const SPAN_COLORS = ["--f", "--b", "--bi", "--bw", "--once", "--idle", "--message"];
const NAME = 62, RIGHT = 112;
let palette = new Map();
const colorOf = (name) => {
  if (!palette.has(name))
    palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return palette.get(name);
};

// Return a row for each simulated rank: computing and waiting in the upper lane, messages below.
function timeRows(plan) {
  const time = plan.timeline, end = time.seconds * 1e9 || 1;
  const lanes = Math.max(1, ...time.ranks.map((own) => own.lanes.length));
  const low = Math.max(4, Math.min(8, 14 / Math.max(1, lanes - 1)));
  const high = 18 + (lanes - 1) * (low + 1) + 8;
  const paint = (g, own, top, place, width) => own.lanes.forEach((lane, number) => {
    const y = top + (number ? 19 + (number - 1) * (low + 1) : 0), tall = number ? low : 18;
    for (const [begin, lasts, kind, name, , row] of lane) {
      const x = place(begin), right = place(begin + lasts);
      if (right < NAME || x > NAME + width) continue;
      const from = Math.max(NAME, x), wide = Math.max(0.6, Math.min(NAME + width, right) - from);
      const axis = row >= 0 && kind === 6 ? plan.steps[row].a[0] : null;
      g.fillStyle = colorOf(axis === null ? SPAN_COLORS[kind] : row === state.row ? "--ink"
        : axisColor(plan, axis).slice(4, -1));
      g.fillRect(from, y, wide > 3 ? wide - 0.5 : wide, tall);
      const label = time.words[name].split(" ")[0].replace(":", "");
      if (!number && wide > 24 && kind < 5) {
        g.fillStyle = colorOf("--on-span");
        g.fillText(label, from + 4, y + 13);
      }
    }
  });
  const at = (own, y, when) => {
    const number = y < 18 ? 0 : 1 + Math.floor((y - 19) / (low + 1));
    const lane = own.lanes[number];
    if (!lane) return null;
    let from = 0, to = lane.length - 1;
    while (from <= to) {
      const middle = (from + to) >> 1, [begin, lasts] = lane[middle];
      if (when < begin) to = middle - 1;
      else if (when > begin + lasts) from = middle + 1;
      else return lane[middle];
    }
    return null;
  };
  return { end, high, ranks: time.ranks, paint, legend: () => [
    ...[["F", "forward"], ["B", "backward"], ["I", "of inputs"], ["W", "of weights"], ["once", "once a step"],
      ["wait", "waits"]].map(([kind, words], i) => [SPAN_COLORS[i], words, i])
      .filter(([, , i]) => time.ranks.some((own) => own.lanes.some((lane) => lane.some((s) => s[2] === i)))),
    ...plan.mesh.filter(([axis]) => plan.comm.some((row) => row.a[0] === axis))
      .map(([axis]) => [axisColor(plan, axis).slice(4, -1), `messages over ${axis}`]),
    ...(plan.comm.length ? [["--ink", "messages of the chosen step"]] : []),
    ...(time.ranks.some((own) => own.lanes.some((lane) => lane.some((s) => s[2] === 6 && s[5] < 0)))
      ? [["--message", "other messages"]] : [])],
    note: (own) => `${percent(own.computes / (time.seconds || 1))} computing`,
    head: () => `${seconds(time.seconds)} a step by simulation, ${percent(time.idle)} not computing`
      + (time.alike > 1 ? `; each rank is like ${time.alike - 1} more` : "")
      + (time.grain ? `; spans shorter than ${seconds(time.grain)} are drawn together` : ""),
    tell: (own, y, when) => {
      const span = at(own, y, when);
      if (!span) return "";
      const source = time.words[span[4]];
      return [`rank ${own.rank}: ${span[2] === 5 ? "waits: " : ""}${time.words[span[3]]}`,
        `${seconds(span[1] / 1e9)} from ${seconds(span[0] / 1e9)}`,
        source.length > 160 ? `${source.slice(0, 160)} …` : source].filter(Boolean).join("\n");
    },
    click: (own, y, when) => {
      const span = at(own, y, when);
      if (span && span[5] >= 0) select(span[5], true);
    } };
}
function memoryRows(plan) {
  const time = plan.timeline, end = time.seconds * 1e9 || 1, device = plan.head.device;
  const peak = Math.max(1, ...time.ranks.map((own) => own.peak)), high = 58;
  const scale = device < 1.6 * peak ? Math.max(device, peak) : peak;
  const least = (own) => Math.min(...own.held.map(([, size]) => size));
  const level = (own, when) => {
    let from = 0, to = own.held.length - 1;
    while (from < to) {
      const middle = (from + to + 1) >> 1;
      if (own.held[middle][0] <= when) from = middle;
      else to = middle - 1;
    }
    return own.held[from][1];
  };
  const paint = (g, own, top, place, width) => {
    const tall = high - 12, y = (size) => top + tall - (tall * size) / (scale * 1.04);
    const area = new Path2D();
    let before = y(level(own, state.window[0]));
    area.moveTo(NAME, before);
    for (const [when, size] of [...own.held, [end, own.held[own.held.length - 1][1]]]) {
      if (when < state.window[0]) continue;
      const x = clamp(place(when), NAME, NAME + width), now = y(size);
      area.lineTo(x, before);
      area.lineTo(x, now);
      before = now;
    }
    area.lineTo(clamp(place(end), NAME, NAME + width), before);
    g.strokeStyle = colorOf("--accent");
    g.lineWidth = 1.2;
    g.stroke(area);
    area.lineTo(clamp(place(end), NAME, NAME + width), top + tall);
    area.lineTo(NAME, top + tall);
    g.globalAlpha = 0.22;
    g.fillStyle = colorOf("--accent");
    g.fill(area);
    g.fillRect(NAME, y(least(own)), width, top + tall - y(least(own)));
    g.globalAlpha = 1;
    if (device < 1.6 * peak) {
      g.strokeStyle = colorOf("--over");
      g.setLineDash([4, 3]);
      g.beginPath();
      g.moveTo(NAME, y(device));
      g.lineTo(NAME + width, y(device));
      g.stroke();
      g.setLineDash([]);
    }
  };
  return { end, high, ranks: time.ranks, paint, legend: () => [["--accent", "held by a rank"],
    ...(device < 1.6 * peak ? [["--over", `${bytes(device)} of the device`]] : [])],
    note: (own) => bytes(own.peak),
    head: () => `values and messages that a rank holds, at most ${bytes(peak)}; darker: all the time`,
    tell: (own, y, when) => `rank ${own.rank} at ${seconds(when / 1e9)}: ${bytes(level(own, when))}\n`
      + `at most ${bytes(own.peak)}, at least ${bytes(least(own))}`,
    click: () => {} };
}
// Draw rows over time on a canvas. Wheel, + and - zoom; drag and arrow keys move; 0 shows all.
function drawChart(plan, rows) {
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": `${state.tab}: ${rows.head()}` });
  const scroll = h("div", { class: "canvas scroll" }, canvas);
  const legend = h("div", { class: "legend" }, h("span", {}, rows.head()), rows.legend().map(
    ([color, words]) => h("span", { class: "key" }, h("i", { style: `background:var(${color})` }), words)),
    h("span", { class: "zoom" }, [["−", 1.6, "zoom out"], ["+", 1 / 1.6, "zoom in"], ["all", 0, "show all"]]
      .map(([name, by, words]) => h("button", { title: words, "aria-label": words,
        onclick: () => zoom(by, 0.5) }, name))));
  byId("tab").replaceChildren(legend, scroll);
  state.window = state.window && state.window[1] <= rows.end ? state.window : [0, rows.end];
  let width = 100, waiting = false;
  const top = 20;
  const place = (when) => NAME + (width * (when - state.window[0])) / (state.window[1] - state.window[0]);
  const timeAt = (x) => state.window[0] + ((x - NAME) / width) * (state.window[1] - state.window[0]);
  function zoom(by, at) {
    const [from, to] = state.window, length = to - from;
    const next = by ? clamp(length * by, rows.end / 1e5, rows.end) : rows.end;
    const begin = clamp(from + (length - next) * at, 0, rows.end - next);
    state.window = [begin, begin + next];
    redraw();
  }
  function move(by) {
    const [from, to] = state.window, begin = clamp(from + by * (to - from), 0, rows.end - (to - from));
    state.window = [begin, begin + to - from];
    redraw();
  }
  function paint() {
    waiting = false;
    if (!canvas.isConnected) return;
    const whole = scroll.clientWidth, tall = top + rows.ranks.length * rows.high;
    const ratio = devicePixelRatio || 1;
    width = Math.max(60, whole - NAME - RIGHT);
    canvas.width = whole * ratio;
    canvas.height = Math.min(tall * ratio, 16000);
    canvas.style.height = `${canvas.height / ratio}px`;
    canvas.style.width = `${whole}px`;
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    g.lineWidth = 1;
    const length = (state.window[1] - state.window[0]) / 1e9;
    const power = 10 ** Math.floor(Math.log10(length / 8));
    const tick = [1, 2, 5, 10].map((n) => n * power).find((t) => t >= length / 8);
    for (let t = Math.ceil(state.window[0] / 1e9 / tick) * tick; t <= state.window[1] / 1e9; t += tick) {
      const x = Math.round(place(t * 1e9)) + 0.5;
      g.strokeStyle = colorOf("--rule");
      g.beginPath();
      g.moveTo(x, 14);
      g.lineTo(x, tall);
      g.stroke();
      g.fillStyle = colorOf("--ink-3");
      g.textAlign = "center";
      g.fillText(seconds(Math.max(0, t)).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 "), x, 10);
    }
    g.textAlign = "left";
    rows.ranks.forEach((own, i) => {
      const y = top + i * rows.high;
      rows.paint(g, own, y, place, width);
      g.fillStyle = colorOf("--ink-2");
      g.fillText(`rank ${own.rank}`, 6, y + 13);
      g.fillStyle = colorOf("--ink-3");
      g.fillText(rows.note(own), NAME + width + 8, y + 13);
    });
  }
  function redraw() {
    if (!waiting) requestAnimationFrame(paint);
    waiting = true;
  }
  const locate = (event) => {
    const box = canvas.getBoundingClientRect(), y = event.clientY - box.top - top;
    const own = rows.ranks[Math.floor(y / rows.high)], x = event.clientX - box.left;
    return own && y >= 0 && x >= NAME && x <= NAME + width
      ? [own, y % rows.high, timeAt(x)] : null;
  };
  let dragged = null, still = true;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = event.clientX;
    still = true;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    dragged = null;
    const found = locate(event);
    if (still && found) rows.click(...found);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged !== null && Math.abs(event.clientX - dragged) > 2) {
      still = false;
      move((dragged - event.clientX) / width);
      dragged = event.clientX;
      showTip("");
      return;
    }
    const found = locate(event);
    showTip(found ? rows.tell(...found) : "", event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => showTip(""));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaY) < Math.abs(event.deltaX))
      move(event.deltaX / width);
    else if (scroll.scrollHeight <= scroll.clientHeight + 1 || event.ctrlKey) {
      const box = canvas.getBoundingClientRect();
      zoom(1.0015 ** event.deltaY, clamp((event.clientX - box.left - NAME) / width, 0, 1));
    } else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = { ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), "+": () => zoom(1 / 1.6, 0.5),
      "=": () => zoom(1 / 1.6, 0.5), "-": () => zoom(1.6, 0.5), 0: () => zoom(0, 0) }[event.key];
    if (act) { act(); event.preventDefault(); }
  });
  state.redraw = redraw;
  state.marked = redraw;
  paint();
}

const COLUMNS = [["name", "collective", (p, r) => r.n], ["kind", "kind", (p, r) => r.v],
  ["axis", "axis", (p, r) => r.a.join(", ")], ["phase", "phase", (p, r) => p.sections[r.g].name],
  ["stage", "stage", (p, r) => p.sections[r.g].stage], ["times", "times", (p, r) => r.times * r.layers],
  ["each", "bytes each", (p, r) => r.b], ["bytes", "bytes a step", (p, r) => r.sent],
  ["seconds", "time a step", (p, r) => r.total],
  ["line", "line", (p, r) => (r.o === undefined ? "" : p.sources[r.o][0])]];
const NUMBERS = new Set(["stage", "times", "each", "bytes", "seconds"]);
function collectives(plan) {
  const columns = COLUMNS.filter(([key]) => key !== "stage" || plan.num_stages > 1);
  const [, , value] = columns.find(([key]) => key === state.sort) || columns[columns.length - 2];
  const rows = [...plan.comm].sort((a, b) => {
    const x = value(plan, a), y = value(plan, b);
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return state.down ? -order : order;
  });
  const most = Math.max(1e-12, ...plan.comm.map((r) => r.total));
  const head = h("tr", {}, columns.map(([key, words]) => h("th", { class: NUMBERS.has(key) ? "number" : "",
    "aria-sort": key === state.sort ? (state.down ? "descending" : "ascending") : "none" },
    h("button", { "data-sort": key, onclick: () => {
      state.down = key === state.sort ? !state.down : NUMBERS.has(key);
      state.sort = key;
      collectives(plan);
      byId("tab").querySelector(`[data-sort=${key}]`).focus();
    } }, words, key === state.sort ? (state.down ? " ↓" : " ↑") : ""))));
  const cell = (key, row, shown) => {
    if (key === "axis") return h("td", {}, row.a.map((axis) => chip(plan, axis)));
    if (key === "each" || key === "bytes") return h("td", { class: "number" }, bytes(shown));
    if (key === "seconds") return h("td", { class: "number took" },
      h("i", { style: `width:${(100 * shown) / most}%` }), seconds(shown));
    return h("td", { class: NUMBERS.has(key) ? "number" : key === "name" || key === "line" ? "mono" : "" },
      key === "times" ? `×${shown}` : `${shown}`);
  };
  const body = rows.map((row) => {
    const line = h("tr", { tabindex: 0, "data-step": row.i, onclick: () => select(row.i, true),
      onkeydown: (event) => {
        if (event.key === "Enter" || event.key === " ") select(row.i, true);
        else if (event.key === "ArrowDown" && line.nextSibling) line.nextSibling.focus();
        else if (event.key === "ArrowUp" && line.previousSibling) line.previousSibling.focus();
        else return;
        event.preventDefault();
      } }, columns.map(([key, , get]) => cell(key, row, get(plan, row))));
    hoverable(line, () => tooltipText(plan, row));
    return line;
  });
  byId("tab").replaceChildren(rows.length ? h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, head), h("tbody", {}, body))) : h("p", { class: "note" }, "Nothing is sent."));
  state.marked = () => { for (const line of byId("tab").querySelectorAll("tbody tr"))
    line.classList.toggle("on", Number(line.dataset.step) === state.row); };
  state.marked();
}

// Show the meaning of the page's colours and marks.
function legend(plan) {
  const key = (color, words) => h("span", { class: "key" }, h("i", { style: `background:${color}` }), words);
  const spans = (rows) => rows.legend().map(([color, words]) => key(`var(${color})`, words));
  const defs = h("defs"), axis = plan.mesh.length ? plan.mesh[plan.mesh.length - 1][0] : "";
  const mark = (words, style, kind) => h("span", { class: "key" }, h("svg", { width: 22, height: 14 },
    h("g", { class: kind || "" }, h("rect", { x: 1, y: 1, width: 20, height: 12, class: "whole" }),
      style && h("rect", { x: 1, y: 1, width: 10, height: 12, style }))), words);
  const color = axisColor(plan, axis), several = plan.num_stages > 1;
  const groups = {
    axes: [...plan.mesh.map(([name]) => key(axisColor(plan, name), `${name}: the dims that it splits, `
      + "the messages over it")), ...(plan.microbatches > 1 ? [key("var(--ink-3)", "mb: microbatches")] : [])],
    bars: [key("var(--compute)", "computes"), key("var(--message)", "communicates, over any axis"),
      key("var(--idle)", "waits, or the rest of the whole"),
      "the line below a step's time: the square root of its part of the longest step's"],
    "memory of the fullest rank": MEMORY.filter(([name]) => plan.head.memory[name])
      .map(([name, words]) => key(`var(--m-${name})`, words)),
    timeline: spans(timeRows(plan)),
    "memory over time": spans(memoryRows(plan)),
    "a rank's box": [mark("the whole tensor"), mark("what the rank holds, split over an axis",
      `fill:${color};fill-opacity:.82`), mark("held, split over no axis", "fill:var(--whole);fill-opacity:.5"),
    mark("a pending sum over an axis", `fill:${hatch(defs, color)}`),
    several && mark("not held: of another stage", "", "absent")],
    marks: [key("var(--accent)", "chosen"), key("var(--over)", "more memory than the device has"),
      "dots: ranks before a message, above, and after it, below; lines: who sends to whom",
      "grey step: moves no bytes", "×: how many are alike", several && "boxed number: stages"],
  };
  byId("tab").replaceChildren(h("div", { class: "scroll" }, h("svg", { width: 0, height: 0 }, defs),
    Object.entries(groups).map(([name, keys]) => h("div", { class: "legend" }, h("b", {}, name),
      keys.map((one) => typeof one === "string" ? h("span", { class: "key" }, one) : one)))));
}

// -- plans side by side ---------------------------------------------------------------------------

function sideBySide() {
  state = null;
  header(null, -1);
  const cards = PLANS.map((plan, i) => h("article", { class: "card" }, h("div", { class: "title" },
    h("h2", {}, plan.label), meshChips(plan, () => open(i))), h("div", { class: "figures" }, figures(plan)),
    h("button", { class: "go", onclick: () => open(i) }, `Explore ${plan.label}`)));
  const rows = [];
  const row = (name, values, show, title) => rows.push([name, values, show, title]);
  const head = (name) => rows.push([name]);
  head("a step");
  row("predicted", PLANS.map((p) => p.head.seconds), seconds);
  row("compute", PLANS.map((p) => p.head.compute), seconds);
  row("communication", PLANS.map((p) => p.head.communication), seconds);
  row("host", PLANS.map((p) => p.head.host), seconds);
  if (PLANS.some((p) => p.num_stages > 1)) row("bubble", PLANS.map((p) => p.head.bubble), percent);
  row("bytes sent", PLANS.map((p) => p.head.sent), bytes);
  row("messages", PLANS.map((p) => p.head.collectives), (n) => n.toLocaleString("en"));
  head("memory of the fullest rank");
  for (const [key, name] of [...MEMORY, ["not_at_once", "not at once"]])
    if (PLANS.some((p) => p.head.memory[key])) row(name, PLANS.map((p) => p.head.memory[key]), bytes);
  row("total", PLANS.map((p) => sum(Object.values(p.head.memory))), bytes);
  const kinds = [...new Set(PLANS.flatMap((p) => p.head.by_kind.map(([axis, kind]) => `${kind} over ${axis}`)))];
  if (kinds.length) head("collectives of a rank in a step");
  const of = (plan, name) => plan.head.by_kind.find(([axis, kind]) => `${kind} over ${axis}` === name);
  for (const name of kinds.sort()) {
    const found = PLANS.map((p) => of(p, name));
    rows.push([name, found.map((f) => (f ? f[3] : 0)), (n, i) => found[i]
      ? `${bytes(n)} in ${found[i][2]}, ${seconds(found[i][4])}` : "none", null]);
  }
  const table = h("table", { class: "differences" }, h("thead", {}, h("tr", {}, h("th", {}, ""),
    PLANS.map((p) => h("th", { class: "number" }, p.label)))), h("tbody", {}, rows.map(([name, values, show]) => {
    if (!values) return h("tr", { class: "head" }, h("th", { colspan: PLANS.length + 1 }, name));
    const least = Math.min(...values), differ = new Set(values).size > 1;
    return h("tr", {}, h("th", {}, name), values.map((value, i) => {
      const by = i && values[0] ? value / values[0] - 1 : 0;
      return h("td", { class: `number${differ && value === least ? " least" : ""}` }, show(value, i),
        h("small", {}, i && Math.abs(by) >= 0.005 ? `${by > 0 ? "+" : "−"}${percent(Math.abs(by))}` : ""));
    }));
  })));
  byId("page").replaceChildren(h("div", { class: "cards", style: `--n:${PLANS.length}` }, cards),
    h("section", { class: "differs", "aria-label": "how they differ" }, h("h2", {}, "How they differ"),
      table, h("p", { class: "note" }, `The least of a row is marked; percentages are beside ${PLANS[0].label}.`)));
}

// -- begin ----------------------------------------------------------------------------------------

addEventListener("resize", () => state && state.redraw && state.redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  palette = new Map();
  if (state && state.redraw) state.redraw();
});
addEventListener("keydown", (event) => {
  if (event.key === "/" && state && event.target.tagName !== "INPUT") {
    byId("filter").focus();
    event.preventDefault();
  } else if (event.key === "Escape") showTip("");
});
open(PLANS.length > 1 ? -1 : 0);
})();
