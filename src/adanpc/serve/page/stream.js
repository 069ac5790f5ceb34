// The view of the stream: how confident, how sure of itself and how right the bank has been, point by point.

import * as api from "./api.js";
import { byPerson, openRollback } from "./changes.js";
import { timelineChart } from "./chart.js";
import { tag } from "./classes.js";
import { atMostEvery, element, fill, showError } from "./dom.js";
import { moment, percent, whole } from "./format.js";
import { bank, mayChange } from "./session.js";

const POINTS = 500;
const READ = 1000; // entries of the log among which changes by people are marked in the chart
const DRAWN = 60; // points; more would be stripes

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

  async function refresh() {
    drawSigns(signs, bank().signs);
    try {
      const [{ points }, { entries }] = await Promise.all([
        api.timeline(POINTS),
        api.log({ limit: READ }),
      ]);
      error.hidden = true;
      chart.draw(joinedPoints(points), entries.filter(byPerson));
      if (!points.length) {
        fill(readout, element("p", { class: "empty" }, "Nothing has been asked yet. Send images or features, and the stream appears here."));
      }
    } catch (problem) {
      showError(error, problem);
    }
  }
  const refreshSoon = atMostEvery(2000, refresh);
  refresh();
  return {
    hear() {
      refreshSoon();
    },
    leave() {
      chart.leave();
    },
  };
}

/** At most so many points, each the mean of some that follow each other and at the position of the last of them. */
function joinedPoints(points) {
  const size = Math.ceil(points.length / DRAWN);
  const result = [];
  for (let start = 0; start < points.length; start += size) {
    const group = points.slice(start, start + size);
    const last = group.at(-1);
    const shares = last.shares?.map((_, label) => mean(group.map((point) => point.shares?.[label])));
    const confidence = mean(group.map((point) => point.confidence));
    const joined = mean(group.map((point) => point.joined));
    const queries = group.reduce((sum, point) => sum + point.queries, 0);
    result.push({ ...last, queries, shares, confidence, joined });
  }
  return result;
}

/** The mean of the numbers that are known, or null. */
function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return null;
  return known.reduce((sum, value) => sum + value, 0) / known.length;
}

function drawSigns(place, signs) {
  if (!signs) {
    fill(place, element("p", { class: "hint" }, "This bank has no guard, so nothing is estimated without labels."));
    return;
  }
  const given = signs.given;
  const facts = [
    ["Estimated accuracy", percent(given?.estimate), given && `${percent(given.low)} to ${percent(given.high)}`],
    ["Without adaptation", percent(signs.frozen?.estimate), signs.frozen && `${percent(signs.frozen.low)} to ${percent(signs.frozen.high)}`],
    ["Trust in adaptation", percent(signs.trust), "0 % is all frozen answers"],
    ["Neighbors agree", percent(signs.agreement), "0 % is chance"],
  ];
  const tiles = facts.map(([name, value, detail]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("span", { class: "faint" }, detail ?? ""))),
  );
  fill(place, element("dl", { class: "tiles" }, tiles), element("p", { class: "words" }, signs.words));
}

function drawReadout(place, point) {
  const facts = [
    ["Position", whole(point.position)],
    ["Time", moment(point.time)],
    ["Queries", whole(point.queries)],
    ["Confidence", percent(point.confidence)],
    ["Joined", percent(point.joined)],
    ["Trust in adaptation", percent(point.trust)],
    ["Estimated accuracy", point.estimate === null ? "–" : `${percent(point.estimate)} (${percent(point.low)} to ${percent(point.high)})`],
  ];
  const list = element("dl", { class: "facts" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  const shares = element(
    "ul",
    { class: "class-shares", "aria-label": "Class shares" },
    (point.shares ?? []).map((share, label) => element("li", {}, tag(label), element("span", { class: "number" }, percent(share)))),
  );
  const back = mayChange() && point.position < bank().position && point.position >= bank().log_start
    && element("button", { type: "button", onclick: () => openRollback(point.position) }, `Roll back to position ${whole(point.position)}…`);
  fill(place, element("div", { class: "heading" }, element("h2", {}, "At this point"), back), list, shares);
}
