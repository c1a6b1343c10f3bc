// Colours, numbers as text, and the little that all charts share.

const VIRIDIS = [
  [68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142],
  [33, 145, 140], [34, 168, 132], [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37],
];

/** A colour of viridis for t in [0, 1], as [r, g, b]. */
export function viridis(t) {
  const at = Math.min(Math.max(t, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[low].map((channel, i) => Math.round(channel + (VIRIDIS[low + 1][i] - channel) * (at - low)));
}

export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** Black or white, whichever can be read on a colour. */
export const inkOn = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10151c" : "#fff");

/** Where a load of `ratio` times the mean stands: half way up at the mean, logarithmic above it up to `most`. */
export function heat(ratio, most) {
  return ratio <= 1 ? ratio / 2 : 0.5 + (0.5 * Math.log(ratio)) / Math.log(Math.max(most, 1.01));
}

let theme = null;
const NAMES = ["ink", "dim", "line", "faint", "surface", "accent", "warm", "bad", "good", "cold", "single", "double"];

/** The style sheet's colours, for canvases. */
export function colours() {
  if (theme === null) {
    const style = getComputedStyle(document.documentElement);
    theme = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    theme.font = style.getPropertyValue("--numbers").trim();
  }
  return theme;
}

export const forgetColours = () => { theme = null; };

/** A canvas's context for drawing `width` x `height` CSS pixels, sharp on any screen. */
export function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** An element with attributes and children; text stays text. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Buttons of which one is pressed. */
export function choice(where, options, chosen, onChoose) {
  const buttons = options.map(([value, label]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => choose(value) }, label));
  function choose(value) {
    options.forEach(([each], i) => buttons[i].setAttribute("aria-pressed", String(each === value)));
    onChoose(value);
  }
  where.replaceChildren(...buttons);
}

/** Put text where it differs: nothing flickers, and a reader's selection stays. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// -- Numbers

export const whole = new Intl.NumberFormat("en");

export function short(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return whole.format(Math.round(value));
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

export const ratio = (value) => `${value < 10 ? value.toFixed(value < 0.95 ? 2 : 1) : value.toFixed(0)}×`;
export const percent = (value) => `${(100 * value).toFixed(value > 0.0995 || value === 0 ? 0 : 1)} %`;

export function millis(seconds) {
  const ms = seconds * 1e3;
  if (ms < 0.1) return `${(ms * 1e3).toFixed(0)} µs`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
}

export function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.floor(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export const plural = (count, one, many = `${one}s`) => `${whole.format(count)} ${count === 1 ? one : many}`;
