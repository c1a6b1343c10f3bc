// Generations as bands, operations as bars under them, pauses as needles: all over one axis of time.

import { ago, bytes, choice, el, millis, plural, say, svg } from "./paint.js";

const [LEFT, RIGHT] = [84, 12];
const BAND = { y: 8, h: 26 };
const DRAIN = { y: 37, h: 7 };
const BARS = { y: 58, h: 20, pitch: 25, most: 4 };
const NEEDLES = { h: 46 };

export class Timeline {
  constructor(model) {
    this.model = model;
    this.span = 300;
    this.holder = document.getElementById("timeline-chart");
    this.note = document.getElementById("timeline-note");
    this.retired = new Map(); // generation -> when it was first seen retired, or gone
    choice(document.getElementById("timeline-span"), [[60, "1 min"], [300, "5 min"], [1800, "30 min"]], this.span, (span) => {
      this.span = span;
      this.draw();
    });
  }

  draw() {
    const { model } = this;
    if (!model.doc?.headline) return;
    const now = model.now();
    const begin = now - this.span;
    const width = Math.max(280, this.holder.clientWidth);
    const x = (at) => LEFT + ((at - begin) / this.span) * (width - LEFT - RIGHT);
    const generations = this.generations(now);
    const { lanes, shown } = this.lanes(begin, now);
    const needles = BARS.y + Math.max(1, lanes) * BARS.pitch + 8;
    const height = needles + NEEDLES.h + 24;
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": this.summary(generations, shown) });
    chart.append(patterns());
    this.axis(chart, begin, now, x, height, width);
    const labels = [["generations", BAND.y + 17], ["draining", DRAIN.y + 7], ["changes", BARS.y + 14], ["pauses", needles + NEEDLES.h - 4]];
    for (const [text, y] of labels) chart.append(svg("text", { class: "lane", x: 0, y }, text));
    for (const each of generations) this.band(chart, each, begin, x);
    for (const each of shown) this.bar(chart, each, begin, now, x);
    this.needles(chart, begin, x, needles);
    this.holder.replaceChildren(chart);
    const newest = generations.at(-1);
    say(this.note, newest ? `generation ${newest.number} serves${Number.isFinite(newest.from) ? `, for ${ago(now - newest.from)} now` : ""}` : "");
  }

  /** When each generation served, and until when it drained: [{number, from, to, drained}]. */
  generations(now) {
    const { switches = [], generations = [], headline } = this.model.doc;
    const taken = new Map();
    for (const each of switches) taken.set(each.generation, Math.min(each.at, taken.get(each.generation) ?? Infinity));
    const states = new Map(generations.map((each) => [each.generation, each.state]));
    const numbers = [...new Set([...taken.keys(), ...states.keys(), headline.generation])].filter((n) => n > 0).sort((a, b) => a - b);
    return numbers.map((number, i) => {
      const next = numbers.slice(i + 1).find((each) => taken.has(each));
      const to = next === undefined ? Infinity : taken.get(next);
      const gone = states.get(number) !== "DRAINING" && to < Infinity;
      if (gone && !this.retired.has(number)) this.retired.set(number, this.model.seen.get(number) === -Infinity ? to : now);
      const from = taken.get(number) ?? (this.model.seen.get(number) || -Infinity);
      return { number, from: i === 0 && !taken.has(number) ? -Infinity : from, to, drained: gone ? this.retired.get(number) : Infinity };
    });
  }

  /** Operations in view, each with a lane of its own while it lasts. */
  lanes(begin, now) {
    const ends = [];
    const shown = [];
    for (const each of this.model.doc.operations ?? []) {
      const end = each.ended_at || now;
      if (end < begin) continue;
      let lane = ends.findIndex((busy) => busy <= each.asked_at);
      if (lane < 0) lane = ends.length < BARS.most ? ends.length : BARS.most - 1;
      ends[lane] = Math.max(end, each.asked_at + this.span * 0.16); // room for its label
      shown.push({ ...each, lane, end });
    }
    return { lanes: ends.length, shown };
  }

  axis(chart, begin, now, x, height, width) {
    const step = this.span <= 60 ? 10 : this.span <= 300 ? 60 : 300;
    for (let back = 0; back <= this.span; back += step) {
      const at = Math.round(x(now - back)) + 0.5;
      chart.append(svg("line", { class: "tick", x1: at, x2: at, y1: 4, y2: height - 18 }));
      const anchor = back === 0 ? "end" : at < LEFT + 14 ? "start" : "middle";
      const text = back === 0 ? "now" : `−${back < 120 && step < 60 ? `${back} s` : `${back / 60} min`}`;
      if (width > 500 || (back / step) % 2 === 0) chart.append(svg("text", { class: "axis", x: at, y: height - 4, "text-anchor": anchor }, text));
    }
  }

