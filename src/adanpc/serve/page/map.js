// The map: every row of the bank as a point of a plane, drawn pixel by pixel so that 100,000 of them follow the hand.

import * as api from "./api.js";
import { LOOKS, classNames, colorVariable, mark, nameOf, otherClass, shapeOf } from "./classes.js";
import { atMostEvery, element, fill, showError } from "./dom.js";
import { ORIGINS, counted, whole } from "./format.js";
import { Grid, extent } from "./grid.js";
import { openRow } from "./row.js";
import { bank } from "./session.js";

const MOST_ROWS = 100_000;
const MOST_CHIPS = 12; // classes with a button each; a list has the others
const ORIGIN_NAMES = ["source", "admitted", "expert"];
const NEAR = 14; // pixels from a point within which a click means it
const MARGIN = 0.06; // of the plane, around the points
const MOST_ZOOM = 400;
const STEP = 1.3; // of the zoom, for a key or a notch of the wheel

/** Shows the view in a place of the page; `id` is the row to point at, if any. */
export function mapView(place) {
  const error = element("p", { class: "error", role: "alert", hidden: true });
  const canvas = element("canvas", {
    class: "map",
    tabindex: 0,
    role: "application",
    "aria-label": "Map of the bank",
    "aria-describedby": "map-help",
  });
  const status = element("p", { class: "map-status", role: "status" });
  const legend = element("div", { class: "legend" });
  const finder = rowFinder((row) => pointAt(row));
  fill(
    place,
    element(
      "section",
      { class: "map-view" },
      element("div", { class: "heading" }, element("h1", {}, "Map"), finder),
      error,
      element("div", { class: "map-frame" }, canvas, status),
      legend,
      element(
        "p",
        { class: "hint", id: "map-help" },
        "Rows that are close here are often similar. Drag to move, turn the wheel or press + and - to zoom, click a point to open its row. " +
          "By keys: the arrows go from row to row, Enter opens, 0 shows all.",
      ),
    ),
  );

  let rows = null;
  let view = { x: 0, y: 0, zoom: 1 }; // what is in the middle, and how large
  let chosen = -1; // the place of the row that is pointed at
  let onlyClass = null; // the class that stands out
  let frame = 0;

  async function load() {
    try {
      rows = readMap(await api.map(MOST_ROWS));
    } catch (problem) {
      showError(error, problem);
      return;
    }
    error.hidden = true;
    chosen = -1;
    drawLegend(legend, rows, (label) => {
      onlyClass = label;
      schedule();
    });
    if (!rows.count) status.textContent = "The bank has no rows yet.";
    else status.textContent = `${shownRows(rows)} in ${counted(classNames().length, "class", "classes")}.`;
    schedule();
  }

  function schedule() {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      paint(canvas, rows, view, chosen, onlyClass);
    });
  }

  function point(place_) {
    chosen = place_;
    if (place_ >= 0) status.textContent = inWords(rows, place_);
    schedule();
  }

  /** Moves the view to a row and points at it. */
  function pointAt(id) {
    const there = rows ? rows.ids.indexOf(id) : -1;
    if (there < 0) throw new Error(`There is no row ${id} on the map; rows that were deleted or are too many are left out.`);
    view = { x: rows.x[there], y: rows.y[there], zoom: Math.max(view.zoom, 4) };
    point(there);
    canvas.focus();
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  function under(spot) {
    const scale = scaleOf(canvas, rows, view);
    return rows.grid.nearest(scale.worldX(spot.x), scale.worldY(spot.y), NEAR / scale.pixels);
  }

  function zoomAt(spot, factor) {
    const before = scaleOf(canvas, rows, view);
    const zoom = Math.min(MOST_ZOOM, Math.max(0.5, view.zoom * factor));
    const worldX = before.worldX(spot.x);
    const worldY = before.worldY(spot.y);
    const ratio = view.zoom / zoom;
    // What is under the pointer stays there.
    view = { x: worldX + (view.x - worldX) * ratio, y: worldY + (view.y - worldY) * ratio, zoom };
    schedule();
  }

  function shift(dx, dy) {
    const { pixels } = scaleOf(canvas, rows, view);
    view = { ...view, x: view.x - dx / pixels, y: view.y + dy / pixels };
    schedule();
  }

  const fingers = new Map(); // where each pointer is
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, at(event));
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!rows?.count) return;
    const spot = at(event);
    const last = fingers.get(event.pointerId);
    if (!last) {
      const there = under(spot);
      canvas.classList.toggle("over", there >= 0);
      if (there >= 0 && there !== chosen) point(there);
      return;
    }
    if (fingers.size === 2) pinch(event.pointerId, spot);
    else shift(spot.x - last.x, spot.y - last.y);
    moved += Math.hypot(spot.x - last.x, spot.y - last.y);
    fingers.set(event.pointerId, spot);
  });
  function pinch(finger, spot) {
    const [other] = [...fingers.keys()].filter((each) => each !== finger);
    const fixed = fingers.get(other);
    const before = distance(fingers.get(finger), fixed);
    if (before > 0) zoomAt(fixed, distance(spot, fixed) / before);
  }
  canvas.addEventListener("pointerup", (event) => {
    const wasClick = fingers.size === 1 && moved < 5;
    fingers.delete(event.pointerId);
    if (!wasClick || !rows?.count) return;
    const there = under(at(event));
    if (there < 0) return;
    point(there);
    openRow(rows.ids[there]);
  });
  canvas.addEventListener("pointercancel", (event) => fingers.delete(event.pointerId));
  canvas.addEventListener("wheel", (event) => {
    if (!rows?.count) return;
    event.preventDefault();
    zoomAt(at(event), event.deltaY < 0 ? STEP : 1 / STEP);
  }, { passive: false });

  canvas.addEventListener("keydown", (event) => {
    if (!rows?.count) return;
    const middle = { x: canvas.clientWidth / 2, y: canvas.clientHeight / 2 };
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    if (event.key in steps) step(...steps[event.key]);
    else if (event.key === "+" || event.key === "=") zoomAt(middle, STEP);
    else if (event.key === "-") zoomAt(middle, 1 / STEP);
    else if (event.key === "0") showAll();
    else if (event.key === "Enter" && chosen >= 0) openRow(rows.ids[chosen]);
    else return;
    event.preventDefault();
  });

  function showAll() {
    view = { x: 0, y: 0, zoom: 1 };
    schedule();
  }

  /** Points at the next row in a direction, and keeps it in sight. */
  function step(dx, dy) {
    const next = chosen < 0 ? rows.grid.nearest(view.x, view.y, Infinity) : rows.grid.toward(chosen, dx, dy);
    if (next < 0) return;
    point(next);
    const scale = scaleOf(canvas, rows, view);
    const x = scale.screenX(rows.x[next]);
    const y = scale.screenY(rows.y[next]);
    const outside = x < NEAR || y < NEAR || x > canvas.clientWidth - NEAR || y > canvas.clientHeight - NEAR;
    if (outside) view = { ...view, x: rows.x[next], y: rows.y[next] };
  }

  const sizes = new ResizeObserver(schedule);
  sizes.observe(canvas);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", schedule);
  const reload = atMostEvery(5000, load);
  load();
  return {
    hear(kind) {
      if (kind === "change") reload();
    },
    leave() {
      sizes.disconnect();
      dark.removeEventListener("change", schedule);
      cancelAnimationFrame(frame);
    },
  };
}

