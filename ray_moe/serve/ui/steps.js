// Step times as they happen: every column of pixels shows the steps that ended in it, the fastest to the slowest.

import { choice, colours, millis, plural, say, sized } from "./paint.js";
import { quantile } from "./model.js";

const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [46, 8, 24, 20, 236];
const LATE_S = 0.7; // what has ended is known so much later: the chart ends there

export class Steps {
  constructor(model) {
    this.model = model;
    this.span = 60;
    this.stats = null;
    this.canvas = document.getElementById("steps-chart");
    this.note = document.getElementById("steps-note");
    choice(document.getElementById("steps-span"), [[20, "20 s"], [60, "1 min"], [300, "5 min"]], this.span, (span) => {
      this.span = span;
      this.count();
      this.draw();
    });
  }

  /** Once for each event: what the numbers are. */
  count() {
    const steps = this.model.recent(this.span);
    const seconds = steps.map((each) => each.seconds).sort((a, b) => a - b);
    const median = quantile(seconds, 0.5);
    const limit = Math.max(3 * median, median + 0.003);
    const longest = steps.reduce((most, each) => (each.seconds > most.seconds ? each : most), { seconds: 0, rank: 0 });
    this.stats = { n: seconds.length, median, p95: quantile(seconds, 0.95), p99: quantile(seconds, 0.99), limit, longest };
    const { n, p95 } = this.stats;
    say(this.note, n
      ? `half of them under ${millis(median)}, 95 % under ${millis(p95)}; longest ${millis(longest.seconds)} on rank ${longest.rank}`
      : "No step has run in this time: nobody asks for anything.");
    return this.stats;
  }

  draw() {
    const { stats, model, canvas } = this;
    if (!stats || !model.doc) return;
    const colour = colours();
    const width = canvas.parentElement.clientWidth;
    if (width < LEFT + RIGHT + 50) return; // it is not shown
    const context = sized(canvas, width, HEIGHT);
    const plot = { x: LEFT, y: TOP, w: width - LEFT - RIGHT, h: HEIGHT - TOP - BOTTOM };
    const end = model.now() - LATE_S;
    const begin = end - this.span;
    const top = Math.max(2.2 * stats.median, 1.25 * stats.p99, 1e-3);
    const x = (at) => plot.x + ((at - begin) / this.span) * plot.w;
    const y = (seconds) => plot.y + plot.h * (1 - Math.min(seconds / top, 1));
    this.axes(context, plot, top, y, colour);
    const columns = this.columns(begin, plot);
    const known = Math.max(0, ((model.began - begin) / this.span) * plot.w);
    this.idle(context, columns, Math.floor(known), plot, colour);
    this.switches(context, begin, end, x, plot, colour);
    const gaps = this.bars(context, columns, plot, y, top, colour);
    this.labels(context, gaps, plot, y, colour);
  }

  /** By column of pixels: lowest and highest step, null where none ended. */
  columns(begin, plot) {
    const columns = Array.from({ length: Math.ceil(plot.w) }, () => null);
    const scale = plot.w / this.span;
    for (const { ends, seconds } of this.model.steps.values()) {
      for (let i = ends.length - 1; i >= 0 && ends[i] >= begin; i -= 1) {
        const at = Math.floor((ends[i] - begin) * scale);
        if (at >= columns.length) continue;
        const held = columns[at];
        if (held === null) columns[at] = { low: seconds[i], high: seconds[i] };
        else {
          held.low = Math.min(held.low, seconds[i]);
          held.high = Math.max(held.high, seconds[i]);
        }
      }
    }
    return columns;
  }

  axes(context, plot, top, y, colour) {
    context.font = `10px ${colour.font}`;
    context.textBaseline = "middle";
    context.lineWidth = 1;
    const step = niceStep(top / 4);
    for (let value = 0; value <= top; value += step) {
      context.strokeStyle = colour.line;
      context.beginPath();
      context.moveTo(plot.x, Math.round(y(value)) + 0.5);
      context.lineTo(plot.x + plot.w, Math.round(y(value)) + 0.5);
      context.stroke();
      context.fillStyle = colour.dim;
      context.textAlign = "right";
      context.fillText(value === 0 ? "0" : millis(value), plot.x - 6, y(value));
    }
    context.textBaseline = "alphabetic";
    const every = this.span <= 20 ? 5 : this.span <= 60 ? 15 : 60;
    for (let back = 0; back <= this.span; back += every) {
      const at = plot.x + plot.w * (1 - back / this.span);
      context.textAlign = back === 0 ? "right" : back === this.span ? "left" : "center";
      context.fillStyle = colour.dim;
      context.fillText(back === 0 ? "now" : back < 120 ? `−${back} s` : `−${back / 60} min`, at, plot.y + plot.h + 14);
    }
  }

