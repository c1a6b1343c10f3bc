// One layer by itself: its experts from the most to the least loaded, and what each rank carries of it.

import { colours, css, heat, percent, plural, ratio, say, sized, viridis } from "./paint.js";

const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [34, 6, 8, 18, 118];

/** Of layer `row`, by default the one whose ranks are least even. */
export function drawProfile(model, row) {
  const canvas = document.getElementById("profile-chart");
  const { balance, placement } = model.doc;
  canvas.hidden = !model.ratios;
  if (!model.ratios) return;
  const at = row ?? (balance ? balance.imbalance.indexOf(Math.max(...balance.imbalance)) : 0);
  const experts = model.ratios[at].map((ratio, expert) => ({ ratio, expert })).sort((a, b) => b.ratio - a.ratio);
  const busy = experts.slice(0, Math.ceil(experts.length / 10));
  const share = busy.reduce((sum, each) => sum + each.ratio, 0) / Math.max(1e-9, experts.length * mean(experts));
  say(document.getElementById("profile-title"), `Layer ${placement.layers[at]}${row === undefined ? ", whose ranks are least even" : ""}`);
  say(document.getElementById("profile-note"), `the busiest ${plural(busy.length, "expert")} of ${experts.length} take ${percent(share)} of its rows`
    + (balance ? `; the busiest rank carries ${ratio(balance.imbalance[at])} the mean` : ""));
  bars(canvas, experts, model, at);
}

const mean = (experts) => experts.reduce((sum, each) => sum + each.ratio, 0) / experts.length;

function bars(canvas, experts, model, row) {
  const colour = colours();
  const width = canvas.parentElement.clientWidth;
  const context = sized(canvas, width, HEIGHT);
  const [w, h] = [(width - LEFT - RIGHT) / experts.length, HEIGHT - TOP - BOTTOM];
  const top = Math.max(1.2, experts[0].ratio);
  const y = (value) => TOP + h * (1 - value / top);
  context.font = `10px ${colour.font}`;
  experts.forEach(({ ratio: value, expert }, i) => {
    const [x, end] = [LEFT + i * w, LEFT + (i + 1) * w];
    context.fillStyle = css(viridis(heat(value, model.most)));
    context.fillRect(x, y(value), Math.max(1, end - x - (w > 4 ? 1 : 0)), TOP + h - y(value));
    if (model.ranksOf(row, expert).length > 1 && w >= 3) { // a cap: it has several copies
      context.fillStyle = colour.ink;
      context.fillRect(x, y(value) - 3, Math.max(1, end - x - 1), 2);
    }
    if (w >= 18) {
      context.fillStyle = colour.dim;
      context.textAlign = "center";
      context.fillText(String(expert), x + w / 2, HEIGHT - 5);
    }
  });
  if (w < 18) {
    context.fillStyle = colour.dim;
    context.textAlign = "left";
    const named = Math.min(experts.length, Math.max(3, Math.floor(width / 240)));
    context.fillText(`${experts.slice(0, named).map((each) => each.expert).join(", ")}, … from the most to the least loaded`, LEFT, HEIGHT - 5);
  }
  context.strokeStyle = colour.ink;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(LEFT, Math.round(y(1)) + 0.5);
  context.lineTo(width - RIGHT, Math.round(y(1)) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.fillStyle = colour.dim;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText("1×", LEFT - 6, y(1));
  if (top > 1.6) context.fillText(ratio(top), LEFT - 6, TOP + 5);
}
