// Figures at a glance, the board of failures, the table of ranks.

import { ago, bytes, colours, el, millis, percent, plural, ratio, say, short, sized, whole } from "./paint.js";

// -- Figures

const FIGURES = [
  ["tokens", "tokens a second"],
  ["steps", "step, half under"],
  ["gap", "longest step"],
  ["requests", "requests"],
  ["kv", "KV cache"],
  ["balance", "busiest rank"],
  ["generation", "generation"],
];

export class Figures {
  constructor(model) {
    this.model = model;
    this.nodes = {};
    document.getElementById("figures").replaceChildren(...FIGURES.map(([name, label]) => {
      const parts = { value: el("b", {}, "–"), note: el("span", { class: "dim" }), extra: name === "tokens" ? el("canvas", { "aria-hidden": "true" }) : el("i", { class: "meter" }) };
      this.nodes[name] = parts;
      return el("div", { class: `figure ${name}` }, el("span", { class: "label" }, label), parts.value, parts.note, ["tokens", "kv"].includes(name) ? parts.extra : "");
    }));
  }

  draw(stats) {
    const { model } = this;
    const { ranks = [], headline, balance, generations = [] } = model.doc;
    const sum = (name) => ranks.reduce((total, each) => total + (each[name] || 0), 0);
    this.put("tokens", short(model.rate(model.totals.length - 1)), `${short(sum("tokens_emitted"))} in all`);
    this.sparkline();
    this.put("steps", stats?.n ? millis(stats.median) : "–", stats?.n ? `95 % under ${millis(stats.p95)}` : "none lately");
    this.put("gap", stats?.n ? millis(stats.longest.seconds) : "–", stats?.n ? `on rank ${stats.longest.rank}` : "");
    this.put("requests", whole.format(sum("running")), `${whole.format(sum("waiting"))} waiting, ${short(sum("outstanding_tokens"))} tokens owed`);
    const [used, total] = [sum("kv_blocks_used"), sum("kv_blocks_total")];
    this.put("kv", total ? percent(used / total) : "–", `${short(used)} of ${short(total)} blocks`);
    this.nodes.kv.extra.style.setProperty("--part", total ? used / total : 0);
    const worst = balance ? Math.max(...balance.imbalance) : 0;
    const mean = balance ? balance.imbalance.reduce((a, b) => a + b, 0) / balance.imbalance.length : 0;
    this.put("balance", balance ? ratio2(worst) : "–", balance ? `the mean, in the least even layer; ${ratio2(mean)} on average` : "no demand yet");
    const draining = generations.filter((each) => each.state === "DRAINING").length;
    this.put("generation", String(Math.max(headline.generation, 0)), `epoch ${headline.epoch}${draining ? `, ${draining} draining` : ""}`);
  }

  put(name, value, note) {
    say(this.nodes[name].value, value);
    say(this.nodes[name].note, note);
  }

  sparkline() {
    const canvas = this.nodes.tokens.extra;
    const width = canvas.parentElement.clientWidth - 28;
    const context = sized(canvas, width, 26);
    const { totals } = this.model;
    const last = totals[totals.length - 1]?.at ?? 0;
    const points = totals.map((each, i) => [1 - (last - each.at) / 120, i ? this.model.rate(i) : 0]).filter(([x]) => x >= 0);
    if (points.length < 3) return;
    const most = Math.max(...points.map(([, rate]) => rate), 1);
    const at = ([x, rate]) => [x * width, 24 - (22 * rate) / most];
    const colour = colours();
    context.beginPath();
    context.moveTo(at(points[0])[0], 25);
    for (const point of points) context.lineTo(...at(point));
    context.lineTo(at(points.at(-1))[0], 25);
    context.fillStyle = colour.accent;
    context.globalAlpha = 0.18;
    context.fill();
    context.globalAlpha = 1;
    context.beginPath();
    points.forEach((point, i) => (i ? context.lineTo(...at(point)) : context.moveTo(...at(point))));
    context.strokeStyle = colour.accent;
    context.lineWidth = 1.5;
    context.stroke();
  }
}

const ratio2 = (value) => `${value.toFixed(2)}×`;

// -- Failures

const OUTCOMES = {
  unnoticed: ["✓", "Requests go on"],
  restart: ["↻", "Ends the epoch"],
  too_small: ["✕", "Ends it, and too few slots are left"],
};