  /** Hatched: no step at all for more than a second. */
  idle(context, columns, known, plot, colour) {
    const least = plot.w / this.span;
    let from = known;
    const close = (to) => {
      if (to - from >= Math.max(least, 24)) {
        context.save();
        context.beginPath();
        context.rect(plot.x + from, plot.y, to - from, plot.h);
        context.clip();
        context.strokeStyle = colour.line;
        context.lineWidth = 1;
        context.beginPath();
        for (let at = from - plot.h; at < to; at += 9) {
          context.moveTo(plot.x + at, plot.y + plot.h);
          context.lineTo(plot.x + at + plot.h, plot.y);
        }
        context.stroke();
        context.restore();
        if (to - from > 60) {
          context.fillStyle = colour.dim;
          context.font = `11px ${colour.font}`;
          context.textAlign = "center";
          const [at, middle] = [plot.x + (from + to) / 2, plot.y + plot.h / 2];
          context.fillStyle = colour.surface;
          context.fillRect(at - 20, middle - 11, 40, 16);
          context.fillStyle = colour.dim;
          context.fillText("idle", at, middle + 1);
        }
      }
    };
    columns.forEach((column, at) => {
      if (column === null) return;
      close(at);
      from = at + 1;
    });
    close(columns.length);
  }

  switches(context, begin, end, x, plot, colour) {
    const first = new Map();
    for (const each of this.model.doc.switches ?? []) {
      if (each.at > begin && each.at < end && each.at < (first.get(each.generation) ?? Infinity)) first.set(each.generation, each.at);
    }
    context.font = `10px ${colour.font}`;
    let right = -Infinity;
    for (const [generation, at] of [...first].sort((a, b) => a[1] - b[1])) {
      const px = Math.round(x(at)) + 0.5;
      context.strokeStyle = colour.good;
      context.lineWidth = 1.5;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(px, plot.y - 8);
      context.lineTo(px, plot.y + plot.h);
      context.stroke();
      context.setLineDash([]);
      const text = `g${generation}`;
      if (px - right > 26) {
        context.fillStyle = colour.good;
        context.textAlign = "center";
        context.fillText(text, px, plot.y - 12);
        right = px;
      }
    }
  }

  bars(context, columns, plot, y, top, colour) {
    const gaps = [];
    const base = plot.y + plot.h;
    context.fillStyle = colour.accent;
    context.globalAlpha = 0.28;
    columns.forEach((column, at) => { if (column) context.fillRect(plot.x + at, y(column.high), 1, base - y(column.high)); });
    context.globalAlpha = 1;
    columns.forEach((column, at) => {
      if (!column) return;
      const slow = column.high > this.stats.limit;
      context.fillStyle = slow ? colour.warm : colour.accent;
      const above = y(column.high);
      context.fillRect(plot.x + at, above, slow ? 2 : 1, Math.max(2, y(column.low) - above));
      if (slow) gaps.push({ at: plot.x + at, seconds: column.high, clipped: column.high > top });
    });
    return gaps;
  }

  /** The longest gaps with their length; a triangle where one is higher than the chart. */
  labels(context, gaps, plot, y, colour) {
    context.font = `bold 10px ${colour.font}`;
    context.textBaseline = "alphabetic";
    const placed = [];
    for (const gap of [...gaps].sort((a, b) => b.seconds - a.seconds)) {
      const text = millis(gap.seconds);
      const needs = text.length * 6.5 + 8;
      const end = gap.at + 8 + needs > plot.x + plot.w;
      const at = end ? gap.at - 6 - needs : gap.at + 8;
      if (placed.length >= 6 || placed.some((other) => at < other.to && at + needs > other.from)) continue;
      placed.push({ from: Math.min(at, gap.at - 4), to: Math.max(at + needs, gap.at + 8) });
      const above = y(gap.seconds);
      context.fillStyle = colour.warm;
      if (gap.clipped) {
        context.beginPath();
        context.moveTo(gap.at - 4, above + 6);
        context.lineTo(gap.at + 1, above - 2);
        context.lineTo(gap.at + 6, above + 6);
        context.fill();
      }
      context.textAlign = "left";
      context.fillText(text, at, above + (gap.clipped ? 5 : -4));
    }
  }

  describe() {
    return this.stats?.n ? plural(this.stats.n, "step") : "";
  }
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
}