  band(chart, { number, from, to, drained }, begin, x) {
    const end = Math.min(to, begin + this.span);
    const left = x(Math.max(from, begin));
    if (end > begin && end > from) {
      const w = Math.max(2, x(end) - left - 1);
      chart.append(svg("rect", { class: `band ${number % 2 ? "odd" : "even"}${to === Infinity ? " active" : ""}`, x: left, y: BAND.y, width: w, height: BAND.h, rx: 3 },
        svg("title", {}, `generation ${number}`)));
      if (w > 30) chart.append(svg("text", { class: "bandlabel", x: left + 7, y: BAND.y + 17 }, w > 96 ? `generation ${number}` : `g${number}`));
      else if (w > 13) chart.append(svg("text", { class: "bandlabel small", x: left + 2, y: BAND.y + 17 }, String(number)));
    }
    const until = Math.min(drained, begin + this.span);
    if (to < begin + this.span && until > begin) {
      const start = x(Math.max(to, begin));
      chart.append(svg("rect", { class: "drain", x: start, y: DRAIN.y, width: Math.max(2, x(until) - start), height: DRAIN.h, rx: 2 },
        svg("title", {}, `generation ${number} drained`)));
    }
  }

  bar(chart, each, begin, now, x) {
    const left = x(Math.max(each.asked_at, begin));
    const w = Math.max(4, x(each.end) - left);
    const y = BARS.y + each.lane * BARS.pitch;
    const text = `${MARKS[each.kind] ?? "·"} ${each.number} ${each.kind}${each.ended_at ? "" : ` ${each.stage}`}`;
    const moved = Object.values(each.moved_bytes).reduce((a, b) => a + b, 0);
    const more = [moved ? bytes(moved) : "", OUTCOMES[each.stage] ?? ""].filter(Boolean).join(", ");
    chart.append(svg("g", { class: `operation ${each.kind} ${each.ended_at ? each.stage : "open"}` },
      svg("title", {}, `${text} ${more}\n${durations(each, now)}`),
      svg("rect", { class: "shape", x: left, y, width: w, height: BARS.h, rx: 3 }),
      svg("rect", { class: "texture", x: left, y, width: w, height: BARS.h, rx: 3 }),
      ...stages(each, now).filter(({ to }) => to > begin).map(({ stage, from, to }) =>
        svg("rect", { class: `stage ${stage}`, x: x(Math.max(from, begin)), y: y + BARS.h - 5, width: Math.max(0.5, x(to) - x(Math.max(from, begin))), height: 4 })),
      ...label(left, w, y + 14, `${text}${more ? ` · ${more}` : ""}`, x(now))));
  }

  /** One needle for each switch: as high as the longest that a rank's step took longer for it. */
  needles(chart, begin, x, y) {
    const pauses = new Map();
    for (const each of this.model.doc.switches ?? []) {
      const held = pauses.get(each.generation);
      if (each.at >= begin && (!held || each.seconds > held.seconds)) pauses.set(each.generation, each);
    }
    const most = Math.max(...[...pauses.values()].map((each) => each.seconds), 1e-4);
    const base = y + NEEDLES.h;
    chart.append(svg("line", { class: "base", x1: LEFT, x2: x(begin + this.span), y1: base + 0.5, y2: base + 0.5 }));
    let right = -Infinity;
    for (const each of [...pauses.values()].sort((a, b) => a.at - b.at)) {
      const [at, top] = [x(each.at), base - 8 - (each.seconds / most) * (NEEDLES.h - 24)];
      const needle = svg("g", { class: "needle" }, svg("title", {}, `generation ${each.generation}: ${millis(each.seconds)} on rank ${each.rank}`),
        svg("line", { x1: at, x2: at, y1: base, y2: top }), svg("circle", { cx: at, cy: top, r: 3.5 }));
      const text = millis(each.seconds);
      const needs = text.length * 7 + 8;
      const end = at + needs > x(begin + this.span);
      if ((end ? at - needs : at) > right) {
        needle.append(svg("text", { x: at + (end ? -7 : 7), y: top + 4, "text-anchor": end ? "end" : "start" }, text));
        right = (end ? at : at + needs) + 4;
      }
      chart.append(needle);
    }
    if (!pauses.size) chart.append(svg("text", { class: "axis", x: LEFT + 8, y: base - 8 }, "no switch in this time"));
  }

