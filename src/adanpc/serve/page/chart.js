// The timeline: four panels over one axis of queries, drawn as SVG, with a cursor for mouse, finger and keys.

import { COLORS, nameOf } from "./classes.js";
import { drawing, element, fill } from "./dom.js";
import { percent, whole } from "./format.js";
import { verb } from "./row.js";

const LEFT = 44; // room for the numbers of the vertical axis
const RIGHT = 12;
const TOP = 26; // room for a panel's title
const HEIGHT = 92;
const GAP = 14;
const AXIS = 26;
const STEP_OF_PAGE = 10; // points that Page Up and Page Down move by

const PANELS = [
  { title: "Estimated accuracy, with its interval", draw: drawEstimate },
  { title: "Confidence (solid), trust (dashed)", draw: drawConfidence },
  { title: "Share of the queries that joined", draw: drawJoined },
  { title: "Classes of the answers", draw: drawShares },
];

/** A chart in a place of the page; calls `select(point)` for the point under the cursor. */
export function timelineChart(place, select) {
  let points = [];
  let entries = [];
  let current = null; // where the chosen point is on the axis; null follows the newest
  const slider = element("div", {
    class: "chart",
    tabindex: 0,
    role: "slider",
    "aria-label": "Point of the timeline",
    "aria-orientation": "horizontal",
  });
  const sizes = new ResizeObserver(() => redraw());

  function draw(newPoints, newEntries) {
    points = numbered(newPoints);
    entries = newEntries;
    if (!points.length) {
      slider.remove();
      return;
    }
    if (!slider.isConnected) {
      fill(place, slider);
      sizes.observe(place);
    }
    redraw();
  }

  function redraw() {
    if (!points.length || !place.clientWidth) return;
    const scale = scaleOf(points, place.clientWidth);
    fill(slider, svgOf(points, entries, scale));
    moveTo(placeOf(current));
  }

  /** The place of the point somewhere on the axis, or the one before it. */
  function placeOf(at) {
    if (at === null) return points.length - 1;
    const after = points.findIndex((point) => point.at > at);
    return after < 0 ? points.length - 1 : Math.max(0, after - 1);
  }

  function moveTo(place_) {
    const point = points[place_];
    const scale = scaleOf(points, place.clientWidth);
    const x = scale.x(point.at);
    const cursor = slider.querySelector(".cursor");
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    slider.setAttribute("aria-valuemin", points[0].at);
    slider.setAttribute("aria-valuemax", points.at(-1).at);
    slider.setAttribute("aria-valuenow", point.at);
    slider.setAttribute("aria-valuetext", inWords(point));
    select(point);
  }

  function choose(place_) {
    // At the newest point the cursor follows the stream.
    current = place_ === points.length - 1 ? null : points[place_].at;
    moveTo(place_);
  }

  slider.addEventListener("keydown", (event) => {
    const next = nextPlace(event.key, placeOf(current), points.length);
    if (next === null) return;
    event.preventDefault();
    choose(next);
  });
  slider.addEventListener("pointerdown", (event) => choose(nearest(event)));
  slider.addEventListener("pointermove", (event) => {
    if (event.buttons === 1) choose(nearest(event));
  });

  function nearest(event) {
    const scale = scaleOf(points, place.clientWidth);
    const x = event.clientX - slider.getBoundingClientRect().left;
    const distances = points.map((point) => Math.abs(scale.x(point.at) - x));
    return distances.indexOf(Math.min(...distances));
  }

  return { draw, leave: () => sizes.disconnect() };
}

function nextPlace(key, place, count) {
  const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -STEP_OF_PAGE, PageUp: STEP_OF_PAGE };
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  if (!(key in steps)) return null;
  return Math.min(count - 1, Math.max(0, place + steps[key]));
}

function inWords(point) {
  return `Query ${whole(point.at)}, position ${whole(point.position)}: confidence ${percent(point.confidence)}, ${percent(point.joined)} joined, estimated accuracy ${percent(point.estimate)}`;
}

/** The points with their place on the axis: how many queries there were until then. */
function numbered(points) {
  let queries = 0;
  return points.map((point) => {
    queries += point.queries;
    return { ...point, at: queries };
  });
}

function scaleOf(points, width) {
  const first = points[0].at;
  const span = Math.max(1, points.at(-1).at - first);
  const room = width - LEFT - RIGHT;
  return { width, first, last: first + span, x: (at) => LEFT + (room * (at - first)) / span };
}

