// Draws the document in #data. Figures come from there; only positions are computed here.
"use strict";
(() => {
  const doc = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const KINDS = ["gradient", "kept", "recomputed", "temporary"]; // from the ground up
  const NAMES = {
    standing: "in memory before the step", gradient: "gradients", kept: "activations kept",
    recomputed: "activations recomputed", temporary: "temporaries and workspace",
    workspace: "temporaries and workspace",
  };
  const COLUMN = { kept: 3, recomputed: 4, gradient: 5, temporary: 6 };
  const standing = Object.values(doc.standing).reduce((a, b) => a + b, 0);
  const limit = doc.plan && doc.plan.limit !== null ? doc.plan.limit : null;
  const planned = doc.planned !== null && doc.plan.overhead > 0;
  const state = { which: planned ? "planned" : "plain", base: false, at: null, modules: false };

  // ------------------------------------------------------------------ small tools

  function bytes(n) {
    let size = n;
    for (const [unit, places] of [["B", 0], ["KiB", 1], ["MiB", 1], ["GiB", 2]]) {
      if (Number(Math.abs(size).toFixed(places)) < 1024) return `${size.toFixed(places)} ${unit}`;
      size /= 1024;
    }
    return `${size.toFixed(2)} TiB`;
  }
  const percent = (share, digits = 1) => `${(100 * share).toFixed(digits).replace(/^-(?=[0.]+$)/, "")} %`;
  const length = (share) => `${(100 * share).toFixed(2)}%`;
  function node(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  function draw(name, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  // A figure on the page, with its name in the document and its value, so that tests can check it.
  function figure(name, value, text) {
    return node("span", { "data-figure": name, "data-value": String(value) }, text);
  }
  const colour = (kind) => `var(--${kind === "workspace" ? "temporary" : kind})`;
  function swatch(kind) {
    const made = node("span", { class: `swatch${kind === "recomputed" ? " hatched" : ""}`, "aria-hidden": "true" });
    made.style.backgroundColor = colour(kind);
    return made;
  }
  const soft = (text) => text.replace(/([._/:])(?=[^._/:])/g, "$1\u200b"); // where a long name may break
  const round = (n) => bytes(n).replace(/\.0 /, " ");
  // What made it, in which module, on which line: in one cell, so that it fits on a phone.
  function origin(operator, module, line, kind = null) {
    const first = node("div", { class: "op" }, node("b", {}, soft(operator || "not broken down")));
    if (kind !== null) first.append(node("span", { class: "kind" }, swatch(kind), kind));
    return node("div", { class: "origin" }, first, node("div", {}, soft(module || "outside of modules")), node("code", {}, soft(line)));
  }
  function fill(table, titles, rows, right = []) {
    const cell = (tag, content, place) => {
      const wide = typeof content === "string" && content.length > 22;
      const made = node(tag, right.includes(place) ? { class: "n" } : wide && tag === "td" ? { class: "wrap" } : {});
      made.append(content);
      return made;
    };
    const head = node("tr", {}, ...titles.map((t, k) => { const c = cell("th", t, k); c.setAttribute("scope", "col"); return c; }));
    const body = rows.map((row) => {
      const made = node("tr", row.total ? { class: "total" } : {});
      made.append(...(row.cells || row).map((c, k) => cell("td", c, k)));
      return made;
    });
    table.replaceChildren(node("thead", {}, head), node("tbody", {}, ...body));
  }
  function choice(place, then) {
    const options = planned ? ["plain", "planned"] : ["plain"];
    place.replaceChildren(...options.map((name) => {
      const button = node("button", { type: "button", "aria-pressed": String(state.which === name) }, name === "plain" ? "Plain" : "Planned");
      button.addEventListener("click", () => { state.which = name; then(); });
      return button;
    }));
    place.hidden = options.length < 2;
  }
  const current = () => (state.which === "planned" ? doc.planned : doc.plain);
  const total = (m) => m[3] + m[4] + m[5] + m[6];

  // ------------------------------------------------------------------ the head

  function head() {
    const half = doc.changes.find((c) => c.peak <= doc.plain.peak / 2);
    const best = half || [...doc.changes].sort((a, b) => a.peak - b.peak)[0];
    byId("headline").replaceChildren(
      figure("plain.peak", doc.plain.peak, bytes(doc.plain.peak)), " at the peak. ",
      best ? (half ? "Half of it is enough" : `${bytes(best.peak)} is enough`) + (best.overhead === null ? " with half the batch." : `, for ${percent(best.overhead)} more time.`)
        : "Nothing that was tried lowers it.",
      doc.trial_refused === null ? "" : " In a real step, the plan did not hold.");
    const frozen = doc.parameters.tensors - doc.parameters.requires_grad;
    byId("subject").textContent = `${doc.name} · ${doc.operations} operations · ${doc.parameters.tensors} parameters${frozen ? `, ${frozen} of them frozen` : ""} · ` +
      (doc.source === "fake" ? `predicted without running, times of ${doc.device}` : `from one recorded step on ${doc.device}`);
    const tiles = [["plain peak", figure("plain.peak", doc.plain.peak, bytes(doc.plain.peak)), "above what was in memory before"]];
    if (doc.plan && limit !== null) tiles.push(["limit", figure("plan.limit", limit, bytes(limit)), percent(limit / doc.plain.peak, 0) + " of the plain peak"]);
    if (doc.plan) {
      tiles.push(["planned peak", figure("plan.peak", doc.plan.peak, bytes(doc.plan.peak)), percent(doc.plan.peak / doc.plain.peak, 0) + " of the plain peak"]);
      tiles.push(["added time", figure("plan.overhead", doc.plan.overhead, percent(doc.plan.overhead)),
        doc.plan.lower_bound === null ? "least possible: not proved" : `least possible: ${percent(doc.plan.lower_bound)}`]);
    }
    tiles.push(["before the step", figure("standing", standing, bytes(standing)),
      Object.entries(doc.standing).filter(([, n]) => n).map(([k, n]) => `${k}s ${bytes(n)}`).join(", ") || "nothing"]);
    byId("tiles").append(...tiles.map(([name, value, of]) => node("div", {}, node("dt", {}, name), node("dd", {}, value), node("dd", { class: "of" }, of))));
    if (doc.refused) {
      byId("refused").hidden = false;
      byId("refused").textContent = `The limit of ${bytes(doc.refused.limit)} cannot be kept; this page shows the smallest limit that is safe to ask for, ${bytes(limit)}.`;
    }
    if (doc.trial_refused !== null) {
      byId("refused").hidden = false;
      byId("refused").textContent = `The plan for ${bytes(limit)} was tried: the real step differed from the predicted one, left the plan and was refused. “Predicted against measured” says what would suffice; a larger limit may hold.`;
    }
    byId("changes").append(...doc.changes.map((change, k) => {
      const share = change.peak / doc.plain.peak;
      const meter = node("div", { class: "meter", "aria-hidden": "true" }, node("i"));
      meter.firstChild.style.width = length(Math.min(1, share));
      return node("li", k === 0 ? { class: "first" } : {},
        node("div", {}, node("b", {}, change.what[0].toUpperCase() + change.what.slice(1)), node("code", {}, change.how)),
        node("div", { class: "price" }, node("strong", {}, figure(`changes.${k}.peak`, change.peak, bytes(change.peak))), ` · ${percent(share, 0)} of the peak`, meter,
          change.overhead === null ? "less work per step" : figure(`changes.${k}.overhead`, change.overhead, `${percent(change.overhead)} more time`)));
    }));
    if (!doc.changes.length) byId("changes").append(node("li", {}, "Nothing that was tried lowers the peak: it does not consist of activations."));
  }

  // ------------------------------------------------------------------ the timeline

  // Plain and planned share positions: an operation, or an event with the replay before it.
  const order = [];
  {
    const seen = new Map();
    const add = (line) => line && line.moments.forEach((m) => seen.set(`${m[0]} ${m[1]}`, [m[0], m[1]]));
    add(doc.plain); add(doc.planned);
    order.push(...[...seen.values()].sort((a, b) =>
      (a[0] !== "forward") - (b[0] !== "forward") || a[1] - b[1] || (a[0] === "backward") - (b[0] === "backward")));
  }
  const rank = new Map(order.map(([phase, place], k) => [`${phase} ${place}`, k]));
  function spread(line) {
    const found = new Array(order.length).fill(null);
    line.moments.forEach((m) => { found[rank.get(`${m[0]} ${m[1]}`)] = m; });
    for (let k = 0; k < found.length; k++) if (found[k] === null) found[k] = found[k + 1] || found[k - 1];
    for (let k = found.length - 1; k >= 0; k--) if (found[k] === null) found[k] = found[k + 1];
    return found;
  }
  const lines = { plain: spread(doc.plain), planned: doc.planned ? spread(doc.planned) : null };
  const firstBackward = order.findIndex(([phase]) => phase !== "forward");
  let geometry = null;

  function ticks(most) {
    const unit = 2 ** Math.floor(Math.log2(most / 4 || 1));
    const step = [1, 2, 4].map((k) => k * unit).find((s) => most / s <= 5) || unit * 4;
    const found = [];
    for (let at = 0; at <= most; at += step) found.push(at);
    return found;
  }

  function timeline() {
    const place = byId("time-chart");
    const width = Math.max(280, place.clientWidth), height = width < 560 ? 280 : 380;
    const left = 66, right = 8, top = 26, bottom = 30;
    const base = state.base ? standing : 0;
    const here = lines[state.which], other = state.which === "planned" ? lines.plain : lines.planned;
    const most = Math.max(doc.plain.peak, doc.planned ? doc.planned.peak : 0, limit || 0) + base;
    const x = (k) => left + (k / order.length) * (width - left - right);
    const y = (n) => height - bottom - (n / (most * 1.06 || 1)) * (height - top - bottom);
    geometry = { x, y, left, right, width, height, top, bottom, base };
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    svg.append(draw("defs", {}, draw("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      draw("rect", { width: 6, height: 6, fill: "var(--recomputed)" }), draw("rect", { width: 1.4, height: 6, fill: "var(--hatch)" }))));
    for (const at of ticks(most * 1.06)) {
      svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: y(at), y2: y(at) }));
      svg.append(draw("text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, at === 0 ? "0" : round(at)));
    }
    const ground = new Array(order.length).fill(0);
    const layer = (values, kind) => {
      let up = "", down = "";
      values.forEach((n, k) => {
        const low = ground[k], high = low + n;
        up += `${k ? "L" : "M"}${x(k).toFixed(1)},${y(high).toFixed(1)}L${x(k + 1).toFixed(1)},${y(high).toFixed(1)}`;
        down = `L${x(k + 1).toFixed(1)},${y(low).toFixed(1)}L${x(k).toFixed(1)},${y(low).toFixed(1)}` + down;
        ground[k] = high;
      });
      svg.append(draw("path", { d: `${up}${down}Z`, fill: kind === "recomputed" ? "url(#hatch)" : colour(kind), "data-kind": kind }));
    };
    if (base) layer(new Array(order.length).fill(base), "standing");
    for (const kind of KINDS) layer(here.map((m) => m[COLUMN[kind]]), kind);
    if (other) {
      const d = other.map((m, k) => `${k ? "L" : "M"}${x(k).toFixed(1)},${y(total(m) + base).toFixed(1)}L${x(k + 1).toFixed(1)},${y(total(m) + base).toFixed(1)}`).join("");
      svg.append(draw("path", { d, fill: "none", stroke: "var(--ghost)", "stroke-width": 1.6, "stroke-dasharray": "4 2.5" }));
    }
    if (firstBackward > 0) {
      svg.append(draw("line", { x1: x(firstBackward), x2: x(firstBackward), y1: top - 6, y2: height - bottom + 6, stroke: "var(--quiet)", "stroke-dasharray": "2 3" }));
    }
    const middle = firstBackward > 0 ? firstBackward : order.length;
    svg.append(draw("text", { x: (x(0) + x(middle)) / 2, y: height - 8, "text-anchor": "middle" }, "forward"));
    if (firstBackward > 0) svg.append(draw("text", { x: (x(middle) + x(order.length)) / 2, y: height - 8, "text-anchor": "middle" }, "backward"));
    const peak = current(), k = rank.get(`${peak.moments[peak.at][0]} ${peak.moments[peak.at][1]}`);
    const px = x(k + 0.5), anchor = px > width - 110 ? "end" : px < left + 90 ? "start" : "middle";
    if (limit !== null) {
      const at = y(limit + base), taken = px < (left + width) / 2; // the peak's label needs the left half
      const words = width < 560 ? "limit" : `limit ${bytes(limit)}${base ? " on top of what was there" : ""}`;
      svg.append(draw("line", { x1: left, x2: width - right, y1: at, y2: at, stroke: "var(--limit)", "stroke-width": 2 }));
      svg.append(draw("text", { class: "limit-text halo", x: taken ? width - right - 6 : left + 6, y: at - 6, "text-anchor": taken ? "end" : "start" }, words));
    }
    svg.append(draw("line", { id: "cross", y1: top - 6, y2: height - bottom, stroke: "var(--ink)", "stroke-width": 1 }));
    svg.append(draw("circle", { cx: px, cy: y(peak.peak + base), r: 4.5, fill: "var(--card)", stroke: "var(--ink)", "stroke-width": 2 }));
    svg.append(draw("text", { class: "halo", x: px, y: y(peak.peak + base) - 10, "text-anchor": anchor, style: "fill:var(--ink);font-weight:600" }, `peak ${bytes(peak.peak)}`));
    place.replaceChildren(svg);
    point(state.at === null ? k : state.at);
  }

  function point(k) {
    state.at = Math.max(0, Math.min(order.length - 1, k));
    const middle = geometry.x(state.at + 0.5);
    const cross = byId("cross");
    cross.setAttribute("x1", middle); cross.setAttribute("x2", middle);
    const m = lines[state.which][state.at], other = state.which === "planned" ? lines.plain : lines.planned;
    const [operator, module, line] = doc.sites[m[2]];
    const phase = { forward: `operation ${m[1]} of the forward`, replay: `recomputed for event ${m[1]} of backward`, backward: `event ${m[1]} of backward` }[m[0]];
    const rows = KINDS.map((kind) => [kind, m[COLUMN[kind]]]).reverse();
    const table = node("table", {}, node("tbody", {},
      ...rows.map(([kind, n]) => node("tr", {}, node("td", {}, swatch(kind), NAMES[kind]), node("td", { class: "n" }, bytes(n)))),
      node("tr", { class: "total" }, node("td", {}, `together (${state.which})`), node("td", { class: "n", "data-value": String(total(m)) }, bytes(total(m)))),
      ...(other ? [node("tr", {}, node("td", {}, state.which === "planned" ? "the same moment, plain" : "the same moment, planned"), node("td", { class: "n" }, bytes(total(other[state.at]))))] : [])));
    byId("readout").replaceChildren(
      node("div", {}, node("p", { class: "op" }, operator || "between two operations"), node("p", {}, module || "outside of modules"),
        node("p", {}, node("code", {}, line)), node("p", { class: "quiet small" }, phase)), table);
  }

  function legend() {
    const mark = (draws) => { const s = draw("svg", { width: 22, height: 12, "aria-hidden": "true" }); s.append(draws); return s; };
    const entries = KINDS.slice().reverse().filter((kind) => kind !== "recomputed" || planned).map((kind) => node("span", {}, swatch(kind), NAMES[kind]));
    if (state.base) entries.push(node("span", {}, swatch("standing"), NAMES.standing));
    if (planned) entries.push(node("span", {}, mark(draw("line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: "var(--ghost)", "stroke-width": 1.6, "stroke-dasharray": "4 2.5" })),
      state.which === "planned" ? "the plain step" : "the planned step"));
    if (limit !== null) entries.push(node("span", {}, mark(draw("line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: "var(--limit)", "stroke-width": 2 })), "limit"));
    byId("legend").replaceChildren(...entries);
  }

  function pointed(event) {
    const box = byId("time-chart").getBoundingClientRect();
    const at = (event.clientX - box.left - geometry.left) / (geometry.width - geometry.left - geometry.right);
    point(Math.floor(at * order.length));
  }
  byId("time-chart").addEventListener("pointermove", pointed);
  byId("time-chart").addEventListener("pointerdown", pointed);
  byId("time-chart").addEventListener("keydown", (event) => {
    const peak = current().moments[current().at];
    const to = {
      ArrowLeft: state.at - 1, ArrowRight: state.at + 1, PageUp: state.at - 20, PageDown: state.at + 20,
      Home: 0, End: order.length - 1, p: rank.get(`${peak[0]} ${peak[1]}`), P: rank.get(`${peak[0]} ${peak[1]}`),
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    point(to);
  });
  byId("base").addEventListener("change", (event) => { state.base = event.target.checked; legend(); timeline(); });

  // ------------------------------------------------------------------ at the peak

  function atPeak() {
    const line = current();
    const sums = {};
    line.holders.forEach((h) => { const kind = h.kind === "workspace" ? "temporary" : h.kind; sums[kind] = (sums[kind] || 0) + h.nbytes; });
    byId("peak-bar").replaceChildren(...KINDS.filter((kind) => sums[kind]).map((kind) => {
      const part = node("i", { class: kind === "recomputed" ? "hatched" : "", title: `${NAMES[kind]} ${bytes(sums[kind])}` });
      part.style.cssText = `flex:${sums[kind]} 1 0;background-color:${colour(kind)}`;
      return part;
    }));
    const shown = line.holders.slice(0, 12), rest = line.holders.slice(12);
    const sum = (some) => some.reduce((a, h) => a + h.nbytes, 0);
    const rows = shown.map((h, k) => [figure(`${state.which}.holders.${k}.nbytes`, h.nbytes, bytes(h.nbytes)), percent(h.nbytes / line.peak, 0), origin(h.operator, h.module, h.line, h.kind), String(h.count)]);
    if (rest.length) rows.push([bytes(sum(rest)), percent(sum(rest) / line.peak, 0), `${rest.length} more rows`, String(rest.reduce((a, h) => a + h.count, 0))]);
    rows.push({ total: true, cells: [figure(`${state.which}.peak`, sum(line.holders), bytes(sum(line.holders))), "100 %", "the peak", String(line.items.length)] });
    fill(byId("holders"), ["size", "share", "made by", "storages"], rows, [0, 1, 3]);
  }

  // ------------------------------------------------------------------ the curve

  function curve() {
    if (doc.curve === null) { byId("curve-section").hidden = true; return; }
    const place = byId("curve-chart");
    const width = Math.max(280, place.clientWidth), height = width < 560 ? 280 : 340;
    const left = 52, right = 16, top = 20, bottom = 44;
    const letters = "ABCDEFGHIJ";
    const points = doc.curve.map((p) => ({ ...p, name: p.limit === null ? "plain" : `limit ${bytes(p.limit)}`, how: p.limit === null ? "nothing recomputed" : `lowtide.budget(${p.limit})` }));
    const options = doc.options.map((o, k) => ({ ...o, letter: letters[k] || "·" }));
    const most = Math.max(doc.plain.peak, ...options.map((o) => o.peak));
    const slowest = Math.max(0.05, ...points.map((p) => p.overhead), ...options.map((o) => o.overhead)) * 1.08;
    const x = (n) => left + (n / most) * (width - left - right);
    const y = (share) => height - bottom - (share / slowest) * (height - top - bottom);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Added time against peak memory; the table below has every point" });
    const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1, 2].find((s) => slowest / s <= 6) || 5;
    for (let at = 0; at <= slowest; at += step) {
      svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: y(at), y2: y(at) }));
      svg.append(draw("text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, percent(at, 0)));
    }
    for (const at of ticks(most)) svg.append(draw("text", { x: x(at), y: height - bottom + 18, "text-anchor": "middle" }, at === 0 ? "0" : round(at)));
    svg.append(draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "peak, above what was in memory before"));
    svg.append(draw("text", { x: left, y: 12 }, "added time"));
    if (limit !== null) {
      svg.append(draw("line", { x1: x(limit), x2: x(limit), y1: top, y2: height - bottom, stroke: "var(--limit)", "stroke-width": 2 }));
      const late = x(limit) > width - right - 40; // no room for the word on its right
      svg.append(draw("text", { class: "limit-text halo", x: x(limit) + (late ? -6 : 6), y: top + 10, "text-anchor": late ? "end" : "start" }, "limit"));
    }
    const sorted = [...points].sort((a, b) => a.peak - b.peak);
    svg.append(draw("path", { d: sorted.map((p, k) => `${k ? "L" : "M"}${x(p.peak)},${y(p.overhead)}`).join(""), fill: "none", stroke: "var(--accent)", "stroke-width": 2 }));
    const titled = (shape, text) => { shape.append(draw("title", {}, text)); return shape; };
    for (const p of points) svg.append(titled(draw("circle", { class: "point", cx: x(p.peak), cy: y(p.overhead), r: 5, fill: "var(--accent)" }), `${p.name}: ${bytes(p.peak)}, ${percent(p.overhead)}`));
    const taken = [];
    for (const o of options) {
      // Letters that would overlap are put side by side: to the right while there is room.
      let px = x(o.peak), py = y(o.overhead), aside = 18;
      while (taken.some(([a, b]) => Math.abs(a - px) < 17 && Math.abs(b - py) < 17)) {
        if (px + aside > width - 9) { px = x(o.peak); aside = -18; }
        px += aside;
      }
      taken.push([px, py]);
      const mark = draw("g", { class: "point" });
      mark.append(draw("circle", { cx: px, cy: py, r: 8.5, fill: "var(--card)", stroke: "var(--recomputed)", "stroke-width": 2 }),
        draw("text", { x: px, y: py + 4, "text-anchor": "middle", style: "fill:var(--ink);font-weight:600;font-size:11px" }, o.letter));
      svg.append(titled(mark, `${o.name}: ${bytes(o.peak)}, ${percent(o.overhead)}`));
    }
    place.replaceChildren(svg);
    const way = (name, how) => node("div", { class: "origin" }, name, node("div", {}, node("code", {}, how)));
    const rows = points.map((p, k) => ["●", way(p.name, p.how), figure(`curve.${k}.peak`, p.peak, bytes(p.peak)), figure(`curve.${k}.overhead`, p.overhead, percent(p.overhead)),
      percent(p.peak / doc.plain.peak, 0), p.lower_bound === null ? "?" : percent(p.lower_bound)]);
    rows.push(...options.map((o, k) => [o.letter, way(`${o.name} (${o.regions} regions)`, o.how), figure(`options.${k}.peak`, o.peak, bytes(o.peak)),
      figure(`options.${k}.overhead`, o.overhead, percent(o.overhead)), percent(o.peak / doc.plain.peak, 0), ""]));
    fill(byId("curve-table"), ["", "what", "peak", "added time", "of plain", "at least"], rows, [2, 3, 4, 5]);
  }

  // ------------------------------------------------------------------ modules

  function modules() {
    if (!doc.plan) { byId("modules-section").hidden = true; return; }
    const all = doc.plan.modules.filter((m) => m.kept_bytes + m.recomputed_bytes > 0);
    const most = Math.max(1, ...all.map((m) => m.kept_bytes + m.recomputed_bytes));
    const large = [...all].sort((a, b) => b.kept_bytes + b.recomputed_bytes - a.kept_bytes - a.recomputed_bytes).slice(0, 40);
    const shown = state.modules ? all : all.filter((m) => large.includes(m));
    byId("strip").replaceChildren(...shown.map((m) => {
      const kept = node("i"), redone = node("i", { class: "hatched" });
      kept.style.cssText = `width:${length(m.kept_bytes / most)};background:var(--kept)`;
      redone.style.cssText = `width:${length(m.recomputed_bytes / most)};background-color:var(--recomputed)`;
      const said = [m.kept_bytes ? `${bytes(m.kept_bytes)} kept` : "", m.recomputed_bytes ? `${bytes(m.recomputed_bytes)} redone` : ""].filter(Boolean).join(", ");
      const name = m.module || "outside of modules";
      return node("div", { class: "strip-row", "data-kept": String(m.kept_bytes), "data-recomputed": String(m.recomputed_bytes) },
        node("code", { title: name }, node("bdi", {}, name)), node("div", { class: "track" }, kept, redone), node("span", { class: "say" }, said));
    }));
    const more = byId("more-modules");
    more.hidden = all.length <= large.length;
    more.textContent = state.modules ? "Show the largest 40" : `Show all ${all.length} modules`;
  }
  byId("more-modules").addEventListener("click", () => { state.modules = !state.modules; modules(); });

  // ------------------------------------------------------------------ the rest

  function rest() {
    const SHOWN = 12;
    byId("kept-section").hidden = !planned || !doc.kept.length;
    fill(byId("kept"), ["size", "made by", "why it is not recomputed"],
      doc.kept.slice(0, 8).map((k) => [bytes(k.nbytes), origin(k.operator, k.module, k.line), k.why]), [0]);
    const groups = new Map();
    for (const row of doc.saved.rows) {
      if (row.kind !== "activation" && row.kind !== "unseen") continue;
      const key = JSON.stringify([row.module, row.operator, row.line]);
      const found = groups.get(key) || { row, nbytes: 0, count: 0 };
      found.nbytes += row.bytes; found.count += 1;
      groups.set(key, found);
    }
    const sorted = [...groups.values()].sort((a, b) => b.nbytes - a.nbytes), shown = sorted.slice(0, SHOWN);
    const more = sorted.slice(SHOWN).reduce((a, g) => a + g.nbytes, 0);
    const rows = shown.map((g) => [bytes(g.nbytes), percent(g.nbytes / doc.saved.activation_bytes, 0), origin(g.row.operator, g.row.module, g.row.line), String(g.count)]);
    if (more) rows.push([bytes(more), percent(more / doc.saved.activation_bytes, 0), `${sorted.length - SHOWN} more rows`, String(sorted.slice(SHOWN).reduce((a, g) => a + g.count, 0))]);
    rows.push({ total: true, cells: [figure("saved.activation_bytes", sorted.reduce((a, g) => a + g.nbytes, 0), bytes(doc.saved.activation_bytes)), "100 %", "for backward alone", String(sorted.reduce((a, g) => a + g.count, 0))] });
    fill(byId("saved"), ["size", "share", "made by", "storages"], rows, [0, 1, 3]);
    const held = doc.saved.total - doc.saved.activation_bytes;
    byId("saved-note").textContent = `Between forward and backward of the plain step, each storage once.${held ? ` Autograd also refers to ${bytes(held)} of parameters and inputs, which are in memory anyway.` : ""}`;
    fill(byId("trials"), ["step", "predicted", "measured", "error", "seconds"],
      doc.trials.map((t, k) => [t.label, figure(`trials.${k}.predicted`, t.predicted, bytes(t.predicted)), figure(`trials.${k}.measured`, t.measured, bytes(t.measured)),
        percent(t.measured ? t.predicted / t.measured - 1 : 0), t.seconds.toFixed(3)]), [1, 2, 3, 4]);
    byId("trials").hidden = !doc.trials.length;
    byId("no-trials").hidden = doc.trials.length > 0 || doc.trial_refused !== null;
    byId("trial-refused").hidden = doc.trial_refused === null;
    if (doc.trial_refused !== null) byId("trial-refused").textContent = `The real step differed from the predicted one, left its plan and was refused: ${doc.trial_refused}`;
    if (!doc.outputs.length) byId("outputs").append(node("li", {}, doc.events ? "The step returned no tensor: it runs backward itself." : "The step returned no tensor."));
    byId("outputs").append(...doc.outputs.slice(0, 8).map((o, k) => node("li", {}, `Output ${k} (${o.dtype}, ${o.shape.length ? o.shape.join(" × ") : "a scalar"}) ${o.requires_grad ? "requires" : "does not require"} grad: ${o.reason}.`)));
    byId("made").textContent = `Peaks are bytes above what was in memory before the step, counted storage by storage; the rows of a table add up to its total. Positions in the timeline are moments of the step, not seconds. Made by lowtide with torch ${doc.torch}.`;
  }

  function chosen() {
    state.at = null;
    choice(byId("which"), chosen); choice(byId("which-peak"), chosen);
    legend(); timeline(); atPeak();
  }
  head(); chosen(); curve(); modules(); rest();
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { timeline(); curve(); }, 80); });
  document.documentElement.dataset.ready = "true";
})();