function distance(one, other) {
  return Math.hypot(one.x - other.x, one.y - other.y);
}

function shownRows(rows) {
  const all = bank().rows;
  return all > MOST_ROWS ? `The newest ${whole(rows.count)} of ${whole(all)} rows` : counted(rows.count, "row");
}

function inWords(rows, place) {
  const vetoed = rows.vetoed[place] ? ", vetoed" : "";
  return `Row ${whole(rows.ids[place])}: ${nameOf(rows.labels[place])}, ${ORIGINS[ORIGIN_NAMES[rows.origin[place]]]}${vetoed}`;
}

/** The arrays of the map; its bytes are a line of JSON and then one array after another, little-endian. */
export function readMap(buffer) {
  const bytes = new Uint8Array(buffer);
  const end = bytes.indexOf(10);
  const { count } = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
  let offset = end + 1;
  function take(Kind) {
    const size = count * Kind.BYTES_PER_ELEMENT;
    const part = new Kind(buffer.slice(offset, offset + size)); // a copy, because the line may end anywhere
    offset += size;
    return part;
  }
  const ids = Array.from(take(BigInt64Array), Number);
  const x = take(Float32Array);
  const y = take(Float32Array);
  const labels = take(Int16Array);
  const origin = take(Uint8Array);
  const vetoed = take(Uint8Array);
  centerPlane(x, y);
  return { count, ids, x, y, labels, origin, vetoed, grid: new Grid(x, y) };
}

