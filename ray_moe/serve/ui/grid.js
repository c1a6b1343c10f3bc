// A canvas of cells: where each is, which one the pointer or the keys are on. What they look like is its owner's.
// Cells are painted on a canvas behind the one that is seen, so that moving a mark over thousands of them costs nothing.

import { sized } from "./paint.js";

const LEFT = 34;
const TOP = 20;

export class Grid {
  /** `onMove(column, row)` for the pointer, null outside; `onChoose(column, row)`; `onKey(event)` for what no arrow is. */
  constructor(holder, { onMove, onChoose, start }) {
    this.holder = holder;
    this.canvas = holder.querySelector("canvas");
    this.columns = this.rows = 0;
    this.cursor = null;
    this.behind = document.createElement("canvas");
    this.start = start; // the cell that the keys begin at
    this.canvas.addEventListener("pointermove", (event) => onMove(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => onMove(null));
    this.canvas.addEventListener("click", (event) => { const at = this.at(event); if (at) onChoose((this.cursor = at)); });
    this.canvas.addEventListener("keydown", (event) => {
      const next = this.step(event);
      if (next === null) return;
      event.preventDefault();
      this.cursor = next;
      this.show(next);
      onChoose(next);
    });
  }

  /** Fit `columns` x `rows`, with a gap after each `every` columns; cells are no narrower than `least`. */
  fit({ columns, rows, every = columns, gap = 0, least = 3, widest = 72, tallest = 40, height = 440, right = 0 }) {
    const gaps = gap * (Math.ceil(columns / every) - 1);
    const room = this.holder.clientWidth - 6 - LEFT - right - gaps - 1; // 6: its padding, for outlines
    Object.assign(this, { columns, rows, every, gap, right });
    this.w = Math.min(widest, Math.max(least, room / columns));
    this.h = Math.min(tallest, Math.max(6, Math.floor(height / rows)));
    this.inner = columns * this.w + gaps;
    this.width = LEFT + this.inner + right;
    this.height = TOP + rows * this.h + 1;
    return sized(this.behind, Math.ceil(this.width), this.height);
  }

  /** The cells as they were painted, on the canvas that is seen; marks go on top. */
  shown() {
    const context = sized(this.canvas, Math.ceil(this.width), this.height);
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(this.behind, 0, 0);
    context.restore();
    return context;
  }

  x(column) {
    return Math.round(LEFT + column * this.w + Math.floor(column / this.every) * this.gap);
  }

  y(row) {
    return TOP + row * this.h;
  }

  /** [x, y, width, height] of a cell, a hair smaller where there is room for it. */
  box(column, row) {
    const hair = this.w >= 5 && this.h >= 5 ? 1 : 0;
    const x = this.x(column);
    const end = Math.round(LEFT + (column + 1) * this.w + Math.floor(column / this.every) * this.gap);
    return [x, this.y(row), Math.max(1, end - x - hair), this.h - hair];
  }

  at(event) {
    const [px, py] = [event.offsetX - LEFT, event.offsetY - TOP];
    const row = Math.floor(py / this.h);
    const stride = this.every * this.w + this.gap;
    const group = Math.floor(px / stride);
    const within = Math.floor((px - group * stride) / this.w);
    const column = group * this.every + within;
    const inside = px >= 0 && py >= 0 && row < this.rows && within < this.every && column < this.columns;
    return inside ? { column, row } : null;
  }

  step(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return null;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const at = this.cursor ?? this.start();
    if (at === null) return null;
    if (event.key === "Home") return { column: 0, row: at.row };
    if (event.key === "End") return { column: this.columns - 1, row: at.row };
    if (!(event.key in moves)) return null;
    if (this.cursor === null) return at;
    const [dx, dy] = moves[event.key];
    return {
      column: Math.min(this.columns - 1, Math.max(0, at.column + dx)),
      row: Math.min(this.rows - 1, Math.max(0, at.row + dy)),
    };
  }

  /** Bring a cell into view where the map is wider than the screen. */
  show({ column }) {
    const x = this.x(column);
    const { scrollLeft, clientWidth } = this.holder;
    if (x < scrollLeft + LEFT) this.holder.scrollLeft = x - LEFT - 8;
    else if (x + this.w > scrollLeft + clientWidth) this.holder.scrollLeft = x + this.w - clientWidth + 8;
  }

  /** Layer numbers on the left, thinned so that none touch. */
  labelRows(context, labels, colour, font) {
    context.fillStyle = colour;
    context.font = `10px ${font}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(12 / this.h));
    labels.forEach((label, row) => {
      if (row % every === 0) context.fillText(String(label), LEFT - 6, this.y(row) + this.h / 2);
    });
  }

  /** Numbers over columns [0, columns), thinned; `place(i)` is where the i-th is centred. */
  labelColumns(context, labels, place, width, colour, font) {
    context.fillStyle = colour;
    context.font = `10px ${font}`;
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    const widest = Math.max(...labels.map((label) => String(label).length)) * 6.5 + 8;
    const steps = [1, 2, 4, 8, 16, 32, 64, 128];
    const every = steps.find((step) => step * width >= widest) ?? 256;
    labels.forEach((label, i) => { if (i % every === 0) context.fillText(String(label), place(i), TOP - 7); });
  }

  outline(context, column, row, colour, under, thick = 2) {
    const [x, y, w, h] = this.box(column, row);
    context.lineWidth = thick + 2;
    context.strokeStyle = under;
    context.strokeRect(x - 1, y - 1, w + 2, h + 2);
    context.lineWidth = thick;
    context.strokeStyle = colour;
    context.strokeRect(x - 1, y - 1, w + 2, h + 2);
  }
}
