// What the page knows: events merged into one document, and what charts derive from it.

const KEPT_S = 900; // seconds of history
const STEPS_KEPT = 30000; // of each rank

export class Model {
  constructor() {
    this.forget("");
  }

  forget(life) {
    this.life = life;
    this.doc = null;
    this.offset = 0; // the controller's clock minus ours
    this.began = Infinity; // the first moment that anything is known of
    this.steps = new Map(); // rank -> {next, ends: [], seconds: []}
    this.totals = []; // {at, tokens, bytes, worked, agreeing}
    this.seen = new Map(); // generation -> when it was first seen here
    this.copies = null; // [L][E] -> ranks
    this.ratios = null; // [L][E] -> rows over the layer's mean
    this.fresh = new Set(); // "rank layer slot" filled by the latest generation
    this.before = null;
  }

  /** Take one event; which parts are new. */
  take(news) {
    if (news.life !== this.life) this.forget(news.life);
    const first = this.doc === null;
    const old = this.doc?.placement ?? null;
    this.doc = { ...this.doc, ...news, steps: undefined };
    this.offset = news.at - Date.now() / 1000;
    for (const each of news.steps) this.add(each);
    if (first) this.began = Math.min(news.at, ...[...this.steps.values()].map((each) => each.ends[0] ?? news.at));
    this.count();
    if (news.placement) {
      this.copies = copiesOf(news.placement);
      this.fresh = first ? new Set() : changed(old, news.placement);
      this.freshAt = this.now();
    }
    if (news.loads) this.ratios = ratiosOf(news.loads.rows_LE);
    if (news.loads || news.placement) this.most = this.ratios ? hottestRatio(this.ratios) : 2;
    for (const each of this.doc.generations ?? []) {
      if (!this.seen.has(each.generation)) this.seen.set(each.generation, first ? -Infinity : news.at);
    }
    return new Set(Object.keys(news));
  }

  /** Now, on the controller's clock. */
  now() {
    return Date.now() / 1000 + this.offset;
  }

  add({ rank, first, ended_at, seconds }) {
    const held = this.steps.get(rank) ?? { next: 0, ends: [], seconds: [] };
    const skip = Math.max(0, held.next - first);
    held.ends.push(...ended_at.slice(skip));
    held.seconds.push(...seconds.slice(skip));
    held.next = Math.max(held.next, first + seconds.length);
    const old = this.doc.at - KEPT_S;
    let drop = Math.max(0, held.ends.length - STEPS_KEPT);
    while (drop < held.ends.length && held.ends[drop] < old) drop += 1;
    if (drop > 2000 || held.ends.length > STEPS_KEPT) {
      held.ends.splice(0, drop);
      held.seconds.splice(0, drop);
    }
    this.steps.set(rank, held);
  }

  count() {
    const ranks = this.doc.ranks ?? [];
    const sum = (name) => ranks.reduce((total, each) => total + (each[name] || 0), 0);
    this.totals.push({ at: this.doc.at, tokens: sum("tokens_emitted"), sent: sum("bytes_sent"), ranks: ranks.length,
      of: new Map(ranks.map((each) => [each.rank, each])) });
    while (this.totals.length > 2 && this.totals[0].at < this.doc.at - 130) this.totals.shift();
  }

  /** Tokens a second over about `seconds`, ending at `index`; 0 where ranks came or went. */
  rate(index, seconds = 3, name = "tokens") {
    const last = this.totals[index];
    let at = index;
    while (at > 0 && last.at - this.totals[at].at < seconds) at -= 1;
    const begin = this.totals[at];
    if (!last || !begin || last.at <= begin.at) return 0;
    return Math.max(0, (last[name] - begin[name]) / (last.at - begin.at));
  }

  /** The same of one rank, for one of its totals. */
  rankRate(rank, name, seconds = 3) {
    const last = this.totals[this.totals.length - 1];
    const begin = this.totals.find((each) => last.at - each.at < seconds && each.of.has(rank)) ?? last;
    const [a, b] = [begin.of.get(rank), last.of.get(rank)];
    return a && b && last.at > begin.at ? Math.max(0, (b[name] - a[name]) / (last.at - begin.at)) : 0;
  }

  /** Ended working steps of the last `span` seconds, of all ranks: [{end, seconds, rank}], by time. */
  recent(span) {
    const from = this.now() - span;
    const found = [];
    for (const [rank, { ends, seconds }] of this.steps) {
      for (let i = ends.length - 1; i >= 0 && ends[i] >= from; i -= 1) found.push({ end: ends[i], seconds: seconds[i], rank });
    }
    return found.sort((a, b) => a.end - b.end);
  }

  layerAt(row) {
    return this.doc.placement.layers[row];
  }

  ranksOf(row, expert) {
    return this.copies?.[row]?.[expert] ?? [];
  }

  /** The hottest experts: [{row, expert, ratio}]. */
  hottest(count) {
    if (!this.ratios) return [];
    const found = [];
    this.ratios.forEach((layer, row) => layer.forEach((ratio, expert) => found.push({ row, expert, ratio })));
    return found.sort((a, b) => b.ratio - a.ratio).slice(0, count);
  }
}

function copiesOf(placement) {
  const copies = placement.layers.map(() => Array.from({ length: placement.num_experts }, () => []));
  placement.slots_RLC.forEach((layers, r) =>
    layers.forEach((slots, row) => slots.forEach((expert) => { if (expert >= 0) copies[row][expert].push(placement.ranks[r]); })));
  return copies;
}

function changed(old, now) {
  const fresh = new Set();
  if (old === null) return fresh;
  const was = new Map(old.ranks.map((rank, r) => [rank, old.slots_RLC[r]]));
  now.ranks.forEach((rank, r) => now.slots_RLC[r].forEach((slots, row) => slots.forEach((expert, slot) => {
    if (expert >= 0 && was.get(rank)?.[row]?.[slot] !== expert) fresh.add(`${rank} ${row} ${slot}`);
  })));
  return fresh;
}

function ratiosOf(rows) {
  return rows.map((layer) => {
    const mean = layer.reduce((a, b) => a + b, 0) / layer.length;
    return layer.map((load) => (mean > 0 ? load / mean : 0));
  });
}

/** The top of the colour scale: nearly the hottest, so that one expert does not darken all others. */
function hottestRatio(ratios) {
  const all = ratios.flat().sort((a, b) => a - b);
  return Math.max(2, all[Math.floor(0.999 * (all.length - 1))]);
}

export function quantile(sorted, q) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : 0;
}