  summary(generations, shown) {
    return `${plural(generations.length, "generation")}, ${plural(shown.length, "change")} in the last ${ago(this.span)}`;
  }
}

/** [{stage, from, to}] of an operation: how long it was in each. */
function stages(each, now) {
  const edges = each.trail ?? [];
  const found = [];
  let [stage, from] = [each.kind === "grow" ? "preparing" : "queued", edges[0]?.number > 1 ? null : each.asked_at];
  for (const edge of edges) {
    if (from !== null) found.push({ stage, from, to: edge.at });
    [stage, from] = [edge.stage, edge.at];
  }
  if (!each.ended_at && from !== null) found.push({ stage, from, to: now });
  return found;
}

/** `filling 1.2 s, switching 31 ms`: what took a tenth of a second, or a twentieth of the whole. */
function durations(each, now) {
  const sums = new Map();
  for (const { stage, from, to } of stages(each, now)) sums.set(stage, (sums.get(stage) ?? 0) + Math.max(0, to - from));
  const whole = [...sums.values()].reduce((a, b) => a + b, 0);
  return [...sums].filter(([, seconds]) => seconds >= Math.min(0.1, whole / 20)).map(([stage, seconds]) => `${stage} ${millis(seconds)}`).join(", ");
}

export const MARKS = { rebalance: "⇄", grow: "+", shrink: "−" };
export const OUTCOMES = { failed: "failed", cancelled: "cancelled" };

/** Inside its bar where it fits, else to the right of it, else to the left. */
function label(left, width, y, text, edge) {
  const needs = text.length * 6.3 + 12;
  if (width > needs) return [svg("text", { class: "inside", x: left + 7, y }, text)];
  if (left + width + needs < edge + 4) return [svg("text", { class: "beside", x: left + width + 5, y }, text)];
  return [svg("text", { class: "beside", x: left - 5, y, "text-anchor": "end" }, text)];
}

function patterns() {
  const hatch = (id, d, size = 8) => svg("pattern", { id, width: size, height: size, patternUnits: "userSpaceOnUse" },
    svg("path", { d, class: "hatch" }));
  return svg("defs", {}, hatch("hatch", "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4"), hatch("cross", "M0,8 l8,-8 M0,0 l8,8"),
    hatch("dots", "M2,3 h2 M6,7 h2", 8));
}

/** The list of changes beside the charts. */
export function listOperations(model) {
  const list = document.getElementById("operations-list");
  const operations = [...(model.doc.operations ?? [])].reverse();
  const open = operations.filter((each) => !each.ended_at).length;
  say(document.getElementById("operations-note"), open ? `${plural(open, "change")} under way` : "nothing is under way");
  if (!operations.length) {
    list.replaceChildren(el("li", { class: "dim" }, "None yet. ", el("code", {}, "ray-moe rebalance"), " asks for one."));
    return;
  }
  list.replaceChildren(...operations.slice(0, 12).map((each) => operation(each, model.now())));
}

function operation(each, now) {
  const what = `${each.kind}${each.ranks.length ? ` ${each.kind === "grow" ? "by" : "of"} ${each.ranks.length === 1 ? "rank" : "ranks"} ${each.ranks.join(", ")}` : ""}`;
  const moved = Object.entries(each.moved_bytes).filter(([, size]) => size)
    .map(([source, size]) => `${bytes(size)} from ${source === "peer" ? "peers" : "the checkpoint"}`).join(", ");
  const took = `${((each.ended_at || now) - each.asked_at).toFixed(1)} s`;
  const facts = [
    each.to_generation ? `generation ${each.from_generation} → ${each.to_generation}` : "",
    each.waves > 1 && !each.ended_at ? `wave ${each.wave} of ${each.waves}` : "",
    moved, took, each.stage === "done" && each.to_generation ? `pause ${millis(each.pause_s)}` : "",
  ].filter(Boolean).join(" · ");
  return el("li", { class: `change ${each.ended_at ? each.stage : "open"}` },
    el("span", { class: "mark", "aria-hidden": "true" }, MARKS[each.kind] ?? "·"),
    el("div", {},
      el("p", {}, el("b", {}, `${each.number} ${what}`), " ", el("span", { class: "stage" }, each.stage)),
      el("p", { class: "dim" }, facts),
      el("p", { class: "dim" }, durations(each, now)),
      each.waits_for ? el("p", { class: "waits" }, `waits for ${each.waits_for}`) : "",
      each.reason ? el("p", { class: "reason" }, each.reason) : "",
      el("p", { class: "dim who" }, `${each.asked_by}${each.why ? `: ${each.why}` : ""}, ${ago(now - each.asked_at)} ago`)));
}
