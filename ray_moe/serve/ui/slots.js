// The replica map: every rank's slots by layer, and which expert is in each.

import { Grid } from "./grid.js";
import { choice, colours, css, el, heat, inkOn, plural, say, viridis } from "./paint.js";

const FRESH_S = 20; // how long a slot that was just filled stays marked

export class Slots {
  constructor(model, focus) {
    this.model = model;
    this.focus = focus;
    this.by = "copies";
    this.hover = null;
    this.grid = new Grid(document.getElementById("slots-map"), {
      onMove: (at) => { this.hover = at; focus.point(at && this.inside(at)); },
      onChoose: (at) => { this.hover = at; focus.choose(this.inside(at)); },
      start: () => ({ column: 0, row: 0 }),
    });
    this.line = document.getElementById("slots-line");
    choice(document.getElementById("slots-by"), [["copies", "copies"], ["load", "load"]], this.by, (by) => {
      this.by = by;
      this.draw();
    });
  }

  place({ column, row }) {
    const { placement, headline } = this.model.doc;
    const size = headline.capacity;
    const r = Math.floor(column / size);
    return { r, rank: placement.ranks[r], slot: column % size, row, expert: placement.slots_RLC[r][row][column % size] };
  }

  /** The expert in a slot, null for a free one. */
  inside(at) {
    const { expert, row } = this.place(at);
    return expert < 0 ? null : { row, expert };
  }

  draw() {
    const { model, grid } = this;
    const { placement, headline } = model.doc;
    if (!placement || !placement.slots_RLC.length) return;
    const colour = colours();
    const [ranks, size, rows] = [placement.ranks.length, headline.capacity, placement.layers.length];
    const gap = ranks > 24 ? 2 : 8;
    const context = grid.fit({ columns: ranks * size, rows, every: size, gap, least: 2.4, widest: 58, tallest: 34, height: rows > 24 ? 440 : 320 });
    grid.labelRows(context, placement.layers, colour.dim, colour.font);
    const group = size * grid.w + gap;
    const label = size * grid.w > 60 ? (rank) => `rank ${rank}` : String;
    grid.labelColumns(context, placement.ranks.map(label), (r) => grid.x(r * size) + (size * grid.w) / 2, group, colour.dim, colour.font);
    const marked = model.fresh.size > 0 && model.now() - model.freshAt < FRESH_S;
    let free = 0;
    for (let r = 0; r < ranks; r += 1) {
      for (let row = 0; row < rows; row += 1) {
        placement.slots_RLC[r][row].forEach((expert, slot) => {
          if (expert < 0) free += 1;
          this.cell(context, r * size + slot, row, expert, colour);
          if (marked && model.fresh.has(`${placement.ranks[r]} ${row} ${slot}`)) this.moved(context, r * size + slot, row, colour);
        });
      }
    }
    this.mark();
    this.describe();
    this.legend(marked);
    say(document.getElementById("slots-note"),
      `${plural(ranks, "rank")} × ${plural(size, "slot")} a layer; ${free ? plural(free, "slot") : "none"} free`);
  }

  cell(context, column, row, expert, colour) {
    const { model, grid } = this;
    const [x, y, w, h] = grid.box(column, row);
    if (expert < 0) {
      context.strokeStyle = colour.line;
      context.lineWidth = 1;
      if (w > 4 && h > 4) context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
      else {
        context.fillStyle = colour.faint;
        context.fillRect(x, y, w, h);
      }
      return;
    }
    const copies = model.ranksOf(row, expert).length;
    let ink = "#fff";
    if (this.by === "load" && model.ratios) {
      const fill = viridis(heat(model.ratios[row][expert] / copies, model.most));
      context.fillStyle = css(fill);
      ink = inkOn(fill);
    } else {
      context.fillStyle = copies > 1 ? colour.double : colour.single;
      ink = copies > 1 ? "#10151c" : "#fff";
    }
    context.fillRect(x, y, w, h);
    if (copies > 1 && w >= 5 && h >= 5) { // a stroke besides the colour
      context.strokeStyle = ink;
      context.globalAlpha = 0.55;
      context.lineWidth = Math.min(w, h) >= 14 ? 1.5 : 1;
      context.beginPath();
      context.moveTo(x, y + h);
      context.lineTo(x + Math.min(w, h * 0.5), y + h - Math.min(w, h * 0.5));
      context.stroke();
      context.globalAlpha = 1;
    }
    if (w >= 17 && h >= 13) {
      context.fillStyle = ink;
      context.font = `${h >= 22 && w >= 24 ? 12 : 10}px ${colour.font}`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(String(expert), x + w / 2, y + h / 2 + 0.5);
    }
  }

  moved(context, column, row, colour) {
    const [x, y, w, h] = this.grid.box(column, row);
    context.strokeStyle = colour.ink;
    context.lineWidth = 2;
    if (Math.min(w, h) > 8) context.setLineDash([4, 2]);
    context.strokeRect(x + 1, y + 1, Math.max(1, w - 2), Math.max(1, h - 2));
    context.setLineDash([]);
  }

  /** Every copy of what is chosen, or under the pointer. */
  mark() {
    if (!this.grid.columns) return;
    const [context, colour] = [this.grid.shown(), colours()];
    const { placement, headline } = this.model.doc;
    const at = this.focus.hover ?? this.focus.chosen;
    if (at) {
      placement.slots_RLC.forEach((layers, r) => (layers[at.row] ?? []).forEach((expert, slot) => {
        if (expert === at.expert) this.grid.outline(context, r * headline.capacity + slot, at.row, colour.ink, colour.surface);
      }));
    } else if (this.hover && this.hover.column < this.grid.columns) {
      this.grid.outline(context, this.hover.column, this.hover.row, colour.dim, colour.surface, 1);
    }
  }

  describe() {
    const { model } = this;
    if (this.hover && this.hover.column < this.grid.columns && this.hover.row < this.grid.rows) {
      const { rank, slot, row, expert } = this.place(this.hover);
      const others = model.ranksOf(row, expert).filter((each) => each !== rank);
      const copies = others.length ? `also on ${others.length === 1 ? "rank" : "ranks"} ${others.join(", ")}` : "its only copy";
      const holds = expert < 0 ? "free" : `expert ${expert}, ${copies}`;
      say(this.line, `rank ${rank} (${model.doc.placement.nodes[model.doc.placement.ranks.indexOf(rank)]}), layer ${model.layerAt(row)}, slot ${slot}: ${holds}`);
      return;
    }
    const at = this.focus.hover ?? this.focus.chosen;
    const text = at ? `layer ${model.layerAt(at.row)}, expert ${at.expert}: on ${model.ranksOf(at.row, at.expert).map((rank) => `rank ${rank}`).join(", ")}` : "";
    say(this.line, text || `generation ${model.doc.placement.generation}, ${model.doc.placement.version}`);
  }

  legend(marked) {
    const kinds = this.by === "load"
      ? [["low", "little load in the slot"], ["high", "much"]]
      : [["single", "only copy"], ["double", "one of several"]];
    const all = [...kinds, ["free", "free"], ...(marked ? [["moved", "filled just now"]] : [])];
    const where = document.getElementById("slots-legend");
    const text = all.map(([kind]) => kind).join(" ");
    if (where.dataset.kinds === text) return;
    where.dataset.kinds = text;
    where.replaceChildren(...all.map(([kind, label]) =>
      el("span", { class: "item" }, el("span", { class: `key ${kind}`, "aria-hidden": "true" }), el("span", { class: "dim" }, label))));
  }
}
