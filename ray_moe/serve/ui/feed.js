// The stream of events: begins, begins again when it breaks, and says how old what is shown is.

const STALE_MS = 3000;

export class Feed {
  /** `handlers`: view(document), problem(text), locked(wanted), fresh(word, seconds). */
  constructor(handlers) {
    this.handlers = handlers;
    this.source = null;
    this.heard = 0; // when the last whole look came, by performance.now()
    this.broken = false;
    this.retry = 0;
    setInterval(() => this.watch(), 500);
    // A page that was hidden or without a network looks at once.
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.again(); });
    window.addEventListener("online", () => this.again());
  }

  async begin() {
    clearTimeout(this.retry);
    const session = await this.session();
    if (session === null) {
      this.later();
    } else if (!session.open) {
      this.close();
      this.handlers.locked(session.wanted);
    } else {
      this.open();
    }
    return session;
  }

  async session() {
    try {
      const answer = await fetch("ui/session", { cache: "no-store" });
      return answer.ok ? await answer.json() : null;
    } catch {
      return null;
    }
  }

  open() {
    this.close();
    const source = new EventSource("ui/events");
    source.addEventListener("view", (event) => {
      this.broken = false;
      this.heard = performance.now();
      this.handlers.view(JSON.parse(event.data));
    });
    source.addEventListener("problem", (event) => {
      this.broken = false;
      this.handlers.problem(JSON.parse(event.data).message);
    });
    source.onerror = () => {
      this.broken = true;
      // The browser tries again by itself, unless it was refused: then the session may have ended.
      if (source.readyState === EventSource.CLOSED) this.later();
    };
    this.source = source;
  }

  close() {
    if (this.source !== null) this.source.close();
    this.source = null;
  }

  later() {
    this.broken = true;
    clearTimeout(this.retry);
    this.retry = setTimeout(() => this.begin(), 1500);
  }

  again() {
    if (this.source !== null && this.source.readyState === EventSource.CLOSED) this.begin();
  }

  watch() {
    if (this.heard === 0) return;
    const age = performance.now() - this.heard;
    if (age < STALE_MS) this.handlers.fresh("live", age / 1000);
    else this.handlers.fresh(this.broken ? "reconnecting" : "stale", age / 1000);
  }
}

/** Ask for a session; an empty string, or why there is none. */
export async function signIn(key) {
  try {
    const answer = await fetch("ui/session", { method: "POST", headers: { authorization: `Bearer ${key}` } });
    if (answer.ok) return "";
    return answer.status === 401 ? "That key does not open this page." : `The server answered ${answer.status}.`;
  } catch {
    return "The server does not answer.";
  }
}

export async function signOut() {
  await fetch("ui/session", { method: "DELETE" }).catch(() => null);
}