/** Moves and scales the plane so that all points lie within -1 and 1, at the same scale in both directions. */
function centerPlane(x, y) {
  const [lowX, highX] = extent(x);
  const [lowY, highY] = extent(y);
  const half = Math.max(highX - lowX, highY - lowY, 1e-9) / 2;
  for (let place = 0; place < x.length; place += 1) {
    x[place] = (x[place] - (lowX + highX) / 2) / half;
    y[place] = (y[place] - (lowY + highY) / 2) / half;
  }
}

function scaleOf(canvas, rows, view) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  // At zoom 1 all points are in sight.
  const [lowX, highX] = rows.grid.rangeX;
  const [lowY, highY] = rows.grid.rangeY;
  const fit = Math.min(width / Math.max(0.2, highX - lowX), height / Math.max(0.2, highY - lowY));
  const pixels = fit * (1 - 2 * MARGIN) * view.zoom;
  return {
    pixels,
    screenX: (x) => width / 2 + (x - view.x) * pixels,
    screenY: (y) => height / 2 - (y - view.y) * pixels,
    worldX: (x) => view.x + (x - width / 2) / pixels,
    worldY: (y) => view.y - (y - height / 2) / pixels,
  };
}

// Drawing ------------------------------------------------------------------------------------------------------------

/** Draws all points; stamps of every class and origin are copied into a buffer, which is then shown at once. */
function paint(canvas, rows, view, chosen, onlyClass) {
  const ratio = devicePixelRatio;
  const width = Math.round(canvas.clientWidth * ratio);
  const height = Math.round(canvas.clientHeight * ratio);
  if (!width || !height) return;
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const context = canvas.getContext("2d");
  const colors = getComputedStyle(canvas);
  const surface = colors.getPropertyValue("--surface");
  context.fillStyle = surface;
  context.fillRect(0, 0, width, height);
  if (!rows?.count) return;
  const scale = scaleOf(canvas, rows, view);
  const size = Math.round(ratio * sizeOf(rows.count, view.zoom));
  const image = context.createImageData(width, height);
  const background = new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer);
  new Uint32Array(image.data.buffer).fill(background[0]);
  if (stamps.size !== size || stamps.surface !== surface) stamps = stampsOf(size, surface, colors);
  drawPoints(image, rows, scale, ratio, stamps, onlyClass);
  context.putImageData(image, 0, 0);
  if (chosen >= 0) drawChosen(context, rows, chosen, scale, ratio, size, colors);
}

/** The side of a point in pixels: small where there are many, larger the closer one looks. */
function sizeOf(count, zoom) {
  const alone = Math.min(15, Math.max(4, 320 / Math.sqrt(count)));
  return Math.min(17, alone * zoom ** 0.35);
}

function drawPoints(image, rows, scale, ratio, stamps, onlyClass) {
  const { x, y, labels, origin, vetoed, count } = rows;
  const half = stamps.size / 2;
  // Rows of the source first, so that what joined later lies above them.
  for (const layer of [0, 1, 2]) {
    for (let place = 0; place < count; place += 1) {
      if (origin[place] !== layer) continue;
      const left = Math.round(scale.screenX(x[place]) * ratio - half);
      const top = Math.round(scale.screenY(y[place]) * ratio - half);
      const faint = onlyClass !== null && labels[place] !== onlyClass;
      copyStamp(image, stamps.of(labels[place], layer, vetoed[place]), stamps.size, left, top, faint);
    }
  }
}

const FAINT = 0.12; // how much is left of the points of other classes

function copyStamp(image, stamp, size, left, top, faint) {
  const { width, height, data } = image;
  if (left <= -size || top <= -size || left >= width || top >= height) return;
  const strength = (faint ? FAINT : 1) / 255;
  for (let row = Math.max(0, -top); row < size && top + row < height; row += 1) {
    for (let column = Math.max(0, -left); column < size && left + column < width; column += 1) {
      const from = 4 * (row * size + column);
      const alpha = stamp[from + 3] * strength;
      if (alpha === 0) continue;
      const to = 4 * ((top + row) * width + left + column);
      data[to] += alpha * (stamp[from] - data[to]);
      data[to + 1] += alpha * (stamp[from + 1] - data[to + 1]);
      data[to + 2] += alpha * (stamp[from + 2] - data[to + 2]);
    }
  }
}

let stamps = {}; // of the latest frame: most of the time, the next one needs the same

