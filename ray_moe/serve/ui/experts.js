// The heat map of experts by layer, and the lists beside it.

import { Grid } from "./grid.js";
import { drawProfile } from "./profile.js";
import { colours, css, el, heat, inkOn, percent, plural, ratio, say, short, viridis } from "./paint.js";

export class Experts {
  constructor(model, focus) {
    this.model = model;
    this.focus = focus; // {chosen, hover: {row, expert} or null, choose(), point()}
    this.grid = new Grid(document.getElementById("experts-map"), {
      onMove: (at) => focus.point(at && { row: at.row, expert: at.column }),
      onChoose: (at) => focus.choose({ row: at.row, expert: at.column }),
      start: () => this.start(),
    });
    this.line = document.getElementById("experts-line");
    this.note = document.getElementById("experts-note");
  }

  start() {
    const { chosen } = this.focus;
    const first = chosen ?? this.model.hottest(1)[0] ?? (this.model.doc?.placement ? { row: 0, expert: 0 } : null);
    return first && { row: first.row, column: first.expert };
  }

  draw() {
    const { model, grid } = this;
    const { placement, loads, balance } = model.doc;
    if (!placement) {
      say(this.note, "Known once the cluster serves.");
      return;
    }
    const colour = colours();
    const [rows, columns] = [placement.layers.length, placement.num_experts];
    const context = grid.fit({ columns, rows, right: 58, height: rows > 24 ? 520 : 300, tallest: 58 });
    grid.labelRows(context, placement.layers, colour.dim, colour.font);
    const names = Array.from({ length: columns }, (_, i) => i);
    grid.labelColumns(context, names, (i) => grid.x(i) + grid.w / 2, grid.w, colour.dim, colour.font);
    for (let row = 0; row < rows; row += 1) for (let column = 0; column < columns; column += 1) this.cell(context, row, column, colour);
    if (balance) this.imbalance(context, balance.imbalance, colour);
    this.mark();
    this.describe();
    say(this.note, loads
      ? `${plural(columns, "expert")} × ${plural(rows, "layer")}, rows routed to each: an estimate up to step ${short(loads.end)}`
      : "Nothing has been routed yet: the map fills with the first requests.");
    this.legend();
  }

  cell(context, row, column, colour) {
    const { model, grid } = this;
    const [x, y, w, h] = grid.box(column, row);
    if (!model.ratios) {
      context.fillStyle = colour.faint;
      context.fillRect(x, y, w, h);
      return;
    }
    const value = model.ratios[row][column];
    const fill = viridis(heat(value, model.most));
    context.fillStyle = css(fill);
    context.fillRect(x, y, w, h);
    const copies = model.ranksOf(row, column).length;
    if (w >= 26 && h >= 14) {
      context.fillStyle = inkOn(fill);
      context.font = `${h >= 24 ? 12 : 10}px ${colour.font}`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(value < 9.95 ? value.toFixed(1) : value.toFixed(0), x + w / 2, y + h / 2);
    }
    if (copies > 1) this.copies(context, x, y, w, h, copies, inkOn(fill));
  }

  /** An expert with several copies has a notch in its corner, and their number where there is room. */
  copies(context, x, y, w, h, copies, ink) {
    const size = Math.min(w, h) >= 14 ? 10 : Math.min(w, h) * 0.6;
    context.fillStyle = ink;
    context.beginPath();
    context.moveTo(x + w, y);
    context.lineTo(x + w - size, y);
    context.lineTo(x + w, y + size);
    context.fill();
    if (w >= 40 && h >= 26) {
      context.font = `9px ${colours().font}`;
      context.textAlign = "right";
      context.textBaseline = "bottom";
      context.fillText(`${copies} copies`, x + w - 3, y + h - 2);
    }
  }

  /** Right of each layer: the busiest rank over the mean rank. */
  imbalance(context, values, colour) {
    const { grid } = this;
    const [left, room] = [grid.width - 48, 46];
    const most = Math.max(1.25, ...values);
    context.font = `10px ${colour.font}`;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.fillStyle = colour.dim;
    context.fillText("ranks", left, 13);
    values.forEach((value, row) => {
      const length = Math.max(1, ((value - 1) / (most - 1)) * room);
      const y = grid.y(row);
      context.fillStyle = value > 1.5 ? colour.warm : colour.cold;
      context.fillRect(left, y, grid.h >= 16 ? Math.min(length, room) : length, grid.h >= 16 ? 4 : Math.max(2, grid.h - 2));
      if (grid.h >= 16) {
        context.fillStyle = colour.ink;
        context.textBaseline = "top";
        context.fillText(ratio(value), left, y + 7);
      }
    });
  }

