// The page: events in, panels out.

import { Figures, drawBoard, drawRanks } from "./board.js";
import { Experts } from "./experts.js";
import { Feed, signIn, signOut } from "./feed.js";
import { Model } from "./model.js";
import { ago, forgetColours, say } from "./paint.js";
import { Slots } from "./slots.js";
import { Steps } from "./steps.js";
import { Timeline, listOperations } from "./timeline.js";

const PANELS = ["experts", "hottest", "steps", "operations", "timeline", "slots", "board", "ranks"];
const KEYED = ["experts", "steps", "timeline", "slots", "board", "operations", "ranks"];
const byId = (id) => document.getElementById(id);
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

const model = new Model();
const focus = {
  chosen: null,
  hover: null,
  choose(at) { this.chosen = at; this.hover = null; markMaps(); },
  point(at) {
    if (at?.row === this.hover?.row && at?.expert === this.hover?.expert && !slots.hover) return;
    this.hover = at;
    markMaps();
  },
};
const figures = new Figures(model);
const experts = new Experts(model, focus);
const slots = new Slots(model, focus);
const steps = new Steps(model);
const timeline = new Timeline(model);

const feed = new Feed({
  view(news) {
    const parts = model.take(news);
    byId("login").hidden = true;
    byId("page").hidden = false;
    headline();
    if (["placement", "loads", "balance", "headline"].some((part) => parts.has(part)) || slotsMarked()) drawMaps();
    if (parts.has("loads") || parts.has("placement") || parts.has("balance")) experts.lists();
    figures.draw(steps.count());
    drawBoard(model);
    drawRanks(model);
    listOperations(model);
    timeline.draw();
    if (calm.matches) steps.draw();
    feed.handlers.fresh("live", 0);
  },
  problem(message) {
    notice(message);
    feed.handlers.fresh("stale", (performance.now() - feed.heard) / 1000);
  },
  locked(wanted) {
    say(byId("wanted"), `${/^[aeiouAEIOU]/.test(wanted) ? "an" : "a"} ${wanted}`);
    byId("login").hidden = false;
    byId("page").hidden = true;
    byId("leave").hidden = true;
    fresh("signed out", "signed-out");
    byId("key").focus();
  },
  fresh(word, seconds) {
    if (feed.source === null && word === "live") return;
    const text = word === "live" ? "live" : `${word}, ${feed.heard ? `data is ${ago(seconds)} old` : "no data yet"}`;
    fresh(text, word);
    byId("page").classList.toggle("stale", word !== "live");
  },
});

function fresh(text, word) {
  const node = byId("freshness");
  say(node, text);
  node.dataset.fresh = word;
}

function notice(text) {
  byId("notice").hidden = !text;
  say(byId("notice"), text);
}

let freshUntil = 0;
function slotsMarked() {
  // Once more when the marks of what was moved run out.
  if (model.fresh.size) freshUntil = model.freshAt + 21;
  const ended = freshUntil && model.now() > freshUntil;
  if (ended) freshUntil = 0;
  return ended;
}

function headline() {
  const { headline: head, ranks = [] } = model.doc;
  say(byId("name"), head.name);
  const state = byId("state");
  say(state, head.state);
  state.dataset.state = head.state;
  const name = head.model.split("/").filter(Boolean).at(-1) ?? "";
  const nodes = new Set(ranks.map((each) => each.node).filter(Boolean)).size;
  const facts = [name, head.release_id && `release ${head.release_id}`, `${head.group}, ${head.transport}, ${head.runner}`.replaceAll("_", "-"),
    `${ranks.length} ${ranks.length === 1 ? "rank" : "ranks"} on ${nodes || "–"} ${nodes === 1 ? "node" : "nodes"}`,
    head.autopilot && `autopilot: ${head.autopilot}`];
  say(byId("facts"), facts.filter(Boolean).join("  ·  "));
  document.title = `${head.name} · ${head.state} · ray_moe`;
  notice(head.failure ? `The cluster is ${head.state}: ${head.failure}` : "");
}

function drawMaps() {
  if (!model.doc) return;
  experts.draw();
  slots.draw();
}

let marking = 0;
/** Say what is chosen at once, and mark it with the next frame. */
function markMaps() {
  if (!model.doc?.placement) return;
  experts.describe();
  slots.describe();
  cancelAnimationFrame(marking);
  marking = requestAnimationFrame(() => {
    experts.mark();
    slots.mark();
  });
}

function drawAll() {
  if (!model.doc || byId("page").hidden) return;
  drawMaps();
  experts.lists();
  steps.draw();
  timeline.draw();
  figures.draw(steps.count());
}

// -- Time passes between two events, too.

let drawn = 0;
function frame(now) {
  if (!calm.matches && model.doc && now - drawn > 66 && !document.hidden && !byId("page").classList.contains("stale")) {
    drawn = now;
    steps.draw();
  }
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);

// -- Screens and themes

let resizing = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(drawAll);
}).observe(byId("page"));
for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)"]) {
  window.matchMedia(query).addEventListener("change", () => {
    forgetColours();
    delete byId("experts-legend").dataset.most;
    drawAll();
  });
}

// -- Keys

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target instanceof HTMLInputElement) return;
  const panel = KEYED[Number(event.key) - 1];
  if (panel && !byId("page").hidden) go(panel);
  else if (event.key === "?") help();
  else if (event.key === "Escape") {
    focus.choose(null);
    if (!byId("help").hidden) help();
  } else if (event.key === "h" || event.key === "H") {
    const [hottest] = model.hottest(1);
    if (hottest) {
      experts.grid.cursor = { row: hottest.row, column: hottest.expert };
      focus.choose(hottest);
      go("experts");
    }
  }
});

function go(panel) {
  const node = byId(panel);
  node.scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "start" });
  (node.querySelector("canvas[tabindex]") ?? node).focus({ preventScroll: true });
}

function help() {
  const open = byId("help").hidden;
  byId("help").hidden = !open;
  byId("help-button").setAttribute("aria-expanded", String(open));
}
byId("help-button").addEventListener("click", help);

// -- Sessions

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const problem = await signIn(byId("key").value);
  say(byId("login-problem"), problem);
  if (!problem) {
    byId("key").value = "";
    start();
  }
});
byId("leave").addEventListener("click", async () => {
  await signOut();
  feed.close();
  model.forget("");
  start();
});

async function start() {
  const session = await feed.begin();
  byId("leave").hidden = !(session?.open && session.wanted);
}
start();
window.ray_moe = { model, panels: PANELS }; // for whoever looks from the console
