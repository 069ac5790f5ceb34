// The view of the stream: how confident, how sure of itself and how right the bank has been, point by point.

import * as api from "./api.js";
import { openRollback } from "./changes.js";
import { timelineChart } from "./chart.js";
import { tag } from "./classes.js";
import { atMostEvery, element, fill, showError } from "./dom.js";
import { moment, percent, whole } from "./format.js";
import { bank, mayChange } from "./session.js";

const POINTS = 500;
const MANY_CLASSES = 100; // with which as many points would be megabytes
const SHARES = 12; // classes whose shares are written out
const MARKED = 200; // changes by people that are marked in the chart
const DRAWN = 60; // points; more would be stripes
const WINDOW = 20; // queries, at least, of which shares are shown: those of two or three would jump

/** Shows the view in a place of the page. */
export function streamView(place) {
  const error = element("p", { class: "error", role: "alert", hidden: true });
  const signs = element("div", { class: "signs" });
  const frame = element("div", { class: "chart-frame" });
  const readout = element("div", { class: "readout" });
  fill(
    place,
    element(
      "section",
      { class: "column stream" },
      element("h1", {}, "Stream"),
      signs,
      error,
      frame,
      readout,
    ),
  );
  const chart = timelineChart(frame, (point) => drawReadout(readout, point));

  let entries = []; // what people changed
  let changed = true; // since they were asked for, which makes the server look through its log
  async function refresh() {
    drawSigns(signs, bank().signs);
    try {
      const { points } = await api.timeline(bank().classes.length > MANY_CLASSES ? DRAWN : POINTS);
      if (changed) {
        changed = false;
        entries = (await api.log({ limit: MARKED, kind: "expert" })).entries;
      }
      error.hidden = true;
      chart.draw(joinedPoints(points), entries);
      if (!points.length) {
        fill(readout, element("p", { class: "empty" }, "Nothing has been asked yet. Send images or features, and the stream appears here."));
      }
    } catch (problem) {
      changed = true;
      showError(error, problem);
    }
  }
  const refreshSoon = atMostEvery(2000, refresh);
  refresh();
  return {
    hear(kind) {
      if (kind === "change") changed = true;
      refreshSoon();
    },
    leave() {
      chart.leave();
    },
  };
}

/** At most so many points, each at the position of the last of those that it stands for. */
function joinedPoints(points) {
  const size = Math.ceil(points.length / DRAWN);
  const result = [];
  for (let end = size; end < points.length + size; end += size) {
    const last = Math.min(end, points.length);
    const own = points.slice(end - size, last);
    const recent = points.slice(startOfWindow(points, end - size, last), last);
    result.push({
      ...known(own.at(-1)),
      queries: queriesIn(own),
      confidence: mean(own, (point) => point.confidence),
      joined: mean(recent, (point) => point.joined),
      shares: own.at(-1).shares.map((_, label) => mean(recent, (point) => point.shares[label])),
    });
  }
  return result;
}

/** The point without an estimate that says nothing, as before the first hundred queries. */
function known(point) {
  return says(point) ? point : { ...point, estimate: null, low: null, high: null };
}

/** Whether an estimate of the accuracy leaves anything out. */
function says(estimate) {
  return estimate.high - estimate.low < 1;
}

/** Where a window begins that ends at a place and holds enough queries. */
function startOfWindow(points, start, end) {
  let first = start;
  while (first > 0 && queriesIn(points.slice(first, end)) < WINDOW) first -= 1;
  return first;
}

function queriesIn(points) {
  return points.reduce((sum, point) => sum + point.queries, 0);
}

/** The mean over all queries of some points. */
function mean(points, value) {
  return points.reduce((sum, point) => sum + point.queries * value(point), 0) / Math.max(1, queriesIn(points));
}

function drawSigns(place, signs) {
  if (!signs) {
    fill(place, element("p", { class: "hint" }, "This bank has no guard, so nothing is estimated without labels."));
    return;
  }
  const facts = [
    ["Estimated accuracy", ...estimateIn(signs.given)],
    ["Without adaptation", ...estimateIn(signs.frozen)],
    ["Trust in adaptation", percent(signs.trust), "0 %: answers without adaptation"],
    ["Neighbors agree", percent(signs.agreement), "0 %: no more than by chance"],
  ];
  const tiles = facts.map(([name, value, detail]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("span", { class: "faint" }, detail ?? ""))),
  );
  fill(place, element("dl", { class: "tiles" }, tiles), element("p", { class: "words" }, signs.words));
}

/** An estimate and its interval in words. */
function estimateIn(estimate) {
  if (!says(estimate)) return ["–", "not enough queries yet"];
  return [percent(estimate.estimate), `${percent(estimate.low)} to ${percent(estimate.high)}`];
}

function drawReadout(place, point) {
  const facts = [
    ["Query", whole(point.at)],
    ["Position of the bank", whole(point.position)],
    ["Time", moment(point.time)],
    ["Confidence", percent(point.confidence)],
    ["Joined", percent(point.joined)],
    ["Trust in adaptation", percent(point.trust)],
    ["Estimated accuracy", point.estimate === null ? "–" : `${percent(point.estimate)} (${percent(point.low)} to ${percent(point.high)})`],
  ];
  const list = element("dl", { class: "facts" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  const shares = element(
    "ul",
    { class: "class-shares", "aria-label": "Class shares" },
    sharesIn(point).map(([label, share]) => element("li", {}, tag(label), element("span", { class: "number" }, percent(share)))),
  );
  const back = mayChange() && point.position < bank().position && point.position >= bank().log_start
    && element("button", { type: "button", onclick: () => openRollback(point.position) }, `Roll back to position ${whole(point.position)}…`);
  fill(place, element("div", { class: "heading" }, element("h2", {}, "At this point"), back), list, shares);
}

/** The shares of all classes, or of the largest if there are many. */
function sharesIn(point) {
  const shares = [...(point.shares ?? []).entries()];
  if (shares.length <= SHARES) return shares;
  return shares.sort(([, one], [, other]) => other - one).slice(0, SHARES).filter(([, share]) => share > 0);
}