export function drawBoard(model) {
  const where = document.getElementById("board-list");
  const text = JSON.stringify(model.doc.survival ?? []);
  if (where.dataset.shown === text) return;
  where.dataset.shown = text;
  const failures = model.doc.survival ?? [];
  if (!failures.length) {
    where.replaceChildren(el("p", { class: "dim" }, "Known once the cluster serves."));
    return;
  }
  const groups = Object.keys(OUTCOMES).map((outcome) => [outcome, failures.filter((each) => each.outcome === outcome)]).filter(([, some]) => some.length);
  where.replaceChildren(...groups.map(([outcome, some]) => {
    const [mark, title] = OUTCOMES[outcome];
    const most = (kind) => Math.max(...some.filter((each) => each.kind === kind).map((each) => each.copies), 1);
    return el("section", { class: `outcome ${outcome}` },
      el("h3", {}, el("span", { class: "mark", "aria-hidden": "true" }, mark), title, el("span", { class: "dim" }, ` · ${some.length}`)),
      outcome === "unnoticed" ? "" : el("p", { class: "dim" }, some[0].costs),
      el("ul", {}, ...some.map((each) => failure(each, most(each.kind), outcome === "unnoticed" || each.costs !== some[0].costs))));
  }));
}

function failure(each, most, withCosts) {
  const parts = [el("p", {}, el("b", {}, each.name))];
  if (each.copies) {
    const shares = el("span", { class: "shares", role: "img", "aria-label": `${each.elsewhere} of ${each.copies} copies are elsewhere too` },
      el("i", { class: "elsewhere" }), el("i", { class: "alone" }));
    shares.children[0].style.width = `${(100 * each.elsewhere) / most}%`;
    shares.children[1].style.width = `${(100 * each.only_here) / most}%`;
    parts[0].append(shares);
  }
  if (withCosts) parts.push(el("p", { class: "dim" }, each.costs));
  parts.push(el("p", { class: "dim" }, `${each.comes_back[0].toUpperCase()}${each.comes_back.slice(1)}.`));
  return el("li", {}, ...parts);
}

// -- Ranks

const STATES = { serving: ["●", "good"], sleeping: ["●", "good"], joining: ["◐", "warm"], leaving: ["◑", "warm"], left: ["○", "dim"], lost: ["✕", "bad"], failed: ["✕", "bad"], stopped: ["○", "dim"] };
const WORDS = { sleeping: "idle" };
const COLUMNS = [
  ["rank", (each) => String(each.rank)],
  ["node", (each) => each.node || "–"],
  ["state", state],
  ["requests", (each) => (each.waiting ? `${each.running} + ${each.waiting} waiting` : String(each.running))],
  ["tokens/s", (each, model) => short(model.rankRate(each.rank, "tokens_emitted"))],
  ["KV", (each) => (each.kv_blocks_total ? percent(each.kv_blocks_used / each.kv_blocks_total) : "–")],
  ["slow step", (each) => (each.slow_step_seconds ? millis(each.slow_step_seconds) : "–")],
  ["agreeing", (each) => (each.seconds_worked ? percent(each.seconds_agreeing / each.seconds_worked) : "–")],
  ["sent/s", (each, model) => `${bytes(model.rankRate(each.rank, "bytes_sent"))}`],
  ["slots", (each) => bytes(each.resident_bytes)],
  ["generation", (each) => (each.generation ? `${each.generation}` : "–")],
  ["step", (each) => (each.committed_step >= 0 ? whole.format(each.committed_step) : "–")],
];

function state(each, model) {
  const [mark, colour] = STATES[each.state] ?? ["●", "dim"];
  const late = each.seen_at && each.state !== "lost" ? model.doc.at - each.seen_at : 0;
  const loading = each.loading[0] && each.state === "joining" ? ` ${each.loading[0]}${each.loading[2] ? ` ${each.loading[1]}/${each.loading[2]}` : ""}` : "";
  return [mark, colour, `${WORDS[each.state] ?? each.state}${loading}${late > 2 ? `, silent for ${ago(late)}` : ""}${each.detail ? `: ${each.detail}` : ""}`];
}

export function drawRanks(model) {
  const { ranks = [] } = model.doc;
  const head = document.getElementById("ranks-head");
  if (!head.children.length) head.append(...COLUMNS.map(([name]) => el("th", { scope: "col" }, name)));
  const body = document.getElementById("ranks-body");
  while (body.children.length > ranks.length) body.lastChild.remove();
  while (body.children.length < ranks.length) {
    body.append(el("tr", {}, ...COLUMNS.map(([name]) => (name === "rank" ? el("th", { scope: "row", "data-label": name }) : el("td", { "data-label": name })))));
  }
  ranks.forEach((each, i) => {
    COLUMNS.forEach(([name, text], at) => {
      const cell = body.children[i].children[at];
      const value = text(each, model);
      if (!Array.isArray(value)) {
        say(cell, value);
        return;
      }
      const [mark, colour, words] = value;
      if (cell.dataset.words === words + colour) return;
      cell.dataset.words = words + colour;
      cell.replaceChildren(el("span", { class: `state ${colour}`, "aria-hidden": "true" }, mark), ` ${words}`);
    });
  });
  const serving = ranks.filter((each) => ["serving", "sleeping"].includes(each.state)).length;
  say(document.getElementById("ranks-note"), `${serving} of ${ranks.length} serve; totals are each rank’s own since it started`);
}
