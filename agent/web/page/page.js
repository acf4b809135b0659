"use strict";
// Draws the data that the server sends (agent/web/page_data.py, hub.py). Text is inserted as text, never as markup.

const $ = (id) => document.getElementById(id);
const STATES = ["training", "recovering", "stopped", "waiting"];
const PHASES = ["detect_s", "agree_s", "stop_s", "start_s", "join_s", "set_up_s", "load_s", "first_step_s", "replay_s"];
const RANKS = {
  starting: "starting", training: "", phase: "in a phase without steps", quiesced: "quiesced for a handoff", ended: "ended",
  unknown: "no answer",
};
const LIVE_WITHIN_MS = 20000; // the server sends something every 15 s
const NOT_YET = 503;  // the server has not read the job's records yet
const ENTER_AGAIN_MS = 1000;
const ROW = 20, NAME = 150, AXIS = 22;

let job = null;      // the present state
let past = null;     // what happened so far
let ranks = {};      // live ranks by node id
let samples = [[], []];
let chart = null;
const curves = new Map(); // points and the chart of each metric, by name
let updatedAt = 0;
let nextEntry = 0;   // timer
let connectionState = "connecting"; // shown until the first update
let skew = 0;        // how far the server's clock is ahead of ours, in seconds

// Elements

function make(name, attributes = {}, ...content) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...content);
  return element;
}