/** The pixels of a point for each look of a class, origin and state, made when they are first needed. */
function stampsOf(size, surface, colors) {
  const made = new Map();
  return {
    size,
    surface,
    of(label, origin, vetoed) {
      const key = (label % LOOKS) * 8 + origin * 2 + vetoed;
      let stamp = made.get(key);
      if (!stamp) {
        stamp = stampPixels(label, ORIGIN_NAMES[origin], Boolean(vetoed), size, colors);
        made.set(key, stamp);
      }
      return stamp;
    },
  };
}

function stampPixels(label, origin, vetoed, size, colors) {
  const stamp = document.createElement("canvas");
  stamp.width = size;
  stamp.height = size;
  const context = stamp.getContext("2d");
  drawStamp(context, label, origin, vetoed, size, colors);
  return context.getImageData(0, 0, size, size).data;
}

/** Source rows are faint and full, joined rows are full with a rim, an expert's rows have a dark rim; vetoed ones are crossed out. */
function drawStamp(context, label, origin, vetoed, size, colors) {
  context.scale(size / 20, size / 20);
  context.translate(2, 2);
  const shape = new Path2D(shapeOf(label));
  context.fillStyle = colors.getPropertyValue(colorVariable(label));
  context.lineJoin = "round";
  context.globalAlpha = vetoed ? 0.25 : origin === "source" ? 0.55 : 1;
  context.fill(shape);
  context.globalAlpha = 1;
  if (origin !== "source") {
    context.strokeStyle = colors.getPropertyValue(origin === "expert" ? "--text" : "--surface");
    context.lineWidth = origin === "expert" ? 2.5 : 1.5;
    context.stroke(shape);
  }
  if (vetoed) {
    context.strokeStyle = colors.getPropertyValue("--text");
    context.lineWidth = 2;
    context.stroke(new Path2D("M1 1L15 15M15 1L1 15"));
  }
}

function drawChosen(context, rows, chosen, scale, ratio, size, colors) {
  const x = scale.screenX(rows.x[chosen]) * ratio;
  const y = scale.screenY(rows.y[chosen]) * ratio;
  context.strokeStyle = colors.getPropertyValue("--text");
  context.lineWidth = 2 * ratio;
  context.beginPath();
  context.arc(x, y, size / 2 + 5 * ratio, 0, 2 * Math.PI);
  context.stroke();
}

// Beside the map -----------------------------------------------------------------------------------------------------

/** The classes, each a button that makes its rows stand out, and what the looks of a point mean. */
function drawLegend(place, rows, choose) {
  const counts = new Map();
  for (const label of rows.labels) counts.set(label, (counts.get(label) ?? 0) + 1);
  const many = classNames().length > MOST_CHIPS;
  const labels = [...classNames().keys()];
  const largest = labels.toSorted((one, other) => (counts.get(other) ?? 0) - (counts.get(one) ?? 0) || one - other);
  const chips = many ? largest.slice(0, MOST_CHIPS) : labels;
  let pressed = null;
  function press(label) {
    pressed = label;
    buttons.forEach((button, place_) => button.setAttribute("aria-pressed", String(chips[place_] === label)));
    if (others && chips.includes(label)) others.value = "";
    choose(label);
  }
  const buttons = chips.map((label) =>
    element(
      "button",
      { type: "button", class: "chip", "aria-pressed": "false", onclick: () => press(pressed === label ? null : label) },
      mark(label),
      nameOf(label),
      element("span", { class: "number" }, whole(counts.get(label) ?? 0)),
    ),
  );
  const others = many && otherClass(labels.filter((label) => !chips.includes(label)), press);
  const looks = [
    ["pale", "source"],
    ["full", "joined from the stream"],
    ["rimmed", "from an expert"],
    ["crossed", "vetoed"],
  ].map(([look, text]) => element("li", { class: `look ${look}` }, text));
  fill(place, element("div", { class: "chips", role: "group", "aria-label": "Make a class stand out" }, buttons, others), element("ul", { class: "looks" }, looks));
}

function rowFinder(find) {
  const problem = element("p", { class: "error", role: "alert", hidden: true });
  const form = element(
    "form",
    { class: "finder" },
    element("label", { for: "find-row" }, "Row"),
    element("input", { id: "find-row", name: "row", type: "number", min: 0, inputmode: "numeric", required: true }),
    element("button", { type: "submit" }, "Find"),
    problem,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    try {
      find(Number(form.elements.row.value));
      problem.hidden = true;
    } catch (error) {
      showError(problem, error);
    }
  });
  return form;
}