  /** What is chosen, or under the pointer; and its layer below. */
  mark() {
    if (!this.grid.columns) return;
    const [context, colour] = [this.grid.shown(), colours()];
    const { chosen, hover } = this.focus;
    for (const at of [hover, chosen]) {
      if (at && at.row < this.grid.rows && at.expert < this.grid.columns) {
        this.grid.outline(context, at.expert, at.row, colour.ink, colour.surface);
      }
    }
    drawProfile(this.model, (hover ?? chosen)?.row);
  }

  describe() {
    const at = this.focus.hover ?? this.focus.chosen;
    const hottest = this.model.hottest(1)[0];
    if (at) say(this.line, this.text(at));
    else if (hottest) say(this.line, `Hottest: ${this.text(hottest)}`);
    else say(this.line, "");
  }

  text({ row, expert }) {
    const { model } = this;
    const ranks = model.ranksOf(row, expert);
    const value = model.ratios?.[row]?.[expert];
    const load = value === undefined ? "" : `, ${ratio(value)} the layer’s mean (${short(model.doc.loads.rows_LE[row][expert])} rows)`;
    const where = ranks.length === 1 ? `one copy, on rank ${ranks[0]}` : `${ranks.length} copies, on ranks ${ranks.join(", ")}`;
    return `layer ${model.layerAt(row)}, expert ${expert}${load}; ${where}`;
  }

  legend() {
    const where = document.getElementById("experts-legend");
    const most = this.model.ratios ? this.model.most : 0;
    if (where.dataset.most === String(most)) return;
    where.dataset.most = String(most);
    if (!most) {
      where.replaceChildren();
      return;
    }
    where.replaceChildren(el("span", {}, "0"), ramp(0), el("span", {}, "1×"), ramp(0.5), el("span", {}, ratio(most)),
      el("span", { class: "dim" }, "the layer’s mean"), el("span", { class: "notch", "aria-hidden": "true" }), el("span", { class: "dim" }, "several copies"));
  }

  lists() {
    const { model } = this;
    const hottest = model.hottest(8);
    const top = hottest[0]?.ratio ?? 1;
    fill("hottest-list", hottest.map((each) => ({
      label: `L${model.layerAt(each.row)} · ${each.expert}`,
      value: ratio(each.ratio),
      part: each.ratio / top,
      note: copiesNote(model.ranksOf(each.row, each.expert)),
      colour: css(viridis(heat(each.ratio, model.most))),
      act: () => this.focus.choose({ row: each.row, expert: each.expert }),
    })), "No demand has been counted yet.");
    const { balance, placement } = model.doc;
    const shares = balance && placement && balance.rank_share.length === placement.ranks.length
      ? placement.ranks.map((rank, r) => ({ rank, share: balance.rank_share[r] })) : [];
    const most = Math.max(...shares.map((each) => each.share), 1e-9);
    say(document.getElementById("share-title"), shares.length > 8 ? `The busiest 8 of ${shares.length} ranks` : "What ranks carry");
    const shown = shares.length > 8 ? [...shares].sort((a, b) => b.share - a.share).slice(0, 8) : shares;
    fill("share-list", shown.map(({ rank, share }) => ({
      label: `rank ${rank}`, value: percent(share), part: share / most,
      note: `${ratio(share * shares.length)} an even share`, colour: colours().accent,
    })), "Known with the first demand.");
  }
}

/** Half of the scale, from `from` on. */
function ramp(from) {
  const made = el("canvas", { class: "ramp", width: 64, height: 10, "aria-hidden": "true" });
  const context = made.getContext("2d");
  for (let x = 0; x < 64; x += 1) {
    context.fillStyle = css(viridis(from + x / 126));
    context.fillRect(x, 0, 1, 10);
  }
  return made;
}

function copiesNote(ranks) {
  if (ranks.length === 1) return `on rank ${ranks[0]} alone`;
  return ranks.length > 4 ? `${ranks.length} copies` : `on ranks ${ranks.join(", ")}`;
}

/** A list of bars, changed in place. */
function fill(id, entries, empty) {
  const list = document.getElementById(id);
  if (!entries.length) {
    list.replaceChildren(el("li", { class: "dim none" }, empty));
    return;
  }
  if (list.querySelector(".none")) list.replaceChildren();
  while (list.children.length > entries.length) list.lastChild.remove();
  while (list.children.length < entries.length) {
    const row = el("button", { type: "button", class: "bar" }, el("span", { class: "what" }), el("span", { class: "track" }, el("i")),
      el("b"), el("span", { class: "dim note" }));
    list.append(el("li", {}, row));
  }
  entries.forEach((entry, i) => {
    const row = list.children[i].firstChild;
    const [what, track, value, note] = row.children;
    say(what, entry.label);
    say(value, entry.value);
    say(note, entry.note);
    track.firstChild.style.width = `${(100 * entry.part).toFixed(1)}%`;
    track.firstChild.style.background = entry.colour;
    row.onclick = entry.act ?? null;
    row.disabled = !entry.act;
  });
}