function duration(seconds) {
  if (seconds < 100) return `${seconds.toFixed(seconds < 0.095 ? 2 : 1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} min`;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const moment = (seconds) => new Date(seconds * 1000).toLocaleString();
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
const now = () => Date.now() / 1000 + skew;

// The job

function showPresent(present) {
  job = present;
  const { status } = job;
  document.title = `${status.job_id}: ${status.state}`;
  $("name").textContent = `Job ${status.job_id}`;
  $("state").textContent = status.state;
  $("state").className = `state ${status.state}`;
  $("reason").textContent = [status.reason, ...status.slow].join("; ");
  $("because").textContent = status.incident || status.cause;
  if (document.activeElement !== $("np")) $("np").value = status.np;
  showNumbers();
  showNodes();
  showLogRanks();
}

function showPast(update) {
  past = update;
  showTimeline();
  showIncidents();
  allCharts().forEach((each) => each.redraw());
}

function showNumbers() {
  const { status } = job;
  const rate = samples[1].at(-1) || 0;
  const steps = Object.values(ranks).flatMap((live) => live.ranks.map((rank) => rank[1]));
  const [most, least] = job.is_at_least ? ["≤ ", "≥ "] : ["", ""];
  const numbers = {
    "goodput": `${most}${(Math.floor(job.goodput * 1000) / 10).toFixed(1)} %`,
    "step": steps.length ? Math.max(...steps) : "–",
    "steps per second": rate ? rate.toFixed(1) : "–",
    "group": status.group,
    "ranks": status.world_size,
    "nodes": status.nodes.length,
    "np": status.np,
    "incidents": job.incidents,
    "downtime": least + duration(job.downtime_s),
    "replayed steps": least + job.replayed_steps,
  };
  $("numbers").replaceChildren(...Object.entries(numbers).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
}

// The timeline, on a canvas: with hundreds of nodes it has tens of thousands of parts

function timeline() {
  const last = past.end === null ? now() : past.end;
  const span = Number($("span").value);
  const first = span ? Math.max(past.begin, last - span) : past.begin;
  const width = Math.max(640, $("timeline").clientWidth);
  const x = (at) => NAME + (width - NAME - 10) * (Math.max(at, first) - first) / Math.max(1, last - first);
  return { first, last, width, x, height: past.rows.length * ROW + AXIS };
}

function showTimeline() {
  const { first, last, width, height, x } = timeline();
  const canvas = $("canvas");
  const scale = Math.min(devicePixelRatio, 16000 / height);
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  for (let tick = 0; tick <= 4; tick++) {
    const at = first + (last - first) * tick / 4;
    pen.fillStyle = colour("line");
    pen.fillRect(x(at), 0, 1, height - AXIS);
    pen.fillStyle = colour("faint");
    pen.textAlign = tick === 4 ? "right" : "center";
    pen.fillText(clock(at), x(at), height - 6);
  }
  pen.textAlign = "left";
  past.rows.forEach((name, row) => pen.fillText(name, 0, row * ROW + 14, NAME - 10));
  for (const [state, began, ended, blocks] of past.spans) {
    if ((ended ?? last) < first) continue;
    pen.fillStyle = colour(state);
    const from = x(began);
    const length = Math.max(1, x(ended ?? last) - from);
    for (const [top, bottom] of blocks) {
      for (let row = top; row <= bottom; row++) pen.fillRect(from, row * ROW + 3, length, ROW - 6);
    }
  }
  pen.fillStyle = colour("fault");
  for (const [row, at] of past.faults) {
    if (at < first) continue;
    pen.beginPath();
    pen.moveTo(x(at) - 4, row * ROW);
    pen.lineTo(x(at) + 4, row * ROW);
    pen.lineTo(x(at), row * ROW + 8);
    pen.fill();
  }
}

function showTooltip(event) {
  const { last, x } = timeline();
  const row = Math.floor(event.offsetY / ROW);
  const name = past.rows[row];
  const fault = past.faults.find(([of, at]) => of === row && Math.abs(x(at) - event.offsetX) < 5);
  const found = past.spans.find(([, began, ended, blocks]) => x(began) <= event.offsetX && event.offsetX <= x(ended ?? last) &&
    blocks.some(([top, bottom]) => top <= row && row <= bottom));
  $("canvas").title = fault ? `${name}: the fault before group ${fault[2]}, ${clock(fault[1])}`
    : found ? `${name}: ${found[0]} from ${clock(found[1])} for ${duration((found[2] ?? last) - found[1])}` : "";
}

function showLegend() {
  const all = [...STATES, "fault"].map((state) => make("span", {}, make("i", { class: `swatch ${state}` }), state));
  $("legend").replaceChildren(...all);
}

// Nodes and ranks

function showNodes() {
  const { status } = job;
  const stalled = new Map(status.stalls.map((stall) => [stall.rank, stall]));
  const first = (node) => (node.ranks.length ? node.ranks[0] : Infinity);
  const nodes = [...status.nodes].sort((a, b) => first(a) - first(b) || a.node_id.localeCompare(b.node_id));
  const rows = nodes.map((node) => nodeRow(node, stalled));
  const body = $("nodes");
  while (body.children.length > rows.length) body.lastChild.remove();
  // Unchanged cells stay: a user may be selecting text in them.
  rows.forEach((row, place) => {
    const old = body.children[place];
    if (!old) body.append(row);
    else [...row.children].forEach((cell, column) => old.children[column].isEqualNode(cell) || old.children[column].replaceWith(cell));
  });
}

function nodeRow(node, stalled) {
  const live = ranks[node.node_id];
  const known = new Map(live && live.group === job.status.group ? live.ranks.map((rank) => [rank[0], rank]) : []);
  const chips = node.ranks.map((rank) => rankChip(rank, known.get(rank), stalled.get(rank)));
  const notes = [node.is_leader ? "leader" : "", node.has_finished ? "finished" : ""].filter(Boolean).join(", ");
  return make("tr", {},
    make("td", {}, node.node_id),
    make("td", {}, node.address),
    make("td", {}, ...(chips.length ? chips : [job.status.state === "training" && !node.note ? "spare" : "–"])),
    make("td", {}, node.standby),
    make("td", {}, notes, node.note ? make("div", { class: "note" }, node.note) : ""));
}

function rankChip(rank, known, stall) {
  const state = stall ? "stalled" : known ? known[2] : "unknown";
  const step = known ? known[1] : stall ? stall.step : "–";
  const what = stall ? `no step for ${duration(stall.for_s)}: ${stall.doing} ${stall.where}` : RANKS[state];
  return make("span", { class: `rank ${state}` }, make("b", {}, String(rank)), ` ${step}`, what ? ` ${what}` : "");
}

// The log of a rank

let isReadingLog = false;

function showLogRanks() {
  const select = $("log-rank");
  if (select.length - 1 === job.status.world_size) return;
  const chosen = select.value;
  const options = [...Array(job.status.world_size).keys()].map((rank) => make("option", { value: rank }, String(rank)));
  select.replaceChildren(make("option", { value: "" }, "none"), ...options);
  select.value = Number(chosen) < job.status.world_size ? chosen : "";
}

async function showLog() {
  const rank = $("log-rank").value;
  $("log").hidden = !rank;
  if (!rank) $("log-error").textContent = "";
  if (!rank || isReadingLog || document.hidden) return;
  isReadingLog = true;
  const answer = await fetch(`/log?rank=${rank}`).catch(() => null);
  const text = answer && answer.ok ? await answer.text() : null;
  const error = text === null && answer ? (await answer.json()).error : "";
  isReadingLog = false;
  if (rank !== $("log-rank").value) {
    showLog();
    return;
  }
  $("log-error").textContent = error;
  const log = $("log");
  if (text === null || text === log.textContent) return;
  const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.textContent = text;
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

// Incidents

function showIncidents() {
  const shown = [...document.querySelectorAll("#incidents details")];
  const open = new Set(shown.filter((each) => each.open).map((each) => each.dataset.group));
  const focused = document.activeElement.closest("#incidents details")?.dataset.group;
  $("incidents").replaceChildren(...past.incidents.map((each) => incident(each, open)));
  if (focused) document.querySelector(`#incidents details[data-group="${focused}"] summary`)?.focus();
  $("cut").textContent = past.incidents.length >= 50 ? `The newest ${past.incidents.length}.` : "";
}

function incident(data, open) {
  const downtime = data.downtime_s ? `, ${duration(data.downtime_s)}` : "";
  const steps = data.replayed_steps;
  const replayed = data.is_at_least ? ", replayed steps not known" : steps ? `, ${steps} replayed step${steps === 1 ? "" : "s"}` : "";
  const head = make("summary", {}, `group ${data.group}, ${moment(data.at)}: `,
    make("span", { class: data.is_planned ? "cause" : "cause fault" }, data.cause), `, ${data.reason}${downtime}${replayed}`);
  const all = Object.values(data.downtime_by_phase).reduce((sum, part) => sum + part, 0);
  const bars = PHASES.filter((name) => data.downtime_by_phase[name]).map((name) => {
    const bar = make("span", { class: name.slice(0, -2).replace("_", "-"), title: `${name.slice(0, -2).replace("_", " ")} ${duration(data.downtime_by_phase[name])}` });
    bar.style.flexGrow = String(data.downtime_by_phase[name] / all);
    return bar;
  });
  const whole = make("details", { "data-group": String(data.group) }, head,
    make("div", { class: "parts", "aria-hidden": "true" }, ...bars), make("pre", {}, data.sentences.join("\n")));
  whole.open = open.has(String(data.group));
  return whole;
}

// Live updates

function showNow(update) {
  ranks = update.nodes;
  addSample(update.sample);
  skew = update.sample[0] - Date.now() / 1000;
  if (!job) return;
  job.goodput = update.sample[2];
  showNumbers();
  showNodes();
  if (past) showTimeline();
  chart.setData(samples);
  showLog();
  Object.entries(update.points).forEach(([name, point]) => {
    const points = curves.get(name)?.points || [];
    if (point[0] > (points.at(-1)?.[0] || 0)) points.push(point);
    showCurve(name, points);
  });
}

function addSample([at, rate]) {
  if (at <= (samples[0].at(-1) || 0)) return;
  samples[0].push(at);
  samples[1].push(rate);
  if (samples[0].length > 900) samples.forEach((column) => column.shift());
}

function showSamples(all) {
  samples = [all.map((each) => each[0]), all.map((each) => each[1])];
  if (!chart) chart = makeRateChart();
  chart.setData(samples);
}

const allCharts = () => [chart, ...[...curves.values()].map((curve) => curve.chart)].filter(Boolean);

function makeRateChart() {
  const scales = { y: { range: (_self, _min, max) => [0, Math.max(1, max * 1.1)] } };
  return makeChart(samples, $("rate"), { scales }, { fill: `${colour("training")}33` });
}

function makeChart(data, element, options, series) {
  const axis = { stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
  return new uPlot({
    width: Math.max(280, element.clientWidth), height: 170,
    legend: { show: false }, cursor: { drag: { x: false, y: false } },
    axes: [axis, { ...axis, size: 62 }],
    series: [{}, { stroke: colour("training"), width: 2, points: { show: false }, ...series }],
    hooks: { draw: [markIncidents] },
    ...options,
  }, data, element);
}

// A line where each incident began that is within the chart
function markIncidents(plot) {
  const { ctx, bbox, scales } = plot;
  for (const { began_at, is_planned } of past ? past.incidents : []) {
    if (began_at < scales.x.min || began_at > scales.x.max) continue;
    ctx.fillStyle = colour(is_planned ? "planned" : "fault");
    ctx.fillRect(plot.valToPos(began_at, "x", true), bbox.top, devicePixelRatio, bbox.height);
  }
}

// The curves of the metrics

function showCurves(all) {
  curves.forEach((curve) => curve.chart.destroy());
  curves.clear();
  $("metrics").replaceChildren();
  $("curves").hidden = true;
  Object.entries(all).forEach(([name, points]) => showCurve(name, points));
}

function showCurve(name, points) {
  const columns = [points.map((point) => point[0]), points.map((point) => point[3])];
  if (!curves.has(name)) {
    $("curves").hidden = false;
    const title = make("h3", {});
    const figure = make("div", { class: "figure", role: "img", "aria-label": `${name} over time` });
    $("metrics").append(make("div", { class: "metric" }, title, figure));
    curves.set(name, { points, title, figure, chart: makeChart(columns, figure, {}, {}) });
  }
  const { title, chart: shown } = curves.get(name);
  const [, , step, value] = points.at(-1);
  title.textContent = `${name}: ${value === null ? "not finite" : Number(value.toPrecision(5))} at step ${step}`;
  shown.setData(columns);
}

function redraw() {
  if (!chart) return;
  chart.destroy();
  chart = makeRateChart();
  showCurves(Object.fromEntries([...curves].map(([name, curve]) => [name, curve.points])));
  if (past) showTimeline();
}

// The connection

function connect() {
  const source = new EventSource("/events");
  const on = (kind, show) => source.addEventListener(kind, (event) => {
    updatedAt = Date.now();
    show(JSON.parse(event.data));
    showLive();
  });
  $("entry").hidden = true;
  $("job").hidden = false;
  on("samples", showSamples);
  on("curves", showCurves);
  on("present", showPresent);
  on("past", showPast);
  on("ranks", showNow);
  on("alive", () => {});
  source.onerror = () => {
    showLive();
    if (source.readyState === EventSource.CLOSED) reconnect();
  };
}

async function reconnect() {
  const answer = await fetch("/session").catch(() => null);
  if (answer && answer.status === 401) {
    askForToken();
    return;
  }
  connectionState = !answer ? "the server does not answer" : answer.ok ? "too many browsers follow the page" : (await answer.json()).error;
  showLive();
  setTimeout(connect, 2000);
}

function showLive() {
  const isLive = Date.now() - updatedAt < LIVE_WITHIN_MS;
  const text = isLive ? "live"
    : updatedAt ? `not connected: as of ${new Date(updatedAt).toLocaleTimeString()}` : connectionState;
  if ($("live").textContent !== text) $("live").textContent = text;
  $("live").className = isLive ? "faint" : "lost";
}

function askForToken() {
  $("job").hidden = true;
  $("entry").hidden = false;
  $("token").focus();
}

async function post(path, content) {
  const answer = await fetch(path, {
    method: "POST", body: JSON.stringify(content),
    headers: { "Content-Type": "application/json", "X-Elastic-Agent": "page" },
  });
  const body = answer.status === 204 ? {} : await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.error), { status: answer.status });
  return body;
}

async function enter(token) {
  clearTimeout(nextEntry);
  try {
    await post("/session", { token });
    $("refused").textContent = "";
    $("token").value = "";
    connect();
  } catch (error) {
    askForToken();
    $("token").value = token;
    $("refused").textContent = error.message;
    if (error.status === NOT_YET) nextEntry = setTimeout(() => enter($("token").value), ENTER_AGAIN_MS);
  }
}

async function scale(np) {
  $("scaled").className = "";
  try {
    const done = await post("/np", { np });
    $("scaled").textContent = done.np === done.np_before ? `np is ${done.np} already` : `np ${done.np_before} → ${done.np}`;
  } catch (error) {
    $("scaled").className = "error";
    $("scaled").textContent = error.message;
  }
}

$("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  enter($("token").value);
});
$("token").addEventListener("input", () => clearTimeout(nextEntry));
$("scale").addEventListener("submit", (event) => {
  event.preventDefault();
  scale($("np").value);
});
$("canvas").addEventListener("mousemove", (event) => past && showTooltip(event));
$("log-rank").addEventListener("change", showLog);
$("span").addEventListener("change", () => past && showTimeline());
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
setInterval(showLive, 1000);
showLegend();

// `#token=…`, as `elastic-agent page` prints it, is never sent with a request, and is removed from the address at once.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  history.replaceState(null, "", location.pathname);
  enter(given);
} else {
  fetch("/session").then((answer) => (answer.ok || answer.status === NOT_YET ? connect() : askForToken()));
}
