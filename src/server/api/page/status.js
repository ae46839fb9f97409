"use strict";
/* Everything that comes from the server is put into the page as text, never as markup. */
(() => {
  const INTERVAL_MS = 1000, RETRY_MS = 4000, TIMEOUT_MS = 10000, ROWS_MAX = 200, FILTER_FROM = 12;
  const at = (id) => document.getElementById(id);
  let key = "", latest = null, failedSince = 0;

  /* ---- numbers ---- */

  const counted = (n) => n.toLocaleString("en-US");
  const rate = (n) => (n < 10 ? n.toFixed(1) : counted(Math.round(n)));

  function seconds(s) {
    if (s <= 0) return "0\u00a0ms";
    if (s < 0.01) return (s * 1000).toFixed(2) + "\u00a0ms";
    if (s < 1) return (s * 1000).toFixed(0) + "\u00a0ms";
    return s < 100 ? s.toFixed(1) + "\u00a0s" : counted(Math.round(s)) + "\u00a0s";
  }

  function duration(s) {
    const m = Math.floor(s / 60), h = Math.floor(m / 60), d = Math.floor(h / 24);
    if (d > 0) return d + " d " + (h % 24) + " h";
    if (h > 0) return h + " h " + (m % 60) + " min";
    return m > 0 ? m + " min " + Math.floor(s % 60) + " s" : Math.floor(s) + " s";
  }

  function bytes(n) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit++; }
    return (unit === 0 ? counted(n) : n.toFixed(1)) + "\u00a0" + units[unit];
  }

  /* ---- pieces ---- */

  function show(id, text) {
    const node = at(id);
    if (node.textContent !== text) node.textContent = text;
  }

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  /* Whether a part of the page has to be made anew: what stays keeps its selection. */
  const made = {};
  function changed(part, value) {
    const text = JSON.stringify(value);
    if (made[part] === text) return false;
    made[part] = text;
    return true;
  }

  function width(id, share) {
    at(id).style.width = Math.max(0, Math.min(100, share * 100)) + "%";
  }

  /* The line touches the top at its largest value, which is returned; nothing at all is the bottom.
   * It begins where the server did: seconds before that are null. */
  function line(id, values) {
    const svg = at(id), known = values.filter((v) => v !== null), most = Math.max(...known, 1e-9);
    const from = values.length - known.length;
    const points = known.map((v, i) => 2 * (from + i) + "," + (29 - 27 * v / most).toFixed(2)).join(" ");
    const shape = (tag, text) => {
      const node = svg.querySelector(tag) ||
        svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
      node.setAttribute("points", text);
    };
    shape("polygon", known.length ? 2 * from + ",30 " + points + " " + 2 * (values.length - 1) + ",30" : "");
    shape("polyline", points);
    return Math.max(...known, 0);
  }

  function state(text, kind) {
    show("state", text);
    at("state").className = "badge " + kind;
  }

  /* ---- parts of the page ---- */

  function showNow(s) {
    const kv = s.kv, used = kv.pages ? kv.used / kv.pages : 0;
    show("tokens-rate", rate(s.rates.tokens_per_second));
    show("over", counted(s.rates.over_seconds));
    show("pause-over", counted(s.rates.over_seconds));
    show("step-mean", seconds(s.rates.step_seconds_mean));
    show("step-max", seconds(s.rates.step_seconds_max));
    show("running", counted(s.queue.running));
    show("running-max", counted(s.queue.running_max));
    show("waiting", counted(s.queue.waiting));
    show("kv-share", Math.round(used * 100) + "%");
    show("kv-used", counted(kv.used));
    show("kv-pages", counted(kv.pages));
    show("pause-now", seconds(s.rates.load_pause_seconds));
    show("pause-all", seconds(s.totals.load_pause_seconds));
    width("running-bar", s.queue.running_max ? s.queue.running / s.queue.running_max : 0);
    width("kv-bar", used);
    width("kv-cached-bar", kv.pages ? kv.cached / kv.pages : 0);
    show("tokens-top", "top: " + counted(line("tokens-line", s.history.tokens)) + " in a second");
    show("step-top", "top: " + seconds(line("step-line", s.history.step_seconds_max)));
    showWaiting(s.queue);
    showSinceStart(s);
  }

  function showWaiting(queue) {
    const reasons = [[queue.for_slot, "for a slot"], [queue.for_load, "for a load"],
      [queue.for_pages, "for pages"], [queue.for_batch, "for the batch"]];
    show("waiting-why", reasons.filter(([n]) => n > 0).map(([n, why]) => counted(n) + " " + why).join(", "));
  }

  /* Nothing was measured yet: no number. */
  function measured(id, latency) {
    show(id + "-p50", latency.count ? seconds(latency.p50) : "\u2014");
    show(id + "-p95", latency.count ? seconds(latency.p95) : "\u2014");
  }

  function showSinceStart(s) {
    const m = s.memory;
    measured("first", s.latency.first_token);
    measured("inter", s.latency.inter_token);
    measured("queue", s.latency.queue);
    show("errors", counted(s.responses.server_errors));
    show("turned-away", counted(s.responses.turned_away));
    show("client-errors", counted(s.responses.client_errors));
    show("memory", bytes(m.weights + m.kv + m.states + m.slots + m.scratch + m.draft_model
      + m.host_cache));
    show("memory-weights", bytes(m.weights));
    show("memory-kv", bytes(m.kv));
    show("memory-states", bytes(m.states));
    show("memory-slots", bytes(m.slots));
    show("memory-scratch", bytes(m.scratch));
    show("host-used", bytes(m.host_cache));
    show("host-max", bytes(m.host_cache_max));
    show("host-evictions", counted(m.host_cache_evictions));
    width("host-bar", m.host_cache_max ? m.host_cache / m.host_cache_max : 0);
    show("prefix-rate", Math.round(s.prefix.hit_rate * 100) + "%");
    show("prefix-tokens", counted(s.prefix.prompt_tokens));
    width("prefix-bar", s.prefix.hit_rate);
  }

  function showSlots(s) {
    if (!changed("slots", s.slots)) return;
    at("slots-title").hidden = s.slots.length === 0;
    at("slots").replaceChildren(...s.slots.map((slot) => {
      const item = make("li", slot.adapter === null ? "empty" : "");
      item.append(make("span", "quiet", slot.slot + " · "), make("span", "quiet " + slot.state, slot.state),
        make("bdi", "name", slot.adapter === null ? "—" : slot.adapter),
        make("span", "quiet", slot.adapter === null ? "" : counted(slot.running) + " running" +
          (slot.names > 1 ? ", " + counted(slot.names) + " names" : "")));
      return item;
    }));
  }

  function number(label, value, className) {
    const cell = make("td", "number " + (className || ""), counted(value));
    cell.dataset.label = label;
    return cell;
  }

  function row(a) {
    const tr = make("tr"), name = make("td");
    name.append(make("bdi", "", a.name));
    if (a.active) name.append(make("span", "note", "default"));
    if (a.pinned) name.append(make("span", "note", "pinned"));
    tr.append(name, make("td", "state " + a.state, a.slot >= 0 ? a.state + " · " + a.slot : a.state),
      number("running", a.running), number("waiting", a.waiting), number("requests", a.requests),
      number("tokens", a.generated_tokens), number("rank", a.rank, "minor"), version(a));
    return tr;
  }

  /* The generation of the name, and the beginning of its content's digest. */
  function version(a) {
    const cell = make("td", "number minor", counted(a.generation) + " \u00b7 " + a.digest.slice(0, 8));
    cell.title = a.digest;
    return cell;
  }

  /* A folder that nothing has loaded yet. */
  function folderRow(folder) {
    const tr = make("tr"), name = make("td");
    name.append(make("bdi", "", folder.name));
    tr.append(name, make("td", "state disk", folder.unloaded ? "unloaded" : "in folder"),
      number("running", 0), number("waiting", 0), number("requests", folder.requests),
      number("tokens", folder.generated_tokens), make("td", "number minor", "\u2014"),
      make("td", "number minor", "\u2014"));
    return tr;
  }

  const ORDERS = {
    traffic: (a, b) => b.generated_tokens - a.generated_tokens || b.requests - a.requests,
    waiting: (a, b) => (b.waiting || 0) - (a.waiting || 0) || (b.running || 0) - (a.running || 0),
    name: (a, b) => (a.name < b.name ? -1 : Number(a.name > b.name)),
    loaded: () => 0,
  };

  function baseRow(base) {
    const tr = make("tr"), name = make("td");
    name.append(make("bdi", "", base.name), make("span", "note", "base"));
    tr.append(name, make("td", "state ready", "base"), number("running", base.running),
      number("waiting", base.waiting), number("requests", base.requests),
      number("tokens", base.generated_tokens), make("td", "number minor", "—"),
      make("td", "number minor", "—"));
    return tr;
  }

  function showAdapters(s) {
    const wanted = at("filter").value.toLowerCase(), order = at("sort").value;
    if (!changed("adapters", [wanted, order, s.base, s.adapters, s.folders])) return;
    const fitting = [...s.adapters, ...s.folders].filter((a) => a.name.toLowerCase().includes(wanted))
      .sort(ORDERS[order]);
    const rows = fitting.slice(0, ROWS_MAX).map((a) => (a.digest ? row(a) : folderRow(a)));
    if (!wanted) rows.unshift(baseRow(s.base));
    at("filter").hidden = s.adapters.length + s.folders.length < FILTER_FROM;
    show("adapters-count", counted(s.adapters.length) + " loaded" +
      (s.folders.length ? ", " + counted(s.folders.length) + " more on disk" : ""));
    at("adapters").replaceChildren(...rows);
    show("more", fitting.length > ROWS_MAX ? counted(fitting.length - ROWS_MAX) + " more" : "");
  }

  function troubleItem(name, code, when, message) {
    const item = make("li");
    item.append(make("bdi", "", name), " ", make("code", "quiet", code), " ",
      make("span", "quiet", when), make("br"), make("span", "quiet", message));
    return item;
  }

  function showTrouble(s) {
    const ago = (f) => "load failed " + duration(f.seconds_ago) + " ago";
    if (!changed("trouble", [s.refused, s.load_failures.map((f) => [f.name, f.code, f.message, ago(f)])]))
      return;
    at("trouble").hidden = s.refused.length + s.load_failures.length === 0;
    at("trouble-list").replaceChildren(
      ...s.load_failures.map((f) => troubleItem(f.name, f.code, ago(f), f.message)),
      ...s.refused.map((r) => troubleItem(r.name, r.code, "at the start", r.message)));
  }

  function showTotals(s) {
    const t = s.totals;
    if (!changed("totals", t)) return;
    const list = [["generated tokens", t.generated_tokens], ["steps", t.steps],
      ["prefill rows", t.prefill_rows], ["prefix cache tokens", t.prefix_tokens],
      ["drafted tokens", t.drafted_tokens], ["accepted drafts", t.accepted_tokens],
      ["preemptions", t.preemptions], ["copies into slots", t.slot_copies],
      ["requests finished", t.finished], ["cancelled", t.cancelled], ["refused", t.refused],
      ["failed", t.failed]];
    at("totals").replaceChildren(...list.map(([name, value]) => {
      const pair = make("div");
      pair.append(make("dt", "quiet", name), make("dd", "", counted(value)));
      return pair;
    }));
  }

  function render(s) {
    latest = s;
    show("base", s.base.name);
    document.title = s.base.name + " · Sidepath";
    state(s.draining ? "shutting down" : "serving", s.draining ? "warn" : "good");
    show("about", s.version + " · " + s.cpu_isa + " · up " + duration(s.uptime_seconds));
    showNow(s);
    showSlots(s);
    showAdapters(s);
    showTrouble(s);
    showTotals(s);
    at("main").hidden = false;
    at("key").hidden = true;
  }

  /* ---- asking the server ---- */

  function unreachable() {
    failedSince = failedSince || Date.now();
    state("no answer for " + duration((Date.now() - failedSince) / 1000), "bad");
  }

  function askForKey() {
    state("locked", "warn");
    at("main").hidden = true;
    at("key").hidden = false;
  }

  async function poll() {
    const headers = key ? { Authorization: "Bearer " + key } : {};
    const answer = await fetch("status.json",
      { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.status === 401) return askForKey();
    if (!answer.ok) throw new Error("status " + answer.status);
    render(await answer.json());
    failedSince = 0;
  }

  async function loop() {
    let wait = INTERVAL_MS;
    if (document.visibilityState === "visible" && at("key").hidden) {
      try {
        await poll();
      } catch {
        unreachable();
        wait = RETRY_MS;
      }
    }
    setTimeout(loop, wait);
  }

  at("filter").addEventListener("input", () => latest && showAdapters(latest));
  at("sort").addEventListener("change", () => latest && showAdapters(latest));
  at("key").addEventListener("submit", (event) => {
    event.preventDefault();
    key = at("key-text").value;
    at("key-text").value = "";
    at("key").hidden = true;
  });
  loop();
})();