function svgOf(points, entries, scale) {
  const height = PANELS.length * (TOP + HEIGHT + GAP) + AXIS;
  const svg = drawing("svg", { width: scale.width, height, viewBox: `0 0 ${scale.width} ${height}`, "aria-hidden": "true" });
  PANELS.forEach((panel, place) => {
    const top = place * (TOP + HEIGHT + GAP) + TOP;
    svg.append(...frameOf(panel.title, top, scale));
    const y = (share) => top + HEIGHT * (1 - share);
    svg.append(...panel.draw(points, scale.x, y));
  });
  const bottom = height - AXIS - GAP;
  svg.append(...axisOf(scale, bottom), ...marksOf(entries, points, scale, bottom));
  svg.append(drawing("line", { class: "cursor", y1: TOP, y2: bottom }));
  return svg;
}

function frameOf(title, top, scale) {
  const parts = [drawing("text", { class: "panel-title", x: LEFT, y: top - 9 }, title)];
  for (const share of [0, 0.5, 1]) {
    const y = top + HEIGHT * (1 - share);
    parts.push(drawing("line", { class: "grid", x1: LEFT, x2: scale.width - RIGHT, y1: y, y2: y }));
    parts.push(drawing("text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, percent(share)));
  }
  return parts;
}

function axisOf(scale, bottom) {
  const count = scale.width < 500 ? 3 : 6;
  const parts = [];
  for (let place = 0; place <= count; place += 1) {
    const at = Math.round(scale.first + ((scale.last - scale.first) * place) / count);
    const anchor = place === 0 ? "start" : place === count ? "end" : "middle";
    const text = place === count ? `${whole(at)} queries` : whole(at);
    parts.push(drawing("text", { class: "tick", x: scale.x(at), y: bottom + 18, "text-anchor": anchor }, text));
  }
  return parts;
}

/** Where people changed the bank: a dotted line through all panels. */
function marksOf(entries, points, scale, bottom) {
  return entries
    .filter((entry) => entry.position >= points[0].position)
    .map((entry) => {
      const next = points.find((point) => point.position >= entry.position) ?? points.at(-1);
      const x = scale.x(next.at);
      const title = drawing("title", {}, `${entry.who || "Someone"} ${verb(entry.kind)} at position ${entry.position}`);
      return drawing("line", { class: "person", x1: x, x2: x, y1: TOP, y2: bottom }, title);
    });
}

/** A path through the points for which there is a value; it breaks where there is none. */
function path(points, x, y, value) {
  let text = "";
  let pen = "M";
  for (const point of points) {
    const share = value(point);
    if (share === null || share === undefined) {
      pen = "M";
      continue;
    }
    text += `${pen}${x(point.at).toFixed(1)} ${y(clamped(share)).toFixed(1)}`;
    pen = "L";
  }
  return text;
}

function clamped(share) {
  return Math.min(1, Math.max(0, share));
}

/** The area between two values. */
function area(points, x, y, low, high) {
  const known = points.filter((point) => low(point) !== null && low(point) !== undefined);
  if (!known.length) return "";
  const there = path(known, x, y, high);
  const back = path([...known].reverse(), x, y, low).replace("M", "L");
  return `${there}${back}Z`;
}

function drawEstimate(points, x, y) {
  return [
    drawing("path", { class: "band", d: area(points, x, y, (point) => point.low, (point) => point.high) }),
    drawing("path", { class: "curve", d: path(points, x, y, (point) => point.estimate) }),
  ];
}

function drawConfidence(points, x, y) {
  return [
    drawing("path", { class: "curve", d: path(points, x, y, (point) => point.confidence) }),
    drawing("path", { class: "curve dashed", d: path(points, x, y, (point) => point.trust) }),
  ];
}

function drawJoined(points, x, y) {
  return [
    drawing("path", { class: "band", d: area(points, x, y, (point) => (point.joined === null ? null : 0), (point) => point.joined) }),
    drawing("path", { class: "curve", d: path(points, x, y, (point) => point.joined) }),
  ];
}

function drawShares(points, x, y) {
  const known = points.filter((point) => point.shares?.length);
  if (!known.length) return [];
  const parts = [];
  const bottoms = new Map(known.map((point) => [point, 0]));
  known[0].shares.forEach((_, label) => {
    if (!known.some((point) => point.shares[label] > 0)) return;
    const low = (point) => bottoms.get(point);
    const high = (point) => bottoms.get(point) + point.shares[label];
    const title = drawing("title", {}, nameOf(label));
    parts.push(drawing("path", { class: `share class-${label % COLORS}`, d: area(known, x, y, low, high) }, title));
    for (const point of known) bottoms.set(point, high(point));
  });
  return parts;
}
